"""What one finished unit of work leaves behind: a file that is on the disk for good, whole, or not there.

    parts/00000042.part     the ids of its documents end to end, in the final type
                            one fixed record per document
                            counts as JSON, and how long that is

One file, because flushing each of several to the disk would take a fifth of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pretrain.errors import DataError

_RECORDS_IN_MEMORY = 8 << 20
_LENGTH_BYTES = 8
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
        self._directory, self._file = directory, directory / part_name(unit)
        # Named by the process: one that outlives its killed parent for a moment must not write into its successor's file.
        self._aside = directory / f".{part_name(unit)}.{os.getpid()}"
        self._token_dtype, self._dtype = token_dtype, document_dtype(deduplicate)
        self.documents = self.tokens = self.bytes = 0

    def __enter__(self) -> PartWriter:
        with writing(self._directory):
            self._stream = open(self._aside, "wb", buffering=1 << 18)
            self._records = tempfile.SpooledTemporaryFile(
                _RECORDS_IN_MEMORY, dir=self._directory, prefix=f"{self._aside.name}."
            )
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._stream, self._records):
            with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk: that has been reported
                file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, **columns: Any) -> None:
        """Append documents: their `tokens` end to end, and the values of every other field of `document_dtype`."""
        records = np.empty(len(lengths), self._dtype)
        records["length"] = lengths
        for name, values in columns.items():
            records[name] = values
        with writing(self._directory):
            self._stream.write(memoryview(np.ascontiguousarray(tokens, self._token_dtype)).cast("B"))
            self._records.write(records.tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.bytes += int(records["bytes"].sum())

    def finish(self, **counts: Any) -> PartSummary:
        """Make the part durable and visible."""
        summary = PartSummary(documents=self.documents, tokens=self.tokens, bytes=self.bytes, **counts)
        text = json.dumps(dataclasses.asdict(summary)).encode()
        with writing(self._directory):
            self._records.seek(0)
            shutil.copyfileobj(self._records, self._stream, 1 << 20)
            self._stream.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))
            self._stream.flush()
            os.fsync(self._stream.fileno())
            # The directory is not flushed: should a crash of the machine undo the renaming, the unit is done once more.
            os.replace(self._aside, self._file)
        return summary


class Parts:
    """The finished parts in a directory."""

    def __init__(self, directory: Path, token_dtype: np.dtype, deduplicate: bool) -> None:
        self.directory = directory
        self.token_dtype = token_dtype
        self.document_dtype = document_dtype(deduplicate)

    def finished(self) -> dict[int, PartSummary]:
        """unit -> counts, of every part that is whole."""
        found = {}
        for file in sorted(self.directory.glob("*.part")):
            if (summary := self._summary(file)) is not None:
                found[int(file.stem)] = summary
        return found

    def _summary(self, file: Path) -> PartSummary | None:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - _LENGTH_BYTES, 0))
            length = min(int.from_bytes(stream.read(), "little"), size)
            stream.seek(max(size - _LENGTH_BYTES - length, 0))
            try:
                summary = PartSummary(**json.loads(stream.read(length)))
            except (ValueError, TypeError):  # a crash of the machine may leave less than was flushed: the unit is done again
                return None
        expected = self._records_begin(summary.tokens) + summary.documents * self.document_dtype.itemsize
        return summary if size == expected + length + _LENGTH_BYTES else None

    def _records_begin(self, tokens: int) -> int:
        return tokens * self.token_dtype.itemsize

    def documents(self, unit: int, tokens: int, first: int, count: int) -> np.ndarray:
        """Records of the documents [first, first + count) of a part that has `tokens` tokens."""
        begin = self._records_begin(tokens) + first * self.document_dtype.itemsize
        return np.fromfile(self.directory / part_name(unit), self.document_dtype, count, offset=begin)

    def open_tokens(self, unit: int) -> BinaryIO:
        """A part's file, unbuffered, which begins with its tokens."""
        return open(self.directory / part_name(unit), "rb", buffering=0)

    def remove_leftovers(self, units: Collection[int]) -> None:
        """Remove what processes that were killed had begun of `units`."""
        for path in self.directory.glob(".*"):
            if int(path.name.split(".")[1]) in units:
                path.unlink(missing_ok=True)


def part_name(unit: int) -> str:
    return f"{unit:08d}.part"
