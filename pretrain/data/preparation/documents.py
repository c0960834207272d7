"""The documents of a piece of input, in one fixed order, a bounded amount at a time.

JSON lines are read by ranges of bytes and parsed here. A reader of tables would guess types (a corpus of dates arrives as dates)
and need one schema even for fields that nobody reads. It could not name the line of an error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.preparation.binary_inputs import (
    WHOLE,
    column_batches,
    cut_at,
    documents_before,
    id_documents,
    ids_of,
    rows_before,
)
from pretrain.data.preparation.inputs import SIGNATURE_BYTES, InputFile, known_as
from pretrain.data.preparation.lines import Tally, lines_before, lines_of, open_bytes, reading
from pretrain.data.preparation.records import archive_texts, table_rows
from pretrain.errors import DataError

TEXT_MODES = ("file", "line")
FIELD_SEPARATOR = "\n\n"
"""The separator of several text fields: a blank line."""

Content = str | np.ndarray
"""A document: its text, or its ids without the end-of-document id."""


@dataclass(frozen=True)
class DocumentOptions:
    """The options that say which part of the input is a document (see the command line). `max_invalid`: rows that may be left out."""

    text_field: str = "text"
    text_mode: str = "file"
    ids_field: str = ""
    ids_dtype: str = ""
    max_invalid: int = 0

    @property
    def text_fields(self) -> list[str]:
        return [name.strip() for name in self.text_field.split(",")]


@dataclass(frozen=True)
class Piece:
    """A part of one input file. The kind of file decides what `start` and `stop` count (parts of tables, bytes, ids).

    `size` is about the number of its bytes in the file, for progress.
    """

    file: InputFile
    start: int = 0
    stop: int = WHOLE
    size: int = 0


class PieceReader:
    """Reads one piece. `end_id` is where ids are cut into documents; `tally` counts."""

    def __init__(self, piece: Piece, options: DocumentOptions, end_id: int, tally: Tally) -> None:
        self._file, self._start, self._stop = piece.file, piece.start, piece.stop
        self._options, self._end_id, self._tally = options, end_id, tally
        self._kind = piece.file.kind(options.ids_dtype)

    def documents(self) -> Iterator[tuple[Content, int]]:
        """(document, row) in order, empty documents included; rows count from 0 at the start of the piece.

        Afterwards `tally.rows` is the number of rows in the piece. Raises DataError naming the file, and the line or row, for
        anything that cannot be read. Unusable rows are left out, as many as the options allow.
        """
        self._tally.rows = 0
        if self._options.ids_field and self._kind in ("text", "csv", "warc"):
            raise DataError(f"{self._file.name}: has no field {self._options.ids_field!r} of ids; leave out --ids-field")
        if self._kind == "json":
            return self._ids_in_lines() if self._options.ids_field else self._texts_in_lines()
        if self._kind in ("parquet", "arrow"):
            return self._ids_in_columns() if self._options.ids_field else self._texts_in_columns()
        if self._kind == "text":
            return self._lines() if self._options.text_mode == "line" else self._whole()
        return {"ids": self._id_file, "csv": self._texts_in_csv, "warc": self._texts_in_archive}[self._kind]()

    def origin(self, row: int) -> str:
        """The place of a row for people, who count lines and rows from 1 and from the start of the file."""
        if self._kind == "text" and self._options.text_mode == "file":
            return self._file.name
        unit = {"ids": "document", "parquet": "row", "arrow": "row", "csv": "row", "warc": "record"}.get(self._kind, "line")
        return f"{self._file.name}, {unit} {1 + row + self._rows_before}"

    @functools.cached_property
    def _rows_before(self) -> int:
        """Rows of the file before the piece."""
        if self._kind == "ids":
            return documents_before(self._file, self._options.ids_dtype, self._end_id, self._start)
        if self._kind in ("parquet", "arrow"):
            return rows_before(self._file, self._kind, self._start)
        return lines_before(self._file, self._start)

    def leave_out(self, row: int, reason: str) -> None:
        """Count an unusable row if the options allow one more; otherwise raise DataError with its place and the reason."""
        origin = self.origin(row)
        if self._tally.invalid >= self._options.max_invalid:
            before = f" (after {self._tally.invalid} rows that were left out)" if self._tally.invalid else ""
            raise DataError(
                f"{origin}: {reason}{before}; correct it, or leave such rows out, up to a number, with --max-invalid"
            )
        self._tally.leave_out(origin, reason)

    # Plain text.

    def _whole(self) -> Iterator[tuple[str, int]]:
        with open_bytes(self._file, self._tally) as stream, reading(self._file):
            data = stream.read()
        self._tally.rows = 1
        text = self._decoded(data, 0)
        if text is not None:
            yield text, 0

    def _lines(self) -> Iterator[tuple[str, int]]:
        for row, line in self._numbered_lines():
            # Only a line feed ends a line; a carriage return just before it belongs to the line end.
            end = -2 if line.endswith(b"\r\n") else -1 if line.endswith(b"\n") else None
            text = self._decoded(line[:end], row)
            if text is not None:
                yield text, row

    def _numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        tally = self._tally
        for row, line in enumerate(lines_of(self._file, self._start, self._stop, tally)):
            tally.rows = row + 1
            yield row, line

    def _decoded(self, data: bytes, row: int) -> str | None:
        """Text without a byte order mark, or None if it is not text and is left out."""
        first = row == self._start == 0
        if first and self._kind == "text" and (other := known_as(data[:SIGNATURE_BYTES])):
            reason = other
        elif self._kind == "text" and b"\0" in data:
            more = "; if it holds token ids, give their type with --ids-dtype" if self._file.suffix == ".bin" else ""
            reason = f"a binary file, not text{more}"
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                reason = f"not valid UTF-8 ({error.reason}); convert it first, for instance with iconv"
            else:
                if not first or not text.startswith("\ufeff"):
                    return text
                self._tally.marks += 1
                return text[1:]
        return self.leave_out(row, reason)

    # JSON lines.

    def _objects(self) -> Iterator[tuple[dict[str, Any], int]]:
        for row, line in self._numbered_lines():
            if not line.strip() or (text := self._decoded(line, row)) is None:
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                self.leave_out(row, f"not valid JSON ({error}); expected one JSON object per line")
                continue
            if isinstance(value, dict):
                yield value, row
            else:
                self.leave_out(row, f"expected one JSON object per line, found {type(value).__name__}")

    def _texts_in_lines(self) -> Iterator[tuple[str, int]]:
        fields = self._options.text_fields
        for value, row in self._objects():
            if self._has_fields(value, fields, row, "--text-field"):
                yield from self._joined([value[name] for name in fields], fields, row)

    def _ids_in_lines(self) -> Iterator[tuple[np.ndarray, int]]:
        name = self._options.ids_field
        for value, row in self._objects():
            if not self._has_fields(value, [name], row, "--ids-field"):
                continue
            ids = ids_of(value[name])
            if ids is None:
                self.leave_out(row, f"field {name!r} is not a list of ids; see --ids-field")
            else:
                for document in cut_at(ids, self._end_id):
                    yield document, row

    def _has_fields(self, value: dict[str, Any], fields: list[str], row: int, option: str) -> bool:
        for name in fields:
            if name not in value:
                present = ", ".join(sorted(value)) or "none"
                self.leave_out(row, f"no field {name!r}; it has: {present}. Name one with {option}")
                return False
        return True

    def _joined(self, texts: list[Any], fields: list[str], row: int) -> Iterator[tuple[str, int]]:
        for name, text in zip(fields, texts):
            if type(text) is not str:
                self.leave_out(row, f"field {name!r} is {type(text).__name__}, not text")
                return
        yield texts[0] if len(texts) == 1 else FIELD_SEPARATOR.join(texts), row

    # Parquet and Arrow.

    def _column_batches(self, fields: list[str]) -> Iterator[tuple[int, list[Any]]]:
        """Batches, each with its first row."""
        for arrays in column_batches(self._file, self._kind, self._start, self._stop, fields, self._tally):
            first = self._tally.rows
            self._tally.rows += len(arrays[0])
            yield first, arrays

    def _texts_in_columns(self) -> Iterator[tuple[str, int]]:
        fields = self._options.text_fields
        for first, arrays in self._column_batches(fields):
            with reading(self._file):
                columns = [array.to_pylist() for array in arrays]
            for row, texts in enumerate(zip(*columns), first):
                yield from self._joined(list(texts), fields, row)

    def _ids_in_columns(self) -> Iterator[tuple[np.ndarray, int]]:
        name = self._options.ids_field
        for first, (array,) in self._column_batches([name]):
            for row, ids in enumerate(_id_lists(array, self._file, name), first):
                if ids is None:
                    self.leave_out(row, f"field {name!r} has no list of ids, or one with gaps")
                    continue
                for document in cut_at(ids, self._end_id):
                    yield document, row

    # Files that are read from start to end.

    def _texts_in_csv(self) -> Iterator[tuple[str, int]]:
        fields = self._options.text_fields
        for row, values in enumerate(table_rows(self._file, fields, self._tally)):
            self._tally.rows = row + 1
            if isinstance(values, str):
                self.leave_out(row, values)
            elif any(map(_is_broken, values)):
                self.leave_out(row, "not valid UTF-8; convert it first, for instance with iconv")
            else:
                yield from self._joined(list(values), fields, row)

    def _texts_in_archive(self) -> Iterator[tuple[str, int]]:
        for row, content in enumerate(archive_texts(self._file, self._tally)):
            self._tally.rows = row + 1
            text = self._decoded(content, row)
            if text is not None:
                yield text, row

    def _id_file(self) -> Iterator[tuple[np.ndarray, int]]:
        options = self._options
        documents = id_documents(self._file, options.ids_dtype, self._end_id, self._start, self._stop, self._tally)
        for row, ids in enumerate(documents):
            self._tally.rows = row + 1
            yield ids, row


def _is_broken(text: str) -> bool:
    """Whether some of its bytes were not UTF-8."""
    return not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)


def _id_lists(array: Any, file: InputFile, name: str) -> Iterator[np.ndarray | None]:
    """The lists of an Arrow array, each as integers; None for a missing one, and for one with missing ids."""
    import pyarrow.types as types

    kind = array.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise DataError(f"{file.name}: column {name!r} is {kind}, not lists of integers; see --ids-field")
    flat = array.flatten()  # flattens the lists that exist
    if flat.null_count:
        yield from (None if ids is None or None in ids else np.array(ids, np.int64) for ids in array.to_pylist())
        return
    values, begin = flat.to_numpy(zero_copy_only=False), 0
    for length in array.value_lengths().to_pylist():
        if length is None:
            yield None
            continue
        yield values[begin : begin + length]
        begin += length


@dataclass(frozen=True)
class Document:
    """One text, the name of its file and, if that holds several, its line or row (from 1)."""

    text: str
    file: str
    place: str = ""

    @property
    def origin(self) -> str:
        """Its place, for people."""
        return f"{self.file}, {self.place}" if self.place else self.file


def read_documents(
    files: Iterable[str | Path | InputFile], text_field: str = "text", text_mode: str = "file"
) -> Iterator[Document]:
    """Every text of `files` in order, empty ones included, in one process, for training tokenizers.

    See `DocumentOptions`. Raises DataError naming the file, and the line or row, for anything that cannot be read.
    """
    options = DocumentOptions(text_field, text_mode)
    for file in files:
        piece = Piece(file if isinstance(file, InputFile) else InputFile.found_at(str(file)))
        reader = PieceReader(piece, options, -1, Tally())
        for text, row in reader.documents():
            if not isinstance(text, str):
                raise DataError(f"{piece.file.name}: holds ids, not text")
            yield Document(text, piece.file.name, reader.origin(row).removeprefix(piece.file.name).removeprefix(", "))
