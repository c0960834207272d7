"""The weight map of one model with the shapes of both sides, known before there is any weight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.config.model_schema import Model
from pretrain.errors import CheckpointError, ConfigError
from pretrain.models import build_network
from pretrain.models.families import family_of
from pretrain.models.families.declare.family import INERT, Family
from pretrain.models.families.declare.weights import TRAINING_ONLY, Entry, Shape


@dataclass(frozen=True)
class WeightPlan:
    """`entries` in the order of conversion, `ours` and `theirs` the shapes of all tensors by name, but for those of TRAINING_ONLY.

    `kept`: number formats, by our names, of the tensors that get no gradient. They keep them whatever that of the weights is: the
    corrections that balance experts, which small steps move, and tables of whole numbers.
    """

    model: Model
    family: Family
    entries: list[Entry]
    ours: dict[str, Shape]
    theirs: dict[str, Shape]
    kept: dict[str, torch.dtype]

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.ours.values())


def plan_weights(model: Model) -> WeightPlan:
    """Resolve the family's weight map against the network itself, and lay out every entry without values, in both directions.

    Raises CheckpointError naming a parameter that the map leaves out or whose layouts do not fit each other.
    """
    family = family_of(model.family)
    with torch.device("meta"):
        named = dict(build_network(model).named_parameters())
    ours = {name: tuple(p.shape) for name, p in named.items() if not name.startswith(TRAINING_ONLY)}
    kept = {name: named[name].dtype for name in ours if not named[name].requires_grad}
    try:
        entries = family.entries(model, list(ours))
    except ValueError as error:
        raise CheckpointError(f"model.family={family.name} cannot be exported: {error}") from error
    theirs: dict[str, Shape] = {}
    for line in entries:
        shapes = [ours[name] for name in line.ours]
        laid_out = line.layout.to_theirs(
            [torch.empty(ours[name], dtype=kept.get(name), device="meta") for name in line.ours], model
        )
        back = [tuple(t.shape) for t in line.layout.to_ours(laid_out, shapes, model)]
        if len(laid_out) != len(line.theirs) or back != shapes or any(name in theirs for name in line.theirs):
            raise CheckpointError(
                f"model.family={family.name} cannot be exported: {line.ours[0]} {list(shapes[0])} does not come back from "
                f"{line.theirs[0]} {[list(t.shape) for t in laid_out][:1]}"
            )
        theirs |= {name: tuple(t.shape) for name, t in zip(line.theirs, laid_out)}
    return WeightPlan(model, family, entries, ours, theirs, kept)


def least_numbers(model: Model) -> int:
    """Weights that a model has at least, from its sizes alone: its table, and of each layer one projection, or its experts."""
    experts = model.experts.count or 0
    dense = (model.layers + (model.encoder.layers or 0)) * model.dim * max(1, model.heads)
    routed = (model.layers - len(model.experts.dense_layers or ())) * experts * model.dim * (model.experts.ffn_dim or 0)
    return model.vocab_size * model.dim + dense + routed


def refuse_odd_numbers(place: object, name: str, tensor: Tensor, kept: bool = False) -> None:
    """Raise CheckpointError naming a tensor that holds NaN or infinity: training, sampling and export would carry it on. `kept`: it
    gets no gradient, and may hold infinities (a mask, say).
    """
    if not tensor.is_floating_point() or torch.isfinite(tensor).all() or (kept and not tensor.isnan().any()):
        return
    what = "NaN" if tensor.isnan().any() else "infinite numbers"
    count = int((~torch.isfinite(tensor)).sum())
    raise CheckpointError(
        f"{place}: {name} holds {what} ({count:,} of {tensor.numel():,}); these are no weights of a working model"
    )


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
