"""Files as bytes and as rows of text, plain or compressed: whole, by lines, rows of CSV files, records of web archives.

Only the lines of a plain file can be read from its middle. CSV files and web archives are read from start to end, because records
cannot be found from the middle.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pretrain.data.preparation.inputs import InputFile
from pretrain.errors import DataError, UserError
from pretrain.store_errors import judged

_BUFFER = 1 << 18
_ZSTD_CHUNK = 1 << 15
_ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` needs
_LONGEST_FIELD = 1 << 28  # characters
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LISTED = 1000  # how many left-out rows are listed with their places; all are counted
_TEXT_RECORDS = ("conversion",)
_PAGE_RECORDS = ("response", "resource", "revisit")
LEAVE_OUT = "correct it, or leave such rows out, up to a number, with --max-invalid"
CORRECT_IT = "correct it, or remove it from the input"
"""What a user can do about an unusable row: the second where a tool has no --max-invalid."""


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

    def leave_out(self, where: str, why: str, most: int, remedy: str = LEAVE_OUT) -> None:
        """Count an unusable row if that makes at most `most` of them; otherwise raise DataError with its place, the reason and the remedy."""
        if self.invalid >= most:
            before = f" (after {self.invalid} rows that were left out)" if self.invalid else ""
            raise DataError(f"{where}: {why}{before}; {remedy}")
        self.invalid += 1
        if len(self.invalid_rows) < _LISTED:
            self.invalid_rows.append((where, why))


@contextlib.contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Turns a library's error about an unreadable or damaged file into one line that names the file."""
    damage = EOFError, zlib.error, lzma.LZMAError
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if file.is_remote and not isinstance(error, damage):
            found = judged(file.path, error)
            if found is error:  # a defect of ours
                raise
            raise (DataError(str(found)) if isinstance(found, FileNotFoundError) else found) from error
        if not isinstance(error, (OSError, ValueError, *damage)):  # pyarrow's are OSErrors or ValueErrors
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise DataError(f"{file.name}: cannot be read ({reason})") from error


def require_columns(file: InputFile, columns: Sequence[str], present: Sequence[str], option: str = "--text-field") -> None:
    """Raise DataError unless the file has these columns, which `option` named, each once."""
    for name in columns:
        if name not in present:
            raise DataError(f"{file.name}: no column {name!r}; it has: {', '.join(present)}. Name one with {option}")
        if present.count(name) > 1:
            raise DataError(f"{file.name}: has {present.count(name)} columns {name!r}; rename all but one")


@contextlib.contextmanager
def open_bytes(file: InputFile, tally: Tally) -> Iterator[BinaryIO]:
    """The content of `file`, decompressed, with the errors of `reading`. `tally` counts the bytes of the file itself."""
    with reading(file), file.open() as raw:
        counted = _Counted(raw, tally, file.size)
        if file.compression == ".zst":
            unpacked: Any = _Zstandard(counted)
        elif file.compression == ".gz":
            unpacked = gzip.open(io.BufferedReader(counted, _BUFFER))
        elif file.compression:
            unpacked = _Streams(counted, {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}[file.compression])
        else:
            unpacked = counted
        yield io.BufferedReader(unpacked, _BUFFER)


@contextlib.contextmanager
def open_at_random(file: InputFile) -> Iterator[BinaryIO]:
    """The bytes of a file for a reader that jumps. A short answer of a server is requested again, or becomes an error."""
    with file.open(at_random=True) as raw:
        yield io.BufferedReader(_Counted(raw, Tally(), file.size), 1 << 16)


def whole_file(file: InputFile, tally: Tally) -> Iterator[bytes]:
    """The content of the file, as its only row."""
    with open_bytes(file, tally) as stream:
        yield stream.read()


def lines_of(file: InputFile, start: int, stop: int, tally: Tally) -> Iterator[bytes]:
    """The lines, with their ends, whose first byte lies in [start, stop). A negative `stop` means the end of the file.

    Adjacent ranges share no line and lose no line. Memory is one line.
    """
    with open_bytes(file, tally) as stream:
        position, stop = start, stop if stop >= 0 else sys.maxsize
        if start:
            stream.seek(start - 1)
            position = _after_line_feed(stream, start - 1, stop)
        while position < stop and (line := stream.readline()):
            position += len(line)
            yield line


def _after_line_feed(stream: BinaryIO, position: int, stop: int) -> int:
    """Read past the next line feed, or at least to `stop`. Return the position."""
    while position < stop:
        part = stream.readline(_BUFFER)
        position += len(part)
        if not part or part.endswith(b"\n"):
            break
    return position


def table_rows(file: InputFile, columns: Sequence[str], tally: Tally) -> Iterator[list[str] | str]:
    """The values of `columns` in each row of a .csv or .tsv, or the error in the row. The first line names the columns.

    CSV follows RFC 4180: commas separate values, and quotation marks around a value may hold separators and line ends. TSV follows IANA's
    text/tab-separated-values: a line is a row, and quotation marks are ordinary characters. Empty lines are not rows. Bytes that are not
    UTF-8 become half surrogates. Raises DataError naming the file if it has no such column. It also raises for a faulty CSV row of several
    lines, because its quotation marks may have swallowed good rows, which nobody could count.
    """
    is_csv = file.suffix != ".tsv"
    with open_bytes(file, tally) as stream:
        if stream.peek(len(_BYTE_ORDER_MARK)).startswith(_BYTE_ORDER_MARK):
            stream.read(len(_BYTE_ORDER_MARK))
            tally.marks += 1
        rows = _csv_rows(stream) if is_csv else _tsv_rows(stream)
        names, line_before = next(rows, ([], 0))
        if isinstance(names, str):
            raise ValueError(f"its first line is {names}")
        require_columns(file, columns, names)
        places = [names.index(name) for name in columns]
        for row, line in rows:
            first, line_before = line_before + 1, line
            if len(row) == len(names) and isinstance(row, list):
                yield [row[place] for place in places]
            elif row:  # else an empty line
                wrong = row if isinstance(row, str) else f"has {len(row)} values, but the first line names {len(names)} columns"
                if first != line:
                    raise DataError(
                        f"{file.name}, lines {first} to {line}: one row by its quotation marks, and {wrong}; one mark too many swallows good "
                        "rows, so such lines are never left out: correct them (a quotation mark inside quotes is written twice)"
                    )
                yield wrong if is_csv or '"' not in "".join(row) else f"{wrong}; in .tsv quotation marks do not group values"


def _csv_rows(stream: BinaryIO) -> Iterator[tuple[list[str] | str, int]]:
    """Each row, or the error in it, and the number of its last line, from 1."""
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.reader(io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline=""), strict=True)
    while True:
        try:
            row: list[str] | str | None = next(rows, None)
        except csv.Error as error:
            row = f"not valid CSV ({error})"
        if row is None:
            return
        yield row, rows.line_num


def _tsv_rows(stream: BinaryIO) -> Iterator[tuple[list[str], int]]:
    """Each row, and the number of its line, from 1."""
    for number, line in enumerate(stream, 1):
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="surrogateescape")
        yield text.split("\t") if text else [], number


def archive_texts(file: InputFile, tally: Tally) -> Iterator[bytes]:
    """The text records of a web archive, such as Common Crawl's WET files.

    Raises DataError for an archive of served pages: another program must extract the text from HTML.
    """
    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError as error:
        raise DataError(
            f"{file.name}: reading web archives needs a package that is not installed: pip install warcio"
        ) from error
    with open_bytes(file, tally) as stream:
        try:
            records = ArchiveIterator(_Loud(stream))
            for record in records:
                length = record.rec_headers.get_header("Content-Length")
                if records.err_count or length is None or not length.isdigit() or record.rec_type is None:
                    raise ValueError("a record has another length than it says, or its head is truncated")
                if record.rec_type in _PAGE_RECORDS:
                    raise DataError(
                        f"{file.name}: holds web pages as they were served ({record.rec_type} records), not text; take the WET files that "
                        "belong to it, or extract the text first, for instance with trafilatura or datatrove"
                    )
                if record.rec_type in _TEXT_RECORDS:
                    content = record.content_stream().read()
                    if len(content) != int(length):
                        raise ValueError(f"a record of {length} bytes ends after {len(content)}")
                    yield content
        except ArchiveLoadFailed as error:
            raise ValueError(f"not a web archive: {error}") from error


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


class _Streams(io.RawIOBase):
    """bzip2 or xz streams one after the other. Python's own readers take all that follows a damaged head for padding, and leave it out."""

    def __init__(self, raw: BinaryIO, new: Callable[[], Any]):
        self._raw, self._new = raw, new
        self._stream = new()
        self._rest = b""  # compressed bytes after the end of a stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        ready = b""
        while not ready:
            if self._stream.eof:
                compressed = self._rest.lstrip(b"\0")  # zeros are padding
                while not compressed:
                    if not (more := self._raw.read(_BUFFER)):
                        return 0
                    compressed = more.lstrip(b"\0")
                self._stream = self._new()
            elif self._stream.needs_input:
                if not (compressed := self._raw.read(_BUFFER)):
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            else:
                compressed = b""
            try:
                ready = self._stream.decompress(compressed, len(buffer))
            except OSError as error:
                raise ValueError(str(error)) from error
            self._rest = self._stream.unused_data
        buffer[: len(ready)] = ready
        return len(ready)


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


class _Loud:
    """A stream that turns EOFError into another error. It means a truncated compressed file, but warcio takes it for the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except EOFError as error:
            raise ValueError(str(error)) from error
