"""A keyed permutation of range(n), computed per index: no array, no state, O(1) memory in n.

It is a balanced Feistel network on 2h bits with 4^h >= n. It walks the cycle until it lands inside range(n) (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002), so it is bijective by construction. Each round hashes the right half with
the finaliser of splitmix64 (Steele et al., OOPSLA 2014) under its own key. It keeps the *high* bits of the product, so that every
output bit depends on every input bit. Rounds that only mix upwards leave long runs of indices that are all even or all odd.

Nothing here depends on world size, batch size or the planned length of a run (invariant 3).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretrain.conventions import scramble

ROUNDS = 6  # part of the definition of the order
_MIN_HALF_BITS = 3


def round_keys(*identity: object) -> np.ndarray:
    """ROUNDS 64-bit keys from anything with a stable text form, e.g. (seed, epoch, fingerprint)."""
    digest = hashlib.blake2b("/".join(map(str, identity)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Images of `indices` (each in range(n)) under the permutation of range(n) that `keys` select; int64 in, int64 out.

    Raises ValueError for an index outside range(n) or n outside 1..2^62.
    """
    return _walk(indices, n, keys, _feistel)


def unpermute(images: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """The indices that `permute` takes to `images`: its inverse, at the same cost."""
    return _walk(images, n, keys, _feistel_back)


def _walk(
    values: np.ndarray, n: int, keys: np.ndarray, step: Callable[[np.ndarray, int, np.ndarray], np.ndarray]
) -> np.ndarray:
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"n={n} is outside 1..2^62")
    values = np.asarray(values, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"indices must lie in range({n})")
    half_bits = max(_MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
    result = step(values.astype(np.uint64).ravel(), half_bits, keys)
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        walked = step(result[outside], half_bits, keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return result.astype(np.int64).reshape(values.shape)


def _feistel(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ _mix(right + key, half_bits)
    return (left << bits) | right


def _feistel_back(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in keys[::-1]:
        left, right = right ^ _mix(left + key, half_bits), left
    return (left << bits) | right


def _mix(z: np.ndarray, half_bits: int) -> np.ndarray:
    return scramble(z) >> np.uint64(64 - half_bits)


class Order(Protocol):
    """One epoch of a source: a bijection between places in the order and samples, both in range(size)."""

    def samples(self, places: np.ndarray) -> np.ndarray:
        """The samples at these places; int64 in and out."""

    def places(self, samples: np.ndarray) -> np.ndarray:
        """The places of these samples: the inverse."""


@dataclass(frozen=True)
class FullOrder:
    """Any sample may come at any place."""

    size: int
    identity: tuple[object, ...]

    def samples(self, places: np.ndarray) -> np.ndarray:
        return permute(places, self.size, round_keys(*self.identity))

    def places(self, samples: np.ndarray) -> np.ndarray:
        return unpermute(samples, self.size, round_keys(*self.identity))


@dataclass(frozen=True)
class ChunkedOrder:
    """Two levels, so that few shards are open at a time. Chunks of neighbouring samples come in a permuted order, and the samples
    of each window of `window` chunks are permuted.

        samples   |chunk 0|chunk 1|chunk 2|chunk 3|c4|        the last chunk may be short
        chunks    |chunk 2|c4|chunk 0|chunk 3|chunk 1|        permuted
        places    |-- window 0 --|-- window 1 --|-wi-|        permuted within each
    """

    size: int
    chunk: int
    window: int
    identity: tuple[object, ...]

    def samples(self, places: np.ndarray) -> np.ndarray:
        line = self._within_windows(np.asarray(places, dtype=np.int64), permute)
        ordinal, offset = self._chunk_at(line)
        return permute(ordinal, self._chunks, self._chunk_keys) * self.chunk + offset

    def places(self, samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, dtype=np.int64)
        ordinal = unpermute(samples // self.chunk, self._chunks, self._chunk_keys)
        line = ordinal * self.chunk - np.where(ordinal > self._short_ordinal, self._missing, 0) + samples % self.chunk
        return self._within_windows(line, unpermute)

    @property
    def _chunks(self) -> int:
        return -(-self.size // self.chunk)

    @property
    def _missing(self) -> int:
        """How many samples the last chunk lacks."""
        return self._chunks * self.chunk - self.size

    @functools.cached_property
    def _chunk_keys(self) -> np.ndarray:
        return round_keys("chunks", *self.identity)

    @functools.cached_property
    def _short_ordinal(self) -> int:
        """The place in the order of the last, short chunk."""
        return int(unpermute(np.array([self._chunks - 1]), self._chunks, self._chunk_keys)[0])

    def _chunk_at(self, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        short_end = (self._short_ordinal + 1) * self.chunk - self._missing
        shifted = np.where(line >= short_end, line + self._missing, line)
        return shifted // self.chunk, shifted % self.chunk

    def _within_windows(self, line: np.ndarray, move: Callable[[np.ndarray, int, np.ndarray], np.ndarray]) -> np.ndarray:
        length = self.chunk * self.window
        result = np.empty_like(line)
        windows = line // length
        for window in np.unique(windows):
            here, start = windows == window, int(window) * length
            size = min(length, self.size - start)
            result[here] = start + move(line[here] - start, size, round_keys("window", window, *self.identity))
        return result
