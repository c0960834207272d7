"""Training on sentence pairs: `PreparedPairs` as a run's data, and batches of tokens as its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.loader import read_ahead
from pretrain.data.pairs.batch import PairBatch, pair_digest, pair_inputs, to_tensors
from pretrain.data.pairs.order import PairOrder, shares
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.shards.reader import Holding
from pretrain.data.targets import IGNORED
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import ConfigError, DataError
from pretrain.models.dropout import sample_keys
from pretrain.models.families import has_encoder
from pretrain.models.shape import start_token


@dataclass(frozen=True)
class PairTraining:
    """A run's data. `seed`: of the run, for dropout; `start_id`: what decoding starts from."""

    pairs: PreparedPairs
    order: PairOrder
    seed: int
    start_id: int

    kind = "pairs"

    @classmethod
    def open(cls, config: Config) -> PairTraining:
        """Open the pairs and check what goes with them. Raises ConfigError or DataError."""
        _check(config)
        pairs = PreparedPairs.open(config.data.pairs)
        micro = config.batch.micro_tokens
        if micro is not None and sum(pairs.longest) > micro:
            raise ConfigError(
                f"batch.micro_tokens={micro} is less than the longest source and the longest target of {pairs.path} together, "
                f"{pairs.longest[0]} + {pairs.longest[1]}; raise it"
            )
        seed = config.run.seed if config.data.seed is None else config.data.seed
        # The target's end token is also what decoding starts from, as in fairseq, unless the model says otherwise.
        start = start_token(config.model, pairs.target.eod_id)
        return cls(pairs, PairOrder(pairs, config.batch.tokens, seed), config.run.seed, start)

    @property
    def attachments(self) -> dict[str, Path]:
        return pair_attachments(self.pairs)

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
    def vocab_size(self) -> int:
        return self.pairs.target.vocab_size

    @property
    def source_vocab_size(self) -> int:
        return self.pairs.source.vocab_size

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Tokens of a source and of a target on average, end tokens included."""
        return self.pairs.source.tokens / len(self.pairs), self.pairs.target.tokens / len(self.pairs)

    def identity(self, until: int) -> dict[str, Any]:
        values = {"source_tokenizer": self.pairs.source.tokenizer.sha256}
        if until:
            values |= {"seed": self.order.seed, "batch_tokens": self.order.tokens} | self.pairs.identity(0)
        return values

    def shares(self, until: int) -> dict[str, float]:
        return {}

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return [("data.pairs", held) for held in self.pairs.holdings]

    def describe(self, until: int) -> list[str]:
        pairs, count = self.pairs, len(self.pairs)
        tokens = "{:.1f} and {:.1f} tokens".format(*self.mean_lengths)
        vocabulary = f"{pairs.source.vocab_size} and {pairs.target.vocab_size} tokens"
        if pairs.source.tokenizer.sha256 == pairs.target.tokenizer.sha256:
            vocabulary = f"{pairs.target.vocab_size} tokens, shared"
        return [
            f"data     {pairs.name}: {count:,} pairs of on average {tokens}, vocabulary of {vocabulary}",
            f"data     steps of at most {self.order.tokens} tokens with padding, "
            f"{self.order.consumed(1000) / 1000:.0f} pairs on average; about {until / count:.1f} epochs",
        ]


def pair_attachments(pairs: PreparedPairs) -> dict[str, Path]:
    """What a checkpoint keeps a copy of: `tokenizer` is that of the targets."""
    return {"tokenizer": pairs.target.tokenizer_path, "source_tokenizer": pairs.source.tokenizer_path}


def _check(config: Config) -> None:
    if config.batch.tokens is None:
        raise ConfigError(
            "batch.tokens is missing: tokens of source and target in a step on data.pairs, padding included, e.g. 4096"
        )
    if not has_encoder(config.model):
        raise ConfigError(
            f"data.pairs is for an encoder-decoder, and model.family={config.model.family} is none; use transformer or t5"
        )


def open_validation(source: Any, training: PairTraining) -> PreparedPairs:
    """Pairs to validate on. Raises DataError unless they were prepared with the tokenizers of those that are trained on."""
    pairs = PreparedPairs.open(source.path, source.name)
    for side in ("source", "target"):
        own, other = getattr(pairs, side), getattr(training.pairs, side)
        if difference := own.tokenizer.difference(other.tokenizer):
            raise DataError(f"{own.path} and {other.path} were prepared with {difference}; prepare both with the same one")
    return pairs


@dataclass(frozen=True)
class PairLoader:
    """Batches of `data_rank` among `data_size`. `micro_tokens`: most of a micro-step on one rank, padding included; 0: no limit."""

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
        mine = shares(sources, targets, self.data_size, self.micro_tokens)[self.data_rank]
        for part in mine:
            inputs = pair_inputs(pairs, numbers[part], self.data.start_id)
            places = consumed + part if len(part) else np.array([-1])
            inputs["keys_B"] = sample_keys(self.data.seed, places)
            micro_inputs.append(to_tensors(inputs, self.pin_memory))
            positions.append(places)
        own = np.concatenate(mine)
        tokens = sum(int((inputs["targets_BT"] != IGNORED).sum()) for inputs in micro_inputs)
        name = pair_digest(pairs, numbers[own], consumed + own)
        return PairBatch(np.concatenate(positions), len(numbers), name, tokens, micro_inputs)

    def validation_inputs(self, source: PreparedPairs, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        return to_tensors(pair_inputs(source, samples, self.data.start_id), pin=False)

    def batches(self, consumed: int) -> Iterator[PairBatch]:
        """Batches from `consumed` pairs on, without end. Close the iterator to stop its threads."""
        return read_ahead(self.read, self.data.order.at, consumed, self.workers)
