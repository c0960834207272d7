"""DistributedDataParallel: every rank holds the whole model, gradients are all-reduced in buckets during backward.

DDP averages over ranks. A factor on the loss could cancel that. But unless the number of ranks is a power of two, it would round the bf16
gradients of activations differently from one process. So a hook sums instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.parallel.blocks import DTYPES


class DataParallel:
    """DDP whose reductions sum, deferred to the last micro-step unless `grad_sync: every`."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.device = mesh.device
        self.replicas = mesh.sizes["replicate"]
        self.every = config.parallel.grad_sync == "every"
        # DDP rebuilds its buckets after the first iteration. With more than two ranks that changes the order of sums, and a
        # resumed run would differ in the last bit. DDP keeps its buckets while it looks for unused parameters.
        self.keep_buckets = config.run.deterministic and self.replicas > 2
        self.wrapped: DistributedDataParallel | None = None

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        network.to_empty(device=self.device)
        fill(network)
        options = self.config.parallel.ddp
        self.wrapped = DistributedDataParallel(
            network,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            find_unused_parameters=self.keep_buckets,
        )
        self.wrapped.register_comm_hook(DTYPES[self.config.precision.reduce], _sum)
        return self.wrapped

    def release(self) -> None:
        return None

    def finish_step(self) -> None:
        return None

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        if self.every:
            # The sum of earlier micro-steps is the same on all ranks, and is about to be summed over them once more.
            earlier = [p.grad for p in self.wrapped.parameters() if p.grad is not None]
            if earlier:
                torch._foreach_mul_(earlier, 1 / self.replicas)
        with nullcontext() if last or self.every else self.wrapped.no_sync():
            yield


# DDP insists on the name `bucket`, and rejects annotations that are strings.
def _sum(state, bucket):
    # torch has such hooks for number formats, which average and refuse gloo.
    buffer = bucket.buffer()
    sent = buffer.to(state)
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda done: done.value()[0] if sent is buffer else buffer.copy_(done.value()[0]))
