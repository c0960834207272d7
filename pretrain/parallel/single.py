"""One process, no communication."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh


class Single:
    """The reference that every other layout must equal."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.device = mesh.device

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        network.to_empty(device=self.device)
        fill(network)
        return network

    def release(self) -> None:
        return None

    def finish_step(self) -> None:
        return None

    def micro_step(self, last: bool) -> AbstractContextManager:
        return nullcontext()
