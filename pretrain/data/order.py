"""A keyed permutation of range(n), computed per index: no array, no state, O(1) memory in n.

A balanced Feistel network on 2h bits with 4^h >= n, walking the cycle until it lands inside range(n) (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002): bijective by construction. Each round hashes the right half with the finaliser of
splitmix64 (Steele et al., OOPSLA 2014) under its own key and keeps the *high* bits of the product, so that every output bit
depends on every input bit; rounds that mix upwards only leave long runs of indices all even or all odd.

Nothing here depends on world size, batch size or the planned length of a run (invariant 3).
"""

from __future__ import annotations

import hashlib

import numpy as np

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
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"n={n} is outside 1..2^62")
    values = np.asarray(indices, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"indices must lie in range({n})")
    half_bits = max(_MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
    result = _feistel(values.astype(np.uint64).ravel(), half_bits, keys)
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        walked = _feistel(result[outside], half_bits, keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return result.astype(np.int64).reshape(values.shape)


def _feistel(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ _mix(right + key, half_bits)
    return (left << bits) | right


def _mix(z: np.ndarray, half_bits: int) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(64 - half_bits)
