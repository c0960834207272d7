"""What optimizers of our own have in common: a step that the device may leave out, and state beside each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretrain.distributed.shards import place_of
from pretrain.optim.rounding import random_bits, round_at_random

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Formats:
    """How numbers are stored. `moments`: of matrices, uint8 for codes of AdamW's; those of vectors are stored as these are. `names`: of the
    parameters, for rounding.
    """

    moments: torch.dtype = torch.float32
    names: dict[Tensor, str] = field(default_factory=dict)


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing where `found_inf` is 1, as torch's fused ones do. The host never waits for that number.

    `moments`: the names of its state, tensors like the parameter. `step_number` is where random rounding begins.
    """

    moments: tuple[str, ...] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    step_number: int = 0

    def __init__(self, groups: list[dict[str, Any]], lr: float, formats: Formats) -> None:
        super().__init__(groups, {"lr": lr})
        self.formats = formats

    def create_state(self) -> None:
        """Create the state that the first step would create."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter)

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """The parameter's moments, in the order of their names."""
        state = self.state[parameter]
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self._stored_in(parameter))
        return [state[name] for name in self.moments]

    def _stored_in(self, parameter: Tensor) -> torch.dtype:
        if parameter.dim() < 2:
            return parameter.dtype
        if self.formats.moments == torch.float32:
            return widest(parameter)
        return self.formats.moments

    def write(self, parameter: Tensor, tensors: Sequence[Tensor], values: Sequence[Tensor], chunk: slice = EVERYTHING) -> None:
        """Give this rank's parts of a parameter and its state new values, in these rows, unless the step is left out.

        Where bf16 is stored, fp32 is rounded at random.
        """
        for number, (tensor, value) in enumerate(zip(tensors, values)):
            old = tensor[chunk]
            if old.dtype == torch.bfloat16 and value.dtype == torch.float32:
                value = round_at_random(value, self.random_bits(parameter, number, chunk, value.device))
            old.copy_(value if self.found_inf is None else torch.where(self.found_inf.to(tensor.device) > 0, old, value))

    def random_bits(self, parameter: Tensor, number: int, chunk: slice, device: torch.device) -> Tensor:
        """Random numbers below 2^16 for these rows of tensor `number` of a parameter and its state, the same in every layout."""
        rows, *others = place_of(parameter)
        first, last, _ = chunk.indices(rows.stop - rows.start)
        place = (slice(rows.start + first, rows.start + last), *others)
        return random_bits(place, f"{self.formats.names[parameter]}.{number}", self.step_number, device)


def widest(tensor: Tensor) -> torch.dtype:
    """The format to compute in: that of the tensor, and at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the format to compute in; the same one where it has it."""
    return tensor.to(widest(tensor))
