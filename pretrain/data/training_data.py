"""What a trainer knows of its data: prepared (`stream.Stream`), text that is tokenized on the way (`text.training.TextTraining`), or
sentence pairs (`pairs.training.PairTraining`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
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
from pretrain.data.shards.reader import Holding
from pretrain.data.sources import (
    cache_folder,
    check_names,
    check_tokenizers,
    check_weights_are_used,
    open_each,
    open_samples,
    open_sources,
)
from pretrain.data.span_corruption import SpanCorruption, Spans
from pretrain.data.text.training import TextLoader, TextTraining
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import ConfigError, DataError, UserError
from pretrain.models.families import has_encoder
from pretrain.models.shape import start_token


class TrainingData(Protocol):
    """The samples of a run."""

    kind: str
    """`prepared`, `text` or `pairs`."""
    attachments: dict[str, Path]
    """Directories that checkpoints keep a copy of, by name."""
    tokenizer_path: Path
    """A directory with the files of the tokenizer, which checkpoints keep a copy of."""
    tokenizer: TokenizerIdentity
    vocab_size: int
    fingerprints: list[str]
    """What the content of each source is, in order; empty for text."""

    def identity(self, until: int) -> dict[str, Any]:
        """Everything that decided the samples before position `until`, for a checkpoint to be compared with."""

    def shares(self, until: int) -> dict[str, float]:
        """Share of each source in the samples before position `until`; empty where there is one source."""

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        """The directories that are read, each with its key in the configuration; empty for text."""

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
    check_weights_are_used(data)
    validation = open_each("data.validation", data.validation, lambda source: open_samples(source, data))
    check_names("data.validation", validation)
    if text != Text():
        _check_text(config)
        opened = TextTraining.open(text, data.sequence_length, cache_folder(data))
        check_tokenizers(validation, opened.tokenizer, f"data.text.tokenizer={text.tokenizer}")
        return opened, validation
    sources = open_sources(config)
    check_tokenizers(sources + validation)
    return sources, validation


class RanksOfRun(Protocol):
    """What checking needs of `distributed.ranks.Ranks`."""

    rank: int

    def gather(self, name: str, value: Any) -> list[Any]: ...

    def attempt(self, name: str, action: Callable[[], Any], kind: type[UserError]) -> Any: ...


def verify_everywhere(
    data: TrainingData, validation: list[Samples] | list[PreparedPairs], full: bool, ranks: RanksOfRun
) -> bool:
    """Whether files were hashed. Raises DataError, on every rank alike, unless all ranks read the same data, as it was written.

    With `full` every file is hashed. Ranks that see the same files, on shared storage or on one host, share the work; a copy on a
    node's own disk is hashed by the ranks of that node, and so is the node's packing index.
    """
    held = data.holdings + [
        (f"data.validation.{number}", holding) for number, source in enumerate(validation) for holding in source.holdings
    ]
    host = socket.gethostname()
    places = ranks.attempt(
        "places of the data", lambda: [_place(holding.manifest_file, host) for _, holding in held], DataError
    )
    everywhere = ranks.gather("content of the data", (host, [(str(h.path), h.content) for _, h in held], places))
    _refuse_differences([key for key, _ in held], everywhere)
    if not full:
        return False

    def verify() -> None:
        for number, (_, holding) in enumerate(held):
            together = [rank for rank, (_, _, seen) in enumerate(everywhere) if seen[number] == places[number]]
            holding.verify(together.index(ranks.rank), len(together))

    ranks.attempt("hashes of the data", verify, DataError)
    return bool(held)


def _place(file: Path, host: str) -> tuple[str, int, int, int]:
    """Equal for ranks that see one and the same file. Disks of different nodes may be copies to the last inode, so a disk counts as
    its host's own; network file systems have no device number of a disk (major 0).
    """
    status = os.stat(file)
    return host if os.major(status.st_dev) else "", status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _refuse_differences(keys: list[str], everywhere: list[tuple[str, list[tuple[str, str]], Any]]) -> None:
    first_host, first, _ = everywhere[0]
    for rank, (host, contents, _) in enumerate(everywhere):
        if len(contents) != len(first):
            raise DataError(
                f"rank {rank} on {host} reads {len(contents)} directories of data and rank 0 on {first_host} {len(first)}; start all "
                "ranks with the same configuration"
            )
        for key, (path, content), (own_path, own_content) in zip(keys, first, contents):
            if content != own_content:
                raise DataError(
                    f"{key}: {own_path} of rank {rank} on {host} has other content than {path} of rank 0 on {first_host}; copy the data "
                    "anew to the node that is wrong, and remove its packing index where one is named"
                )


def _open_pairs(config: Config) -> tuple[PairTraining, list[PreparedPairs]]:
    data = config.data
    if data.sources or data.text != Text():
        raise ConfigError("data.pairs and another key of data (sources or text) both say what is trained on; keep one")
    training = PairTraining.open(config)
    validation = open_each("data.validation", data.validation, lambda source: open_validation(source, training))
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
