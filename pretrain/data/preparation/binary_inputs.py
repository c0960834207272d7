"""Inputs that are not text: rows of Parquet and Arrow files, and ids from elsewhere (.npy, .bin, lists of ids in rows).

Rows are read a batch at a time, and files are cut into parts of about equal size. Ids are cut into documents at one id.

A part is a range [start, stop). It counts row groups in Parquet and record batches in an Arrow IPC file. In an Arrow IPC stream
(which `datasets` writes) it counts bytes, at record batch boundaries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, open_at_random, reading
from pretrain.errors import ConfigError, DataError

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
    """Rows before the part that begins at `start`, for messages."""
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
    """The parts of a file, each of about `part_bytes` if its inner structure allows that."""
    with reading(file):
        if kind == "parquet":
            with _parquet(file) as content:
                groups = [content.metadata.row_group(number).total_byte_size for number in range(content.num_row_groups)]
            scale = file.size / max(sum(groups), 1)  # the metadata has the size before compression
            return _grouped(list(range(len(groups) + 1)), [size * scale for size in groups], part_bytes)
        with _source(file) as source:
            if _is_stream(file):
                if _has_dictionaries(_stream_schema(source)):
                    return [(0, WHOLE)]  # a dictionary comes once, before the batches that need it
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
        # With a buffer, because pyarrow otherwise reads a column of a whole row group at once.
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
    """The file for pyarrow. It is not mapped, because truncating a mapped file ends the process with SIGBUS."""
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
    """The schema of an Arrow stream. Afterwards `source` is just behind it."""
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
    """The beginning of each record batch of a stream, and the end of the last. Only their headers are read from the disk."""
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


# ---- ids ------------------------------------------------------------------------------------------------------------------

IDS_DTYPES = ("uint16", "uint32")
_CHUNK = 1 << 20  # ids


def cut_at(ids: np.ndarray, end_id: int) -> list[np.ndarray]:
    """The stretches of `ids` between the occurrences of `end_id`. Empty ones are included, except after the last occurrence."""
    ends = np.flatnonzero(ids == end_id)
    if not len(ends):
        return [ids]
    bounds = [0, *(ends + 1).tolist()]
    parts = [ids[begin : end - 1] for begin, end in zip(bounds, bounds[1:])]
    return parts if bounds[-1] == len(ids) else [*parts, ids[bounds[-1] :]]


class IdFile:
    """The ids of a file, read a stretch at a time. Raises DataError for anything but one dimension of integers."""

    def __init__(self, file: InputFile, ids_dtype: str) -> None:
        self._file, self._offset = file, 0
        if file.suffix != ".npy":
            self.dtype = np.dtype(ids_dtype).newbyteorder("<")
            if file.size % self.dtype.itemsize:
                raise DataError(
                    f"{file.name}: {file.size} bytes are not a multiple of the size of {ids_dtype}; see --ids-dtype"
                )
            self._length = file.size // self.dtype.itemsize
            return
        with reading(file), file.open(at_random=True) as stream:
            version = np.lib.format.read_magic(stream)
            read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, self.dtype = read_header(stream)
            self._offset = stream.tell()
        if len(shape) != 1 or self.dtype.kind not in "iu":
            raise DataError(f"{file.name}: holds {len(shape)} dimensions of {self.dtype}; expected one of integers")
        self._length = shape[0]
        if file.size != self._offset + self._length * self.dtype.itemsize:
            raise DataError(
                f"{file.name}: cannot be read (its {file.size} bytes are not the {self._length} ids that it says it holds)"
            )

    def __len__(self) -> int:
        return self._length

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[int, int], np.ndarray]]:
        """A function that reads the ids [start, stop)."""
        size = self.dtype.itemsize
        with reading(self._file), self._file.open(at_random=True) as stream:

            def read(start: int, stop: int) -> np.ndarray:
                stream.seek(self._offset + start * size)
                content, missing = b"", (stop - start) * size
                while missing and (part := stream.read(missing)):
                    content, missing = content + part, missing - len(part)
                if missing:
                    raise EOFError(f"it ends {missing} bytes before id {stop}")
                return np.frombuffer(content, dtype=self.dtype)

            yield read


def id_documents(file: InputFile, ids_dtype: str, end_id: int, start: int, stop: int, tally: Tally) -> Iterator[np.ndarray]:
    """The documents of a file whose first id lies in [start, stop); a negative `stop` means the end. Some may be empty.

    Memory is one document, or at least a stretch of 4 MB.
    """
    ids = IdFile(file, ids_dtype)
    stop = len(ids) if stop < 0 else stop
    with ids.opened() as read:
        position = start if not start else _after_end(read, end_id, start - 1, stop)
        place, open_parts = position, []  # what was read, and the part of it that belongs to an unfinished document
        while position < stop:
            chunk, begin = read(place, min(place + _CHUNK, len(ids))), 0
            place += len(chunk)
            for end in np.flatnonzero(chunk == end_id).tolist():
                document = np.concatenate([*open_parts, chunk[begin:end]]) if open_parts else chunk[begin:end]
                position, begin, open_parts = position + len(document) + 1, end + 1, []
                tally.consumed += (len(document) + 1) * ids.dtype.itemsize
                yield document
                if position >= stop:
                    return
            open_parts.append(chunk[begin:])
            if place == len(ids):
                document = np.concatenate(open_parts)
                tally.consumed += len(document) * ids.dtype.itemsize
                yield document
                return


def documents_before(file: InputFile, ids_dtype: str, end_id: int, start: int) -> int:
    """Documents of a file that begin before the first one in a range at `start`, for messages."""
    if not start:
        return 0
    ids, count = IdFile(file, ids_dtype), 1
    with ids.opened() as read:
        for first in range(0, start - 1, _CHUNK):
            count += int((read(first, min(first + _CHUNK, start - 1)) == end_id).sum())
    return count


def _after_end(read: Callable[[int, int], np.ndarray], end_id: int, position: int, stop: int) -> int:
    """The place after the first `end_id` at or after `position`; `stop` if no end comes before it."""
    size = 1 << 12
    while position < stop:
        found = np.flatnonzero(read(position, min(position + size, stop)) == end_id)
        if len(found):
            return position + int(found[0]) + 1
        position, size = min(position + size, stop), _CHUNK
    return stop


def ids_of(value: Any) -> np.ndarray | None:
    """The value of a JSON field as one dimension of integers; None for anything else."""
    try:
        ids = np.array(value if isinstance(value, list) else None)
    except (ValueError, OverflowError):  # lists of different lengths
        return None
    if ids.size == 0 and ids.ndim == 1:
        return ids.astype(np.int64)
    return ids if ids.ndim == 1 and ids.dtype.kind in "iu" else None


def check_ids_options(ids_field: str, ids_dtype: str) -> None:
    """Raise ConfigError for options that do not go together."""
    if ids_dtype and ids_dtype not in IDS_DTYPES:
        raise ConfigError(f"--ids-dtype {ids_dtype}: expected one of {', '.join(IDS_DTYPES)}")
    if ids_field and "," in ids_field:
        raise ConfigError(f"--ids-field {ids_field}: expected the name of one field")
