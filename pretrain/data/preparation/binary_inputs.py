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
from pretrain.data.preparation.text_inputs import Tally, open_at_random, reading, require_columns
from pretrain.errors import DataError

WHOLE = -1
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096
_ARROW_MAGIC = b"ARROW1"


def column_rows(
    file: InputFile, kind: str, start: int, stop: int, columns: Sequence[str], as_ids: bool, tally: Tally
) -> Iterator[Any]:
    """The values of `columns` in each row of part [start, stop) of the file, in order.

    `as_ids`: the lists of the only column instead, each as integers; None for a missing list, and for one with missing ids. Raises
    DataError naming the file when it is damaged or has no such column.
    """
    batches, option = _parquet_batches if kind == "parquet" else _arrow_batches, "--ids-field" if as_ids else "--text-field"
    with reading(file):
        for arrays in batches(file, start, stop, columns, option, tally):
            yield from _id_lists(arrays[0], file, columns[0]) if as_ids else zip(*[array.to_pylist() for array in arrays])


def _id_lists(array: Any, file: InputFile, name: str) -> Iterator[np.ndarray | None]:
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


def rows_before(file: InputFile, kind: str, start: int) -> int:
    """Rows before the part that begins at `start`, for messages."""
    if kind == "parquet":
        with _parquet(file) as content:
            return sum(content.metadata.row_group(number).num_rows for number in range(start))
    return sum(batch.num_rows for batch, _ in _record_batches(file, 0, start))


def column_parts(file: InputFile, kind: str, part_bytes: int) -> list[tuple[int, int]]:
    """The parts of a file, each of about `part_bytes` if its inner structure allows that."""
    with reading(file):
        bounds, sizes = _parquet_structure(file) if kind == "parquet" else _arrow_structure(file)
    parts, begin, size = [], 0, 0.0
    for number, more in enumerate(sizes):
        if size and size + more > part_bytes:
            parts.append((bounds[begin], bounds[number]))
            begin, size = number, 0.0
        size += more
    return [*parts, (bounds[begin], bounds[len(sizes)])]


def _parquet_structure(file: InputFile) -> tuple[Sequence[int], Sequence[float]]:
    """Where the file can be cut, and the bytes between these places."""
    with _parquet(file) as content:
        groups = [content.metadata.row_group(number).total_byte_size for number in range(content.num_row_groups)]
    scale = file.size / max(sum(groups), 1)  # the metadata has the size before compression
    return range(len(groups) + 1), [size * scale for size in groups]


def _arrow_structure(file: InputFile) -> tuple[Sequence[int], Sequence[float]]:
    with _arrow(file) as (content, source):
        if source is None:
            count = content.num_record_batches
            return range(count + 1), [file.size / max(count, 1)] * count
        if any(map(_has_dictionary, content.schema.types)):
            return (0, WHOLE), (file.size,)  # a dictionary comes once, before the batches that need it
        places = [source.tell(), *(source.tell() for _ in content)]
        return places, [end - begin for begin, end in zip(places, places[1:])]


def _has_dictionary(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_dictionary(kind) or any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


@contextlib.contextmanager
def _parquet(file: InputFile) -> Iterator[Any]:
    import pyarrow.parquet

    with _source(file) as source:
        # With a buffer, because pyarrow otherwise reads a column of a whole row group at once.
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as content:
            yield content


def _parquet_batches(
    file: InputFile, start: int, stop: int, columns: Sequence[str], option: str, tally: Tally
) -> Iterator[list[Any]]:
    with _parquet(file) as content:
        require_columns(file, columns, content.schema_arrow.names, option)
        metadata = content.metadata
        bytes_per_group = file.size / max(metadata.num_row_groups, 1)
        for number in range(start, metadata.num_row_groups if stop == WHOLE else stop):
            group = metadata.row_group(number)
            rows = max(1, int(_BATCH_BYTES * group.num_rows / max(group.total_byte_size, 1)))
            rows = min(rows, _BATCH_ROWS)
            for batch in content.iter_batches(rows, row_groups=[number], columns=list(columns), use_threads=False):
                tally.consumed += int(bytes_per_group * batch.num_rows / max(group.num_rows, 1))
                yield [batch.column(name) for name in columns]


@contextlib.contextmanager
def _arrow(file: InputFile) -> Iterator[tuple[Any, Any]]:
    """The reader of an Arrow IPC file, and None; or the reader of a stream, and the open file, whose place that reader follows."""
    import pyarrow as pa

    with _source(file) as source:
        is_stream = source.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC
        source.seek(0)
        yield (pa.ipc.open_stream(source), source) if is_stream else (pa.ipc.open_file(source), None)


def _arrow_batches(
    file: InputFile, start: int, stop: int, columns: Sequence[str], option: str, tally: Tally
) -> Iterator[list[Any]]:
    for batch, size in _record_batches(file, start, stop, columns, option):
        tally.consumed += size
        indices = [batch.schema.get_field_index(name) for name in columns]
        for first in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(first, _BATCH_ROWS)
            yield [part.column(index) for index in indices]


def _record_batches(
    file: InputFile, start: int, stop: int, columns: Sequence[str] = (), option: str = ""
) -> Iterator[tuple[Any, int]]:
    """The record batches of a part, and the bytes of each."""
    with _arrow(file) as (content, source):
        require_columns(file, columns, content.schema.names, option)
        if source is None:
            count = content.num_record_batches
            for number in range(start, count if stop == WHOLE else stop):
                yield content.get_batch(number), file.size // max(count, 1)
            return
        source.seek(max(start, source.tell()))
        while stop == WHOLE or source.tell() < stop:
            begin = source.tell()
            if (batch := next(content, None)) is None:
                return
            yield batch, source.tell() - begin


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


# ---- ids ------------------------------------------------------------------------------------------------------------------

IDS_DTYPES = ("uint16", "uint32")
_CHUNK = 1 << 20  # ids


def cut_at(ids: np.ndarray, end_id: int) -> list[np.ndarray]:
    """The stretches of `ids` between the occurrences of `end_id`. Empty ones are included, except after the last occurrence."""
    *closed, rest = np.split(ids, np.flatnonzero(ids == end_id) + 1)
    parts = [part[:-1] for part in closed]
    return parts if parts and not len(rest) else [*parts, rest]


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
        with reading(file), open_at_random(file) as stream:
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
        with reading(self._file), open_at_random(self._file) as stream:

            def read(start: int, stop: int) -> np.ndarray:
                stream.seek(self._offset + start * size)
                return np.frombuffer(stream.read((stop - start) * size), dtype=self.dtype)

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
