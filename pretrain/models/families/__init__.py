"""Model families: one file each, and nothing about a family anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrain.config.schema import Model
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """How a family is written by Hugging Face transformers.

    `weights` is read in both directions: pairs of (our name, their name) in which `{layer}` stands for every block.
    """

    name: str
    architecture: str
    weights: tuple[tuple[str, str], ...]
    to_hf: Callable[[Model], dict[str, Any]]
    from_hf: Callable[[dict[str, Any]], Model]

    def names(self, model: Model) -> dict[str, str]:
        """Our name -> their name, of every parameter of a model of this shape."""
        pairs = {}
        for ours, theirs in self.weights:
            if ours == "output.weight" and model.tie_embeddings:
                continue
            layers = range(model.layers) if "{layer}" in ours else range(1)
            pairs |= {ours.format(layer=i): theirs.format(layer=i) for i in layers}
        return pairs


def family_of(name: str) -> Family:
    """The family of a `model.family` value."""
    from pretrain.models.families.llama import LLAMA

    return {"llama": LLAMA}[name]


def family_of_hf(config: dict[str, Any]) -> Family:
    """The family that reads a Hugging Face config.json; ConfigError names an architecture that none reads."""
    from pretrain.models.families.llama import LLAMA

    families = {family.architecture: family for family in (LLAMA,)}
    for architecture in config.get("architectures") or []:
        if architecture in families:
            return families[architecture]
    raise ConfigError(f"config.json: architectures={config.get('architectures')} is not supported; supported: {list(families)}")
