"""What a trainer knows of its data: prepared (`stream.Stream`) or text that is tokenized on the way (`text_training.TextTraining`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pretrain.data.loader import StepBatch


class TrainingData(Protocol):
    """The samples of a run."""

    tokenizer_path: Path
    """A directory with the files of the tokenizer, which checkpoints keep a copy of."""
    tokenizer_sha256: str
    vocab_size: int

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
    mask_documents: bool

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""
