"""A step whose work is queued: what the host knows of it at once, and the figures that the device may still be computing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def runs_ahead(device: torch.device) -> bool:
    """Whether the host queues work for a device that computes beside it."""
    return device.type == "cuda"


class Figures:
    """Tensors on their way to the host. A GPU copies them when it has come so far; the host waits in `read` alone."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._copies = {name: _begin_copy(tensor) for name, tensor in tensors.items()}
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        self._arrived = torch.cuda.current_stream().record_event() if on_gpu else None

    def read(self) -> dict[str, Tensor]:
        """The tensors, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


def _begin_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass
class QueuedStep:
    """A step whose update is made or queued, unless the device finds it not finite. `figures`: objective, loss, gradient norm and what the routers report."""

    number: int
    tokens: int
    samples: int
    """Target tokens and samples of the run up to this step."""
    rate: float
    digest: str
    positions: list[int]
    """The samples of this rank; with `losses_B` to name those of a step that is refused."""
    losses_B: Tensor
    """What each of them lost."""
    figures: Figures
    source_tokens: list[int]
    """Target tokens of the step by source, over all ranks; empty for data with one source."""

    @staticmethod
    def is_finite(figures: dict[str, Tensor]) -> bool:
        """Whether the update was made. The device decided by the same figures."""
        return math.isfinite(figures["objective"]) and math.isfinite(figures["grad_norm"])
