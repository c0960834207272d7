"""Dropout (Srivastava et al., JMLR 2014) whose mask is a pure function of (sample, layer, position, component).

torch's own dropout draws from a generator, so its mask depends on the rank, on the micro-batch and on earlier draws. Here a mask is a
hash, as in counter-based generators (Salmon et al., SC'11). So gradients are the same in every layout and with any padding. A resumed
run goes on exactly, and a recomputed block gets the mask it had.

    key of the sample, name of the layer, position --64-bit finaliser--> a number per row --xor--> a number per two components
    --multiply, xor-shift, multiply--> 2 x 16 bits, each compared with the rate

For the weights of attention, a row is a query of one head. Its components are the keys.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pretrain.config.model_schema import Model
from pretrain.models.compiling import constant_when_compiled

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as an int64: what positions are apart
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)  # splitmix64
_THIRD, _FOURTH = 0x7FEB352D, 0x846CA68B - (1 << 32)  # lowbias32 (Wellons, "Prospecting for Hash Functions", 2018)
_LEVELS = 1 << 16
_TABLE = 1 << 12


def every_row(x_BTX: Tensor) -> Tensor:
    """Which positions of a sequence the hidden states of a network are of, unless parallel/ sets another function: all."""
    return x_BTX


class Dropout:
    """Dropout of one forward pass.

    `rate`: the share of elements that become zero, rounded to a multiple of 2^-16. `keys_B`: an int64 per sample (`conventions.sample_keys`).
    `dim`: the width of the hidden states. `steps_R`: `position_steps` of the positions at hand. `weights`: dropout of the weights of attention,
    None where these are kept.
    """

    def __init__(self, rate: float, keys_B: Tensor, dim: int, steps_R: Tensor, weights: DropoutOfWeights | None = None) -> None:
        self.rate, self.keys_B, self.dim, self.steps_R, self.weights = rate, keys_B, dim, steps_R, weights

    def at(self, name: str) -> StateMask | None:
        """The mask of one place in the network, None at rate 0. Every place has a name of its own."""
        if not self.rate:
            return None
        columns = _columns(-(-self.dim // 2), self.keys_B.device)
        return StateMask(self.rate, _finalise(self.keys_B ^ _hash_of(name)), self.steps_R, columns)

    def of_block(self, block: str, sublayers: Sequence[str] = ("attention", "mlp")) -> BlockDropout:
        """The masks of a block, by sublayer. They are made outside the block, so that one compiled function serves all blocks."""
        masks: BlockDropout = {sublayer: self.at(f"{block}.{sublayer}") for sublayer in sublayers}
        for name in (f"{sublayer}.weights" for sublayer in sublayers if sublayer != "mlp"):
            masks[name] = self.weights and self.weights.at(f"{block}.{name}")
        return masks


class DropoutOfWeights:
    """Dropout of the weights of attention in one forward pass. `heads`: of queries; `length`: of whole sequences of queries, whatever positions a
    rank has.
    """

    def __init__(self, rate: float, keys_B: Tensor, heads: int, length: int) -> None:
        self.rate, self.keys_B = rate, keys_B
        self.heads_H, self.steps_T = (position_steps(count, keys_B.device) for count in (heads, length))

    def at(self, name: str) -> WeightMask:
        """The mask of the weights of one attention."""
        keys_B = _finalise(self.keys_B ^ _hash_of(name))
        return WeightMask(self.rate, _finalise(keys_B[:, None] + self.heads_H), self.steps_T)


class DropoutMask:
    """Dropout at one place in the network. `keys`: of the samples there, or of their heads; `steps_R`: a number per position.

    The elements that are kept are scaled up by what is right for the rounded rate.
    """

    def __init__(self, rate: float, keys: Tensor, steps_R: Tensor) -> None:
        self.rate, self.keys, self.steps_R = rate, keys, steps_R
        self.dropped = max(1, min(_LEVELS - 1, round(rate * _LEVELS)))  # a rate is never nothing, nor everything
        self.scale = _LEVELS / (_LEVELS - self.dropped)

    def __call__(self, x: Tensor) -> Tensor:
        """`x`, [B, R, D] or [B, H, R, S], with elements zeroed."""
        # The factor comes last: in bf16 a mask that is already scaled would be off by its rounding everywhere. Backward keeps the mask, a byte per element.
        return torch.where(self.kept(x.shape[-1]), x, 0.0) * self.scale

    def kept(self, dim: int) -> Tensor:
        """False where an element is zeroed, [B, R, D] or [B, H, R, D], of the first `dim` components."""
        rows = _finalise(self.keys[..., None] + self.steps_R)
        # Two elements to a hash, its halves; in place, because this is the whole cost.
        z = rows.to(torch.int32)[..., None] ^ self.columns(-(-dim // 2))
        z.mul_(_THIRD)
        z ^= z >> 15
        z.mul_(_FOURTH)
        halves = z.view(torch.int16)
        halves[..., 0::2] ^= halves[..., 1::2]  # low bits of a product depend on low bits alone
        return halves[..., :dim] >= self.dropped - _LEVELS // 2

    def columns(self, count: int) -> Tensor:
        """A number per two components, int32 [count]."""
        raise NotImplementedError


class StateMask(DropoutMask):
    """Dropout of hidden states [B, R, D]. `keys`: of the samples, [B]; `columns_C`: the numbers of all components."""

    def __init__(self, rate: float, keys: Tensor, steps_R: Tensor, columns_C: Tensor) -> None:
        super().__init__(rate, keys, steps_R)
        self.columns_C = columns_C

    def columns(self, count: int) -> Tensor:
        return self.columns_C


class WeightMask(DropoutMask):
    """Dropout of the weights [B, H, R, S] of one attention. `keys`: of the heads at hand, [B, H]. Any number of keys may be seen."""

    def of_heads(self, heads: slice) -> WeightMask:
        """The mask of some of the heads."""
        return WeightMask(self.rate, self.keys[:, heads], self.steps_R)

    def of_queries(self, steps_R: Tensor) -> WeightMask:
        """The mask of the queries with these of the numbers `steps_R`."""
        return WeightMask(self.rate, self.keys, steps_R)

    def columns(self, count: int) -> Tensor:
        return _finalise(position_steps(count, self.keys.device) ^ _hash_of("keys of attention")).to(torch.int32)


BlockDropout = dict[str, DropoutMask | None]
"""The masks of a block: by sublayer of what it adds, and by "attention.weights" and the like of the weights. None: nothing is dropped."""


def drop(x: Tensor, mask: DropoutMask | None) -> Tensor:
    """`x` with elements zeroed, where there is a mask."""
    return x if mask is None else mask(x)


def make_dropout(
    model: Model, keys_B: Tensor | None, length: int, rows_at_hand: Callable[[Tensor], Tensor] = every_row
) -> Dropout | None:
    """Dropout in sequences of a length. None where nothing is dropped: at rate 0, and without keys, which is how a network is evaluated."""
    if not (model.dropout or model.attention_dropout) or keys_B is None:
        return None
    weights = None
    if model.attention_dropout:
        weights = DropoutOfWeights(model.attention_dropout, keys_B, model.heads, length)
    rows = rows_at_hand(position_steps(length, keys_B.device)[None])[0]
    return Dropout(model.dropout, keys_B, model.dim, rows, weights)


def _finalise(z: Tensor) -> Tensor:
    """splitmix64's, but for its shifts, which in torch are signed."""
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@constant_when_compiled  # a compiler cannot trace it
def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def position_steps(length: int, device: torch.device) -> Tensor:
    """A number per position, int64: the position times `_STEP`."""
    high, low = _multiples(device)
    return (high[: -(-length // _TABLE), None] + low).flatten()[:length]


@constant_when_compiled  # compiled for a GPU, a product with a position would be made in 32 bits
def _multiples(device: torch.device) -> Tensor:
    """Numbers of positions 0, `_TABLE`, 2 `_TABLE`, ... and of 0, 1, 2, ..., int64 [2, _TABLE]. Their sums are those of all positions up to `_TABLE` squared."""
    return _multiplied(device)


@functools.cache  # for ever, as _drawn_columns
def _multiplied(device: torch.device) -> Tensor:
    positions = np.arange(_TABLE, dtype=np.int64) * np.array([[_TABLE], [1]])
    return torch.from_numpy(positions * np.int64(_STEP)).to(device)


@constant_when_compiled  # a compiler cannot trace the hash
def _columns(count: int, device: torch.device) -> Tensor:
    """A random number per pair of components, int32."""
    return _drawn_columns(count, device)


@functools.cache  # for ever: what is compiled or recorded reads this very memory
def _drawn_columns(count: int, device: torch.device) -> Tensor:
    numbers = np.frombuffer(hashlib.shake_128(b"pretrain/dropout").digest(4 * count), dtype="<i4")
    return torch.from_numpy(numbers.astype(np.int32)).to(device)
