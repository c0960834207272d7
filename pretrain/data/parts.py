"""What one finished unit of work leaves behind: three files that appear together, on the disk for good, or not at all.

parts/00000042.tokens       the ids of its documents end to end, in the final type
parts/00000042.documents    one fixed record per document
parts/00000042.json         counts; written last, and what makes the part exist
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.errors import DataError
from pretrain.storage import flush, replace_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def document_dtype(deduplicate: bool) -> np.dtype:
    """A document's record: tokens with its end, bytes of text, input file, row in its piece, split, and hash where needed."""
    fields = [("length", "<u8"), ("bytes", "<u8"), ("input", "<u4"), ("row", "<u4"), ("validation", "?")]
    return np.dtype([*fields, ("hash", "<u8", (2,))] if deduplicate else fields)


@dataclass(frozen=True)
class PartSummary:
    """The counts of one part. `rows` is those of its last piece; `seconds` and `encode_seconds` are only reported."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0
    empty: int = 0
    invalid: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    invalid_names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns a failure to write below `directory` into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = "no space left; what is finished is kept: make room and start the same command again"
        else:
            message = f"cannot be written ({error.strerror})"
        raise DataError(f"{directory}: {message}") from error


class PartWriter:
    """Writes the part of one unit in `directory`; use it in a `with` block and `finish` it there."""

    def __init__(self, directory: Path, unit: int, token_dtype: np.dtype, deduplicate: bool) -> None:
        self._directory, self._name, self._unit = directory, part_name(unit), unit
        self._token_dtype, self._dtype = token_dtype, document_dtype(deduplicate)
        self.documents = self.tokens = self.bytes = 0
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> PartWriter:
        with writing(self._directory):
            for suffix in (".tokens", ".documents"):
                self._files[suffix] = open(self._aside(suffix), "wb", buffering=1 << 18)
        return self

    def __exit__(self, *_: object) -> None:
        for suffix, file in self._files.items():
            with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk: that has been reported
                file.close()
            self._aside(suffix).unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, **columns: Any) -> None:
        """Append documents: their `tokens` end to end, and the values of every other field of `document_dtype`."""
        records = np.empty(len(lengths), self._dtype)
        records["length"] = lengths
        for name, values in columns.items():
            records[name] = values
        with writing(self._directory):
            self._files[".tokens"].write(memoryview(np.ascontiguousarray(tokens, self._token_dtype)).cast("B"))
            self._files[".documents"].write(records.tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.bytes += int(records["bytes"].sum())

    def finish(self, **counts: Any) -> PartSummary:
        """Make the part durable and visible."""
        summary = PartSummary(documents=self.documents, tokens=self.tokens, bytes=self.bytes, **counts)
        with writing(self._directory):
            for suffix, file in self._files.items():
                file.flush()
                os.fsync(file.fileno())
                os.replace(self._aside(suffix), self._directory / (self._name + suffix))
            replace_text(self._directory / (self._name + ".json"), json.dumps(dataclasses.asdict(summary)))
            flush(self._directory)
        return summary

    def _aside(self, suffix: str) -> Path:
        # Named by the process: one that outlives its killed parent for a moment must not write into its successor's file.
        return self._directory / f".{self._name}{suffix}.{os.getpid()}"


class Parts:
    """The finished parts in a directory."""

    def __init__(self, directory: Path, token_dtype: np.dtype, deduplicate: bool) -> None:
        self.directory = directory
        self.token_dtype = token_dtype
        self.document_dtype = document_dtype(deduplicate)

    def finished(self) -> dict[int, PartSummary]:
        """unit -> counts, of every part that is whole."""
        with os.scandir(self.directory) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        found = {}
        for name in sorted(sizes):
            if name.endswith(".json") and not name.startswith("."):
                summary = PartSummary(**json.loads((self.directory / name).read_bytes()))
                stem = name.removesuffix(".json")
                tokens = summary.tokens * self.token_dtype.itemsize
                records = summary.documents * self.document_dtype.itemsize
                # A crash of the machine, unlike one of the process, may lose a file that was renamed just before.
                if sizes.get(stem + ".tokens") == tokens and sizes.get(stem + ".documents") == records:
                    found[int(stem)] = summary
        return found

    def documents(self, unit: int, first: int = 0, count: int = -1) -> np.ndarray:
        """Records of the documents [first, first + count) of a part."""
        file = self.directory / (part_name(unit) + ".documents")
        return np.fromfile(file, self.document_dtype, count, offset=first * self.document_dtype.itemsize)

    def open_tokens(self, unit: int) -> BinaryIO:
        """The file of a part's tokens, unbuffered."""
        return open(self.directory / (part_name(unit) + ".tokens"), "rb", buffering=0)

    def remove_leftovers(self, units: Collection[int]) -> None:
        """Remove what processes that were killed had begun of `units`."""
        for path in self.directory.glob(".*"):
            if int(path.name.split(".")[1]) in units:
                path.unlink(missing_ok=True)


def part_name(unit: int) -> str:
    return f"{unit:08d}"
