"""AdamW's two means in 8 bits each, without scales that a block of numbers would share.

    mean of squares v       6 bits of exponent, 2 of fraction: 2^-55.75 to 2^7.75 in steps of a quarter of a power of two, and 0
    mean of gradients m     as m / sqrt(v): a sign, 4 bits of exponent, 3 of fraction, 2^-10.9 to 30, and 0

Where v is known, what m can be is known too: |m| is at most a few times sqrt(v). So m needs no wide range, and a number is stored without looking at its
neighbours. Where v is stored as 0, m is divided by the root of the least v that can be stored. Formats with a scale per block (Dettmers et al., arXiv
2110.02861) store other numbers when other ranks share a matrix; this one does not. Both are rounded at random (`rounding.py`), so that in the mean nothing
is lost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class _Codes(NamedTuple):
    """Codes 1 to `last` are the upper bits of consecutive fp32 numbers, from the one with the bits (1 + `offset`) << `shift`, which is `smallest`;
    0 is 0.
    """

    shift: int
    offset: int
    last: int
    smallest: float

    def encode(self, values: Tensor, bits: Tensor) -> Tensor:
        """`values`: fp32, none below 0. `bits`: random numbers below 2^16, int32. What is beyond the last code becomes that one."""
        code = ((values.view(torch.int32) + (bits << (self.shift - 16))) >> self.shift) - self.offset
        below = (values * (65536 / self.smallest) > bits).int()
        return torch.where(values < self.smallest, below, code.clamp_(max=self.last))

    def decode(self, codes: Tensor) -> Tensor:
        """`codes`: int32; returns fp32."""
        return ((codes + self.offset) << self.shift).view(torch.float32) * (codes > 0)


_SQUARES = _Codes(21, ((127 - 56) << 2), 255, 1.25 * 2**-56)
_RATIOS = _Codes(20, ((127 - 11) << 3), 127, 1.125 * 2**-11)
LEAST_ROOT = math.sqrt(_SQUARES.smallest)
"""The root of the least mean of squares above 0, 4e-9."""
LARGEST_RATIO = 30.0
"""The value of the last code of m / sqrt(v)."""


def encode_means(mean: Tensor, square: Tensor, bits: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, uint8, of AdamW's mean of gradients and mean of squares, fp32. `bits`: random numbers below 2^16 for each, int32."""
    squares = _SQUARES.encode(square, bits[1])
    stored = _SQUARES.decode(squares)
    # Above the last code both means are taken down together.
    root = torch.where(squares == _SQUARES.last, torch.maximum(stored, square), stored).sqrt_()
    ratio = mean / root.clamp_(min=LEAST_ROOT)
    ratios = _RATIOS.encode(ratio.abs(), bits[0]) + 128 * (ratio < 0)
    return ratios.to(torch.uint8), squares.to(torch.uint8)


def decode_means(ratios: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of gradients and the mean of squares, fp32."""
    square, signed = _SQUARES.decode(squares.int()), ratios.int()
    ratio = _RATIOS.decode(signed & 127) * (1 - 2 * (signed >> 7))
    return ratio * square.sqrt().clamp_(min=LEAST_ROOT), square
