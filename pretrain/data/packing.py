"""Which documents share a sample: best-fit packing (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830).

A document longer than a sample is cut into *pieces* of `sequence_length` tokens and a rest; every other document is one piece. In
groups of neighbouring documents, pieces are taken from the longest to the shortest, and each goes to the fullest sample that
still has room for it. The result is an index on disk, made once and mapped, so that memory does not grow with the corpus:

    DIR/manifest.json    mode, sequence length, fingerprint of the data, counts, sha256 of the files
    DIR/starts.idx       uint64: where each piece starts in the token stream, in its order; and the end of the stream
    DIR/order.idx        uint64: the pieces, sample after sample                    \\
    DIR/samples.idx      uint64 per sample: its end in order.idx                     > best_fit only: padded has one piece a sample
    DIR/places.idx       uint64 per piece: its sample                               /
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.staging import staged_directory
from pretrain.errors import DataError
from pretrain.storage import sha256_of

log = logging.getLogger(__name__)

VERSION = 1  # of the algorithm and the format; part of an index's name
GROUP = 1 << 16  # documents packed together; part of the definition
_NUMBER = np.dtype("<u8")
_FILES = {"best_fit": ("starts.idx", "order.idx", "samples.idx", "places.idx"), "padded": ("starts.idx",)}
_NOTICE_SECONDS = 10.0

Mode = Literal["best_fit", "padded"]


@dataclass(frozen=True)
class PackIndex:
    """An index on disk. `cut_documents`: those longer than a sample; `sha256`: of each file."""

    path: Path
    mode: Mode
    sequence_length: int
    samples: int
    pieces_count: int
    tokens: int
    cut_documents: int
    sha256: dict[str, str]

    @property
    def fill(self) -> float:
        """Share of the inputs that are tokens; the rest is padding."""
        return self.tokens / (self.samples * self.sequence_length)

    def pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many pieces each sample has, and where each piece, one sample after the other, starts and ends in the token stream."""
        if self.mode == "padded":
            counts, numbers = np.ones_like(samples), samples
        else:
            sample_ends = self._map("samples.idx")
            lasts = sample_ends[samples].astype(np.int64)
            firsts = np.where(samples > 0, sample_ends[samples - 1].astype(np.int64), 0)
            counts = lasts - firsts
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            numbers = self._map("order.idx")[np.repeat(firsts, counts) + within].astype(np.int64)
        starts = self._map("starts.idx")
        return counts, starts[numbers].astype(np.int64), starts[numbers + 1].astype(np.int64)

    def find(self, start: int, end: int) -> np.ndarray:
        """The samples with a token of the stretch [start, end) of the token stream, sorted."""
        starts = self._map("starts.idx")
        first = int(np.searchsorted(starts, _NUMBER.type(start), side="right")) - 1
        last = int(np.searchsorted(starts, _NUMBER.type(end), side="left"))
        pieces = np.arange(first, last)
        return pieces if self.mode == "padded" else np.unique(self._map("places.idx")[pieces].astype(np.int64))

    def verify(self) -> None:
        """Raise DataError naming the first file that is not what was written."""
        for name, expected in self.sha256.items():
            if sha256_of(self.path / name) != expected:
                raise DataError(f"{self.path / name}: content does not match its hash in manifest.json; remove {self.path}")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}  # maps stay at home

    @functools.cached_property
    def _maps(self) -> dict[str, np.ndarray]:
        return {}

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            # As a plain array: a memmap's own indexing costs a microsecond.
            self._maps[name] = np.memmap(self.path / name, dtype=_NUMBER, mode="r").view(np.ndarray)
        return self._maps[name]


def open_index(data: PreparedData, mode: Mode, sequence_length: int, cache: Path) -> PackIndex:
    """The index of `data` in the folder `cache`, made there if it is missing; processes that come together make it once.

    Raises DataError when it cannot be written or is not what this program writes.
    """
    path = index_path(data, mode, sequence_length, cache)
    if path.exists():  # complete: it was renamed into place
        return _read(path)
    name = path.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _build(data, mode, sequence_length, path)
    except OSError as error:
        raise DataError(f"{path}: the packing index cannot be written: {error.strerror}; set data.cache.dir") from error
    return _read(path)


def index_path(data: PreparedData, mode: Mode, sequence_length: int, cache: Path) -> Path:
    """Where `open_index` keeps the index."""
    return cache / "packing" / f"{data.fingerprint[:24]}-{mode}-{sequence_length}-v{VERSION}"


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the sample of each piece, and the number of samples. Lengths must be 1..capacity.

    Equal lengths are placed together. `holes` has a bit for every amount of room that some open sample has, so that the least
    sufficient one is found with two operations on integers.
    """
    by_length = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    sample_of = np.empty(len(lengths), dtype=np.int64)
    room: dict[int, list[int]] = {}
    holes = samples = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        while count:
            fitting = holes >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                each, open_samples = free // length, room[free]
                used = min(len(open_samples), -(-count // each))
                chosen = open_samples[-used:]
                del open_samples[-used:]
                if not open_samples:
                    holes &= ~(1 << free)
            else:
                free, each = capacity, capacity // length
                used = -(-count // each)
                chosen = list(range(samples, samples + used))
                samples += used
            taken = min(count, used * each)
            sample_of[by_length[placed : placed + taken]] = np.repeat(chosen, each)[:taken]
            for sample, pieces in ((chosen[:-1], each), (chosen[-1:], taken - (used - 1) * each)):
                left = free - pieces * length
                if sample and left:
                    room.setdefault(left, []).extend(sample)
                    holes |= 1 << left
            placed, count = placed + taken, count - taken
    return sample_of, samples


def _build(data: PreparedData, mode: Mode, sequence_length: int, path: Path) -> None:
    log.info("data: packing %s (%s, %d documents) into %s", data.path, mode, data.documents, path)
    with staged_directory(path) as stage:
        with ExitStack() as stack:
            files = {name: stack.enter_context((stage / name).open("wb")) for name in _FILES[mode]}
            samples = pieces = cut = 0
            for starts, lengths, longer in _groups(data, sequence_length):
                files["starts.idx"].write(starts.astype(_NUMBER).tobytes())
                if mode == "best_fit":
                    place, count = pack(lengths, sequence_length)
                    order = np.argsort(place, kind="stable")
                    files["order.idx"].write((order + pieces).astype(_NUMBER).tobytes())
                    files["samples.idx"].write((np.cumsum(np.bincount(place)) + pieces).astype(_NUMBER).tobytes())
                    files["places.idx"].write((place + samples).astype(_NUMBER).tobytes())
                else:
                    count = len(lengths)
                samples, pieces, cut = samples + count, pieces + len(lengths), cut + longer
            files["starts.idx"].write(np.array([data.tokens], dtype=_NUMBER).tobytes())
        hashes = {name: sha256_of(stage / name) for name in _FILES[mode]}
        index = PackIndex(path, mode, sequence_length, samples, pieces, data.tokens, cut, hashes)
        content = {"version": VERSION, "fingerprint": data.fingerprint, **dataclasses.asdict(index)}
        del content["path"]
        (stage / "manifest.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _groups(data: PreparedData, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Starts and lengths of the pieces of each group of documents, and how many of these are longer than a sample."""
    begin, shown = 0, time.monotonic()
    for first in range(0, data.documents, GROUP):
        ends = data.document_ends(first, min(first + GROUP, data.documents))
        lengths = np.diff(ends, prepend=begin)
        parts = -(-lengths // sequence_length)
        first_part = np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(ends - lengths, parts) + (np.arange(parts.sum()) - first_part) * sequence_length
        yield starts, np.diff(starts, append=ends[-1]), int((parts > 1).sum())
        begin = int(ends[-1])
        if time.monotonic() - shown > _NOTICE_SECONDS:
            shown = time.monotonic()
            log.info("data: packed %d of %d documents", first + len(ends), data.documents)


def _read(path: Path) -> PackIndex:
    try:
        content = json.loads((path / "manifest.json").read_bytes())
        fields = {field.name: content[field.name] for field in dataclasses.fields(PackIndex) if field.name != "path"}
        index = PackIndex(path, **fields)
        lengths = {"starts.idx": index.pieces_count + 1, "samples.idx": index.samples}
        for name in _FILES[index.mode]:
            expected = lengths.get(name, index.pieces_count) * _NUMBER.itemsize
            if (path / name).stat().st_size != expected:
                raise DataError(f"{path / name}: damaged: not {expected} bytes; remove {path}, and it is made again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a packing index ({error}); remove it, and it is made again") from error
    return index
