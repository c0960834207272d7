"""Model families: one file each, and nothing about a family anywhere else."""

from __future__ import annotations

import importlib
from typing import Any

from pretrain.errors import ConfigError
from pretrain.models.families.family import Family

# File and name of each, by `model.family`; a file is imported when its family is used.
_FAMILIES = {
    "custom": "CUSTOM", "hf": "HF", "transformer": "TRANSFORMER", "deepseek_v3": "DEEPSEEK_V3", "gpt2": "GPT2", "gpt_neox": "GPT_NEOX", "gpt_oss": "GPT_OSS",
    "llama": "LLAMA", "mixtral": "MIXTRAL", "qwen3_moe": "QWEN3_MOE",
}  # fmt: skip


def family_of(name: str) -> Family:
    """The family of a `model.family` value."""
    return getattr(importlib.import_module(f"pretrain.models.families.{name}"), _FAMILIES[name])


def families() -> list[Family]:
    """Those that our network computes and transformers has."""
    return [family_of(name) for name in _FAMILIES if name not in ("custom", "hf", "transformer")]


def family_of_hf(config: dict[str, Any]) -> Family:
    """The family that reads a Hugging Face config.json; ConfigError names an architecture that none reads."""
    known = {family.architecture: family for family in families()}
    for architecture in config.get("architectures") or []:
        if architecture in known:
            return known[architecture]
    raise ConfigError(f"config.json: architectures={config.get('architectures')} is not supported; supported: {list(known)}")
