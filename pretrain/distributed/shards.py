"""A rank's part of a sharded tensor, and where it lies; and its part of other things that ranks share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor. It shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole, by dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    # Imported here because parts of this module path are private.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))


def own_part(count: int, rank: int, size: int) -> slice:
    """A rank's stretch of `count` things, which all ranks share equally."""
    return slice(rank * count // size, (rank + 1) * count // size)


def own_passes(count: int, rows: int, rank: int, size: int) -> Iterator[range]:
    """A rank's numbers of each pass over `count` things, at most `rows`. All ranks make as many passes, and may have none in the last one."""
    for first in range(0, count, rows * size):
        start = min(first + rank * rows, count)
        yield range(start, min(start + rows, count))


def stretch_length(length: int, ranks: int) -> int:
    """The positions of a stretch. Context-parallel ranks cut a sequence into 2 x ranks of them; its last ones may be filled up."""
    return -(-length // (2 * ranks))


def own_stretches(rank: int, ranks: int) -> tuple[int, int]:
    """The numbers of a rank's two stretches, as far from the beginning as from the end: together they are equal work on every rank."""
    return rank, 2 * ranks - 1 - rank
