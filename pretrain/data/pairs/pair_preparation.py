"""Preparing sentence pairs: parallel files of lines become two prepared directories with the same number of documents.

Line i of the sources and line i of the targets are a pair. A pair with an empty side is left out, and so is one that is longer than
the limits. Both are counted, in the manifest and on the console. Anything else that does not fit is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from pretrain.data.pairs.prepared_pairs import write_pairs
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.lines import Tally, lines_of
from pretrain.data.shards.transfer import refuse_url
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.storage import staged_directory

_BATCH = 4096  # pairs that are encoded at a time


@dataclass
class PairOptions:
    """How text becomes tokens. Limits count tokens with the end token; 0: no limit."""

    lowercase: bool = False
    max_source_length: int = 0
    max_target_length: int = 0


@dataclass
class PairCounts:
    """The numbers of lines and pairs, and of those left out."""

    lines: int = 0
    pairs: int = 0
    empty: int = 0
    too_long: int = 0
    altered: int = 0
    """Targets that a round trip through the tokenizer changes. Scores compare with the changed text."""
    source_tokens: int = 0
    target_tokens: int = 0

    def describe(self, where: Path) -> str:
        """One line for people."""
        left_out = f"left out: {self.empty:,} with an empty side, {self.too_long:,} too long"
        altered = f"; {self.altered:,} targets are altered by the tokenizer" if self.altered else ""
        tokens = f"{self.source_tokens:,} and {self.target_tokens:,} tokens"
        return f"{where}: {self.pairs:,} pairs of {self.lines:,} lines, {tokens}; {left_out}{altered}"


@dataclass
class Split:
    """Parallel files: the lines of all `source` files in order, and the lines of all `target` files."""

    source: Sequence[str]
    target: Sequence[str]
    counts: PairCounts = field(default_factory=PairCounts)


def prepare_pairs(
    output: str | Path,
    train: Split,
    validation: Split | None,
    source_tokenizer: str | Path,
    target_tokenizer: str | Path | None = None,
    options: PairOptions | None = None,
) -> list[str]:
    """Write the new directory `output`, or with `validation` its parts `train` and `validation`. Return a line about each.

    Without `target_tokenizer` both languages share one. Raises DataError, naming file and line, for text that is not UTF-8, files
    with different numbers of lines, and characters that a tokenizer cannot express. Nothing is left behind then.
    """
    refuse_url("--output", output)
    source = load_tokenizer(source_tokenizer)
    target = load_tokenizer(target_tokenizer) if target_tokenizer else source
    options = options or PairOptions()
    if min(options.max_source_length, options.max_target_length) < 0:
        raise ConfigError("--max-source-length and --max-target-length: expected at least 1, or 0 for no limit")
    output = Path(output)
    splits = {"": train} if validation is None else {"train": train, "validation": validation}
    with staged_directory(output) as stage:
        for name, split in splits.items():
            _prepare_split(stage / name, split, source, target, options)
    return [split.counts.describe(output / name) for name, split in splits.items()]


def _prepare_split(directory: Path, split: Split, source: Tokenizer, target: Tokenizer, options: PairOptions) -> None:
    counts = split.counts
    with (
        ShardWriter.create(directory / "source", source) as sources,
        ShardWriter.create(directory / "target", target) as targets,
    ):
        lines = _pairs(split, options)
        while batch := list(itertools.islice(lines, _BATCH)):
            _add(batch, source, target, sources, targets, counts, options)
        counts.source_tokens, counts.target_tokens = sources.tokens, targets.tokens
        if not counts.pairs:
            raise DataError(f"{split.source[0]}: none of its {counts.lines} lines gives a pair ({counts.describe(directory)})")
    names = {"sources": ", ".join(map(str, split.source)), "targets": ", ".join(map(str, split.target))}
    write_pairs(directory, counts.pairs, {**names, **asdict(options), **asdict(counts)})


@dataclass(frozen=True)
class Line:
    """A sentence."""

    text: str
    origin: str
    """File and line, for messages."""


def _add(batch, source: Tokenizer, target: Tokenizer, sources: ShardWriter, targets: ShardWriter, counts, options) -> None:
    """Encode a batch of pairs and write those that are not too long."""
    encoded = [_encode(tokenizer, [pair[i] for pair in batch]) for i, tokenizer in enumerate((source, target))]
    limits = options.max_source_length, options.max_target_length
    fits = [not any(limit and len(ids) + 1 > limit for ids, limit in zip(pair, limits)) for pair in zip(*encoded, strict=True)]
    counts.too_long += len(fits) - sum(fits)
    counts.pairs += sum(fits)
    for ids, tokenizer, writer in zip(encoded, (source, target), (sources, targets)):
        closed = [np.append(x, tokenizer.eod_id).astype(np.int64) for x, fit in zip(ids, fits) if fit]
        if closed:
            writer.add(np.concatenate(closed), np.array([len(x) for x in closed]))
    kept = [(ids, line[1].text) for ids, line, fit in zip(encoded[1], batch, fits) if fit]
    counts.altered += sum(target.decode(ids.tolist()) != text for ids, text in kept)


def _encode(tokenizer: Tokenizer, lines: list[Line]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_arrays([line.text for line in lines])
    except DataError:
        for line in lines:  # finds the line at fault
            try:
                tokenizer.encode(line.text)
            except DataError as error:
                raise DataError(f"{line.origin}: {error}") from error
        raise


def _pairs(split: Split, options: PairOptions) -> Iterator[tuple[Line, Line]]:
    """The pairs without an empty side. Both sides must have the same number of lines."""
    counts = split.counts
    sides = [read_lines(files, options.lowercase) for files in (split.source, split.target)]
    for source, target in itertools.zip_longest(*sides):
        if source is None or target is None:
            longer, shorter = (split.target, split.source) if source is None else (split.source, split.target)
            more = counts.lines + 1 + sum(1 for _ in sides[source is None])
            raise DataError(
                f"{', '.join(map(str, longer))}: {more} lines, but {', '.join(map(str, shorter))}: {counts.lines}; line i of one is "
                "the translation of line i of the other, so give files that match"
            )
        counts.lines += 1
        if source.text and target.text:
            yield source, target
        else:
            counts.empty += 1


def read_lines(files: Sequence[str], lowercase: bool) -> Iterator[Line]:
    """The lines of the files, without white space around them. Raises DataError naming file and line for bytes that are not UTF-8.

    Only a line feed ends a line, so that no character inside a sentence shifts the lines after it.
    """
    for file in files:
        for number, raw in enumerate(lines_of(InputFile.found_at(str(file)), 0, -1, Tally()), 1):
            origin = f"{file}, line {number}"
            try:
                text = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{origin}: not valid UTF-8 ({error.reason} at byte {error.start}); convert the file"
                ) from error
            yield Line(text.lower() if lowercase else text, origin)
