"""Batches of a rank, read ahead by threads. The number of threads changes nothing but speed: what a step reads is decided by
its position in the stream, and steps are handed out in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.data.batch_schedule import BatchSchedule
from pretrain.data.stream import Stream, digest, documents_of, rank_positions
from pretrain.data.targets import IGNORED

PREFETCH_STEPS = 32
"""How far ahead remote shards are fetched, beyond the batches that are being read."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one optimizer step, on the host. All tensors are int64 [its samples, sequence_length].

    `positions`: of its samples in the stream; `sequences`: samples of the step over all ranks; `digest`: see stream.digest;
    `target_tokens`: targets that carry a loss; `documents_BT`: which document each token belongs to, where attention ends with it;
    `cursor`: where the rank's text goes on after this batch, of data that is not prepared.
    """

    positions: np.ndarray
    sequences: int
    digest: int
    target_tokens: int
    tokens_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None
    cursor: list[int] | None = None

    def micro_steps(self, sequences: int) -> int:
        """How many micro-steps of `sequences` samples the batch is; equal on all ranks."""
        return len(self.positions) // sequences

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """The network's inputs of a micro-step, by name, on the device."""
        part = slice(index * sequences, (index + 1) * sequences)
        tensors = {"tokens_BT": self.tokens_BT, "targets_BT": self.targets_BT, "documents_BT": self.documents_BT}
        return {name: t[part].to(device, non_blocking=True) for name, t in tensors.items() if t is not None}


def make_batch(
    positions: np.ndarray, sequences: int, tokens_BT: Tensor, targets_BT: Tensor, mask_eod_id: int | None
) -> StepBatch:
    """A batch from its tokens and targets. `mask_eod_id`: the token that closes a document, where attention ends with it."""
    tokens, targets = tokens_BT.numpy(), targets_BT.numpy()
    documents_BT = None
    if mask_eod_id is not None:
        documents_BT = torch.from_numpy(documents_of(tokens, mask_eod_id))
        documents_BT = documents_BT.pin_memory() if tokens_BT.is_pinned() else documents_BT
    target_tokens = int(np.count_nonzero(targets != IGNORED))
    return StepBatch(
        positions, sequences, digest(positions, tokens, targets), target_tokens, tokens_BT, targets_BT, documents_BT
    )


@dataclass(frozen=True)
class Loader:
    """Batches of `data_rank` among `data_size`. `mask_documents`: say which document each token belongs to."""

    stream: Stream
    schedule: BatchSchedule
    data_rank: int
    data_size: int
    workers: int
    mask_documents: bool = False
    pin_memory: bool = False

    def read(self, consumed: int) -> StepBatch:
        """The batch of the step that starts after `consumed` samples."""
        sequences = self.schedule.at(consumed)
        positions = rank_positions(consumed, sequences, self.data_rank, self.data_size)
        shape = len(positions), self.stream.sequence_length
        tokens_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        targets_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        self.stream.read(positions, tokens_BT.numpy(), targets_BT.numpy())
        eod_id = self.stream.sources[0].data.eod_id if self.mask_documents else None
        return make_batch(positions, sequences, tokens_BT, targets_BT, eod_id)

    def _prefetch(self, consumed: int) -> None:
        later = self.schedule.after(consumed, PREFETCH_STEPS)
        self.stream.prefetch(rank_positions(later, self.schedule.at(later), self.data_rank, self.data_size))

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""
        return read_ahead(self.read, self.schedule.at, consumed, self.workers, self._prefetch)


def read_ahead(
    read: Callable[[int], Any],
    size_at: Callable[[int], int],
    consumed: int,
    workers: int,
    prefetch: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """`read(consumed)` of step after step, by `workers` threads; `size_at(consumed)` samples come in between."""
    if workers == 0:
        while True:
            yield read(consumed)
            consumed += size_at(consumed)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
    ahead: deque[Future[Any]] = deque()
    try:
        while True:
            while len(ahead) < workers + 1:
                ahead.append(pool.submit(read, consumed))
                consumed += size_at(consumed)
                if prefetch:
                    prefetch(consumed)
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
