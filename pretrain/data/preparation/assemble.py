"""Finished parts -> prepared directories.

    parts, in order ──one process: which documents go where──▶ shards ──N processes: copy, hash──▶ files ──N processes──▶ verified

The content of each shard follows from the lengths and order of the documents alone. So any number of processes can write the
shards, in any order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.data.preparation.deduplicate import blocks
from pretrain.data.preparation.parts import PartSummary, UnitParts, writing
from pretrain.data.preparation.process_pool import ProcessPool
from pretrain.data.shards.manifest import (
    ORIGIN_DTYPE,
    Manifest,
    Scalar,
    Shard,
    check_content,
    dtype_for,
    tokenizer_keys,
    write_inputs,
    write_invalid,
    write_manifest,
)
from pretrain.data.shards.writer import ShardFiles, cut_into_shards
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity, copy_difference
from pretrain.errors import DataError

_BLOCK = 1 << 16  # documents at a time
_CHUNK_TOKENS = 1 << 20  # tokens at a time, or one document
_MOST_ROWS = 2**32

SPLITS = ("train", "validation")


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
    filled = base = 0
    for number, unit in enumerate(units):
        token = 0
        for begin, records in blocks(selection.parts, number, unit, _BLOCK):
            starts = np.concatenate(([0], np.cumsum(records["length"], dtype=np.int64)))
            kept = np.flatnonzero(selection.mask(records, base + begin))
            lengths = records["length"][kept].astype(np.int64)
            for first, last, opens in cut_into_shards(lengths, filled, shard_tokens):
                if opens and segments:
                    yield tuple(segments)
                    segments, filled = [], 0
                one, other = int(kept[first]), int(kept[last - 1]) + 1
                place = (token + int(starts[one]), base + begin + one, rows[number])
                segments.append(PartSegment(number, begin + one, begin + other, *place))
                filled += int(lengths[first:last].sum())
            token += int(starts[-1])
        base += unit.documents
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


@dataclass(frozen=True)
class Description:
    """The content of a manifest beside its shards. `tokenizer_files`: the tokenizer's directory; `invalid`: (where, why) of rows left out."""

    tokenizer: TokenizerIdentity
    tokenizer_files: Path
    inputs: Sequence[str]
    preparation: dict[str, Scalar]
    plan_sha256: str
    invalid: Sequence[tuple[str, str]]


def assemble(
    directory: Path,
    selection: Selection,
    units: Sequence[PartSummary],
    rows: Sequence[int],
    shard_tokens: int,
    description: Description,
    pool: ProcessPool,
    on_tokens: Callable[[int], None],
) -> Manifest | None:
    """Write one prepared directory into the new `directory`, and compare the files on the disk with their hashes.

    Returns None if the selection is empty. Raises DataError if the disk is full or returns other bytes.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        segments = list(plan_shards(selection, units, rows, shard_tokens))
    if not segments:
        return None
    jobs = [ShardJob(directory, number, selection, own) for number, own in enumerate(segments)]
    found = dict(pool.run(write_shard, jobs, on_tokens))
    shards = tuple(found[number] for number in range(len(jobs)))
    with writing(directory):
        shutil.copytree(description.tokenizer_files, directory / "tokenizer")
        if difference := copy_difference(directory / "tokenizer", description.tokenizer):
            raise DataError(f"{description.tokenizer_files}: damaged ({difference}); start again with --restart")
        manifest = Manifest(
            **tokenizer_keys(description.tokenizer),
            dtype=dtype_for(description.tokenizer.vocab_size),
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            inputs_sha256=write_inputs(directory, description.inputs),
            preparation=description.preparation,
            shards=shards,
            plan_sha256=description.plan_sha256,
            invalid_sha256=write_invalid(directory, description.invalid),
        )
        write_manifest(directory, manifest)
    for _ in pool.run(verify_shard, [(directory, shard) for shard in shards], on_tokens):
        pass
    return manifest
