"""Training on text that was not prepared: `TextStream` as a run's data, and its windows as batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.data_schema import Text
from pretrain.data.batch_schedule import BatchSchedule
from pretrain.data.loader import StepBatch, make_batch, validation_inputs
from pretrain.data.objective import NextToken, Objective
from pretrain.data.samples import Samples
from pretrain.data.shards.reader import Holding
from pretrain.data.shards.staging import staged_directory
from pretrain.data.stream import rank_positions
from pretrain.data.text.corpus import FileCorpus, HubCorpus
from pretrain.data.text.stream import START, Cursor, TextStream
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity, identity_of, load_tokenizer
from pretrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class TextTraining:
    """A run's data. `tokenizer_path`: a copy of the tokenizer's own files."""

    stream: TextStream
    tokenizer_path: Path

    kind = "text"

    @classmethod
    def open(cls, text: Text, sequence_length: int, cache: Path) -> TextTraining:
        """Find the corpus and load the tokenizer. Raises ConfigError or DataError."""
        if bool(text.input) == bool(text.dataset):
            raise ConfigError("data.text: give one of input (files and globs) and dataset (a Hugging Face dataset)")
        if text.tokenizer is None:
            raise ConfigError(
                "data.text.tokenizer is missing: a directory or file of tools/train_tokenizer.py, or a tokenizer.json"
            )
        tokenizer = load_tokenizer(text.tokenizer)
        if text.dataset:
            corpus: Any = HubCorpus(text.dataset, text.text_field, text.split, text.dataset_config, text.revision)
        else:
            corpus = FileCorpus.find(text.input, text.text_field, text.documents)
        copy = cache / "tokenizers" / f"{tokenizer.fingerprint}-{tokenizer.eod_id}"
        if not copy.is_dir():
            try:
                with staged_directory(copy) as stage:
                    tokenizer.save(stage)
            except DataError:
                if not copy.is_dir():  # else another rank was first, with the same content
                    raise
        return cls(TextStream(corpus, tokenizer, sequence_length), copy)

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return identity_of(self.stream.tokenizer)

    @property
    def fingerprints(self) -> list[str]:
        return []

    @property
    def vocab_size(self) -> int:
        return self.stream.tokenizer.vocab_size

    @property
    def eod_id(self) -> int:
        return self.stream.tokenizer.eod_id

    def identity(self, until: int) -> dict[str, Any]:
        return {"text": self.stream.identity()} if until else {}

    def shares(self, until: int) -> dict[str, float]:
        return {}

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return []  # text has no hashes; files whose size changes are noticed when they are read

    def describe(self, until: int) -> list[str]:
        return [
            "data     text, tokenized while training, in the order of the corpus, without a shuffle",
            "data     resume: exact on the same number of ranks; on another, no document is lost and some are repeated; the samples of a "
            "step depend on the number of ranks; tools/prepare_data.py has none of these limits",
        ]


@dataclass(frozen=True)
class TextLoader:
    """Batches of `data_rank` among `data_size`; each carries the cursor of the rank after it."""

    stream: TextStream
    schedule: BatchSchedule
    data_rank: int
    data_size: int
    workers: int
    cursor: list[int] | None = None
    objective: Objective = NextToken()
    pin_memory: bool = False

    def validation_inputs(self, source: Samples, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        return validation_inputs(self.objective, source, samples, rows)

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        stream = replace(self.stream, data_rank=self.data_rank, data_size=self.data_size)
        sequences = self.schedule.sequences
        cursor = START if self.cursor is None else Cursor.from_list(self.cursor)
        with closing(stream.batches(sequences // self.data_size, cursor, max(1, self.workers))) as windows_of_steps:
            for windows, after in windows_of_steps:
                windows_BT = torch.from_numpy(windows)
                tokens_BT, targets_BT = windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()
                positions = rank_positions(consumed, sequences, self.data_rank, self.data_size)
                batch = make_batch(positions, sequences, tokens_BT, targets_BT, self.objective, self.pin_memory)
                yield replace(batch, cursor=after.to_list())
                consumed += sequences
