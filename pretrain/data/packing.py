"""Which documents share a sample: best-fit packing (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830).

A document longer than a sample is cut into *pieces* of `sequence_length` tokens and a rest; every other document is one piece. In
groups of neighbouring documents, pieces are taken from the longest to the shortest. Each goes to the fullest sample that still
has room for it. The result is an index on disk, made once and read in parts, so that memory does not grow with the corpus:

    DIR/manifest.json    mode, sequence length, fingerprints of the data, counts, sha256 of the files
    DIR/starts.idx       uint64: where each piece starts in the token stream, in its order; and the end of the stream
    DIR/pieces.idx       two uint64 per piece, sample after sample: its start and end in the token stream    \\
    DIR/samples.idx      uint64 per sample: where its pieces begin in pieces.idx; and their number            > best_fit only
    DIR/places.idx       uint64 per piece of starts.idx: its sample                                          /

`padded` has one piece per sample and needs only starts.idx. An index is built from document indices that were hashed just before.
Its name is made from their content and that of the tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pretrain.data.shards.open_files import OpenFile, OpenFiles
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import DataError
from pretrain.storage import make_once, sealed_json, sha256_of, staged_directory, unsealed

log = logging.getLogger(__name__)

VERSION = 2  # of the algorithm and the format; part of an index's name
GROUP = 1 << 16  # documents packed together; part of the definition
_NUMBER = np.dtype("<u8")
_FILES = {"best_fit": ("starts.idx", "pieces.idx", "samples.idx", "places.idx"), "padded": ("starts.idx",)}
_NOTICE_SECONDS = 10.0

Mode = Literal["best_fit", "padded"]


@dataclass(frozen=True)
class PackIndex:
    """An index on disk. `cut_documents`: the number of documents longer than a sample; `sha256`: the hash of each file."""

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

    @property
    def content(self) -> str:
        """sha256 of the hashes of its files: which documents share a sample."""
        return hashlib.sha256("\n".join(f"{name} {self.sha256[name]}" for name in sorted(self.sha256)).encode()).hexdigest()

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    def pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number of pieces of each sample; and the start and end in the token stream of each piece, one sample after the other."""
        if self.mode == "padded":
            spans = self._pairs("starts.idx", samples)
            return np.ones_like(samples), spans[:, 0], spans[:, 1]
        bounds = self._pairs("samples.idx", samples)
        counts, read, size = bounds[:, 1] - bounds[:, 0], self._files.get("pieces.idx").read, 2 * _NUMBER.itemsize
        content = b"".join([read(count * size, first * size) for first, count in zip(bounds[:, 0].tolist(), counts.tolist())])
        spans = np.frombuffer(content, dtype=_NUMBER).astype(np.int64).reshape(-1, 2)
        return counts, spans[:, 0], spans[:, 1]

    def find(self, start: int, end: int) -> np.ndarray:
        """The samples with a token of the stretch [start, end) of the token stream, sorted."""

        def start_of(piece: int) -> int:
            return int(self._numbers("starts.idx", piece, 1)[0])

        pieces = range(self.pieces_count + 1)
        first, last = bisect.bisect_right(pieces, start, key=start_of) - 1, bisect.bisect_left(pieces, end, key=start_of)
        return np.arange(first, last) if self.mode == "padded" else np.unique(self._numbers("places.idx", first, last - first))

    @property
    def pieces_to_verify(self) -> int:
        """The number of files."""
        return len(self.sha256)

    def verify(
        self, part: int = 0, parts: int = 1, hashes: bool = True, *, seen: Callable[[int], object] | None = None
    ) -> None:
        """Hash the files i with i % parts == part. Raises DataError naming the first damaged file. Without `hashes` nothing is left to check:
        `open_index` has compared the sizes. `seen`: see `sha256_of`.
        """
        for name, expected in sorted(self.sha256.items())[part::parts]:
            if hashes and sha256_of(self.path / name, seen) != expected:
                raise DataError(f"{self.path / name}: content does not match its hash in manifest.json; remove {self.path}")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_files"}  # open files are not pickled

    @functools.cached_property
    def _files(self) -> OpenFiles:
        return OpenFiles(lambda name: OpenFile.at(self.path / name, _sizes(self)[name]))

    def _numbers(self, name: str, first: int, count: int) -> np.ndarray:
        content = self._files.get(name).read(count * _NUMBER.itemsize, first * _NUMBER.itemsize)
        return np.frombuffer(content, dtype=_NUMBER).astype(np.int64)

    def _pairs(self, name: str, places: np.ndarray) -> np.ndarray:
        """The numbers of a file at these places, each with the one after it: int64 [places, 2]."""
        read, size = self._files.get(name).read, 2 * _NUMBER.itemsize
        content = b"".join([read(size, offset) for offset in (places * _NUMBER.itemsize).tolist()])
        return np.frombuffer(content, dtype=_NUMBER).astype(np.int64).reshape(-1, 2)


def open_index(data: PreparedData, mode: Mode, sequence_length: int, cache: Path) -> PackIndex:
    """The index of `data` in the folder `cache`. If it is missing, it is made there, once for all processes.

    Raises DataError if it cannot be written, if it is not what this program writes, or if the data's document index is damaged.
    """
    path = index_path(data, mode, sequence_length, cache)
    make_once(path, "the packing index", lambda: _build(data, mode, sequence_length, path))
    return _read(path, data, mode, sequence_length)


def index_path(data: PreparedData, mode: Mode, sequence_length: int, cache: Path) -> Path:
    """The place where `open_index` keeps the index."""
    content = hashlib.sha256(f"{data.fingerprint}\n{data.documents_fingerprint}".encode()).hexdigest()
    return cache / "packing" / f"{content[:24]}-{mode}-{sequence_length}-v{VERSION}"


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the sample of each piece, and the number of samples. Lengths must be 1..capacity.

    Equal lengths are placed together. `holes` has a bit for every amount of room that some open sample has. Two integer
    operations on it find the least sufficient amount.
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
    data.verify_documents()  # a packing of a damaged index would stay in use
    with staged_directory(path) as stage:
        with ExitStack() as stack:
            files = {name: stack.enter_context((stage / name).open("wb")) for name in _FILES[mode]}
            samples = pieces = cut = 0
            for starts, lengths, longer in _groups(data, sequence_length):
                files["starts.idx"].write(starts.astype(_NUMBER).tobytes())
                if mode == "best_fit":
                    place, count = pack(lengths, sequence_length)
                    order = np.argsort(place, kind="stable")
                    spans = np.stack([starts, starts + lengths], axis=1)[order]
                    files["pieces.idx"].write(spans.astype(_NUMBER).tobytes())
                    counts = np.bincount(place)
                    files["samples.idx"].write((np.cumsum(counts) - counts + pieces).astype(_NUMBER).tobytes())
                    files["places.idx"].write((place + samples).astype(_NUMBER).tobytes())
                else:
                    count = len(lengths)
                samples, pieces, cut = samples + count, pieces + len(lengths), cut + longer
            files["starts.idx"].write(np.array([data.tokens], dtype=_NUMBER).tobytes())
            if mode == "best_fit":
                files["samples.idx"].write(np.array([pieces], dtype=_NUMBER).tobytes())
        hashes = {name: sha256_of(stage / name) for name in _FILES[mode]}
        index = PackIndex(path, mode, sequence_length, samples, pieces, data.tokens, cut, hashes)
        content = {**_identity(data, mode, sequence_length), **dataclasses.asdict(index)}
        del content["path"]
        (stage / "manifest.json").write_text(sealed_json(content), encoding="utf-8")


def _groups(data: PreparedData, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Starts and lengths of the pieces of each group of documents, and how many documents are longer than a sample."""
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


def _identity(data: PreparedData, mode: Mode, sequence_length: int) -> dict[str, object]:
    """The data and settings that an index belongs to."""
    content = {"fingerprint": data.fingerprint, "documents_fingerprint": data.documents_fingerprint, "tokens": data.tokens}
    return {"version": VERSION, "mode": mode, "sequence_length": sequence_length, **content}


def _sizes(index: PackIndex) -> dict[str, int]:
    """Bytes of each file."""
    starts = {"starts.idx": _NUMBER.itemsize * (index.pieces_count + 1)}
    if index.mode == "padded":
        return starts
    each = _NUMBER.itemsize * index.pieces_count
    return starts | {"pieces.idx": 2 * each, "samples.idx": _NUMBER.itemsize * (index.samples + 1), "places.idx": each}


def _read(path: Path, data: PreparedData, mode: Mode, sequence_length: int) -> PackIndex:
    try:
        content = unsealed((path / "manifest.json").read_bytes())
        for key, expected in _identity(data, mode, sequence_length).items():
            if content[key] != expected:
                raise ValueError(f"its {key} is {content[key]}, not {expected}")
        fields = {field.name: content[field.name] for field in dataclasses.fields(PackIndex) if field.name != "path"}
        index = PackIndex(path, **fields)
        for name, expected in _sizes(index).items():
            if (path / name).stat().st_size != expected:
                raise DataError(f"{path / name}: damaged: not {expected} bytes; remove {path}, and it is made again")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not a packing index ({error}); remove it, and it is made again") from error
    return index
