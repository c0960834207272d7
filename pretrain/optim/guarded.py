"""What optimizers of our own have in common: a step that the device may leave out, and state beside each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing where `found_inf` is 1, as torch's fused ones do. The host never waits for that number.

    `moments`: the names of its state, tensors like the parameter.
    """

    moments: tuple[str, ...] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})

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
                state[name] = torch.zeros_like(parameter)
        return [state[name] for name in self.moments]

    def write(self, tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """Give tensors new values, unless the step is left out."""
        for tensor, value in zip(tensors, values):
            tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf.to(tensor.device) > 0, tensor, value))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor. It shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
