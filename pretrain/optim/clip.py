"""Gradient clipping by global norm: one function for every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most `max_norm` (0: leave them); return the norm before.

    Squares are added in fp64: fp32 sums over half a million elements are off by some 1e-6, differently for whole and for
    sharded tensors. The result is a plain fp64 scalar on the gradients' device, equal on all ranks (Pascanu et al.,
    arXiv 1211.5063; the factor is that of torch.nn.utils.clip_grad_norm_).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    squares: dict[object, list[Tensor]] = {}
    for gradient, norm in zip(gradients, torch._foreach_norm(local, 2, dtype=torch.float64)):
        squares.setdefault(_sharding_of(gradient), []).append(norm.square())
    total = torch.zeros((), dtype=torch.float64, device=local[0].device)
    for sharding, values in squares.items():
        total += _sum_over_shards(torch.stack(values).sum(), sharding).to(total.device)
    total = total.sqrt()
    if max_norm > 0:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, factor.to(local[0].dtype))
    return total


def _sharding_of(gradient: Tensor) -> tuple | None:
    """The mesh and its axes that a gradient is sharded over; None for a tensor that is whole on every rank."""
    if not isinstance(gradient, DTensor):
        return None
    axes = tuple(axis for axis, placement in enumerate(gradient.placements) if placement.is_shard())
    return gradient.device_mesh, axes


def _sum_over_shards(squares: Tensor, sharding: tuple | None) -> Tensor:
    if sharding is not None:
        mesh, axes = sharding
        for axis in axes:
            dist.all_reduce(squares, group=mesh.get_group(axis))
    return squares
