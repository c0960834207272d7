"""Ids that were made elsewhere: .npy and raw .bin files, and lists of ids in rows; cut into documents at one id."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, reading
from pretrain.errors import ConfigError, DataError

IDS_DTYPES = ("uint16", "uint32")
_CHUNK = 1 << 20  # ids


def cut_at(ids: np.ndarray, end_id: int) -> list[np.ndarray]:
    """The stretches of `ids` between the occurrences of `end_id`, without them; empty ones included, but not after a last one."""
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
                raise DataError(f"{file.name}: {file.size} bytes are no whole number of {ids_dtype}; see --ids-dtype")
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
    """The documents of a file whose first id lies in [start, stop), to the end for a negative `stop`; some may be empty.

    Memory is one document, or a stretch of 4 MB at the least.
    """
    ids = IdFile(file, ids_dtype)
    stop = len(ids) if stop < 0 else stop
    with ids.opened() as read:
        position = start if not start else _after_end(read, end_id, start - 1, stop)
        place, open_parts = position, []  # what was read, and what of it is of a document that goes on
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
    """Documents of a file that begin before the first one in a range at `start`: for messages."""
    if not start:
        return 0
    ids, count = IdFile(file, ids_dtype), 1
    with ids.opened() as read:
        for first in range(0, start - 1, _CHUNK):
            count += int((read(first, min(first + _CHUNK, start - 1)) == end_id).sum())
    return count


def _after_end(read: Callable[[int, int], np.ndarray], end_id: int, position: int, stop: int) -> int:
    """The place after the first `end_id` at or after `position`; `stop` when there is none before it."""
    size = 1 << 12
    while position < stop:
        found = np.flatnonzero(read(position, min(position + size, stop)) == end_id)
        if len(found):
            return position + int(found[0]) + 1
        position, size = min(position + size, stop), _CHUNK
    return stop


def ids_of(value: Any) -> np.ndarray | None:
    """One dimension of integers from what a JSON field held; None for anything else."""
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
