"""One process, no communication."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.parallel.blocks import DTYPES


class Single:
    """The reference that every other layout must equal."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.device = mesh.device
        self.gradient_dtype = DTYPES.get(config.precision.gradients)

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        network.to_empty(device=self.device)
        fill(network)
        for parameter in network.parameters():
            if self.gradient_dtype is not None and parameter.dim() > 1 and parameter.requires_grad:
                parameter.grad_dtype = self.gradient_dtype
        return network

    def release(self) -> None:
        return None

    def partial_gradients(self) -> tuple[Tensor, ...]:
        return ()

    def finish_step(self) -> None:
        return None

    def micro_step(self, last: bool) -> AbstractContextManager:
        return nullcontext()
