"""A batch of matrices that ranks share, sharded another way. The exchange is begun, and waited for later.

torch's `redistribute` waits for its all-to-all, so between two ways of sharding on one axis the messages are made here.

    parts     each rank has its rows (or columns) of all matrices
    whole     each rank has some of the matrices, with all rows and columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

Pending = Callable[[], Tensor]
"""Waits for what travels, and returns this rank's part."""


def begin_exchange(
    part: Tensor, mesh: DeviceMesh, shape: torch.Size, source: Sequence[Placement], target: Sequence[Placement]
) -> Pending:
    """Begin to shard a batch [K, M, N] of this `shape` as `target` says. `part`: this rank's, as `source` says. K is a multiple of the ranks."""
    kinds = [type(placement) for placement in (*source, *target)]
    if mesh.ndim == 1 and kinds == [Shard, Shard]:
        if source[0].dim > 0 and target[0].dim == 0:
            return _to_whole(part, mesh, shape, source[0].dim)
        if source[0].dim == 0 and target[0].dim > 0:
            return _to_parts(part, mesh, shape, target[0].dim)
    stride = (shape[1] * shape[2], shape[2], 1)
    shared = DTensor.from_local(part.contiguous(), mesh, source, run_check=False, shape=shape, stride=stride)
    travelling = shared.redistribute(mesh, target, async_op=True).to_local()
    return travelling.wait if isinstance(travelling, AsyncCollectiveTensor) else lambda: travelling


def _lengths(length: int, ranks: int) -> list[int]:
    """How many rows or columns each rank has, as torch shards them: the last ranks may have fewer, or none."""
    most = -(-length // ranks)
    return [max(0, min(most, length - rank * most)) for rank in range(ranks)]


def _to_whole(part_KMN: Tensor, mesh: DeviceMesh, shape: torch.Size, dim: int) -> Pending:
    ranks, others = mesh.size(), shape[3 - dim]
    count, lengths = shape[0] // ranks, _lengths(shape[dim], ranks)
    received = [count * length * others for length in lengths]
    arrives = part_KMN.new_empty(sum(received))
    sent = part_KMN.contiguous().flatten()
    work = dist.all_to_all_single(arrives, sent, received, [sent.numel() // ranks] * ranks, mesh.get_group(), async_op=True)

    def wait() -> Tensor:
        work.wait()
        blocks = zip(arrives.split(received), lengths)
        return torch.cat([block.view((count, n, others) if dim == 1 else (count, others, n)) for block, n in blocks], dim)

    return wait


def _to_parts(whole_KMN: Tensor, mesh: DeviceMesh, shape: torch.Size, dim: int) -> Pending:
    ranks, lengths = mesh.size(), _lengths(shape[dim], mesh.size())
    part_shape = [shape[0], *shape[1:]]
    part_shape[dim] = lengths[mesh.get_local_rank()]
    blocks = [block.flatten() for block in whole_KMN.split(lengths, dim)]
    arrives = whole_KMN.new_empty(part_shape)
    received = [arrives.numel() // ranks] * ranks
    sent = torch.cat(blocks)
    work = dist.all_to_all_single(
        arrives.view(-1), sent, received, [b.numel() for b in blocks], mesh.get_group(), async_op=True
    )

    def wait() -> Tensor:
        work.wait()
        return arrives

    return wait
