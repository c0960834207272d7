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
    """The caches of a model's layers; `length` positions are in it.

    `documents_BS` labels them (see `models/masks.py`) where the first tokens came with labels; tokens without continue the last document.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.documents_BS: Tensor | None = None

    @property
    def length(self) -> int:
        return self.layers[0].length

    def label(self, documents_BT: Tensor | None, tokens: int) -> Tensor | None:
        """Labels of all positions once so many tokens are added, of which these are the labels; None where there are none."""
        if documents_BT is not None and self.length and self.documents_BS is None:
            raise ValueError("tokens with labels of documents cannot follow tokens without")
        if documents_BT is None and self.documents_BS is not None:
            documents_BT = self.documents_BS[:, -1:].expand(-1, tokens)
        if documents_BT is not None:
            parts = [documents_BT] if self.documents_BS is None else [self.documents_BS, documents_BT]
            self.documents_BS = torch.cat(parts, dim=1)
        return self.documents_BS

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order."""
        for layer in self.layers:
            layer.select(rows)
        if self.documents_BS is not None:
            self.documents_BS = self.documents_BS.index_select(0, rows)
