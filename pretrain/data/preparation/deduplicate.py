"""Exact duplicates: the first of all documents with the same 128-bit hash stays.

    records of all parts ──by the hash's last bits──▶ buckets on disk ──each sorted in memory──▶ one byte per document on disk

Memory is one bucket and one block of records: constant up to 10^8 documents, and 1/512 of all hashes beyond. With 10^12
documents the chance that any two different ones share a hash (BLAKE2b) is below 2^-48.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrain.data.preparation.parts import PartSummary, UnitParts, writing

_BLOCK = 1 << 16  # documents read at a time
_BUCKET = 1 << 18  # documents in a bucket, on average
_MOST_BUCKETS = 512  # open files
_ENTRY = np.dtype([("hash", "<u8", (2,)), ("number", "<u8")])


def find_duplicates(
    parts: UnitParts, units: Sequence[PartSummary], directory: Path, *, bucket_documents: int = _BUCKET
) -> tuple[Path, int]:
    """(file, count): a file with one byte per document in order, 1 for a repetition of an earlier one; and their number.

    `units` are the units in `parts`, in order. Temporary files go to the new `directory`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    with writing(directory):
        directory.mkdir(parents=True)
        total = sum(unit.documents for unit in units)
        buckets = max(1, min(_MOST_BUCKETS, -(-total // bucket_documents)))
        _distribute(parts, units, directory, buckets)
        marks, count = directory / "duplicates", 0
        with open(marks, "wb") as file:
            file.truncate(total)
            for bucket in range(buckets):
                path = _bucket(directory, bucket)
                numbers = _repetitions(np.fromfile(path, _ENTRY))
                path.unlink()
                count += len(numbers)
                for number in numbers.tolist():  # ascending, so that most writes stay in one page
                    file.seek(number)
                    file.write(b"\x01")
    return marks, count


def blocks(parts: UnitParts, number: int, unit: PartSummary, size: int = _BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    """(first, records) of the documents of a unit, a bounded number at a time."""
    with parts.open(number) as part:
        for first in range(0, unit.documents, size):
            yield first, part.records(first, min(size, unit.documents - first))


def _distribute(parts: UnitParts, units: Sequence[PartSummary], directory: Path, buckets: int) -> None:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(_bucket(directory, number), "wb")) for number in range(buckets)]
        base = 0
        for number, unit in enumerate(units):
            for first, records in blocks(parts, number, unit):
                entries = np.empty(len(records), _ENTRY)
                entries["hash"] = records["hash"]
                entries["number"] = np.arange(base + first, base + first + len(records), dtype=np.uint64)
                which = (entries["hash"][:, 1] % np.uint64(buckets)).astype(np.int64)
                order = np.argsort(which, kind="stable")
                bounds = np.searchsorted(which[order], np.arange(buckets + 1))
                for bucket in np.flatnonzero(np.diff(bounds)).tolist():
                    files[bucket].write(entries[order[bounds[bucket] : bounds[bucket + 1]]].tobytes())
            base += unit.documents


def _repetitions(entries: np.ndarray) -> np.ndarray:
    """The numbers of the documents that are not the first of their hash, ascending."""
    low, high = entries["hash"][:, 0], entries["hash"][:, 1]
    order = np.lexsort((entries["number"], low, high))
    same = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
    return np.sort(entries["number"][order[1:][same]])


def _bucket(directory: Path, number: int) -> Path:
    return directory / f"bucket-{number:03d}"
