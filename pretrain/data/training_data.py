"""The interface between a run and any kind of data, and how data is opened and verified."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.pairs.pair_training import PairTraining
from pretrain.data.prepared_training import PreparedTraining
from pretrain.data.shards.reader import Holding
from pretrain.data.stream import StepBatch
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity, Vocabulary
from pretrain.errors import DataError, UserError


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
    lengths: tuple[float, ...]
    """Tokens that a network sees of a sample. For an encoder-decoder: of a source and of a target, on average."""
    fingerprints: list[str]
    """The fingerprint of each source's content, in order."""
    validation: Sequence[ValidationData]

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        """The directories that a run reads, with those of its validation. Each has its key in the configuration."""

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

    def describe(self, until: int) -> list[str]:
        """Lines for the log about the samples before position `until`."""

    def loader(self, data_rank: int, data_size: int, pin: bool = False) -> BatchLoader:
        """The batches of one data-parallel rank. `pin`: in page-locked memory."""

    def validation_rows(self, source: ValidationData) -> int:
        """Samples of a validation source in one forward pass of a rank."""

    def bytes_per_token(self, source: ValidationData) -> float | None:
        """Mean bytes of text per target token of a validation source; None if unknown, or if targets are not plain text."""


def open_data(config: Config, start_id: int | None = None) -> TrainingData:
    """The data of a run, from a configuration with its derived values filled in. Raises ConfigError or DataError.

    `start_id`: the token from which the decoder of an encoder-decoder starts; by default the end-of-document token.
    """
    kind = PreparedTraining if config.data.pairs is None else PairTraining
    return kind.open(config, start_id)


class RanksOfRun(Protocol):
    """The part of `distributed.ranks.Ranks` that checking needs."""

    rank: int

    def gather(self, name: str, value: Any) -> list[Any]: ...

    def attempt(self, name: str, action: Callable[[], Any], kind: type[UserError]) -> Any: ...


def verify_everywhere(held: list[tuple[str, Holding]], full: bool, ranks: RanksOfRun) -> bool:
    """Check that all ranks read the same, intact data; raise DataError on every rank if not. Return whether files were hashed.

    `held`: the data of the run (`TrainingData.holdings`). With `full` every file is hashed. Ranks that see the same files, on
    shared storage or on one host, share the work. A copy or packing index on a node's own disk is hashed by the ranks of that node.
    """
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
    """A value that is equal for ranks that see the same file. Disks of different nodes may be exact copies, so a disk counts as its
    host's own; network file systems have no device number of a disk (major 0).
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
