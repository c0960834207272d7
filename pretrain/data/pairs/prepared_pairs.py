"""Prepared sentence pairs on disk: two prepared directories whose documents of one number belong together, and a file that ties them.

DIR/pairs.json           counts, how they were made, and the sha256 of both manifests
DIR/source/              a prepared directory (data/shards): a document per sentence, closed by the end-of-document token
DIR/target/              likewise
DIR/invalid.jsonl        lines that were left out with their pairs: where, and why (if there were any)

They are made of parallel files of lines. Line i of the sources and line i of the targets are a pair. A pair with an empty side is
left out, and so is one that is longer than the limits. Both are counted, in the manifest and on the console. So is a pair with an
unusable side, up to `max_invalid` of them in the whole preparation: one that is not UTF-8, has characters that the tokenizer lacks, or
text that it takes for a special token. Anything else that does not fit is an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.text_inputs import Tally, lines_of
from pretrain.data.shards.manifest import INVALID_NAME, directory_name, read_described, splits_with, write_invalid
from pretrain.data.shards.reader import PreparedData
from pretrain.data.shards.writer import ShardWriter
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, DataError
from pretrain.storage import sealed_json, sha256_of, staged_directory
from pretrain.transfer import refuse_url

FORMAT, VERSION, NAME = "pretrain-pairs", 2, "pairs.json"
SIDES = ("source", "target")
_KEYS = {"format", "version", "pairs", "source_sha256", "target_sha256", "preparation"}
INVALID_KEY = "invalid_sha256"
"""A further key of pairs.json, the hash of invalid.jsonl, if there is one."""
_BATCH = 4096  # pairs that are encoded at a time


# ---- reading -----------------------------------------------------------------------------------------------------------


def read_pairs(directory: Path) -> dict[str, Any]:
    """The checked content of `directory`/pairs.json. Raises DataError, naming the file, unless it ties the manifests of both sides."""
    file = directory / NAME
    if not file.is_file():
        splits = splits_with(directory, NAME)
        hint = f"did you mean {splits[0]}?" if splits else "prepare pairs with tools/prepare_pairs.py"
        raise DataError(f"{file}: missing; {hint}")
    content = read_described(file, FORMAT, VERSION, "prepare the pairs again")
    for key in sorted(_KEYS ^ content.keys() - {INVALID_KEY}):
        raise DataError(f"{file}: {key} is {'missing' if key in _KEYS else 'not a known key'}")
    if not isinstance(content["preparation"], dict):
        raise DataError(f"{file}: preparation must be an object, got {content['preparation']!r}")
    for side in SIDES:
        manifest = directory / side / "manifest.json"
        if not manifest.is_file():
            raise DataError(f"{manifest}: missing; restore it or prepare the pairs again")
        if content[f"{side}_sha256"] != sha256_of(manifest):
            raise DataError(f"{manifest}: not the manifest that {NAME} ties to the other side; prepare the pairs again")
    return content


@dataclass(frozen=True)
class PreparedPairs:
    """Pairs of documents, read at random. `PreparedPairs.open` makes one."""

    name: str
    path: Path
    source: PreparedData
    target: PreparedData
    preparation: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, name: str | None = None) -> PreparedPairs:
        """Read the manifests and check that the two sides belong together. Raises DataError naming a file that does not. No shard is
        looked at (see `data_of_all_ranks.verify_everywhere`).
        """
        path = Path(path)
        content = read_pairs(path)
        sides = [PreparedData.open(path / side, sizes=False) for side in SIDES]
        for side, data in zip(SIDES, sides):
            if data.documents != content["pairs"]:
                raise DataError(f"{path / NAME}: pairs is {content['pairs']!r}, but {side} has {data.documents} documents")
            data.check_tokenizer()
        return cls(name or directory_name(path), path, *sides, content["preparation"])

    def __len__(self) -> int:
        return self.source.documents

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity of the content, independent of its place."""
        return hashlib.sha256(f"{self.source.fingerprint}\n{self.target.fingerprint}".encode()).hexdigest()

    def identity(self, number: int) -> dict[str, str]:
        """See `Samples.identity` (data/samples.py)."""
        key = f"sources.{number}"
        ends = f"{self.source.documents_fingerprint}\n{self.target.documents_fingerprint}"
        documents = hashlib.sha256(ends.encode()).hexdigest()
        return {key: self.fingerprint, f"{key}.documents": documents, f"{key}.path": str(self.path)}

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target, end tokens included; known without reading the shards."""
        return tuple(max(shard.longest for shard in data.manifest.shards) for data in (self.source, self.target))

    def lengths(self, pairs: np.ndarray) -> np.ndarray:
        """Tokens of source and target of these pairs, end tokens included, int64 [2, pairs]."""
        spans = [data.spans(pairs) for data in (self.source, self.target)]
        return np.stack([ends - starts for starts, ends in spans])

    def read(self, pairs: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The tokens of the sources and of the targets of these pairs, each closed by its end token, int64."""
        return tuple(_documents(data, pairs) for data in (self.source, self.target))

    @property
    def holdings(self) -> list[PreparedData]:
        """The parts of the data that have their own manifests."""
        return [self.source, self.target]


def _documents(data: PreparedData, numbers: np.ndarray) -> list[np.ndarray]:
    starts, ends = data.spans(numbers)
    tokens = data.read_joined(starts, ends - starts).astype(np.int64)
    return np.split(tokens, np.cumsum(ends - starts)[:-1])


# ---- preparing ---------------------------------------------------------------------------------------------------------


@dataclass
class PairOptions:
    """How text becomes tokens. Limits count tokens with the end token; 0: no limit. `max_invalid`: how many pairs with an unusable side
    may be left out of all splits together.
    """

    lowercase: bool = False
    max_source_length: int = 0
    max_target_length: int = 0
    max_invalid: int = 0


@dataclass
class PairCounts:
    """The numbers of lines and pairs, and of those left out."""

    lines: int = 0
    pairs: int = 0
    empty: int = 0
    too_long: int = 0
    invalid: int = 0
    """Pairs with a side that cannot be used."""
    altered: int = 0
    """Targets that a round trip through the tokenizer changes. Scores compare with the changed text."""
    marks: int = 0
    """Byte order marks that were removed."""
    source_tokens: int = 0
    target_tokens: int = 0

    def describe(self, where: Path) -> str:
        """One line for people."""
        left_out = f"left out: {self.empty:,} with an empty side, {self.too_long:,} too long"
        left_out += f", {self.invalid:,} invalid (see {where / INVALID_NAME})" if self.invalid else ""
        altered = f"; {self.altered:,} targets are altered by the tokenizer" if self.altered else ""
        marks = f", {self.marks} byte order marks removed" if self.marks else ""
        tokens = f"{self.source_tokens:,} and {self.target_tokens:,} tokens"
        return f"{where}: {self.pairs:,} pairs of {self.lines:,} lines, {tokens}; {left_out}{marks}{altered}"


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

    Without `target_tokenizer` both languages share one. Raises DataError, naming the files, if they have different numbers of lines.
    Raises DataError, naming file and line, for a line that is not UTF-8 or that a tokenizer refuses, unless the options allow to leave
    its pair out. Nothing is left behind then.
    """
    refuse_url("--output", output)
    source = load_tokenizer(source_tokenizer)
    tokenizers = source, load_tokenizer(target_tokenizer) if target_tokenizer else source
    options = options or PairOptions()
    if min(options.max_source_length, options.max_target_length) < 0:
        raise ConfigError("--max-source-length and --max-target-length: expected at least 1, or 0 for no limit")
    if options.max_invalid < 0:
        raise ConfigError(f"--max-invalid {options.max_invalid}: expected at least 0")
    output = Path(output)
    splits = {"": train} if validation is None else {"train": train, "validation": validation}
    left_out = 0
    with staged_directory(output) as stage:
        for name, split in splits.items():
            _prepare_split(stage / name, split, tokenizers, options, left_out)
            left_out += split.counts.invalid
    return [split.counts.describe(output / name) for name, split in splits.items()]


class Line(NamedTuple):
    """A sentence. `origin`: its file and line, for messages; `problem`: why it cannot be used, empty if it can."""

    text: str
    origin: str
    problem: str = ""


def _prepare_split(
    directory: Path, split: Split, tokenizers: tuple[Tokenizer, Tokenizer], options: PairOptions, left_out: int
) -> None:
    """Write one split. `left_out`: the invalid pairs of the splits before, which count towards the limit."""
    counts, limits = split.counts, (options.max_source_length, options.max_target_length)
    tally = Tally(invalid=left_out)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(ShardWriter.create(directory / side, tokenizer)) for side, tokenizer in zip(SIDES, tokenizers)
        ]
        pairs = _pairs(split, options.lowercase, tally)
        while batch := list(itertools.islice(pairs, _BATCH)):
            batch, sides = _usable(batch, tokenizers, tally, options.max_invalid)
            fits = [not any(limit and len(ids) > limit for ids, limit in zip(pair, limits)) for pair in zip(*sides)]
            for writer, documents in zip(writers, sides):
                kept = list(itertools.compress(documents, fits))
                if kept:
                    writer.add(np.concatenate(kept), np.array([len(ids) for ids in kept]))
            for (_, line), ids in itertools.compress(zip(batch, sides[1]), fits):
                counts.altered += tokenizers[1].decode(ids[:-1].tolist()) != line.text
            counts.too_long += len(fits) - sum(fits)
            counts.pairs += sum(fits)
        counts.invalid = tally.invalid - left_out
        counts.source_tokens, counts.target_tokens = (writer.tokens for writer in writers)
        if not counts.pairs:
            raise DataError(_no_pairs(split, tally))
    names = {"sources": ", ".join(map(str, split.source)), "targets": ", ".join(map(str, split.target))}
    content = {"format": FORMAT, "version": VERSION, "pairs": counts.pairs}
    content |= {f"{side}_sha256": sha256_of(directory / side / "manifest.json") for side in SIDES}
    if counts.invalid:
        content[INVALID_KEY] = write_invalid(directory, tally.invalid_rows)
    content["preparation"] = {**names, **asdict(options), **asdict(counts)}
    (directory / NAME).write_text(sealed_json(content), encoding="utf-8")


def _no_pairs(split: Split, tally: Tally) -> str:
    """Why a split has no pair. Nothing of it is kept, its invalid.jsonl neither."""
    counts = split.counts
    limits = ", or raise --max-source-length or --max-target-length" if counts.too_long else ""
    first = f"; the first invalid line is {': '.join(tally.invalid_rows[0])}" if counts.invalid else ""
    return (
        f"{split.source[0]}: none of its {counts.lines:,} lines gives a pair ({counts.empty:,} with an empty side, {counts.too_long:,} too long, "
        f"{counts.invalid:,} invalid); correct the files{limits}{first}"
    )


def _usable(
    batch: list[tuple[Line, Line]], tokenizers: tuple[Tokenizer, Tokenizer], tally: Tally, most: int
) -> tuple[list[tuple[Line, Line]], list[list[np.ndarray]]]:
    """The pairs whose two sides can be used, and the ids of their sources and of their targets. The others are left out, up to `most`."""
    pairs: list[tuple[Line, Line]] = []
    sides: list[list[np.ndarray]] = [[], []]
    for pair, encoded in zip(batch, zip(*map(encode_lines, tokenizers, zip(*batch)))):
        faults = [(line.origin, why) for line, why in zip(pair, encoded) if isinstance(why, str)]
        if faults:
            tally.leave_out(*faults[0], most)
            continue
        pairs.append(pair)
        for side, ids in zip(sides, encoded):
            side.append(ids)
    return pairs, sides


def encode_lines(tokenizer: Tokenizer, lines: Sequence[Line]) -> list[np.ndarray | str]:
    """The ids of each line with the end-of-document id, or why the line cannot be used."""
    try:
        encoded = tokenizer.encode_arrays([line.text for line in lines])
    except DataError as error:
        if len(lines) == 1:
            return [str(error)]
        return [found for line in lines for found in encode_lines(tokenizer, [line])]
    return [line.problem or np.append(ids, tokenizer.eod_id).astype(np.int64) for line, ids in zip(lines, encoded)]


def _pairs(split: Split, lowercase: bool, tally: Tally) -> Iterator[tuple[Line, Line]]:
    """The pairs without an empty side. Both sides must have the same number of lines."""
    counts = split.counts
    sides = [read_lines(files, lowercase, tally) for files in (split.source, split.target)]
    for source, target in itertools.zip_longest(*sides):
        if source is None or target is None:
            longer, shorter = (split.target, split.source) if source is None else (split.source, split.target)
            more = counts.lines + 1 + sum(1 for _ in sides[source is None])
            raise DataError(
                f"{', '.join(map(str, longer))}: {more} lines, but {', '.join(map(str, shorter))}: {counts.lines}; line i of one is "
                "the translation of line i of the other, so give files that match"
            )
        counts.lines, counts.marks = counts.lines + 1, tally.marks
        if all(line.text or line.problem for line in (source, target)):
            yield source, target
        else:
            counts.empty += 1


def read_lines(files: Sequence[str], lowercase: bool, tally: Tally | None = None) -> Iterator[Line]:
    """The lines of the files, without white space around them and without byte order marks, which `tally` counts. A line that is not
    UTF-8 has no text, but a problem.

    Only a line feed ends a line, so that no character inside a sentence shifts the lines after it.
    """
    tally = Tally() if tally is None else tally
    for file in files:
        for number, raw in enumerate(lines_of(InputFile.found_at(str(file)), 0, -1, tally), 1):
            origin = f"{file}, line {number}"
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                yield Line("", origin, f"not valid UTF-8 ({error.reason} at byte {error.start}); convert the file")
                continue
            if number == 1 and text.startswith("\ufeff"):
                tally.marks, text = tally.marks + 1, text[1:]
            text = text.strip()
            yield Line(text.lower() if lowercase else text, origin)
