"""Rows of Parquet and Arrow files, a batch at a time, and how such files are cut into parts of about equal size.

A part is a range [start, stop): of row groups in Parquet, of record batches in an Arrow IPC file, of bytes at record batch
boundaries in an Arrow IPC stream (which is what `datasets` writes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, open_at_random, reading
from pretrain.errors import DataError

WHOLE = -1
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096
_ARROW_MAGIC = b"ARROW1"


def column_batches(
    file: InputFile, kind: str, start: int, stop: int, columns: Sequence[str], tally: Tally
) -> Iterator[list[Any]]:
    """Arrow arrays of `columns`, all of one length, for the rows of part [start, stop) of the file, in order.

    Raises DataError naming the file when it is damaged or has no such column.
    """
    read = _parquet_batches if kind == "parquet" else _arrow_batches
    with reading(file):
        yield from read(file, start, stop, columns, tally)


def rows_before(file: InputFile, kind: str, start: int) -> int:
    """Rows ahead of the part that begins at `start`: for messages."""
    if not start:
        return 0
    if kind == "parquet":
        with _parquet(file) as content:
            return sum(content.metadata.row_group(number).num_rows for number in range(start))
    with _source(file) as source:
        if _is_stream(file):
            rows = 0
            schema = _stream_schema(source)
            while source.tell() < start:
                rows += _next_batch(source, schema).num_rows
            return rows
        import pyarrow as pa

        batches = pa.ipc.open_file(source)
        return sum(batches.get_batch(number).num_rows for number in range(start))


def column_parts(file: InputFile, kind: str, part_bytes: int) -> list[tuple[int, int]]:
    """The parts of a file, each of about `part_bytes` of it where its inner structure allows that."""
    with reading(file):
        if kind == "parquet":
            with _parquet(file) as content:
                groups = [content.metadata.row_group(number).total_byte_size for number in range(content.num_row_groups)]
            scale = file.size / max(sum(groups), 1)  # what the metadata says is the size before compression
            return _grouped(list(range(len(groups) + 1)), [size * scale for size in groups], part_bytes)
        with _source(file) as source:
            if _is_stream(file):
                if _has_dictionaries(_stream_schema(source)):
                    return [(0, WHOLE)]  # a dictionary is sent once, ahead of the batches that need it
                places = _stream_places(source)
                return _grouped(places, [end - begin for begin, end in zip(places, places[1:])], part_bytes)
            import pyarrow as pa

            count = pa.ipc.open_file(source).num_record_batches
            return _grouped(list(range(count + 1)), [file.size / max(count, 1)] * count, part_bytes)


def _grouped(bounds: list[int], sizes: Sequence[float], part_bytes: int) -> list[tuple[int, int]]:
    parts, begin, size = [], 0, 0.0
    for number, more in enumerate(sizes):
        if size and size + more > part_bytes:
            parts.append((bounds[begin], bounds[number]))
            begin, size = number, 0.0
        size += more
    return [*parts, (bounds[begin], bounds[len(sizes)])]


@contextlib.contextmanager
def _parquet(file: InputFile) -> Iterator[Any]:
    import pyarrow.parquet

    with _source(file) as source:
        # A buffer, because pyarrow otherwise reads a column of a whole row group at once.
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as content:
            yield content


def _parquet_batches(file: InputFile, start: int, stop: int, columns: Sequence[str], tally: Tally) -> Iterator[list[Any]]:
    with _parquet(file) as content:
        require_columns(file, columns, content.schema_arrow.names)
        metadata = content.metadata
        groups = range(start, metadata.num_row_groups if stop == WHOLE else stop)
        bytes_per_group = file.size / max(metadata.num_row_groups, 1)
        for number in groups:
            group = metadata.row_group(number)
            rows = max(1, int(_BATCH_BYTES * group.num_rows / max(group.total_byte_size, 1)))
            rows = min(rows, _BATCH_ROWS)
            for batch in content.iter_batches(rows, row_groups=[number], columns=list(columns), use_threads=False):
                tally.consumed += int(bytes_per_group * batch.num_rows / max(group.num_rows, 1))
                yield [batch.column(name) for name in columns]


def _arrow_batches(file: InputFile, start: int, stop: int, columns: Sequence[str], tally: Tally) -> Iterator[list[Any]]:
    with _source(file) as source:
        require_columns(file, columns, _arrow_schema(file).names)
        share = file.size
        for batch, share in _record_batches(file, source, start, stop):
            tally.consumed += share
            indices = [batch.schema.get_field_index(name) for name in columns]
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                part = batch.slice(first, _BATCH_ROWS)
                yield [part.column(index) for index in indices]


def _record_batches(file: InputFile, source: Any, start: int, stop: int) -> Iterator[tuple[Any, int]]:
    """The record batches of a part, and the bytes of each."""
    import pyarrow as pa

    if not _is_stream(file):
        content = pa.ipc.open_file(source)
        count = content.num_record_batches
        for number in range(start, count if stop == WHOLE else stop):
            yield content.get_batch(number), file.size // max(count, 1)
        return
    if stop == WHOLE:
        for batch in pa.ipc.open_stream(source):
            yield batch, batch.nbytes
        return
    schema = _stream_schema(source)
    source.seek(max(start, source.tell()))
    while (begin := source.tell()) < stop:
        batch = _next_batch(source, schema)
        yield batch, source.tell() - begin


def _arrow_schema(file: InputFile) -> Any:
    import pyarrow as pa

    with _source(file) as source:
        return _stream_schema(source) if _is_stream(file) else pa.ipc.open_file(source).schema


@contextlib.contextmanager
def _source(file: InputFile) -> Iterator[Any]:
    """The file for pyarrow. It is not mapped: a mapping of a file that is cut short ends the process with SIGBUS."""
    import pyarrow as pa

    if not file.is_remote:
        with pa.OSFile(file.path, "r") as source:
            yield source
        return
    with open_at_random(file) as raw, pa.PythonFile(raw, mode="r") as source:
        yield source


def _is_stream(file: InputFile) -> bool:
    with open_at_random(file) as content:
        return content.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC


def _stream_schema(source: Any) -> Any:
    """The schema of an Arrow stream, which `source` is left just after."""
    import pyarrow as pa

    source.seek(0)
    return pa.ipc.read_schema(pa.ipc.read_message(source))


def _has_dictionaries(schema: Any) -> bool:
    import pyarrow as pa

    def found(kind: Any) -> bool:
        inner = [kind.field(number).type for number in range(kind.num_fields)]
        return pa.types.is_dictionary(kind) or any(map(found, inner))

    return any(found(field.type) for field in schema)


def _stream_places(source: Any) -> list[int]:
    """Where each record batch of a stream begins, and where the last one ends; only their headers are read from the disk."""
    import pyarrow as pa

    _stream_schema(source)
    places = [source.tell()]
    size = source.size()
    while places[-1] < size:
        try:
            pa.ipc.read_message(source)
        except EOFError:
            break
        places.append(source.tell())
    return places


def _next_batch(source: Any, schema: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def require_columns(file: InputFile, columns: Sequence[str], present: Sequence[str]) -> None:
    for name in columns:
        if name not in present:
            raise DataError(f"{file.name}: no column {name!r}; it has: {', '.join(present)}. Name one with --text-field")
