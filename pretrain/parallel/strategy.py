"""The switch: how a model is spread over ranks, behind verbs that the training loop uses without knowing which is in force.

A strategy is one file. It gets a model on the meta device, gives back what to call, and says how gradients of several
micro-steps are synchronised. In every strategy the gradient that ends up in `parameter.grad` is the sum over all ranks and
micro-steps: the loop divides the loss by the target tokens of the whole step, once, and nothing is averaged after that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from pretrain.config.schema import Config
from pretrain.distributed.ranks import Ranks
from pretrain.parallel.layout import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Strategy(Protocol):
    """What the training loop asks of a layout."""

    data_rank: int
    """This rank's place among the ranks that see different samples."""

    def place(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        """Put a meta-device model on this rank, give its parameters values with `fill`, return what to call.

        `model` is a network (models/network.py); the result has its forward, and `model` itself keeps the plain parameter names.
        """
        ...

    def release(self) -> None:
        """Give up what a forward pass without backward leaves behind; parameters are the sharded ones again."""
        ...

    def micro_step(self, last: bool) -> AbstractContextManager:
        """Around the forward and backward of a micro-step: gradients are synchronised as `parallel.grad_sync` says."""
        ...


def build_strategy(config: Config, layout: Layout, ranks: Ranks) -> Strategy:
    """The strategy of a layout. Imports only what that strategy needs."""
    if layout.strategy == "single":
        from pretrain.parallel.single import Single

        return Single(ranks)
    if layout.strategy == "ddp":
        from pretrain.parallel.ddp import DataParallel

        return DataParallel(config, layout, ranks)
    from pretrain.parallel.fsdp import FullyShard

    return FullyShard(config, layout, ranks)


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """What every strategy does alike: compute format, recomputation, compilation block by block."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = DTYPES[config.precision.compute]
    model.recompute_blocks = config.parallel.activation_checkpointing
    if config.parallel.compile:
        for block in model.parts().blocks:
            block.compile()
