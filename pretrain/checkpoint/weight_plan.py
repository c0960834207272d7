"""The weight map of one model with the shapes of both sides, known before there is any weight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.config.model_schema import Model
from pretrain.errors import CheckpointError, ConfigError
from pretrain.models.families import family_of
from pretrain.models.families.family import INERT, Family
from pretrain.models.families.weights import TRAINING_ONLY, Entry, Shape
from pretrain.models.network import build_network


@dataclass(frozen=True)
class WeightPlan:
    """`entries` in the order of conversion, `ours` and `theirs` the shapes of all tensors by name, but for those of TRAINING_ONLY."""

    model: Model
    family: Family
    entries: list[Entry]
    ours: dict[str, Shape]
    theirs: dict[str, Shape]

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.ours.values())


def plan_weights(model: Model) -> WeightPlan:
    """Resolve the family's weight map against the network itself, and lay out every entry without values, in both directions.

    Raises CheckpointError naming a parameter that the map leaves out or whose layouts do not fit each other.
    """
    family = family_of(model.family)
    ours = {name: shape for name, shape in shapes_of(model).items() if not name.startswith(TRAINING_ONLY)}
    try:
        entries = family.entries(model, list(ours))
    except ValueError as error:
        raise CheckpointError(f"model.family={family.name} cannot be exported: {error}") from error
    theirs: dict[str, Shape] = {}
    for line in entries:
        shapes = [ours[name] for name in line.ours]
        laid_out = line.layout.to_theirs([torch.empty(shape, device="meta") for shape in shapes], model)
        back = [tuple(t.shape) for t in line.layout.to_ours(laid_out, shapes, model)]
        if len(laid_out) != len(line.theirs) or back != shapes or any(name in theirs for name in line.theirs):
            raise CheckpointError(
                f"model.family={family.name} cannot be exported: {line.ours[0]} {list(shapes[0])} does not come back from "
                f"{line.theirs[0]} {[list(t.shape) for t in laid_out][:1]}"
            )
        theirs |= {name: tuple(t.shape) for name, t in zip(line.theirs, laid_out)}
    return WeightPlan(model, family, entries, ours, theirs)


def shapes_of(model: Model) -> dict[str, Shape]:
    """The shape of every parameter of a model, by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_network(model).named_parameters()}


def check_round_trip(family: Family, config: dict[str, Any]) -> None:
    """Raise ConfigError naming a field of this config.json that does not come back when it is read and written again."""
    config = json.loads(json.dumps(config))
    again = json.loads(json.dumps(family.to_hf(family.from_hf(config))))
    for name, value in again.items():
        # Special tokens are the tokenizer's, not the model's.
        if config.get(name) != value and name not in INERT:
            raise ConfigError(f"config.json: {name}={config.get(name)!r} comes back as {value!r} for {family.name}")
