"""Rows of CSV files, and the text records of web archives: files that are read from start to end, because their records cannot be
found from the middle.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from pretrain.data.preparation.columns import require_columns
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, open_bytes, reading
from pretrain.errors import DataError

_LONGEST_FIELD = 1 << 28  # characters; a quotation mark too many would otherwise swallow a file
_TEXT_RECORDS = ("conversion",)
_PAGE_RECORDS = ("response", "resource", "revisit")


def csv_rows(file: InputFile, columns: Sequence[str], tally: Tally) -> Iterator[list[str] | str]:
    """The values of `columns` in each row, or what is wrong with the row. The first line names the columns.

    Commas separate values, in .tsv tabs; quotation marks around a value may hold separators and line ends (RFC 4180). Bytes that are
    not UTF-8 come as half surrogates. Raises DataError naming the file when it has no such column.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    with open_bytes(file, tally) as stream, reading(file):
        if stream.peek(3)[:3] == b"\xef\xbb\xbf":
            stream.read(3)
            tally.marks += 1
        lines = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        rows = csv.reader(lines, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
        except csv.Error as error:
            raise ValueError(f"its first line is not valid CSV: {error}") from error
        require_columns(file, columns, names)
        if double := next((name for name in columns if names.count(name) > 1), None):
            raise DataError(f"{file.name}: has two columns {double!r}; rename one")
        places = [names.index(name) for name in columns]
        while True:
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield f"not valid CSV ({error})"
                continue
            if row is None:
                return
            if len(row) == len(names):
                yield [row[place] for place in places]
            elif row:  # else an empty line
                yield f"has {len(row)} values, and the first line names {len(names)} columns"


def archive_texts(file: InputFile, tally: Tally) -> Iterator[bytes]:
    """The text records of a web archive: what Common Crawl publishes as WET files.

    Raises DataError for an archive of pages as they were served: taking text out of HTML is another program's work.
    """
    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError as error:
        raise DataError(
            f"{file.name}: reading web archives needs a package that is not installed: pip install warcio"
        ) from error
    with open_bytes(file, tally) as stream, reading(file):
        try:
            records = ArchiveIterator(_Loud(stream))
            for record in records:
                length = record.rec_headers.get_header("Content-Length")
                if records.err_count or length is None or not length.isdigit() or record.rec_type is None:
                    raise ValueError("a record does not end where it says, or its head is cut short")
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


class _Loud:
    """A stream whose EOFError, which says that a compressed file was cut short, is no EOFError: warcio takes that for the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except EOFError as error:
            raise ValueError(str(error)) from error
