"""Files as bytes and as lines, plain or compressed: whole, or only the lines that begin in a range of bytes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pretrain.data.preparation.inputs import InputFile
from pretrain.data.shards.transfer import judged
from pretrain.errors import DataError, UserError

_BUFFER = 1 << 18
_ZSTD_CHUNK = 1 << 15
_ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` needs


LISTED = 1000
"""How many left-out rows of a unit of work are listed with their places; all are counted."""


@dataclass
class Tally:
    """The counts of a reader: rows of the current piece, bytes of input used, documents left out, byte order marks removed."""

    rows: int = 0
    consumed: int = 0
    empty: int = 0
    invalid: int = 0
    invalid_rows: list[tuple[str, str]] = field(default_factory=list)
    """(where, why) of the first invalid rows."""
    marks: int = 0

    def leave_out(self, origin: str, reason: str) -> None:
        self.invalid += 1
        if len(self.invalid_rows) < LISTED:
            self.invalid_rows.append((origin, reason))


@contextlib.contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Turns a library's error about an unreadable or damaged file into one line that names the file."""
    try:
        yield
    except (UserError, GeneratorExit):
        raise
    except Exception as error:
        if file.is_remote and not isinstance(error, (EOFError, zlib.error, lzma.LZMAError)):
            found = judged(file.path, error)
            if isinstance(found, FileNotFoundError):
                found = DataError(str(found))
            if found is error:  # a defect of ours
                raise
            raise found from error
        if not isinstance(
            error, (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)
        ):  # pyarrow's are OSErrors or ValueErrors
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise DataError(f"{file.name}: cannot be read ({reason})") from error


@contextlib.contextmanager
def open_bytes(file: InputFile, tally: Tally) -> Iterator[BinaryIO]:
    """The content of `file`, decompressed. `tally` counts the bytes of the file itself."""
    with reading(file):
        raw: Any = file.open()
    with raw:
        counted = _Counted(raw, tally, file.size)
        if file.compression == ".zst":
            unpacked: Any = _Zstandard(counted)
        elif file.compression:
            opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[file.compression]
            unpacked = opener(io.BufferedReader(counted, _BUFFER))
        else:
            unpacked = counted
        yield io.BufferedReader(unpacked, _BUFFER)


@contextlib.contextmanager
def open_at_random(file: InputFile) -> Iterator[BinaryIO]:
    """The bytes of a file for a reader that jumps. A short answer of a server is requested again, or becomes an error."""
    with file.open(at_random=True) as raw:
        yield io.BufferedReader(_Counted(raw, Tally(), file.size), 1 << 16)


def lines_of(file: InputFile, start: int, stop: int, tally: Tally) -> Iterator[bytes]:
    """The lines, with their ends, whose first byte lies in [start, stop). A negative `stop` means the end of the file.

    Adjacent ranges share no line and lose no line. Memory is one line.
    """
    with open_bytes(file, tally) as stream, reading(file):
        position = start
        if start:
            stream.seek(start - 1)
            position = _after_line_feed(stream, start - 1, stop)
        if stop < 0:
            for line in stream:
                yield line
            return
        while position < stop:
            line = stream.readline()
            if not line:
                return
            position += len(line)
            yield line


def lines_before(file: InputFile, start: int) -> int:
    """The number of lines of an uncompressed file that begin before the first one in a range at `start`, for messages."""
    if not start:
        return 0
    count, left = 0, start - 1
    with reading(file), file.open() as stream:
        while left and (chunk := stream.read(min(left, _BUFFER))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    return count + 1


def _after_line_feed(stream: BinaryIO, position: int, stop: int) -> int:
    """Read past the next line feed, or at least to `stop`. Return the position."""
    while position < stop:
        part = stream.readline(_BUFFER)
        position += len(part)
        if not part or part.endswith(b"\n"):
            break
    return position


class _Counted(io.RawIOBase):
    """A file that counts the bytes read in a tally. It raises an error if it ends before its `size`, as a server's answer may."""

    def __init__(self, raw: BinaryIO, tally: Tally, size: int):
        self._raw, self._tally, self._size, self._place = raw, tally, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = self._raw.seek(offset, whence)
        return self._place

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        size = self._raw.readinto(buffer)
        self._tally.consumed += size
        self._place += size
        if not size and len(buffer) and self._place < self._size:
            raise OSError(f"it ends after {self._place} of {self._size} bytes")
        return size


class _Zstandard(io.RawIOBase):
    """zstd frames one after the other. The package's own stream reader accepts a truncated frame as a whole one."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError as error:
            raise DataError("reading .zst files needs a package that is not installed: pip install zstandard") from error
        self._new = lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._error = zstandard.ZstdError
        self._raw = raw
        self._frame: Any = None
        self._rest = b""  # compressed bytes of the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._rest or self._raw.read(_ZSTD_CHUNK)
            self._rest = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-frame marker")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = memoryview(self._frame.decompress(compressed))
            except self._error as error:
                raise ValueError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
