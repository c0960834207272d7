"""Keys and values of positions that have been computed, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values [B, K, S, G] of one layer, for at most `capacity` positions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k_BKTG: Tensor, v_BKTG: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest positions; keys and values of all positions so far. Raises ValueError beyond the capacity."""
        if self._keys is None:
            self._keys, self._values = (
                torch.empty(*x.shape[:2], self.capacity, x.shape[3], dtype=x.dtype, device=x.device) for x in (k_BKTG, v_BKTG)
            )
        stop = self.length + k_BKTG.shape[2]
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, and {stop} are to be put into it")
        self._keys[:, :, self.length : stop] = k_BKTG
        self._values[:, :, self.length : stop] = v_BKTG
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; one may come several times."""
        if self._keys is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)


class Cache:
    """The caches of a model's layers; `length` positions are in it."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        return self.layers[0].length
