"""DistributedDataParallel: every rank holds the whole model, gradients are all-reduced in buckets during backward.

DDP averages over ranks. A factor on the loss could cancel that. But unless the number of ranks is a power of two, it would round the bf16
gradients of activations differently from one process. So a hook sums instead.

DDP's buckets have the format of the weights. With weights in bf16 and `precision.gradients: fp32`, gradients go past them:

    backward            adds to gradients in fp32, as in one process
    synchronised        each gradient is taken away as soon as it is complete, and DDP finds none; when a bucket is, the hook reduces what was taken
    end of the step     the sums become the gradients

Otherwise, where the ranks wait with the reduction until the last of several micro-steps, the first one moves each gradient into its bucket, and later
ones add to it there. torch would make a second set of gradients beside the buckets, and copy it at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.parallel.blocks import DTYPES


def keeps_buckets(config: Config, replicas: int) -> bool:
    """Whether buckets stay as they were made, on so many ranks.

    DDP rebuilds them after the first iteration. With more than two ranks that changes the order of sums, and a resumed run would differ in the last
    bit. It keeps them while it looks for unused parameters.
    """
    return config.run.deterministic and replicas > 2


def is_wide(config: Config) -> bool:
    """Whether gradients have a wider format than weights, and so than buckets."""
    return config.precision.gradients == "fp32" and config.precision.master == "bf16"


def accumulates_in_buckets(config: Config, replicas: int) -> bool:
    """Whether gradients of micro-steps are added up in the buckets. Not where DDP looks for unused parameters: their gradients stay undefined."""
    views = config.parallel.ddp.gradient_as_bucket_view
    return views and not is_wide(config) and not keeps_buckets(config, replicas)


class DataParallel:
    """DDP whose reductions sum, deferred to the last micro-step unless `grad_sync: every`."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.device = mesh.device
        self.replicas = mesh.sizes["replicate"]
        self.every = config.parallel.grad_sync == "every"
        self.keep_buckets = keeps_buckets(config, self.replicas)
        self.is_wide = is_wide(config)
        self.in_buckets = accumulates_in_buckets(config, self.replicas)
        self.views: dict[nn.Parameter, Tensor] = {}
        """The parts of the buckets that are the gradients."""
        self.reached: set[nn.Parameter] = set()
        self.hooks: list[RemovableHandle] = []
        """They note, in the first step, which parameters get a gradient."""
        self.moved: list[RemovableHandle] = []
        """They move the gradients of a step's first micro-step into the buckets."""
        self.taken: dict[nn.Parameter, Tensor] = {}
        """Gradients in fp32 of this rank, not yet reduced, where weights are stored in bf16."""
        self.sums: dict[nn.Parameter, Tensor] = {}
        """The same, reduced."""
        self.arrived: list[tuple[list[nn.Parameter], Tensor]] = []
        """Reduced ones of this micro-step, in a row."""
        self.wrapped: DistributedDataParallel | None = None
        # DDP holds its hooks where Python's garbage collector does not see them: a strong reference would keep the whole model for ever.
        self.itself = weakref.ref(self)

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        network.to_empty(device=self.device)
        fill(network)
        options = self.config.parallel.ddp
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad] if self.in_buckets else []
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)  # which DDP moves into its buckets
        self.wrapped = DistributedDataParallel(
            network,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            find_unused_parameters=self.keep_buckets,
        )
        self.views = {parameter: parameter.grad for parameter in trained}
        self.hooks = [parameter.register_post_accumulate_grad_hook(self.reached.add) for parameter in trained]
        network.zero_grad()
        if self.is_wide:
            for parameter in self._wide():
                parameter.grad_dtype = torch.float32
                parameter.register_post_accumulate_grad_hook(lambda parameter, axes=self.itself: axes()._take(parameter))
            self.wrapped.register_comm_hook(self.itself, _sum_in_fp32)
        else:
            self.wrapped.register_comm_hook(DTYPES[self.config.precision.reduce], _sum)
        return self.wrapped

    def release(self) -> None:
        return None

    def partial_gradients(self) -> Iterator[Tensor]:
        yield from self.taken.values()
        yield from self.sums.values()

    def finish_step(self) -> None:
        for parameter, summed in self.sums.items():
            parameter.grad = summed
        self.sums = {}
        if self.hooks:
            self._end_first_step()

    def _end_first_step(self) -> None:
        """Let DDP rebuild its buckets, which it would do in the next forward pass, beside the old ones and activations."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        untrained = self.views.keys() - self.reached
        for parameter in untrained:
            parameter.grad = None  # not zeros: the training loop looks for it
        if not untrained:  # else DDP would say that it has not finished
            self.wrapped.reducer._rebuild_buckets()
            self.views = {parameter: parameter.grad for parameter in self.views}

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        self.is_synced = last or self.every
        if self.every:
            # The sum of earlier micro-steps is the same on all ranks, and is about to be summed over them once more.
            earlier = [p.grad for p in self.wrapped.parameters() if p.grad is not None]
            if earlier:
                torch._foreach_mul_(earlier, 1 / self.replicas)
        if self.views and not self.is_synced and not self.moved:
            move = lambda parameter, axes=self.itself: axes()._into_bucket(parameter)  # noqa: E731
            self.moved = [parameter.register_post_accumulate_grad_hook(move) for parameter in self.views]
        with nullcontext() if self.is_synced else self.wrapped.no_sync():
            yield
        self._add_arrived()
        for parameter in self._wide() if self.is_synced else ():
            parameter.grad = None  # a bucket's

    def _add_arrived(self) -> None:
        """Add up what was reduced. DDP's callbacks run on many streams, and each would keep memory for sums that were made on it."""
        while self.arrived:
            parameters, summed = self.arrived.pop()
            for parameter, part in zip(parameters, summed.split([p.numel() for p in parameters])):
                earlier, new = self.sums.get(parameter), part.view_as(parameter).float()
                self.sums[parameter] = new if earlier is None else earlier + new

    def _into_bucket(self, parameter: nn.Parameter) -> None:
        """Make the bucket the gradient of a parameter, which has got its first one in this step."""
        if not self.is_synced and parameter.grad is not (view := self.views[parameter]):
            parameter.grad = view.copy_(parameter.grad)

    def _wide(self) -> Iterator[nn.Parameter]:
        """The parameters whose gradients go past DDP's buckets; none by default."""
        return (p for p in self.wrapped.parameters() if self.is_wide and p.requires_grad and p.dtype == torch.bfloat16)

    def _take(self, parameter: nn.Parameter) -> None:
        if self.is_synced:
            self.taken[parameter], parameter.grad = parameter.grad, None


def _sum_in_fp32(state, bucket):
    axes = state()
    buffer, dtype = bucket.buffer(), DTYPES[axes.config.precision.reduce]
    if buffer.dtype != torch.bfloat16:
        return _sum(dtype, bucket)
    parameters = bucket.parameters()
    found = (axes.taken.pop(parameter, None) for parameter in parameters)
    parts = [torch.zeros_like(p, dtype=dtype) if g is None else g.to(dtype) for p, g in zip(parameters, found)]
    sent = torch.cat([part.flatten() for part in parts])

    def keep(done):
        axes.arrived.append((parameters, done.value()[0]))
        return buffer

    return dist.all_reduce(sent, async_op=True).get_future().then(keep)


# DDP insists on the name `bucket`, and rejects annotations that are strings.
def _sum(state, bucket):
    # torch has such hooks for number formats, which average and refuse gloo.
    buffer = bucket.buffer()
    sent = buffer.to(state)
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda done: done.value()[0] if sent is buffer else buffer.copy_(done.value()[0]))
