"""What generation keeps of earlier positions: keys and values of attention, and the state of linear attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.models.layer_specs import LayerSpec


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


class RecurrentCache:
    """The state of one layer of linear attention, which has the same size after any number of positions."""

    def __init__(self) -> None:
        self.length = 0
        self.recent: Sequence[Tensor | None] = (None, None, None)
        """The last inputs [B, W - 1, C] of the short convolutions of queries, keys and values."""
        self.state: Tensor | None = None
        """The matrix of each head, [B, K, R, G, V]."""

    def keep(self, recent: Sequence[Tensor], state: Tensor, positions: int) -> None:
        """Take the state after so many more positions."""
        self.recent, self.state = recent, state
        self.length += positions

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; one may come several times."""
        if self.state is not None:
            self.state = self.state.index_select(0, rows)
            self.recent = tuple(x.index_select(0, rows) for x in self.recent)


class Cache:
    """The caches of a model's layers; `length` positions are in it.

    `documents_BS` labels them (see `models/masks.py`) where the first tokens came with labels; tokens without continue the last document.
    """

    def __init__(self, specs: Sequence[LayerSpec], capacity: int) -> None:
        self.layers = [RecurrentCache() if spec.linear else LayerCache(capacity) if spec.has_scores else None for spec in specs]
        """None for a layer that mixes no positions."""
        self.documents_BS: Tensor | None = None

    @property
    def length(self) -> int:
        return next(layer.length for layer in self.layers if layer is not None)

    def label(self, documents_BT: Tensor | None, tokens: int) -> Tensor | None:
        """Add the document numbers of `tokens` new positions. Returns those of all positions so far, or None if documents are not told apart."""
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
            if layer is not None:
                layer.select(rows)
        if self.documents_BS is not None:
            self.documents_BS = self.documents_BS.index_select(0, rows)
