"""One process, no communication."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from pretrain.distributed.ranks import Ranks


class Single:
    """The reference that every other strategy must equal."""

    data_rank = 0

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device

    def place(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        model.to_empty(device=self.device)
        fill(model)
        return model

    def release(self) -> None:
        return None

    def micro_step(self, last: bool) -> AbstractContextManager:
        return nullcontext()
