"""The interface between a run and any kind of data; training on samples of one length; how data is opened.

`PreparedTraining` cuts prepared text into samples. The other kind is in pairs/pair_training.py. Nothing outside `data/` asks which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.conventions import IGNORED
from pretrain.data.pairs.pair_training import PairTraining
from pretrain.data.samples import Samples
from pretrain.data.shards.reader import Holding
from pretrain.data.sources import (
    batch_schedule,
    check_tokenizers,
    cut_identity,
    open_each,
    open_samples,
    open_sources,
    open_stream,
    validation_holdings,
    with_prepared_text,
)
from pretrain.data.stream import BatchSchedule, StepBatch, Stream, digest, rank_positions, read_ahead
from pretrain.data.tasks import NextToken, Objective, SpanCorruption, Spans, sentinel_ids
from pretrain.data.tokenizers.export import ADDED_NAME, added_tokens_json
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity, Vocabulary
from pretrain.errors import ConfigError

PREFETCH_STEPS = 32
"""How far ahead remote shards are downloaded, beyond the batches that are being read. The shards of a start's first 32 steps are downloaded when
they are read, and so are all with data.workers=0.
"""


class ValidationData(Protocol):
    """Samples, or pairs, for the evaluation of a run: the first ones of a source, in order."""

    name: str

    def __len__(self) -> int: ...

    @property
    def holdings(self) -> list[Holding]:
        """The directories that are read."""


class BatchLoader(Protocol):
    """The batches of one rank."""

    data_rank: int
    data_size: int

    def validation_inputs(self, source: ValidationData, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        """The network's inputs on these samples of a validation source, perhaps zero. Samples of one length are filled up to `rows` with
        rows that carry no loss.
        """

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""


class TrainingData(Protocol):
    """The samples of a run. Only its implementations know what a sample is: a window of a text, or a pair of sentences."""

    attachments: dict[str, Path | str]
    """Directories and texts that a checkpoint copies beside the state, by name."""
    tokenizer_path: Path
    """A directory with the files of the tokenizer."""
    tokenizer: TokenizerIdentity
    vocabularies: dict[str, Vocabulary]
    """The vocabularies by key of the section `model`: `vocab_size` and perhaps `encoder.vocab_size`."""
    added_tokens: list[str]
    """Tokens of training that the tokenizer lacks, which an export adds to it."""
    fingerprints: list[str]
    """The fingerprint of each source's content, in order."""
    validation: Sequence[ValidationData]

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        """The directories that a run reads, with those of its validation. Each has its key in the configuration."""

    def lengths(self, consumed: int) -> tuple[float, ...]:
        """The length of the sequences that a network sees in the step after `consumed` samples. For an encoder-decoder: of a source and of a
        target, on average.
        """

    def identity(self, until: int) -> dict[str, Any]:
        """Everything that decided the samples before position `until`, to compare with a checkpoint.

        JSON values by key of an identity record, without its prefix `data.`; mappings and lists may be nested.
        """

    def samples_after(self, consumed: int, steps: int) -> int:
        """Samples consumed `steps` steps after `consumed`; an estimate if steps have a fixed number of tokens."""

    def check_suffices(self, step: int, samples: int) -> None:
        """Raise ConfigError if a run that continues after `step` steps and `samples` samples would outlast its data."""

    def shares(self, until: int) -> dict[str, float]:
        """Share of each source in the samples before position `until`; empty for a single source."""

    @property
    def source_names(self) -> list[str]:
        """The sources in the order of their numbers; empty for a single one."""

    def describe(self, until: int) -> list[str]:
        """Lines for the log about the samples before position `until`."""

    def loader(self, data_rank: int, data_size: int, pin: bool = False) -> BatchLoader:
        """The batches of one data-parallel rank. `pin`: in page-locked memory."""

    def validation_rows(self, source: ValidationData) -> int:
        """Samples of a validation source in one forward pass of a rank."""

    def bytes_per_token(self, source: ValidationData) -> float | None:
        """Mean bytes of text per target token of a validation source; None if unknown, or if targets are not plain text."""


# ---- samples of one length -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleBatch(StepBatch):
    """`inputs`: the network's inputs by name, with the rows of a sample together."""

    inputs: dict[str, Tensor]

    @property
    def rows_per_sample(self) -> int:
        return len(self.inputs["targets_BT"]) // len(self.positions)

    def micro_steps(self, sequences: int) -> int:
        return len(self.positions) // sequences

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        rows = sequences * self.rows_per_sample
        part = slice(index * rows, (index + 1) * rows)
        return {name: tensor[part].to(device, non_blocking=True) for name, tensor in self.inputs.items()}


@dataclass(frozen=True)
class Loader:
    """Batches of `data_rank` among `data_size`. `objective`: turns samples into the network's inputs; `loss_weights`: by source, none if all are 1."""

    stream: Stream
    schedule: BatchSchedule
    data_rank: int
    data_size: int
    workers: int
    objective: Objective = NextToken()
    pin_memory: bool = False
    loss_weights: tuple[float, ...] = ()

    def read(self, consumed: int) -> SampleBatch:
        """The batch of the step that starts after `consumed` samples."""
        sequences = self.schedule.at(consumed)
        positions = rank_positions(consumed, sequences, self.data_rank, self.data_size)
        shape = len(positions), self.stream.sequence_length
        tokens_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        targets_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        sources = self.stream.read(positions, tokens_BT.numpy(), targets_BT.numpy())
        name = digest(positions, tokens_BT.numpy(), targets_BT.numpy())
        rows = self.schedule.rows_at(consumed)
        cut = (len(positions) * rows, self.stream.sequence_length // rows)
        # Masks of dropout are made from a row's place, so no row of another stage has the same.
        places = (positions[:, None] * self.schedule.most_rows + np.arange(rows)).ravel()
        inputs = self.objective.inputs(tokens_BT.view(cut), targets_BT.view(cut), places)
        targets_B = np.count_nonzero(inputs["targets_BT"].numpy() != IGNORED, axis=1)
        sources_B, source_tokens = None, []
        if len(self.stream.sources) > 1:
            sources_B = torch.from_numpy(sources.repeat(rows))
            source_tokens = np.bincount(sources.repeat(rows), targets_B, len(self.stream.sources)).astype(int).tolist()
            if self.loss_weights:
                inputs["sequence_weights_B"] = torch.tensor(self.loss_weights)[sources_B]
            sources_B = sources_B.pin_memory() if self.pin_memory else sources_B
        if self.pin_memory:
            inputs = {key: tensor if tensor.is_pinned() else tensor.pin_memory() for key, tensor in inputs.items()}
        return SampleBatch(
            positions, sequences, name, int(targets_B.sum()), inputs, sources_B=sources_B, source_tokens=source_tokens
        )

    def batches(self, consumed: int) -> Iterator[SampleBatch]:
        return read_ahead(self.read, self.schedule.at, consumed, self.workers, self._prefetch)

    def _prefetch(self, consumed: int) -> None:
        later = self.schedule.after(consumed, PREFETCH_STEPS)
        self.stream.prefetch(rank_positions(later, self.schedule.at(later), self.data_rank, self.data_size))

    def validation_inputs(self, source: Samples, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        tokens_BT, targets_BT = torch.zeros((2, rows, source.sequence_length), dtype=torch.int64)
        filled = np.pad(samples, (0, rows - len(samples)))
        if len(samples):
            source.fill(filled, np.arange(rows), tokens_BT.numpy(), targets_BT.numpy())
        inputs = self.objective.for_validation().inputs(tokens_BT, targets_BT, filled)
        inputs["targets_BT"][len(samples) :] = IGNORED
        return inputs


@dataclass(frozen=True)
class PreparedTraining:
    """A run's data. `config`: with text as a source; `objective`: makes inputs of samples."""

    config: Config
    stream: Stream
    schedule: BatchSchedule
    objective: Objective
    validation: list[Samples]

    kind = "prepared"

    @classmethod
    def open(cls, config: Config, start_id: int | None) -> PreparedTraining:
        """Open the sources and check them with their settings. Raises ConfigError or DataError."""
        data = config.data
        validation = open_each("data.validation", data.validation, lambda source: open_samples(source, data))
        config = with_prepared_text(config)
        sources = open_sources(config)
        check_tokenizers(sources + validation)
        stream = open_stream(config, sources)
        return cls(config, stream, batch_schedule(config), _objective(config, stream, start_id), validation)

    @property
    def attachments(self) -> dict[str, Path | str]:
        added = self.added_tokens
        beside = {f"tokenizer/{ADDED_NAME}": added_tokens_json(added, self.stream.data.vocab_size)} if added else {}
        return {"tokenizer": self.tokenizer_path, **beside}

    @property
    def tokenizer_path(self) -> Path:
        return self.stream.data.tokenizer_path

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return self.stream.data.tokenizer

    @property
    def fingerprints(self) -> list[str]:
        return [source.data.fingerprint for source in self.stream.sources]

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        own = self.stream.data
        needed = max(own.vocab_size, sentinel_ids(self.config.data, own.vocab_size).stop)
        return {"vocab_size": Vocabulary(needed, own.tokenizer.sha256, own.path)}

    @property
    def added_tokens(self) -> list[str]:
        return self.objective.added_tokens(self.stream.data.vocab_size)

    def lengths(self, consumed: int) -> tuple[float, ...]:
        return self.objective.lengths(self.config.data.sequence_length // self.schedule.rows_at(consumed))

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return self.stream.holdings + validation_holdings(self.validation)

    def identity(self, until: int) -> dict[str, Any]:
        weights = {f"loss_weight.{n}": s.loss_weight for n, s in enumerate(self.config.data.sources) if s.loss_weight != 1}
        return cut_identity(self.config.data, self.kind, self.tokenizer, self.objective) | self.stream.identity(until) | weights

    def samples_after(self, consumed: int, steps: int) -> int:
        return self.schedule.after(consumed, steps)

    def check_suffices(self, step: int, samples: int) -> None:
        config, mixture, schedule = self.config, self.stream.mixture, self.schedule
        length, needed = config.data.sequence_length, schedule.after(samples, config.run.steps - step)
        budget = sum(source.tokens or 0 for source in config.data.sources)
        last = schedule.step_of(mixture.length, samples, step) - 1 if mixture.length is not None else config.run.steps
        if mixture.length is not None and mixture.length < needed:
            stage = config.data.stages[-1].until_tokens if config.data.stages else None
            cause = (
                f"data.stages end at until_tokens={stage}"
                if stage is not None and mixture.length == -(-stage // length)
                else "every source that is drawn has come data.sources[].max_epochs times"
            )
            raise ConfigError(
                f"run.steps={config.run.steps} reads {needed} samples, and {cause}, after {mixture.length} samples: run.steps at most "
                f"{last}, or give the data more"
            )
        if budget and needed * length > budget:
            raise ConfigError(
                f"run.steps={config.run.steps} reads {needed * length} tokens, more than the {budget} of all data.sources[].tokens; "
                f"run.steps at most {schedule.step_of(budget // length, samples, step) - 1}, or raise the budgets"
            )

    def shares(self, until: int) -> dict[str, float]:
        return self.stream.shares(until)

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.stream.sources] if len(self.stream.sources) > 1 else []

    def describe(self, until: int) -> list[str]:
        return [*self.stream.describe(until), *self.objective.describe()]

    def loader(self, data_rank: int, data_size: int, pin: bool = False) -> Loader:
        workers = self.config.data.workers
        weights = tuple(source.loss_weight for source in self.config.data.sources)
        weights = () if all(weight == 1 for weight in weights) else weights
        return Loader(self.stream, self.schedule, data_rank, data_size, workers, self.objective, pin, weights)

    def validation_rows(self, source: Samples) -> int:
        return self.config.batch.micro_sequences

    def bytes_per_token(self, source: Samples) -> float | None:
        return source.data.bytes_per_token if self.config.data.objective == "next_token" else None


def _objective(config: Config, stream: Stream, start_id: int | None) -> Objective:
    spans, eod_id = Spans.of_data(config.data), stream.data.eod_id
    dropout_seed = config.run.seed if config.model.dropout or config.model.attention_dropout else None
    if spans is None:
        return NextToken(
            eod_id if config.data.document_mask else None, dropout_seed, config.model.attention_backend == "varlen"
        )
    first = sentinel_ids(config.data, stream.data.vocab_size)[-1]
    return SpanCorruption(spans, first, eod_id, eod_id if start_id is None else start_id, config.data.seed, dropout_seed)


# ---- opening ----------------------------------------------------------------------------------------------------------


def open_data(config: Config, start_id: int | None = None) -> TrainingData:
    """The data of a run, from a resolved configuration. Raises ConfigError or DataError.

    `start_id`: the token from which the decoder of an encoder-decoder starts; by default the end-of-document token.
    """
    kind = PreparedTraining if config.data.pairs is None else PairTraining
    return kind.open(config, start_id)
