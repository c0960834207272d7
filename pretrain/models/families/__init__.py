"""Model families: one file each, and nothing about a family anywhere else."""

from __future__ import annotations

import importlib
import re
from typing import Any, get_args

from pretrain.config.model_schema import FamilyName, Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.family import Family


def family_of(name: str) -> Family:
    """The family of a `model.family` value: what its file calls by the same name, in capitals. Imported when it is used."""
    module = f"pretrain.models.families.{name}"
    try:
        family = getattr(importlib.import_module(module), name.upper(), None)
    except ValueError as error:  # of what it declares
        raise ConfigError(f"model.family={name}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        family = None
    if not isinstance(family, Family) or family.name != name:
        file = f"pretrain/models/families/{name}.py"
        raise ConfigError(
            f'model.family={name}: {file} must have {name.upper()} = Family(name="{name}", ...); docs/adding_a_family.md'
        )
    return family


def families() -> list[Family]:
    """Those that our networks compute and transformers has."""
    return [family_of(name) for name in get_args(FamilyName) if name not in ("custom", "hf", "transformer")]


def complete(model: Model, sequence_length: int | None = None) -> Model:
    """The section with every key that its family derives filled in. Raises ConfigError naming both keys."""
    return family_of(model.family).complete(model, sequence_length)


def family_of_hf(config: dict[str, Any]) -> Family:
    """The family that reads a Hugging Face config.json; ConfigError names an architecture that none reads."""
    known: dict[str, Family] = {}
    for family in families():
        if family.architecture in known:
            raise ConfigError(
                f"model.family={known[family.architecture].name} and model.family={family.name} both read files of {family.architecture}; one of them needs "
                "another architecture, or an empty one, with which it has no files (docs/adding_a_family.md)"
            )
        known[family.architecture] = family
    base = {_base_class(family): family for family in known.values()}  # whose files are whole where the head is tied
    said = config.get("architectures")
    for architecture in said if isinstance(said, list) else []:
        if isinstance(architecture, str) and architecture in known | base:
            return (known | base)[architecture]
    if isinstance(config.get("text_config"), dict):
        raise ConfigError(
            f"config.json: architectures={shown(said)} is a model of text and of something else, with a text_config; save its text model alone, by "
            "save_pretrained of transformers' AutoModelForCausalLM"
        )
    raise ConfigError(
        f"config.json: architectures={shown(said)} is not supported; supported: {list(known)}, "
        "and with --family hf whatever causal language model transformers builds itself"
    )


def _base_class(family: Family) -> str:
    """transformers' class of the model without its head."""
    stem = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", family.architecture)
    return f"{stem}{'Text' if family.model_type.endswith('_text') else ''}Model"
