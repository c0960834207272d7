"""Prepared data as a list of training samples, cut in one of three ways.

A sample has `sequence_length` inputs, and the target of each is the token after it. Inputs are *pieces* of the token stream:

    concatenate   |AAAAAaBBBBB|BBBBBBBbCCC|CcDDDDDDDDD|      windows of the stream, whatever document they begin in
    best_fit      |AAAAAaCCCCc|BBBBBBBBBBB|BbEEEEEe...|      whole documents, as many as fit; only longer ones are cut (packing.py)
    padded        |AAAAAa.....|BBBBBBBBBBB|Bb.........|      one document, or a part of a longer one

Capitals are a document's tokens, small letters its end-of-document token, dots padding: end-of-document tokens as inputs, with no
loss. Every token of a document but its first is a target once per epoch. `boundary_loss` says whether the first token of a
document is a target too, if another document stands before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from pretrain.conventions import IGNORED
from pretrain.data.packing import PackIndex
from pretrain.data.shards.reader import Holding, PreparedData
from pretrain.errors import DataError


@dataclass(frozen=True)
class Samples(ABC):
    """A list of samples."""

    name: str
    data: PreparedData
    sequence_length: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fill(self, samples: np.ndarray, rows: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> None:
        """Write inputs and targets of `samples[i]` into row `rows[i]` of int64 arrays; targets without loss are IGNORED."""

    @abstractmethod
    def pieces(self, index: int) -> list[tuple[int, int]]:
        """The origin of the inputs: stretches (start, length) of the token stream, in order."""

    @abstractmethod
    def find(self, start: int, end: int) -> np.ndarray:
        """The samples with an input among the stream's tokens [start, end), sorted. The tokens lie within one document."""

    def prefetch(self, samples: np.ndarray) -> None:
        """Download the data of these samples in the background, if it is remote."""
        if self.data.is_remote:
            for sample in samples.tolist():
                for start, length in self.pieces(sample):
                    self.data.prefetch(start, length + 1)

    def describe(self) -> str:
        """A phrase about the packing, for the log."""
        return ""

    @property
    def holdings(self) -> list[Holding]:
        """The parts with their own manifests: the prepared directory, and the packing index if one is used."""
        return [self.data]

    def identity(self, number: int) -> dict[str, str]:
        """The values that decide the samples of source `number` of a run, by keys of the run's identity; and its path, for messages:
        keys that end in .path are not compared.
        """
        key, data = f"sources.{number}", self.data
        return {key: data.fingerprint, f"{key}.documents": data.documents_fingerprint, f"{key}.path": str(data.path)}


@dataclass(frozen=True)
class Windows(Samples):
    """Documents end to end, cut into windows; neighbours share one token, as a target and as an input."""

    boundary_loss: bool = True

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise DataError(
                f"{self.data.path}: {self.data.tokens} tokens are less than one sample of data.sequence_length={self.sequence_length}"
                " + 1 tokens; prepare more data or shorten the sequence"
            )

    def __len__(self) -> int:
        return (self.data.tokens - 1) // self.sequence_length

    def fill(self, samples: np.ndarray, rows: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> None:
        width = self.sequence_length + 1
        stored = self.data.read_joined(samples * self.sequence_length, np.full(len(samples), width)).reshape(-1, width)
        block = _block(rows)
        tokens_BT[block], targets_BT[block] = stored[:, :-1], stored[:, 1:]
        if not self.boundary_loss:
            for row in rows.tolist():
                targets_BT[row, tokens_BT[row] == self.data.eod_id] = IGNORED

    def pieces(self, index: int) -> list[tuple[int, int]]:
        return [(index * self.sequence_length, self.sequence_length)]

    def find(self, start: int, end: int) -> np.ndarray:
        first, last = start // self.sequence_length, (end - 1) // self.sequence_length
        return np.arange(first, min(last, len(self) - 1) + 1)


@dataclass(frozen=True)
class Packed(Samples):
    """Pieces that a PackIndex has put together, then padding."""

    index: PackIndex
    boundary_loss: bool = True

    def __len__(self) -> int:
        return self.index.samples

    def fill(self, samples: np.ndarray, rows: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> None:
        counts, starts, ends = self.index.pieces(samples)
        used = np.add.reduceat(ends - starts, np.cumsum(counts) - counts)
        joined = self.data.read_joined(starts, ends - starts)
        if len(joined) == len(samples) * self.sequence_length:
            stored = joined.reshape(-1, self.sequence_length)
        else:
            stored = np.full((len(samples), self.sequence_length), self.data.eod_id, dtype=self.data.dtype)
            stored[np.arange(self.sequence_length) < used[:, None]] = joined
        block = _block(rows)
        tokens_BT[block], targets_BT[block, :-1] = stored, stored[:, 1:]
        for row, size in zip(rows.tolist(), used.tolist()):
            if size < self.sequence_length:
                targets_BT[row, size:] = IGNORED
            if not self.boundary_loss:
                targets_BT[row, :size][tokens_BT[row, :size] == self.data.eod_id] = IGNORED
        targets_BT[rows, used - 1] = IGNORED
        # A piece that does not end with a document is part of a longer one, and has a sample to itself.
        cut = np.flatnonzero(tokens_BT[rows, used - 1] != self.data.eod_id)
        after = ends[np.cumsum(counts) - 1][cut]
        targets_BT[rows[cut], used[cut] - 1] = self.data.read_joined(after, np.ones_like(after))

    def pieces(self, index: int) -> list[tuple[int, int]]:
        _, starts, ends = self.index.pieces(np.array([index]))
        return list(zip(starts.tolist(), (ends - starts).tolist()))

    def describe(self) -> str:
        index = self.index
        return f", {index.mode}: {1 - index.fill:.2%} padding, {index.cut_documents:,} of {self.data.documents:,} documents cut"

    @property
    def holdings(self) -> list[Holding]:
        return [self.data, self.index]

    def identity(self, number: int) -> dict[str, str]:
        return super().identity(number) | {f"packing.index.{number}": self.index.content}

    def find(self, start: int, end: int) -> np.ndarray:
        return self.index.find(start, end)


def _block(rows: np.ndarray) -> slice | np.ndarray:
    """Rows that follow each other, as a slice: numpy converts into a slice several times faster."""
    neighbours = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all()
    return slice(int(rows[0]), int(rows[-1]) + 1) if neighbours else rows
