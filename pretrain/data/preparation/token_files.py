"""Ids that were made elsewhere: .npy and raw .bin files, and lists of ids in rows; cut into documents at one id."""

from __future__ import annotations

from collections.abc import Iterator
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


def open_ids(file: InputFile, ids_dtype: str) -> np.ndarray:
    """The ids of a file as a map of it. Raises DataError for anything but one dimension of integers."""
    with reading(file):
        if not file.path.lower().endswith(".npy"):
            kind = np.dtype(ids_dtype).newbyteorder("<")
            if file.size % kind.itemsize:
                raise DataError(f"{file.name}: {file.size} bytes are no whole number of {ids_dtype}; see --ids-dtype")
            return np.memmap(file.path, kind, "r") if file.size else np.empty(0, kind)
        ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(f"{file.name}: holds {ids.ndim} dimensions of {ids.dtype}; expected one of integers")
        return ids


def id_documents(file: InputFile, ids_dtype: str, end_id: int, start: int, stop: int, tally: Tally) -> Iterator[np.ndarray]:
    """The documents of a file whose first id lies in [start, stop), to the end for a negative `stop`; some may be empty.

    Memory is one document, and what the system caches of the file.
    """
    ids = open_ids(file, ids_dtype)
    stop = len(ids) if stop < 0 else stop
    position = start if not start else _after_end(ids, end_id, start - 1, stop)
    while position < stop:
        end = _after_end(ids, end_id, position, len(ids))
        closed = ids[end - 1] == end_id
        tally.consumed += (end - position) * ids.itemsize
        yield ids[position : end - 1 if closed else end]
        position = end


def documents_before(file: InputFile, ids_dtype: str, end_id: int, start: int) -> int:
    """Documents of a file that begin before the first one in a range at `start`: for messages."""
    if not start:
        return 0
    ids = open_ids(file, ids_dtype)[: start - 1]
    return 1 + sum(int((ids[first : first + _CHUNK] == end_id).sum()) for first in range(0, len(ids), _CHUNK))


def _after_end(ids: np.ndarray, end_id: int, position: int, stop: int) -> int:
    """The place after the first `end_id` at or after `position`; `stop` when there is none before it."""
    size = 1 << 12
    while position < stop:
        found = np.flatnonzero(ids[position : min(position + size, stop)] == end_id)
        if len(found):
            return position + int(found[0]) + 1
        position, size = min(position + size, stop), _CHUNK
    return stop


def ids_of(value: Any, field: str, origin: str) -> np.ndarray:
    """One dimension of integers from what a JSON field held."""
    try:
        ids = np.array(value if isinstance(value, list) else None)
    except (ValueError, OverflowError):  # lists of different lengths
        ids = np.array(None)
    if ids.size == 0 and ids.ndim == 1:
        return ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{origin}: field {field!r} is not a list of ids; see --ids-field")
    return ids


def check_ids_options(ids_field: str, ids_dtype: str) -> None:
    """Raise ConfigError for options that do not go together."""
    if ids_dtype and ids_dtype not in IDS_DTYPES:
        raise ConfigError(f"--ids-dtype {ids_dtype}: expected one of {', '.join(IDS_DTYPES)}")
    if ids_field and "," in ids_field:
        raise ConfigError(f"--ids-field {ids_field}: expected the name of one field")
