"""What the axes have in common: collectives, most of them with gradients, and extension of modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.models.compiling import new_name

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def extend(module: nn.Module, extension: type, **attributes: Any) -> None:
    """Make a module one of a subclass of its class, in which the methods of `extension` come first. They find the attributes on the module.

    Modules could have functions of their own in place of a class. But torch compiles anew for every such function, and once for modules of one class.
    """
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = _extended(extension, type(module))


@functools.cache
def _extended(extension: type, kind: type) -> type:
    return type(f"{extension.__name__}{kind.__name__}", (extension, kind), {})


def gather(x_BRX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, R, X] of each rank, one after the other: [B, ranks x R, X]. In backward each rank gets the sum of its part's gradients."""
    if x_BRX.dtype == torch.bool:
        # Gathered Booleans that a compiled backward needs are kept as integers and read as Booleans there (Inductor of torch 2.13, on CPUs).
        return _Gather.apply(x_BRX.to(torch.uint8), group).bool()
    return _Gather.apply(x_BRX, group)


def scatter(y_BTX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of this rank's stretch [B, T / ranks, X]. The gradient of a sum is that of every addend."""
    return _Scatter.apply(y_BTX, group)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks. Each rank goes on with it in its own way, so its gradient is a sum over ranks too."""
    return _Total.apply(x, group)


def exchange(x_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of the first dimension goes to rank i; what comes from each rank, in their order. Gradients go the other way."""
    return _AllToAll.apply(x_NX, group)


def add_in_place(tensors: list[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None) -> None:
    """Give each tensor its sum over ranks, all in one message. It is formed in `dtype`, by default in the widest of theirs."""
    together = torch.cat([tensor.flatten() for tensor in tensors])
    together = together.to(dtype or together.dtype)
    dist.all_reduce(together, group=group)
    for tensor, summed in zip(tensors, together.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(summed.view_as(tensor))


def _gather(x_BRX: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x_BRX.new_empty(group.size(), *x_BRX.shape)
    _all_gather(parts.flatten(0, 1), x_BRX.contiguous(), group=group)
    return parts.movedim(0, 1).flatten(1, 2)


def _scatter(y_BTX: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = y_BTX.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


def _all_to_all(x_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    arrived_NX = torch.empty_like(x_NX, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived_NX, x_NX.contiguous(), group=group)
    return arrived_NX


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BRX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BRX, group)

    @staticmethod
    def backward(ctx, g_BTX: Tensor) -> tuple[Tensor, None]:
        return _scatter(g_BTX, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_BTX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return new_name(_scatter(y_BTX, group))

    @staticmethod
    def backward(ctx, g_BRX: Tensor) -> tuple[Tensor, None]:
        return _gather(g_BRX, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return new_name(_all_to_all(x_NX, group))

    @staticmethod
    def backward(ctx, g_NX: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(g_NX, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return new_name(x)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None
