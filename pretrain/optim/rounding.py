"""Stochastic rounding to bf16 (Gupta et al., arXiv 1502.02551), from random numbers that no layout changes.

A weight w that an update moves by less than half the distance to its neighbours in bf16 would stay w for ever. Rounded up with a probability as
large as the share of the way to the neighbour above, it moves as it should in the mean. The random number of a weight is a hash of the
step, the parameter's name and the weight's place in the whole matrix. So every rank that holds the weight rounds it alike, and a resumed run
as the straight one does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1 - (1 << 32)
"""2^32 / golden ratio, signed as the seeds are: compiled for a GPU, places are computed in 32 bits, which have no larger numbers. All this is mod 2^32."""


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values in bf16. `bits`: random numbers below 2^16, of the same shape, int32. Values are rounded up in size where what bf16 cuts off
    of them is more than 2^16 less the random number.
    """
    rounded = (values.view(torch.int32) + bits).bitwise_and_(~0xFFFF).view(torch.float32)
    # The sum would make a number of some NaN, a GPU's among them.
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def seed_of(name: str, step: int) -> int:
    """What the random numbers of a tensor in a step begin with, for `hash_places`: a signed number of 32 bits."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return seed - (seed >> 31 << 32)


Hashes = tuple[Tensor, Tensor]
"""What random numbers of a part of a tensor are made of: hashes of its rows, int32 [..., 1], and of its columns, int32 [C]."""
StackedHashes = tuple[Tensor, Tensor]
"""Those of N tensors: int32 [N, ..., 1] and [N, C]."""


def hash_places(shape: Sequence[int], starts: Sequence[int], seeds_N: Tensor) -> StackedHashes:
    """The hashes of a part of a tensor for N seeds, int64. `starts`: where the part begins in each dimension of the whole.

    They are apart from `random_bits` because a compiler would make them anew for every number, in 64 bits, which took a GPU more time than the
    update. All seeds are hashed at once, because the host takes longer to start so small a kernel than the GPU to run it.
    """
    *leading, columns = (torch.arange(size, device=seeds_N.device) + start for size, start in zip(shape, starts))
    rows = torch.zeros_like(seeds_N)
    for number, index in enumerate(leading):
        rows = _hashed(rows[..., None] + index, seeds_N.view(-1, *[1] * (number + 1)) + number)
    of_columns = _hashed(columns, -1 - seeds_N[:, None])
    return _signed(rows)[..., None], _signed(of_columns)


def random_bits(hashes: Hashes) -> Tensor:
    """Numbers below 2^16, int32, of the shape that the hashes are of."""
    rows, columns = hashes
    # A sum of hashes alone would repeat its differences; two rounds of mixing leave nothing of them.
    mixed = rows ^ columns
    for factor in (0x7FEB352D, 0x2C1B3C6D):
        mixed = (mixed ^ (mixed >> 15)).mul_(factor)
    return (mixed >> 16).bitwise_and_(0xFFFF)


def _hashed(index: Tensor, seed: Tensor) -> Tensor:
    """MurmurHash3's finalizer: numbers below 2^32 as int64."""
    x = (index * _GOLDEN + seed) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def _signed(x: Tensor) -> Tensor:
    """Numbers below 2^32, int64, by the same 32 bits as int32."""
    return (x - ((x >> 31) << 32)).to(torch.int32)
