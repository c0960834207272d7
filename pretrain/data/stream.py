"""The stream of training samples: position -> tokens, a pure function of the seed and the sources.

    position --mixture--> source, n-th sample of it --epoch = n // size--> permuted sample --> window of the token stream

A sample is `sequence_length` inputs and as many targets: a window of sequence_length + 1 tokens, neighbours sharing one token,
so that every token but the first of a source is a target once per epoch. The only cursor is the number of samples consumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.data.mixture import Mixture
from pretrain.data.order import permute, round_keys
from pretrain.data.shards import PreparedData
from pretrain.errors import DataError

DIGEST_MODULUS = 1 << 52  # so that the sum over 2,000 ranks fits in an int64


@dataclass(frozen=True)
class Samples:
    """A prepared directory as a list of samples."""

    name: str
    data: PreparedData
    sequence_length: int

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise DataError(
                f"{self.data.path}: {self.data.tokens} tokens are less than one sample of data.sequence_length={self.sequence_length}"
                " + 1 tokens; prepare more data or shorten the sequence"
            )

    def __len__(self) -> int:
        return (self.data.tokens - 1) // self.sequence_length

    def read(self, index: int) -> np.ndarray:
        """The tokens of a sample, [sequence_length + 1], int64."""
        return self.data.read(index * self.sequence_length, self.sequence_length + 1)


class Stream:
    """Training samples in their global order."""

    def __init__(self, sources: list[Samples], weights: list[float], seed: int) -> None:
        self.sources = sources
        self.seed = seed
        self.mixture = Mixture.of(weights, seed)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, sample in the source, epoch of the source) of each position."""
        sources, numbers = self.mixture.locate(np.asarray(positions, dtype=np.int64))
        samples, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for source in np.unique(sources):
            size = len(self.sources[source])
            fingerprint = self.sources[source].data.fingerprint
            for epoch in np.unique(numbers[sources == source] // size):
                here = np.flatnonzero((sources == source) & (numbers // size == epoch))
                keys = round_keys("order", self.seed, epoch, fingerprint)
                samples[here] = permute(numbers[here] % size, size, keys)
                epochs[here] = epoch
        return sources, samples, epochs

    def read(self, positions: np.ndarray) -> np.ndarray:
        """The tokens of the samples at these positions, [len(positions), sequence_length + 1], int64."""
        sources, samples, _ = self.locate(positions)
        return np.stack([self.sources[s].read(int(i)) for s, i in zip(sources, samples)])

    def identity(self) -> dict[str, Any]:
        """Everything that decides the order, for a checkpoint to be compared with."""
        return {
            "seed": self.seed,
            "sequence_length": self.sources[0].sequence_length,
            "sources": [{"fingerprint": s.data.fingerprint, "slots": n} for s, n in zip(self.sources, self.mixture.slots)],
        }


def rank_positions(consumed: int, sequences: int, data_rank: int, data_size: int) -> np.ndarray:
    """Stream positions of this rank's share of the global batch that starts after `consumed` samples, in order."""
    share = sequences // data_size
    return np.arange(share, dtype=np.int64) + consumed + data_rank * share


def digest(positions: np.ndarray, windows: np.ndarray) -> int:
    """52 bits that name these samples at these positions: the sum of a hash of each, so that ranks can add up their shares.

    Two runs whose steps have equal digests saw the same samples in the same order.
    """
    total = 0
    for position, window in zip(positions.tolist(), np.ascontiguousarray(windows, dtype="<i8")):
        key = position.to_bytes(8, "little")
        total += int.from_bytes(hashlib.blake2b(window.tobytes(), digest_size=8, key=key).digest(), "little")
    return total % DIGEST_MODULUS
