"""Training on sentence pairs: `PreparedPairs` as a run's data, batches of tokens as its steps, and pairs as tensors of an encoder-decoder.

The order of pairs, and how it is cut into batches of a number of tokens:

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.data_schema import ValidationSource
from pretrain.config.schema import Config
from pretrain.conventions import IGNORED, sample_keys
from pretrain.data.order import permute, round_keys
from pretrain.data.pairs.prepared_pairs import PreparedPairs
from pretrain.data.shards.reader import Holding
from pretrain.data.sources import cut_identity, open_each, validation_holdings
from pretrain.data.stream import StepBatch, digest, read_ahead
from pretrain.data.tasks import NextToken
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity, Vocabulary
from pretrain.errors import ConfigError, DataError

WINDOW = 1 << 16  # pairs; part of the definition of the order


@dataclass(frozen=True)
class PairWindow:
    """Pairs in their order, batch after batch: batch i is `pairs[ends[i - 1] : ends[i]]`."""

    pairs: np.ndarray
    ends: np.ndarray


class PairOrder:
    """Batches of at most `tokens` tokens. Each pair counts as the longest source plus the longest target of its batch."""

    def __init__(self, pairs: PreparedPairs, tokens: int, seed: int, window: int = WINDOW) -> None:
        _refuse_less_than_a_pair("batch.tokens", tokens, pairs)
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
        ends = batch_ends(sources, targets, self.tokens)
        starts = np.concatenate(([0], ends[:-1]))
        batches = permute(np.arange(len(ends)), len(ends), round_keys("batches", number, self.tokens, *identity))
        parts = [pairs[starts[i] : ends[i]] for i in batches]
        return PairWindow(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def _refuse_less_than_a_pair(key: str, tokens: int, pairs: PreparedPairs) -> None:
    if sum(pairs.longest) > tokens:
        raise ConfigError(
            f"{key}={tokens} is less than the longest source and the longest target of {pairs.path} together, "
            f"{pairs.longest[0]} + {pairs.longest[1]}; raise it, or prepare the pairs with --max-source-length and --max-target-length"
        )


def batch_ends(sources: np.ndarray, targets: np.ndarray, tokens: int) -> np.ndarray:
    """The ends of batches that each take as many pairs as fit into `tokens` tokens, padding included; at least one."""
    ends, count, source, target = [], 0, 0, 0
    for i, (s, t) in enumerate(zip(sources.tolist(), targets.tolist())):
        longest = max(source, s), max(target, t)
        if count and (count + 1) * sum(longest) > tokens:
            ends.append(i)
            count, longest = 0, (s, t)
        count, (source, target) = count + 1, longest
    return np.array([*ends, len(sources)])


def pairs_of_ranks(sources: np.ndarray, targets: np.ndarray, ranks: int, tokens: int) -> list[list[np.ndarray]]:
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


# ---- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairBatch(StepBatch):
    """`positions`: -1 for a row that only fills up; `micro_inputs`: the network's inputs by name, per micro-step."""

    micro_inputs: list[dict[str, Tensor]]

    def micro_steps(self, sequences: int) -> int:
        return len(self.micro_inputs)

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in self.micro_inputs[index].items()}


def pair_inputs(pairs: PreparedPairs, numbers: np.ndarray, start_id: int) -> dict[str, np.ndarray]:
    """These pairs as inputs of models/encoder_decoder.py, int64, padded to the longest. Without numbers, one row that carries no loss.

    Inputs are [start, y1, ... yn], targets [y1, ... yn, end].
    """
    sources, targets = pairs.read(numbers) if len(numbers) else ([np.array([pairs.source.eod_id])], [np.empty(0, np.int64)])
    width = max(1, *map(len, targets))
    tokens_BT = np.full((len(sources), width + 1), pairs.target.eod_id, dtype=np.int64)
    tokens_BT[:, 0] = start_id
    targets_BT = np.full((len(sources), width), IGNORED, dtype=np.int64)
    source_BS = np.full((len(sources), max(map(len, sources))), pairs.source.eod_id, dtype=np.int64)
    for row, (source, target) in enumerate(zip(sources, targets)):
        source_BS[row, : len(source)] = source
        tokens_BT[row, 1 : 1 + len(target)] = target
        targets_BT[row, : len(target)] = target
    return {
        "source_BS": source_BS,
        "source_lengths_B": np.array([len(source) for source in sources]),
        "tokens_BT": np.ascontiguousarray(tokens_BT[:, :-1]),
        "targets_BT": targets_BT,
    }


def to_tensors(inputs: dict[str, np.ndarray], pin: bool) -> dict[str, Tensor]:
    """Tensors on the host; `pin`: in page-locked memory."""
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors


def pair_digest(pairs: PreparedPairs, numbers: np.ndarray, positions: np.ndarray) -> int:
    """52 bits that identify these pairs at these positions, independent of padding: see stream.digest."""
    if not len(numbers):
        return 0
    width = max(pairs.longest)
    both = np.zeros((2, len(numbers), width), dtype=np.int64)
    for side, documents in enumerate(pairs.read(numbers)):
        for row, document in enumerate(documents):
            both[side, row, : len(document)] = document + 1
    return digest(positions, both[0], both[1])


@dataclass(frozen=True)
class PairTraining:
    """A run's data. `start_id`: the token that decoding starts from."""

    config: Config
    pairs: PreparedPairs
    order: PairOrder
    start_id: int
    validation: list[PreparedPairs]

    kind = "pairs"

    @classmethod
    def open(cls, config: Config, start_id: int | None) -> PairTraining:
        """Open the pairs and check them with their settings. Raises ConfigError or DataError."""
        pairs = PreparedPairs.open(config.data.pairs)
        if config.batch.micro_tokens is not None:
            _refuse_less_than_a_pair("batch.micro_tokens", config.batch.micro_tokens, pairs)
        validation = open_each("data.validation", config.data.validation, lambda source: _open_validation(source, pairs))
        # Decoding starts from the target's end token, as in fairseq, unless the model says otherwise.
        start = pairs.target.eod_id if start_id is None else start_id
        return cls(config, pairs, PairOrder(pairs, config.batch.tokens, config.data.seed), start, validation)

    @property
    def attachments(self) -> dict[str, Path | str]:
        return {"tokenizer": self.tokenizer_path, "source_tokenizer": self.pairs.source.tokenizer_path}

    @property
    def tokenizer_path(self) -> Path:
        return self.pairs.target.tokenizer_path

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return self.pairs.target.tokenizer

    @property
    def fingerprints(self) -> list[str]:
        return [self.pairs.fingerprint]

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        sides = {"vocab_size": self.pairs.target, "encoder.vocab_size": self.pairs.source}
        return {key: Vocabulary(side.vocab_size, side.tokenizer.sha256, side.path) for key, side in sides.items()}

    def lengths(self, consumed: int) -> tuple[float, float]:
        """The mean lengths of sources and targets, end tokens included."""
        return self.pairs.source.tokens / len(self.pairs), self.pairs.target.tokens / len(self.pairs)

    @property
    def added_tokens(self) -> list[str]:
        return []

    def identity(self, until: int) -> dict[str, Any]:
        values = cut_identity(self.config.data, self.kind, self.tokenizer, NextToken())
        values["source_tokenizer"] = self.pairs.source.tokenizer.sha256
        if until:
            values |= {"seed": self.order.seed, "batch_tokens": self.order.tokens} | self.pairs.identity(0)
        return values

    def samples_after(self, consumed: int, steps: int) -> int:
        return consumed + self.order.consumed(steps)

    def check_suffices(self, step: int, samples: int) -> None:
        """Pairs always suffice: they are repeated for as long as a run lasts."""

    @property
    def source_names(self) -> list[str]:
        return []

    def shares(self, until: int) -> dict[str, float]:
        return {}

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return [("data.pairs", held) for held in self.pairs.holdings] + validation_holdings(self.validation)

    def describe(self, until: int) -> list[str]:
        pairs, count = self.pairs, len(self.pairs)
        tokens = "{:.1f} and {:.1f} tokens".format(*self.lengths(0))
        vocabulary = f"{pairs.source.vocab_size} and {pairs.target.vocab_size} tokens"
        if pairs.source.tokenizer.sha256 == pairs.target.tokenizer.sha256:
            vocabulary = f"{pairs.target.vocab_size} tokens, shared"
        return [
            f"data     {pairs.name}: {count:,} pairs of on average {tokens}, vocabulary of {vocabulary}",
            f"data     steps of at most {self.order.tokens} tokens with padding, "
            f"{self.order.consumed(1000) / 1000:.0f} pairs on average; about {until / count:.1f} epochs",
        ]

    def loader(self, data_rank: int, data_size: int, pin: bool = False) -> PairLoader:
        return PairLoader(self, data_rank, data_size, self.config.data.workers, self.config.batch.micro_tokens or 0, pin)

    def validation_rows(self, source: PreparedPairs) -> int:
        batch = self.config.batch
        return max(1, (batch.micro_tokens or batch.tokens) // sum(source.longest))

    def bytes_per_token(self, source: PreparedPairs) -> float | None:
        return source.target.bytes_per_token


def _open_validation(source: ValidationSource, trained_on: PreparedPairs) -> PreparedPairs:
    """The validation pairs. Raises DataError unless they were prepared with the tokenizers of the training pairs."""
    pairs = PreparedPairs.open(source.path, source.name)
    for side in ("source", "target"):
        own, other = getattr(pairs, side), getattr(trained_on, side)
        if difference := own.tokenizer.difference(other.tokenizer):
            raise DataError(f"{own.path} and {other.path} were prepared with {difference}; prepare both with the same one")
    return pairs


@dataclass(frozen=True)
class PairLoader:
    """Batches of `data_rank` among `data_size`. `micro_tokens`: the most tokens of a micro-step on one rank, padding included; 0: no limit."""

    data: PairTraining
    data_rank: int
    data_size: int
    workers: int
    micro_tokens: int = 0
    pin_memory: bool = False

    def read(self, consumed: int) -> PairBatch:
        """The batch of the step that starts after `consumed` pairs."""
        pairs = self.data.pairs
        numbers = self.data.order.batch(consumed)
        sources, targets = pairs.lengths(numbers)
        micro_inputs, positions = [], []
        mine = pairs_of_ranks(sources, targets, self.data_size, self.micro_tokens)[self.data_rank]
        for part in mine:
            inputs = pair_inputs(pairs, numbers[part], self.data.start_id)
            places = consumed + part if len(part) else np.array([-1])
            inputs["keys_B"] = sample_keys(self.data.config.run.seed, places)
            micro_inputs.append(to_tensors(inputs, self.pin_memory))
            positions.append(places)
        own = np.concatenate(mine)
        tokens = sum(int((inputs["targets_BT"] != IGNORED).sum()) for inputs in micro_inputs)
        name = pair_digest(pairs, numbers[own], consumed + own)
        return PairBatch(np.concatenate(positions), len(numbers), name, tokens, micro_inputs)

    def validation_inputs(self, source: PreparedPairs, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        return to_tensors(pair_inputs(source, samples, self.data.start_id), pin=False)

    def batches(self, consumed: int) -> Iterator[PairBatch]:
        return read_ahead(self.read, self.data.order.at, consumed, self.workers)
