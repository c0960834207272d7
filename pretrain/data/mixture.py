"""Which source each sample of the stream comes from, with random access.

The stream is cut into blocks of BLOCK samples. In every block each source has the same number of slots (its weight, rounded by
largest remainder), and a keyed permutation spreads them. The n-th sample of a source is therefore found without counting:

    position --block, slot--> permuted slot --which source's range--> source, n = block * slots of the source + place in the range
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain.data.order import permute, round_keys
from pretrain.errors import ConfigError

BLOCK = 4096  # part of the definition of the order; shares are exact to 1/4096


@dataclass(frozen=True)
class Mixture:
    """Slots per block of each source."""

    slots: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, weights: list[float], seed: int) -> Mixture:
        """Weights are relative; ConfigError for one too small to get a slot in a block."""
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * BLOCK
        slots = np.floor(shares).astype(np.int64)
        most_left = np.argsort(-(shares - slots), kind="stable")
        slots[most_left[: BLOCK - slots.sum()]] += 1
        if slots.min() == 0:
            which = int(slots.argmin())
            raise ConfigError(
                f"data.sources.{which}.weight={weights[which]} is below 1/{BLOCK} of the sum {sum(weights)} and would never be drawn"
            )
        return cls(tuple(int(n) for n in slots), seed)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each stream position, and which of that source's samples it is, counted from 0 over all epochs."""
        if len(self.slots) == 1:
            return np.zeros_like(positions), positions
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        starts = np.concatenate(([0], np.cumsum(self.slots)))
        blocks = positions // BLOCK
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            slot = permute(positions[here] - block * BLOCK, BLOCK, round_keys("mixture", self.seed, block))
            source = np.searchsorted(starts, slot, side="right") - 1
            sources[here] = source
            numbers[here] = block * np.asarray(self.slots)[source] + slot - starts[source]
        return sources, numbers
