"""Conventions of data and networks, so that neither imports the other: targets without loss, and the keys of samples.

This file does not import torch, so that tools which look at data answer at once.
"""

from __future__ import annotations

import hashlib

import numpy as np

IGNORED = -100
"""A target that carries no loss."""


def scramble(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 in which every bit of the result depends on every bit of `z`."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_keys(seed: int, positions: np.ndarray) -> np.ndarray:
    """The key of each sample for dropout, int64, from its position in the stream. So a sample has another mask in every epoch."""
    return position_keys(f"dropout/{seed}", positions).view(np.int64)


def position_keys(name: str, positions: np.ndarray) -> np.ndarray:
    """A key of each position in the stream, uint64. Keys of another `name` are independent of these."""
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return scramble(np.asarray(positions).astype(np.uint64) + np.uint64(start))


FEWEST_STARTS = 16


def document_starts(documents_BT: np.ndarray) -> np.ndarray:
    """Where documents begin in each row, int32 [B, N], and T in the places that are left. N is a power of two, so that few shapes occur."""
    rows, length = documents_BT.shape
    is_first = np.ones(documents_BT.shape, dtype=bool)
    np.not_equal(documents_BT[:, 1:], documents_BT[:, :-1], out=is_first[:, 1:])
    counts = is_first.sum(axis=1)
    starts = np.full((rows, max(FEWEST_STARTS, 1 << int(counts.max() - 1).bit_length())), length, dtype=np.int32)
    starts[np.arange(starts.shape[1]) < counts[:, None]] = np.nonzero(is_first)[1]
    return starts
