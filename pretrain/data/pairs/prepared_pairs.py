"""Prepared sentence pairs on disk: two prepared directories whose documents of one number belong together, and a file that ties them.

DIR/pairs.json           counts, how they were made, and the sha256 of both manifests
DIR/source/              a prepared directory (data/shards): a document per sentence, closed by the end-of-document token
DIR/target/              likewise

Their order, and how it is cut into batches of a number of tokens:

    epoch     a permutation of all pairs, in windows                      |----- window 0 -----|----- window 1 -----|
    window    its pairs by length, cut where a batch is full of tokens    |..|....|......|...|
    batches   of the window, permuted                                     |......|..|...|....|

Pairs of one batch have similar lengths, so little of it is padding. The batch of a step is a pure function of the pairs before it,
(seed, fingerprint of the pairs) and the tokens per batch. Which rank computes which part is decided later. Memory and the cost of
seeking depend on the window, not on the size of the corpus.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.order import permute, round_keys
from pretrain.data.shards.manifest import read_described
from pretrain.data.shards.reader import PreparedData
from pretrain.errors import ConfigError, DataError
from pretrain.storage import sealed_json, sha256_of

FORMAT, VERSION, NAME = "pretrain-pairs", 2, "pairs.json"
READABLE = (1, 2)
"""Version 1 had no seal."""
SIDES = ("source", "target")
_KEYS = {"format", "version", "pairs", "source_sha256", "target_sha256", "preparation"}


def write_pairs(directory: Path, pairs: int, preparation: dict[str, Any]) -> None:
    """Write `directory`/pairs.json for the two prepared directories there."""
    content = {"format": FORMAT, "version": VERSION, "pairs": pairs}
    content |= {f"{side}_sha256": sha256_of(directory / side / "manifest.json") for side in SIDES}
    (directory / NAME).write_text(sealed_json(content | {"preparation": preparation}), encoding="utf-8")


def _read_pairs(directory: Path) -> dict[str, Any]:
    file = directory / NAME
    if not file.is_file():
        splits = [name for name in ("train", "validation") if (directory / name / NAME).is_file()]
        hint = f"did you mean {directory / splits[0]}?" if splits else "prepare pairs with tools/prepare_pairs.py"
        raise DataError(f"{file}: missing; {hint}")
    content = read_described(file, FORMAT, READABLE, "prepare the pairs again")
    for key in sorted(_KEYS ^ content.keys()):
        raise DataError(f"{file}: {key} is {'missing' if key in _KEYS else 'not a known key'}")
    if not isinstance(content["preparation"], dict):
        raise DataError(f"{file}: preparation must be an object, got {content['preparation']!r}")
    for side in SIDES:
        if not (directory / side / "manifest.json").is_file():
            raise DataError(f"{directory / side / 'manifest.json'}: missing; restore it or prepare the pairs again")
        if content[f"{side}_sha256"] != sha256_of(directory / side / "manifest.json"):
            raise DataError(
                f"{directory / side / 'manifest.json'}: not the manifest that {NAME} ties to the other side; prepare the pairs again"
            )
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
        """Read the manifests and check that the two sides belong together. Raises DataError naming a file that does not."""
        path = Path(path)
        content = _read_pairs(path)
        sides = [PreparedData.open(path / side) for side in SIDES]
        for side, data in zip(SIDES, sides):
            if data.documents != content["pairs"]:
                raise DataError(f"{path / NAME}: pairs is {content['pairs']!r}, but {side} has {data.documents} documents")
            data.check_tokenizer()
        split = path.name in ("train", "validation") and path.parent.name
        return cls(name or split or path.name, path, *sides, content["preparation"])

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


# ---- the order -----------------------------------------------------------------------------------------------------------

WINDOW = 1 << 16  # pairs; part of the definition of the order


@dataclass(frozen=True)
class PairWindow:
    """Pairs in their order, batch after batch: batch i is `pairs[ends[i - 1] : ends[i]]`."""

    pairs: np.ndarray
    ends: np.ndarray


class PairOrder:
    """Batches of at most `tokens` tokens. Each pair counts as the longest source plus the longest target of its batch."""

    def __init__(self, pairs: PreparedPairs, tokens: int, seed: int, window: int = WINDOW) -> None:
        if sum(pairs.longest) > tokens:
            raise ConfigError(
                f"batch.tokens={tokens} is less than the longest source and the longest target of {pairs.path} together, "
                f"{pairs.longest[0]} + {pairs.longest[1]}; raise it, or prepare the pairs with --max-source-length and --max-target-length"
            )
        self.pairs, self.tokens, self.seed = pairs, tokens, seed
        self.windows = -(-len(pairs) // window)
        self.window = functools.lru_cache(4)(self._window)

    def batch(self, consumed: int) -> np.ndarray:
        """The pairs of the step that begins after `consumed` pairs. Raises ValueError if no step begins there."""
        epoch, place = divmod(consumed, len(self.pairs))
        number = self._window_at(place)
        window = self.window(epoch, number)
        first = place - self._start(number)
        if first and first not in window.ends:
            raise ValueError(f"no batch begins after {consumed} pairs")
        return window.pairs[first : window.ends[np.searchsorted(window.ends, first, side="right")]]

    def at(self, consumed: int) -> int:
        """Pairs of the step that begins after `consumed` pairs."""
        return len(self.batch(consumed))

    def consumed(self, steps: int) -> int:
        """About how many pairs the first `steps` steps take, if each takes the average of the first window."""
        window = self.window(0, 0)
        return round(steps * len(window.pairs) / len(window.ends))

    def _start(self, number: int) -> int:
        # Windows of an epoch have nearly equal sizes, so that no small rest remains.
        return number * len(self.pairs) // self.windows

    def _window_at(self, place: int) -> int:
        return bisect.bisect_right(range(self.windows + 1), place, key=self._start) - 1

    def _window(self, epoch: int, number: int) -> PairWindow:
        identity = ("pairs", self.seed, epoch, self.pairs.fingerprint)
        places = np.arange(self._start(number), self._start(number + 1))
        pairs = permute(places, len(self.pairs), round_keys(*identity))
        sources, targets = self.pairs.lengths(pairs)
        by_length = np.lexsort((targets, sources))  # pairs of equal lengths stay in permuted order
        pairs, sources, targets = pairs[by_length], sources[by_length], targets[by_length]
        ends = cut(sources, targets, self.tokens)
        starts = np.concatenate(([0], ends[:-1]))
        batches = permute(np.arange(len(ends)), len(ends), round_keys("batches", number, self.tokens, *identity))
        parts = [pairs[starts[i] : ends[i]] for i in batches]
        return PairWindow(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def cut(sources: np.ndarray, targets: np.ndarray, tokens: int) -> np.ndarray:
    """The ends of runs that each take as many pairs as fit into `tokens` tokens, padding included; at least one."""
    ends, count, source, target = [], 0, 0, 0
    for i, (s, t) in enumerate(zip(sources.tolist(), targets.tolist())):
        longest = max(source, s), max(target, t)
        if count and (count + 1) * sum(longest) > tokens:
            ends.append(i)
            count, longest = 0, (s, t)
        count, (source, target) = count + 1, longest
    return np.array([*ends, len(sources)])


def shares(sources: np.ndarray, targets: np.ndarray, ranks: int, tokens: int) -> list[list[np.ndarray]]:
    """The pairs of a batch that each rank computes in each micro-step: indices into the batch, [rank][micro-step].

    Ranks get neighbouring shares of the batch. All have the same number of micro-steps: the fewest that keep each to `tokens` tokens
    (0: one). With too few pairs an entry is empty; the rank then fills up, because the others wait for it.
    """
    parts = np.array_split(np.arange(len(sources)), ranks)
    count = 1
    while tokens:
        cuts = [np.array_split(part, count) for part in parts]
        sizes = (len(cut) * (sources[cut].max() + targets[cut].max()) for cut in sum(cuts, []) if len(cut))
        if max(sizes) <= tokens or count >= max(map(len, parts)):
            break
        count += 1
    return [np.array_split(part, count) for part in parts]
