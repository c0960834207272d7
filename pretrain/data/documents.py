"""Corpus files -> documents, in one fixed order, a bounded piece at a time.

    *.jsonl *.ndjson *.json (.gz)   one JSON object per line, the text in one of its fields
    *.parquet *.pq                  one row per document, the text in one column
    anything else (.gz)             plain text: a document per file, or per line

JSON lines and Parquet are streamed through `datasets`. JSON lines go through its *text* reader and are parsed here: its
JSON reader guesses column types (a corpus of dates arrives as datetimes), wants one schema for all the fields we do not
even read, and cannot say on which line an error is.
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pretrain.errors import DataError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
TEXT_MODES = ("file", "line")
_ROWS = 1000  # rows taken from a stream at a time


@dataclass(frozen=True)
class Document:
    """One text and where it comes from: the file and, where it holds several, the line or row (from 1)."""

    text: str
    file: str
    place: str = ""

    @property
    def origin(self) -> str:
        return f"{self.file}, {self.place}" if self.place else self.file


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that any of the glob `patterns` matches (`**` descends), each once, sorted.

    Raises DataError for a pattern that matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        # A name that exists is taken literally, so that a file called "a[1].txt" can be given at all.
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = [os.path.normpath(match) for match in matches if os.path.isfile(match)]
        if not files:
            hint = " (a directory: write DIR/**/*)" if os.path.isdir(pattern) else ""
            raise DataError(f"{pattern}: no such input file{hint}")
        found.update(files)
    return [Path(name) for name in sorted(found)]


def read_documents(files: Iterable[Path], text_field: str = "text", text_mode: str = "file") -> Iterator[Document]:
    """Every document of `files` in order, empty ones included.

    `text_field` names the JSON field or Parquet column; `text_mode` ("file" or "line") says what a document is in plain
    text. Raises DataError naming the file, and the line or row, for anything that cannot be read.
    """
    for file in files:
        kind = _kind(file)
        if kind == "json":
            yield from _read_json_lines(file, text_field)
        elif kind == "parquet":
            yield from _read_parquet(file, text_field)
        else:
            yield from _read_text(file, text_mode)


def _kind(file: Path) -> str:
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if suffix.lower() in JSON_SUFFIXES:
        return "json"
    return "parquet" if file.suffix.lower() in PARQUET_SUFFIXES else "text"


def _read_json_lines(file: Path, field: str) -> Iterator[Document]:
    batches = (batch["text"] for batch in _stream("text", file, sample_by="line"))
    for number, line in enumerate(_rows(batches, file), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(line.removeprefix("\ufeff") if number == 1 else line)
        except ValueError as error:
            raise DataError(f"{file}, {place}: not valid JSON ({error}); expected one JSON object per line") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, {place}: expected one JSON object per line, found {type(row).__name__}")
        yield Document(_text_of(row, field, f"{file}, {place}"), str(file), place)


def _read_parquet(file: Path, field: str) -> Iterator[Document]:
    columns = _guarded(lambda: _dataset("parquet", file).column_names, file)
    if field not in columns:
        raise DataError(f"{file}: no column {field!r}; name one of {', '.join(columns)} with --text-field")
    batches = (batch[field] for batch in _stream("parquet", file, columns=[field]))
    for number, text in enumerate(_rows(batches, file), start=1):
        place = f"row {number}"
        yield Document(_text_of({field: text}, field, f"{file}, {place}"), str(file), place)


def _text_of(row: dict[str, Any], field: str, origin: str) -> str:
    if field not in row:
        fields = ", ".join(sorted(row)) or "none"
        raise DataError(f"{origin}: no field {field!r}; it has: {fields}. Name the text with --text-field")
    if not isinstance(row[field], str):
        raise DataError(f"{origin}: field {field!r} is {type(row[field]).__name__}, not text")
    return row[field]


def _read_text(file: Path, mode: str) -> Iterator[Document]:
    if mode == "file":
        yield Document(_guarded(lambda: _read_whole(file), file), str(file))
        return
    lines = _text_lines(file)
    batches = iter(lambda: list(islice(lines, _ROWS)), [])
    for number, line in enumerate(_rows(batches, file), start=1):
        yield Document(line, str(file), f"line {number}")


def _open_text(file: Path) -> Any:
    # newline="\n": carriage returns are part of the text, and only a line feed ends a line.
    opener = gzip.open if file.suffix == ".gz" else open
    return opener(file, "rt", encoding="utf-8", newline="\n")


def _read_whole(file: Path) -> str:
    with _open_text(file) as stream:
        return stream.read()


def _text_lines(file: Path) -> Iterator[str]:
    with _open_text(file) as stream:
        for line in stream:
            yield line.removesuffix("\n").removesuffix("\r")


def _dataset(builder: str, file: Path, **options: Any) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are ours to report, in one line
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise every load_dataset, even of local files, calls a server
    if "::" in str(file) or "://" in str(file):
        raise DataError(f"{file}: `datasets` reads '::' and '://' in a file name as an address; rename the file")
    # Escaped, because a name such as "part[1].jsonl" is a pattern to it that silently matches nothing.
    name = glob.escape(os.path.abspath(file))
    return datasets.load_dataset(builder, data_files=[name], split="train", streaming=True, **options)


def _stream(builder: str, file: Path, **options: Any) -> Iterator[dict[str, list[Any]]]:
    yield from _dataset(builder, file, **options).iter(batch_size=_ROWS)


def _rows(batches: Iterable[list[Any]], file: Path) -> Iterator[Any]:
    """The rows of `batches`, with failures of the source turned into errors that name `file`."""
    source = iter(batches)
    end: list[Any] = []
    while (batch := _guarded(lambda: next(source, end), file)) is not end:
        yield from batch


def _guarded(read: Any, file: Path) -> Any:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not valid UTF-8 ({error.reason}); convert it first, for instance with iconv") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{file}: cannot be read ({error})") from error
