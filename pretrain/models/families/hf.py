"""Models that transformers builds itself: configuration and names are its own (models/hf/hf_model.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.models.families.declare.family import BALANCE, Family
from pretrain.models.families.declare.weights import SAME, Entry, Shape
from pretrain.models.hf.hf_config import complete_hf, hf_window

_OTHERS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")


class _Own(Family):
    """What the configuration of transformers says itself, in place of declarations."""

    def to_hf(self, model: Model) -> dict[str, Any]:
        return json.loads(model.hf_config)

    def from_hf(self, config: dict[str, Any]) -> Model:
        fields = {name: value for name, value in config.items() if name not in _OTHERS}
        return self.complete(Model(family="hf", hf_config=json.dumps(fields, sort_keys=True)))

    def complete(self, model: Model, sequence_length: int | None = None) -> Model:
        return complete_hf(model, sequence_length)

    def smallest_section(self, model: Model) -> dict[str, Any]:
        said = {"family": "hf", "hf_config": model.hf_config}
        if self.complete(Model(**said)) != model:
            said["max_sequence_length"] = model.max_sequence_length
        return said

    def build(self, model: Model, loss: Loss | None = None) -> nn.Module:
        from pretrain.models.hf.hf_model import HfModel

        return HfModel(model, loss)

    def use_plain_kernels(self, network: nn.Module) -> None:
        network.transformers.set_experts_implementation("eager")  # the grouped kernel that it takes by default has no fp64

    def reach(self, model: Model) -> tuple[int, int]:
        return hf_window(model), 0

    @property
    def has_export(self) -> bool:
        return True

    def check_training(self, model: Model) -> None:
        """Routers are the affair of transformers' model."""

    def describe(self, model: Model) -> list[str]:
        from pretrain.models.hf.hf_model import describe_hf

        return describe_hf(model)

    def usual_switches(self, given: Model, model: Model) -> dict[str, list[Any]]:
        return {}

    def import_notes(self, config: dict[str, Any], model: Model) -> list[str]:
        weight = config.get(BALANCE)
        why = "with model.family=hf the auxiliary losses of transformers are not added"
        return [f"{BALANCE}={weight} is not used: {why}"] if weight else []

    def entries(self, model: Model, parameters: Sequence[str]) -> list[Entry]:
        """Our names are theirs in memory; on disk, transformers keeps some tensors apart that it holds as one, those of experts mostly."""
        with torch.device("meta"):
            network = self.build(model)
        theirs, shapes = network.transformers, {name: p.shape for name, p in network.named_parameters()}
        lines = []
        for name in parameters:
            layout = _OnDisk(theirs, name)
            names = tuple(layout.apart(torch.empty(shapes[name], device="meta")))
            lines.append(Entry((name,), names, SAME if names == (name,) else layout))
        return lines

    def copies_of(self, model: Model) -> dict[str, str]:
        with torch.device("meta"):
            return self.build(model).tied_names()


class _OnDisk:
    """The layout (`TensorLayout`) of one tensor that transformers itself takes apart when it saves."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name

    def apart(self, tensor: Tensor) -> dict[str, Tensor]:
        """Their tensors by name."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, {self.name: tensor})

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return [tensor.contiguous() for tensor in self.apart(ours[0]).values()]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        # What is taken apart is moved and never changed, so numbers in place of values say where each of theirs belongs.
        count = torch.Size(shapes[0]).numel()
        places = torch.arange(count, dtype=torch.int32 if count < 2**31 else torch.int64, device=theirs[0].device)
        whole = torch.empty(torch.Size(shapes[0]), dtype=theirs[0].dtype, device=theirs[0].device)
        for place, tensor in zip(self.apart(places.view(shapes[0])).values(), theirs):
            if place.shape != tensor.shape:
                return [tensor]
            if not tensor.is_meta:
                whole.view(-1)[place.flatten().long()] = tensor.flatten()
        return [whole]


HF = _Own(name="hf", rope=None, prefix="", is_ours=False, packages=("transformers",))
