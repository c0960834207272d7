"""DistributedDataParallel: every rank holds the whole model, gradients are all-reduced in buckets during backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.config.schema import Config
from pretrain.distributed.ranks import Ranks
from pretrain.parallel.layout import Layout


class DataParallel:
    """DDP averages over ranks, which `gradient_scale` cancels: a summing hook would count gradients that are already
    synchronised once per rank in the next micro-step of `grad_sync: every`, where averaging leaves them as they are.
    """

    def __init__(self, config: Config, layout: Layout, ranks: Ranks) -> None:
        self.config = config
        self.device = ranks.device
        self.data_rank = ranks.rank
        self.gradient_scale = float(layout.replicate)
        self.every = config.parallel.grad_sync == "every"
        # DDP lays its buckets out anew after the first iteration, which changes the order in which more than two ranks are
        # summed: a resumed run would differ in the last bit. It does not while it looks for unused parameters.
        self.keep_buckets = config.run.deterministic and layout.replicate > 2
        self.wrapped: DistributedDataParallel | None = None

    def place(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        model.to_empty(device=self.device)
        fill(model)
        options = self.config.parallel.ddp
        self.wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            find_unused_parameters=self.keep_buckets,
        )
        if self.config.precision.reduce == "bf16":
            self.wrapped.register_comm_hook(None, _average_in_bf16)
        return self.wrapped

    def release(self) -> None:
        return None

    def micro_step(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last or self.every else self.wrapped.no_sync()


def _average_in_bf16(state, bucket):
    # torch has such a hook, which refuses gloo. DDP insists on the name `bucket`, and rejects annotations that are strings.
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    return dist.all_reduce(small, async_op=True).get_future().then(lambda done: buffer.copy_(done.value()[0]))
