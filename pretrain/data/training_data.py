"""What a trainer knows of its data: prepared (`stream.Stream`), text that is tokenized on the way (`text.training.TextTraining`), or
sentence pairs (`pairs.training.PairTraining`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from pretrain.config.data_schema import Text
from pretrain.config.schema import Config
from pretrain.data.batch_schedule import BatchSchedule
from pretrain.data.loader import Loader, StepBatch
from pretrain.data.objective import NextToken, Objective
from pretrain.data.pairs.order import PairOrder
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.pairs.training import PairLoader, PairTraining, open_validation
from pretrain.data.samples import Samples
from pretrain.data.sources import cache_folder, check_names, check_tokenizers, open_samples, open_sources
from pretrain.data.span_corruption import SpanCorruption, Spans
from pretrain.data.text.training import TextLoader, TextTraining
from pretrain.errors import ConfigError
from pretrain.models.shape import has_encoder, start_token


class TrainingData(Protocol):
    """The samples of a run."""

    kind: str
    """`prepared`, `text` or `pairs`."""
    attachments: dict[str, Path]
    """Directories that checkpoints keep a copy of, by name."""
    tokenizer_path: Path
    """A directory with the files of the tokenizer, which checkpoints keep a copy of."""
    tokenizer_sha256: str
    vocab_size: int
    fingerprints: list[str]
    """What the content of each source is, in order; empty for text."""

    def identity(self, until: int) -> dict[str, Any]:
        """Everything that decided the samples before position `until`, for a checkpoint to be compared with."""

    def shares(self, until: int) -> dict[str, float]:
        """Share of each source in the samples before position `until`; empty where there is one source."""

    def verify(self, part: int, parts: int) -> None:
        """Hash the files i with i % parts == part. Raises DataError naming one that is not what was written."""

    def describe(self, until: int) -> list[str]:
        """Lines that say what the samples before position `until` are."""


class BatchLoader(Protocol):
    """The batches of one rank."""

    data_rank: int
    data_size: int

    def validation_inputs(self, source: Samples | PreparedPairs, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        """The network's inputs on these samples of a validation source, perhaps none; samples of one length are filled up to `rows` with
        some that carry no loss.
        """

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""


def open_data(config: Config) -> tuple[list[Samples] | TextTraining | PairTraining, list[Samples] | list[PreparedPairs]]:
    """What is trained on, opened, and the validation sources. Raises ConfigError or DataError."""
    data = config.data
    text = data.text
    if text != Text() and data.sources:
        raise ConfigError("data.sources and data.text both say what is trained on; keep one")
    if data.pairs is not None:
        return _open_pairs(config)
    _check_objective(config)
    validation = [open_samples(source, data) for source in data.validation]
    check_names("data.validation", validation)
    if text != Text():
        _check_text(config)
        opened = TextTraining.open(text, data.sequence_length, cache_folder(data))
        check_tokenizers(validation, opened.tokenizer_sha256, text.tokenizer)
        return opened, validation
    sources = open_sources(config)
    check_tokenizers(sources + validation)
    return sources, validation


def _open_pairs(config: Config) -> tuple[PairTraining, list[PreparedPairs]]:
    data = config.data
    if data.sources or data.text != Text():
        raise ConfigError("data.pairs and another key of data (sources or text) both say what is trained on; keep one")
    training = PairTraining.open(config)
    validation = [open_validation(source, training) for source in data.validation]
    check_names("data.validation", validation)
    return training, validation


def _check_text(config: Config) -> None:
    data = config.data
    if data.exact_resume:
        raise ConfigError(
            "data.text cannot resume exactly on another number of ranks (no document is lost, some are repeated) and has no shuffle; "
            "accept it with data.exact_resume=false, or prepare the data with tools/prepare_data.py"
        )
    if config.batch.ramp:
        raise ConfigError("batch.ramp is not built for data.text; prepare the data, or remove it")


def build_loader(
    config: Config,
    data: TrainingData,
    objective: Objective,
    schedule: BatchSchedule | PairOrder,
    data_rank: int,
    data_size: int,
    cursor: list[int] | None,
    pin: bool,
) -> BatchLoader:
    """The batches of one data-parallel rank. `cursor`: where the text of this rank goes on; `pin`: in page-locked memory."""
    workers = config.data.workers
    if isinstance(data, PairTraining):
        return PairLoader(data, data_rank, data_size, workers, config.batch.micro_tokens or 0, pin)
    if isinstance(data, TextTraining):
        return TextLoader(data.stream, schedule, data_rank, data_size, workers, cursor, objective, pin)
    return Loader(data, schedule, data_rank, data_size, workers, objective, pin)


def open_objective(config: Config, data: TrainingData) -> Objective:
    """What becomes of a sample, of a configuration whose model is complete. Raises ConfigError where it cannot be done."""
    spans, eod_id = Spans.of_data(config.data), eod_of(data)
    if spans is None:
        return NextToken(eod_id if config.data.document_mask else None)
    first = sentinel_ids(config, data.vocab_size)[-1]
    return SpanCorruption(spans, first, eod_id, start_token(config.model, eod_id), config.data.seed, config.run.seed)


def sentinel_ids(config: Config, vocab_size: int) -> range:
    """The ids that stand for spans, rising, where the tokenizer has `vocab_size` tokens; empty where there are no spans."""
    options = config.data.span_corruption
    if config.data.objective != "span_corruption":
        return range(0)
    if options.first_sentinel is None:
        return range(vocab_size, vocab_size + options.sentinels)
    if options.first_sentinel < options.sentinels:
        raise ConfigError(
            f"data.span_corruption.first_sentinel={options.first_sentinel}: {options.sentinels} sentinels that count down from there reach "
            "below 0; it is the id of the first span's, lower sentinels, or remove it"
        )
    return range(options.first_sentinel - options.sentinels + 1, options.first_sentinel + 1)


def eod_of(data: TrainingData) -> int:
    """The token that closes a document."""
    if isinstance(data, PairTraining):
        return data.pairs.target.eod_id
    return data.stream.tokenizer.eod_id if isinstance(data, TextTraining) else data.sources[0].data.eod_id


def _check_objective(config: Config) -> None:
    data = config.data
    if data.objective == "next_token":
        return
    if not has_encoder(config.model):
        raise ConfigError(
            f"data.objective=span_corruption is for an encoder-decoder, and model.family={config.model.family} is none; use t5"
        )
    for name, only in (("packing", "concatenate"), ("document_mask", False), ("boundary_loss", True), ("text", Text())):
        if (value := getattr(data, name)) != only:
            shown = "prepare the data" if name == "text" else f"{name}={value} is not built for it, remove it"
            raise ConfigError(f"data.objective=span_corruption takes samples as they are cut: data.{shown}")
