"""The documents of a piece of input, in one fixed order, a bounded amount at a time.

JSON lines are read by ranges of bytes and parsed here. A reader of tables would guess types (a corpus of dates arrives as dates)
and need one schema even for fields that nobody reads. It could not name the line of an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.preparation.binary_inputs import column_rows, cut_at, id_documents, ids_of, rows_before
from pretrain.data.preparation.inputs import SIGNATURE_BYTES, InputFile, known_as
from pretrain.data.preparation.preparation_plan import Piece, Settings
from pretrain.data.preparation.text_inputs import CORRECT_IT, LEAVE_OUT, Tally, archive_texts, lines_of, table_rows, whole_file
from pretrain.errors import DataError

FIELD_SEPARATOR = "\n\n"
"""The separator of several text fields: a blank line."""

Content = str | np.ndarray
"""A document: its text, or its ids without the end-of-document id."""


class _Unusable(Exception):
    """A row that gives no document, and why."""


class PieceReader:
    """Reads one piece. `end_id` is where ids are cut into documents; `tally` counts; `remedy`: what the user can do about an unusable row."""

    def __init__(self, piece: Piece, settings: Settings, end_id: int, tally: Tally, remedy: str = LEAVE_OUT) -> None:
        self.piece, self._settings, self._end_id, self._tally, self._remedy = piece, settings, end_id, tally, remedy
        self._file, self._fields, self._ids_field = piece.file, settings.text_fields, settings.ids_field
        self._kind = piece.file.kind(settings.ids_dtype)

    def documents(self) -> Iterator[tuple[Content, int]]:
        """(document, row) in order, empty documents included; rows count from 0 at the start of the piece.

        Afterwards `tally.rows` is the number of rows in the piece. Raises DataError naming the file, and the line or row, for
        anything that cannot be read. Unusable rows are left out, as many as the settings allow.
        """
        self._tally.rows = 0
        rows, documents_of = self._rows()
        for row, value in enumerate(rows):
            self._tally.rows = row + 1
            try:
                documents = documents_of(value, row)
            except _Unusable as reason:
                self.leave_out(row, str(reason))
                continue
            for document in documents:
                yield document, row

    def _rows(self) -> tuple[Iterable[Any], Callable[[Any, int], Sequence[Content]]]:
        """The rows of the piece, and the function that makes documents of a row and its number."""
        file, settings, tally, part = self._file, self._settings, self._tally, (self.piece.start, self.piece.stop)
        if self._kind == "ids":
            return id_documents(file, settings.ids_dtype, self._end_id, *part, tally), lambda ids, row: [ids]
        if self._kind in ("parquet", "arrow"):
            fields = [self._ids_field] if self._ids_field else self._fields
            rows = column_rows(file, self._kind, *part, fields, bool(self._ids_field), tally)
            return rows, self._in_columns
        if self._kind == "json":
            return lines_of(file, *part, tally), self._in_object
        if self._ids_field:
            raise DataError(f"{file.name}: has no field {self._ids_field!r} of ids; leave out --ids-field")
        if self._kind == "csv":
            return table_rows(file, self._fields, tally), self._in_table
        if self._kind == "warc":
            return archive_texts(file, tally), self._text
        if settings.text_mode == "line":
            return lines_of(file, *part, tally), self._line
        return whole_file(file, tally), self._text

    def origin(self, row: int) -> str:
        """The place of a row for people, who count lines and rows from 1 and from the start of the file."""
        if self._kind == "text" and self._settings.text_mode == "file":
            return self._file.name
        unit = {"ids": "document", "parquet": "row", "arrow": "row", "csv": "row", "warc": "record"}.get(self._kind, "line")
        return f"{self._file.name}, {unit} {1 + row + self._rows_before}"

    @functools.cached_property
    def _rows_before(self) -> int:
        """Rows of the file before the piece."""
        if not self.piece.start:
            return 0
        if self._kind in ("parquet", "arrow"):
            return rows_before(self._file, self._kind, self.piece.start)
        before = dataclasses.replace(self.piece, start=0, stop=self.piece.start)
        return sum(1 for _ in PieceReader(before, self._settings, self._end_id, Tally())._rows()[0])

    def leave_out(self, row: int, reason: str) -> None:
        """Count an unusable row if the settings allow one more; otherwise raise DataError with its place and the reason."""
        self._tally.leave_out(self.origin(row), reason, self._settings.max_invalid, self._remedy)

    # The documents of a row, by the kind of file. Each raises _Unusable.

    def _text(self, data: bytes, row: int) -> list[str]:
        """The text without a byte order mark."""
        first = row == self.piece.start == 0
        if self._kind == "text":
            if first and (other := known_as(data[:SIGNATURE_BYTES])):
                raise _Unusable(other)
            if b"\0" in data:
                more = "; if it holds token ids, prepare_data.py needs their type: --ids-dtype"
                raise _Unusable(f"a binary file, not text{more if self._file.suffix == '.bin' else ''}")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise _Unusable(f"not valid UTF-8 ({error.reason}); convert it first, for instance with iconv") from error
        if first and text.startswith("\ufeff"):
            self._tally.marks += 1
            return [text[1:]]
        return [text]

    def _line(self, line: bytes, row: int) -> list[str]:
        # Only a line feed ends a line; a carriage return just before it belongs to the line end.
        end = -2 if line.endswith(b"\r\n") else -1 if line.endswith(b"\n") else None
        return self._text(line[:end], row)

    def _in_object(self, line: bytes, row: int) -> Sequence[Content]:
        if not line.strip():
            return []
        (text,) = self._text(line, row)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Unusable(f"not valid JSON ({error}); expected one JSON object per line") from error
        if not isinstance(value, dict):
            raise _Unusable(f"expected one JSON object per line, found {type(value).__name__}")
        for name in [self._ids_field] if self._ids_field else self._fields:
            if name not in value:
                option, present = "--ids-field" if self._ids_field else "--text-field", ", ".join(sorted(value)) or "none"
                raise _Unusable(f"no field {name!r}; it has: {present}. Name one with {option}")
        if not self._ids_field:
            return self._joined([value[name] for name in self._fields])
        ids = ids_of(value[self._ids_field])
        if ids is None:
            raise _Unusable(f"field {self._ids_field!r} is not a list of ids; see --ids-field")
        return cut_at(ids, self._end_id)

    def _in_columns(self, value: Any, row: int) -> Sequence[Content]:
        if not self._ids_field:
            return self._joined(value)
        if value is None:
            raise _Unusable(f"field {self._ids_field!r} has no list of ids, or one with gaps")
        return cut_at(value, self._end_id)

    def _in_table(self, values: list[str] | str, row: int) -> list[str]:
        if isinstance(values, str):
            raise _Unusable(values)
        if any(not text.isascii() and any("\udc80" <= sign <= "\udcff" for sign in text) for text in values):
            raise _Unusable("not valid UTF-8; convert it first, for instance with iconv")
        return self._joined(values)

    def _joined(self, texts: Sequence[Any]) -> list[str]:
        for name, text in zip(self._fields, texts):
            if type(text) is not str:
                raise _Unusable(f"field {name!r} is {type(text).__name__}, not text")
        return [FIELD_SEPARATOR.join(texts)]


def read_documents(files: Iterable[str | Path | InputFile], text_field: str = "text", text_mode: str = "file") -> Iterator[str]:
    """Every text of `files` in order, empty ones included, in one process, for training tokenizers.

    See `Settings`. Raises DataError naming the file, and the line or row, for anything that cannot be read.
    """
    settings = Settings(text_field, text_mode)
    for file in files:
        piece = Piece(file if isinstance(file, InputFile) else InputFile.found_at(str(file)))
        for text, _ in PieceReader(piece, settings, -1, Tally(), CORRECT_IT).documents():
            if not isinstance(text, str):
                raise DataError(f"{piece.file.name}: holds ids, not text")
            yield text
