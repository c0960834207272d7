"""Rows of CSV files, and the text records of web archives. Such files are read from start to end, because records cannot be found
from the middle.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from pretrain.data.preparation.binary_inputs import require_columns
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, open_bytes, reading
from pretrain.errors import DataError

_LONGEST_FIELD = 1 << 28  # characters
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TEXT_RECORDS = ("conversion",)
_PAGE_RECORDS = ("response", "resource", "revisit")


def table_rows(file: InputFile, columns: Sequence[str], tally: Tally) -> Iterator[list[str] | str]:
    """The values of `columns` in each row of a .csv or .tsv, or the error in the row. The first line names the columns.

    CSV follows RFC 4180: commas separate values, and quotation marks around a value may hold separators and line ends. TSV follows IANA's
    text/tab-separated-values: a line is a row, and quotation marks are ordinary characters. Empty lines are not rows. Bytes that are not
    UTF-8 become half surrogates. Raises DataError naming the file if it has no such column. It also raises for a faulty CSV row of several
    lines, because its quotation marks may have swallowed good rows, which nobody could count.
    """
    is_csv = file.suffix != ".tsv"
    with open_bytes(file, tally) as stream, reading(file):
        if stream.peek(len(_BYTE_ORDER_MARK)).startswith(_BYTE_ORDER_MARK):
            stream.read(len(_BYTE_ORDER_MARK))
            tally.marks += 1
        rows = _csv_rows(stream) if is_csv else _tsv_rows(stream)
        names, line_before = next(rows, ([], 0))
        if isinstance(names, str):
            raise ValueError(f"its first line is {names}")
        require_columns(file, columns, names)
        if double := next((name for name in columns if names.count(name) > 1), None):
            raise DataError(f"{file.name}: has two columns {double!r}; rename one")
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
                        "rows, so --max-invalid never leaves such lines out: correct them (a quotation mark inside quotes is written twice)"
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
    with open_bytes(file, tally) as stream, reading(file):
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


class _Loud:
    """A stream that turns EOFError into another error. It means a truncated compressed file, but warcio takes it for the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except EOFError as error:
            raise ValueError(str(error)) from error
