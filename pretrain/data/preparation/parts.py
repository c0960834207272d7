"""The result of one finished unit of work: a file that is durable and whole, or does not exist.

    parts/00000042.part     the ids of its documents end to end, in the final type
                            one fixed record per document
                            counts, and the sha256 of every MiB so far, as JSON
                            the sha256 of that JSON, and how long it is

It is one file, because flushing each of several to the disk would take a fifth of the time. Parts may lie on shared storage for days
before they are merged, so every read hashes the blocks that it touches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from pretrain.errors import FULL, DataError

_RECORDS_IN_MEMORY = 8 << 20
_BLOCK = 1 << 20
_HASH_BYTES, _LENGTH_BYTES = 32, 8
_LEFTOVER = re.compile(r"\.(\d{8})\.part\.")


def document_dtype(deduplicate: bool) -> np.dtype:
    """A document's record: tokens with its end, bytes of text, input file, row in its piece, split, and hash where needed."""
    fields = [("length", "<u8"), ("bytes", "<u8"), ("input", "<u4"), ("row", "<u4"), ("validation", "?")]
    return np.dtype([*fields, ("hash", "<u8", (2,))] if deduplicate else fields)


@dataclass(frozen=True)
class PartSummary:
    """The counts of one part. `rows`: those of its last piece; `marks`: byte order marks that were removed; `invalid_rows`: place
    and reason of the first invalid rows.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0
    empty: int = 0
    invalid: int = 0
    marks: int = 0
    invalid_rows: list[tuple[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns a failure to write below `directory` into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = "no space left; finished work is kept: make room and start the same command again"
        else:
            message = f"cannot be written ({error.strerror})"
        raise DataError(f"{directory}: {message}") from error


class PartWriter:
    """Writes the part of one unit in `directory`; use it in a `with` block and `finish` it there."""

    def __init__(self, directory: Path, unit: int, token_dtype: np.dtype, deduplicate: bool) -> None:
        self._directory, self._file = directory, directory / part_name(unit)
        # The name has the process number: a process that outlives its killed parent must not write into its successor's file.
        self._aside = directory / f".{part_name(unit)}.{os.getpid()}"
        self._token_dtype, self._dtype = token_dtype, document_dtype(deduplicate)
        self._hashes: list[str] = []
        self._block, self._filled = hashlib.sha256(), 0
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
            with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk: that error was reported already
                file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, **columns: Any) -> None:
        """Append documents: their `tokens` end to end, and the values of the other fields of `document_dtype`."""
        records = np.empty(len(lengths), self._dtype)
        records["length"] = lengths
        for name, values in columns.items():
            records[name] = values
        with writing(self._directory):
            self._write(memoryview(np.ascontiguousarray(tokens, self._token_dtype)).cast("B"))
            self._records.write(records.tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.bytes += int(records["bytes"].sum())

    def _write(self, content: memoryview | bytes) -> None:
        """Append to the file, and to the hash of the current block."""
        self._stream.write(content)
        content = memoryview(content)
        while len(content):
            taken = content[: _BLOCK - self._filled]
            self._block.update(taken)
            self._filled += len(taken)
            if self._filled == _BLOCK:
                self._close_block()
            content = content[len(taken) :]

    def _close_block(self) -> None:
        self._hashes.append(self._block.hexdigest())
        self._block, self._filled = hashlib.sha256(), 0

    def finish(self, **counts: Any) -> PartSummary:
        """Make the part durable and visible."""
        summary = PartSummary(documents=self.documents, tokens=self.tokens, bytes=self.bytes, **counts)
        with writing(self._directory):
            self._records.seek(0)
            while chunk := self._records.read(_BLOCK):
                self._write(chunk)
            if self._filled:
                self._close_block()
            text = json.dumps({"summary": dataclasses.asdict(summary), "blocks": self._hashes}).encode()
            self._stream.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(_LENGTH_BYTES, "little"))
            self._stream.flush()
            os.fsync(self._stream.fileno())
            # The directory is not flushed. If a crash of the machine undoes the renaming, the unit is done once more.
            os.replace(self._aside, self._file)
        return summary


class Part:
    """A finished part, read a stretch at a time. `UnitParts.open` makes one; use it in a `with` block."""

    def __init__(self, file: Path, token_dtype: np.dtype, records_dtype: np.dtype) -> None:
        self._file, self._token_dtype, self._records_dtype = file, token_dtype, records_dtype
        self._held: tuple[int, bytes] = (-1, b"")
        with self._readable():
            self._stream = open(file, "rb", buffering=0)
        footer = _footer(self._stream, token_dtype, records_dtype)
        if footer is None:
            self._set_aside("its end")
        self.summary, self._hashes, self._size = footer

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def tokens(self, first: int, count: int) -> np.ndarray:
        """The `count` tokens from number `first` on."""
        size = self._token_dtype.itemsize
        return np.frombuffer(self._read(first * size, count * size), self._token_dtype)

    def records(self, first: int, count: int) -> np.ndarray:
        """Records of the documents [first, first + count)."""
        begin, size = self.summary.tokens * self._token_dtype.itemsize, self._records_dtype.itemsize
        return np.frombuffer(self._read(begin + first * size, count * size), self._records_dtype)

    def _read(self, offset: int, size: int) -> bytearray:
        content, filled = bytearray(size), 0
        while filled < size:
            number, begin = divmod(offset + filled, _BLOCK)
            piece = self._checked(number)[begin : begin + size - filled]
            content[filled : filled + len(piece)] = piece
            filled += len(piece)
        return content

    def _checked(self, number: int) -> bytes:
        """A block of the content, checked by its hash. The last block is kept, because the next read begins in it."""
        if self._held[0] != number:
            with self._readable():
                content = os.pread(self._stream.fileno(), min(_BLOCK, self._size - number * _BLOCK), number * _BLOCK)
            if number >= len(self._hashes) or hashlib.sha256(content).hexdigest() != self._hashes[number]:
                self._set_aside(f"bytes {number * _BLOCK} to {number * _BLOCK + len(content)}")
            self._held = number, content
        return self._held[1]

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._file}: cannot be read ({error.strerror}); start the same command again") from error

    def _set_aside(self, what: str) -> NoReturn:
        with contextlib.suppress(OSError):
            os.replace(self._file, self._file.with_suffix(".damaged"))
        raise DataError(
            f"{self._file}: damaged: {what} are not what was written; it was set aside. Start the same command again, which makes it anew "
            f"(with several tasks the one that does unit {int(self._file.stem)}, then merge)"
        )


def _footer(stream: BinaryIO, tokens: np.dtype, records: np.dtype) -> tuple[PartSummary, list[str], int] | None:
    """The counts, the hashes of the blocks, and the size of the content; None if the file is not as long as it says, or its end is damaged."""
    end = stream.seek(0, os.SEEK_END) - _HASH_BYTES - _LENGTH_BYTES
    stream.seek(max(end, 0))
    sha256, length = stream.read(_HASH_BYTES), int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if length > end:
        return None
    stream.seek(end - length)
    text = stream.read(length)
    if hashlib.sha256(text).digest() != sha256:
        return None
    content = json.loads(text)
    summary = PartSummary(**content["summary"])
    size = summary.tokens * tokens.itemsize + summary.documents * records.itemsize
    return (summary, content["blocks"], size) if size == end - length else None


class UnitParts:
    """The finished parts in a directory."""

    def __init__(self, directory: Path, token_dtype: np.dtype, deduplicate: bool) -> None:
        self.directory = directory
        self.token_dtype = token_dtype
        self.document_dtype = document_dtype(deduplicate)

    def finished(self) -> dict[int, PartSummary]:
        """The counts of every whole part, by unit."""
        found = {}
        for file in sorted(self.directory.glob("*.part")):
            with open(file, "rb") as stream:
                footer = _footer(stream, self.token_dtype, self.document_dtype)
            if footer is not None:  # a crash of the machine may leave less than was flushed: then the unit is done again
                found[int(file.stem)] = footer[0]
        return found

    def open(self, unit: int) -> Part:
        """The part of a finished unit. If it is damaged, reading it raises DataError and sets it aside."""
        return Part(self.directory / part_name(unit), self.token_dtype, self.document_dtype)

    def remove_leftovers(self, units: Collection[int]) -> None:
        """Remove the unfinished files that killed processes left of `units`."""
        for path in self.directory.glob(".*"):  # NFS has its own files there, for files that are removed while open
            if (found := _LEFTOVER.match(path.name)) and int(found[1]) in units:
                path.unlink(missing_ok=True)


def part_name(unit: int) -> str:
    """The file name of a unit's part."""
    return f"{unit:08d}.part"
