"""Training on samples of one length: sources, mixture and batch schedule of a run behind `TrainingData`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.schema import Config
from pretrain.data.loader import Loader
from pretrain.data.samples import Samples
from pretrain.data.shards.reader import Holding
from pretrain.data.sources import (
    batch_schedule,
    check_length,
    check_tokenizers,
    cut_identity,
    open_each,
    open_samples,
    open_sources,
    open_stream,
    validation_holdings,
    with_prepared_text,
)
from pretrain.data.stream import BatchSchedule, Stream
from pretrain.data.tasks import NextToken, Objective, SpanCorruption, Spans, sentinel_ids
from pretrain.data.tokenizers.tokenizer import ADDED_NAME, TokenizerIdentity, Vocabulary, added_tokens_json


@dataclass(frozen=True)
class PreparedTraining:
    """A run's data. `config`: with text as a source; `eod_id`: the token that closes a document; `objective`: makes inputs of samples."""

    config: Config
    stream: Stream
    schedule: BatchSchedule
    objective: Objective
    eod_id: int
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
        return cls(config, stream, batch_schedule(config), _objective(config, stream, start_id), stream.eod_id, validation)

    @property
    def attachments(self) -> dict[str, Path | str]:
        added = self.added_tokens
        beside = {f"tokenizer/{ADDED_NAME}": added_tokens_json(added, self.stream.vocab_size)} if added else {}
        return {"tokenizer": self.tokenizer_path, **beside}

    @property
    def tokenizer_path(self) -> Path:
        return self.stream.tokenizer_path

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return self.stream.tokenizer

    @property
    def fingerprints(self) -> list[str]:
        return self.stream.fingerprints

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        own = self.stream.vocab_size
        needed = max(own, sentinel_ids(self.config.data, own).stop)
        return {"vocab_size": Vocabulary(needed, self.tokenizer.sha256, self.stream.sources[0].data.path)}

    @property
    def added_tokens(self) -> list[str]:
        return self.objective.added_tokens(self.stream.vocab_size)

    @property
    def lengths(self) -> tuple[float, ...]:
        return self.objective.lengths(self.config.data.sequence_length)

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return self.stream.holdings + validation_holdings(self.validation)

    def identity(self, until: int) -> dict[str, Any]:
        return cut_identity(self.config.data, self.kind, self.tokenizer, self.objective) | self.stream.identity(until)

    def samples_after(self, consumed: int, steps: int) -> int:
        return self.schedule.after(consumed, steps)

    def check_suffices(self, step: int, samples: int) -> None:
        check_length(self.config, self.stream.mixture, self.schedule, step, samples)

    def shares(self, until: int) -> dict[str, float]:
        return self.stream.shares(until)

    def describe(self, until: int) -> list[str]:
        return [*self.stream.describe(until), *self.objective.describe()]

    def loader(self, data_rank: int, data_size: int, pin: bool = False) -> Loader:
        workers = self.config.data.workers
        return Loader(self.stream, self.schedule, data_rank, data_size, workers, self.objective, pin)

    def validation_rows(self, source: Samples) -> int:
        return self.config.batch.micro_sequences

    def bytes_per_token(self, source: Samples) -> float | None:
        return source.data.bytes_per_token if self.config.data.objective == "next_token" else None


def _objective(config: Config, stream: Stream, start_id: int | None) -> Objective:
    spans, eod_id = Spans.of_data(config.data), stream.eod_id
    dropout_seed = config.run.seed if config.model.dropout else None
    if spans is None:
        return NextToken(eod_id if config.data.document_mask else None, dropout_seed)
    first = sentinel_ids(config.data, stream.vocab_size)[-1]
    return SpanCorruption(spans, first, eod_id, eod_id if start_id is None else start_id, config.data.seed, dropout_seed)
