"""Finished parts -> prepared directories.

    parts, in order ──one process: which documents go where──▶ shards ──N processes: copy, hash──▶ files ──N processes──▶ verified

The content of each shard follows from the lengths and order of the documents alone. So any number of processes can write the
shards, in any order.

Exact duplicates go before that: the first of all documents with the same 128-bit hash stays.

    records of all parts ──by the hash's last bits──▶ buckets on disk ──each sorted in memory──▶ one byte per document on disk

Memory is one bucket and one block of records: constant up to 10^8 documents, and 1/512 of all hashes beyond. With 10^12
documents the chance that any two different ones share a hash (BLAKE2b) is below 2^-48.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.data.preparation.parts import PartSummary, UnitParts, writing
from pretrain.data.preparation.preparation_plan import PreparationPlan
from pretrain.data.preparation.process_pool import ProcessPool
from pretrain.data.shards.manifest import ORIGIN_DTYPE, Manifest, Scalar, Shard, check_content, write_manifest
from pretrain.data.shards.writer import ShardFiles, cut_into_shards
from pretrain.errors import DataError

_BLOCK = 1 << 16  # documents at a time
_BUCKET = 1 << 18  # documents in a bucket, on average
_MOST_BUCKETS = 512  # open files
_ENTRY = np.dtype([("hash", "<u8", (2,)), ("number", "<u8")])
_CHUNK_TOKENS = 1 << 20  # tokens at a time, or one document
_MOST_ROWS = 2**32


def find_duplicates(parts: UnitParts, units: Sequence[PartSummary], directory: Path) -> tuple[Path, int]:
    """(file, count): a file with one byte per document in order, 1 for a repetition of an earlier one; and their number.

    `units` are the units in `parts`, in order. Temporary files go to the new `directory`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    with writing(directory):
        directory.mkdir(parents=True)
        total = sum(unit.documents for unit in units)
        count = max(1, min(_MOST_BUCKETS, -(-total // _BUCKET)))
        buckets = [directory / f"bucket-{number:03d}" for number in range(count)]
        _distribute(parts, units, buckets)
        marks, count = directory / "duplicates", 0
        with open(marks, "wb") as file:
            file.truncate(total)
            for bucket in buckets:
                numbers = _repetitions(np.fromfile(bucket, _ENTRY))
                bucket.unlink()
                count += len(numbers)
                for number in numbers.tolist():  # ascending, so that most writes stay in one page
                    file.seek(number)
                    file.write(b"\x01")
    return marks, count


def _blocks(parts: UnitParts, units: Sequence[PartSummary]) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(unit, first, document, records), a bounded number at a time: the number of the first record in its unit and in the corpus."""
    document = 0
    for number, unit in enumerate(units):
        with parts.open(number) as part:
            for first in range(0, unit.documents, _BLOCK):
                yield number, first, document + first, part.records(first, min(_BLOCK, unit.documents - first))
        document += unit.documents


def _distribute(parts: UnitParts, units: Sequence[PartSummary], buckets: Sequence[Path]) -> None:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(bucket, "wb")) for bucket in buckets]
        for _, _, document, records in _blocks(parts, units):
            entries = np.empty(len(records), _ENTRY)
            entries["hash"] = records["hash"]
            entries["number"] = np.arange(document, document + len(records), dtype=np.uint64)
            which = (entries["hash"][:, 1] % np.uint64(len(files))).astype(np.int64)
            order = np.argsort(which, kind="stable")
            bounds = np.searchsorted(which[order], np.arange(len(files) + 1))
            for bucket in np.flatnonzero(np.diff(bounds)).tolist():
                files[bucket].write(entries[order[bounds[bucket] : bounds[bucket + 1]]].tobytes())


def _repetitions(entries: np.ndarray) -> np.ndarray:
    """The numbers of the documents that are not the first of their hash, ascending."""
    low, high = entries["hash"][:, 0], entries["hash"][:, 1]
    order = np.lexsort((entries["number"], low, high))
    same = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
    return np.sort(entries["number"][order[1:][same]])


@dataclass(frozen=True)
class PartSegment:
    """Documents [first, last) of a unit, if they belong to the current split.

    `first` begins at `token` in the unit's tokens, and its number in the corpus is `document`. `row` is added to the rows of the
    unit's pieces.
    """

    unit: int
    first: int
    last: int
    token: int
    document: int
    row: int


@dataclass(frozen=True)
class Selection:
    """The documents of one split: those with this `validation` flag (None: all) that `duplicates` does not mark."""

    parts: UnitParts
    validation: bool | None
    duplicates: Path | None

    def mask(self, records: np.ndarray, document: int) -> np.ndarray:
        """Which of the `records` belong to it. The first has the number `document` in the corpus."""
        kept = np.ones(len(records), bool) if self.validation is None else records["validation"] == self.validation
        if self.duplicates is not None:
            kept &= np.fromfile(self.duplicates, np.uint8, len(records), offset=document) == 0
        return kept


@dataclass(frozen=True)
class ShardJob:
    """One shard to write into `directory`."""

    directory: Path
    number: int
    selection: Selection
    segments: tuple[PartSegment, ...]


def plan_shards(
    selection: Selection, units: Sequence[PartSummary], rows: Sequence[int], shard_tokens: int
) -> Iterator[tuple[PartSegment, ...]]:
    """The segments of each shard, in order. `rows`: the rows before each unit in its file. Memory is a block of records."""
    segments: list[PartSegment] = []
    filled = token = 0
    for unit, begin, document, records in _blocks(selection.parts, units):
        token = token if begin else 0
        starts = np.concatenate(([0], np.cumsum(records["length"], dtype=np.int64)))
        kept = np.flatnonzero(selection.mask(records, document))
        lengths = records["length"][kept].astype(np.int64)
        for first, last, opens in cut_into_shards(lengths, filled, shard_tokens):
            if opens and segments:
                yield tuple(segments)
                segments, filled = [], 0
            one, other = int(kept[first]), int(kept[last - 1]) + 1
            place = (token + int(starts[one]), document + one, rows[unit])
            segments.append(PartSegment(unit, begin + one, begin + other, *place))
            filled += int(lengths[first:last].sum())
        token += int(starts[-1])
    if segments:
        yield tuple(segments)


def write_shard(job: ShardJob, report: Callable[[int], None]) -> Shard:
    """Write, flush and hash one shard; `report` gets the numbers of tokens written."""
    with writing(job.directory):
        files = ShardFiles(job.directory, job.number, job.selection.parts.token_dtype)
        try:
            for segment in job.segments:
                for tokens, records, row in _content(job.selection, segment):
                    files.append(tokens, records["length"], records["bytes"], _origins(records, row))
                    report(len(tokens))
            return files.finish()
        finally:
            files.close()


def _content(selection: Selection, segment: PartSegment) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(tokens, records, row) of the selected documents of a segment, a bounded number at a time."""
    token = segment.token
    with selection.parts.open(segment.unit) as part:
        for first in range(segment.first, segment.last, _BLOCK):
            records = part.records(first, min(_BLOCK, segment.last - first))
            kept = selection.mask(records, segment.document + first - segment.first)
            starts = np.concatenate(([0], np.cumsum(records["length"], dtype=np.int64)))
            begin = 0
            while begin < len(records):
                end = int(np.searchsorted(starts, starts[begin] + _CHUNK_TOKENS, side="right")) - 1
                end = max(end, begin + 1)
                chosen = kept[begin:end]
                if chosen.any():
                    tokens = part.tokens(token + int(starts[begin]), int(starts[end] - starts[begin]))
                    if not chosen.all():
                        tokens = tokens[np.repeat(chosen, records["length"][begin:end].astype(np.int64))]
                    yield tokens, records[begin:end][chosen], segment.row
                begin = end
            token += int(starts[-1])


def _origins(records: np.ndarray, row: int) -> np.ndarray:
    origins = np.empty(len(records), ORIGIN_DTYPE)
    origins["input"] = records["input"]
    rows = records["row"].astype(np.int64) + row
    if len(rows) and int(rows.max()) >= _MOST_ROWS:
        raise DataError(f"an input file has more than {_MOST_ROWS:,} rows; cut it in two")
    origins["row"] = rows
    return origins


def verify_shard(job: tuple[Path, Shard], report: Callable[[int], None]) -> None:
    """Read a shard's files back from the disk and compare their hashes."""
    directory, shard = job
    for name, sha256 in shard.files:
        check_content(directory / name, sha256)
    report(shard.tokens)


def assemble(
    directory: Path,
    selection: Selection,
    plan: PreparationPlan,
    units: Sequence[PartSummary],
    copy_tokenizer: Callable[[Path], None],
    preparation: dict[str, Scalar],
    pool: ProcessPool,
    on_tokens: Callable[[int], None],
) -> Manifest | None:
    """Write one prepared directory into the new `directory`, and compare the files on the disk with their hashes.

    `copy_tokenizer` makes the new directory that it is given. `preparation` is the manifest's record of how it was made. Returns None
    if the selection is empty. Raises DataError if the disk is full or returns other bytes.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        segments = plan_shards(selection, units, _rows_before(plan, units), plan.settings.shard_tokens)
        jobs = [ShardJob(directory, number, selection, own) for number, own in enumerate(segments)]
    if not jobs:
        return None
    found = dict(pool.run(write_shard, jobs, on_tokens))
    shards = [found[number] for number in range(len(jobs))]
    with writing(directory):
        copy_tokenizer(directory / "tokenizer")
        inputs, invalid = [file.name for file in plan.inputs], [row for unit in units for row in unit.invalid_rows]
        manifest = write_manifest(directory, plan.tokenizer, shards, inputs, preparation, plan.sha256, invalid)
    for _ in pool.run(verify_shard, [(directory, shard) for shard in shards], on_tokens):
        pass
    return manifest


def _rows_before(plan: PreparationPlan, units: Sequence[PartSummary]) -> list[int]:
    """For each unit, the rows before it in its file. A unit that continues a file counts its rows from there."""
    rows, before, last_input = [], 0, -1
    for spans, unit in zip(plan.units, units):
        before = before if spans[0][0] == last_input else 0
        rows.append(before)
        before, last_input = before + unit.rows, spans[-1][0]
    return rows
