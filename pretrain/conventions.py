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
    start = int.from_bytes(hashlib.blake2b(f"dropout/{seed}".encode(), digest_size=8).digest(), "little")
    return scramble(positions.astype(np.uint64) + np.uint64(start)).view(np.int64)
