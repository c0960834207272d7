"""Batches of a rank, read ahead by threads. The number of threads changes only the speed: a step's position in the stream decides
what it reads, and steps are handed out in order.
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

from pretrain.conventions import IGNORED
from pretrain.data.samples import Samples
from pretrain.data.stream import BatchSchedule, Stream, digest, rank_positions
from pretrain.data.tasks import NextToken, Objective

PREFETCH_STEPS = 32
"""How far ahead remote shards are downloaded, beyond the batches that are being read."""


@dataclass(frozen=True)
class SampleBatch:
    """The samples of one rank in one optimizer step, on the host. `inputs`: the network's inputs by name, with a row per sample.

    `positions`: the places of its samples in the stream; `sequences`: samples of the step over all ranks; `digest`: see
    stream.digest; `target_tokens`: targets that carry a loss.
    """

    positions: np.ndarray
    sequences: int
    digest: int
    target_tokens: int
    inputs: dict[str, Tensor]

    def micro_steps(self, sequences: int) -> int:
        """The number of micro-steps of `sequences` samples in the batch; equal on all ranks."""
        return len(self.positions) // sequences

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """The network's inputs of a micro-step, by name, on the device."""
        part = slice(index * sequences, (index + 1) * sequences)
        return {name: tensor[part].to(device, non_blocking=True) for name, tensor in self.inputs.items()}


def make_batch(
    positions: np.ndarray, sequences: int, tokens_BT: Tensor, targets_BT: Tensor, objective: Objective, pin: bool
) -> SampleBatch:
    """A batch from the tokens of its samples and the token after each. `pin`: put it in page-locked memory."""
    name = digest(positions, tokens_BT.numpy(), targets_BT.numpy())
    inputs = objective.inputs(tokens_BT, targets_BT, positions)
    target_tokens = int(np.count_nonzero(inputs["targets_BT"].numpy() != IGNORED))
    if pin:
        inputs = {key: tensor if tensor.is_pinned() else tensor.pin_memory() for key, tensor in inputs.items()}
    return SampleBatch(positions, sequences, name, target_tokens, inputs)


def validation_inputs(objective: Objective, source: Samples, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
    """The network's inputs on these samples of a validation source, filled up to `rows` with rows that carry no loss."""
    tokens_BT, targets_BT = torch.zeros((2, rows, source.sequence_length), dtype=torch.int64)
    filled = np.pad(samples, (0, rows - len(samples)))
    if len(samples):
        source.fill(filled, np.arange(rows), tokens_BT.numpy(), targets_BT.numpy())
    inputs = objective.for_validation().inputs(tokens_BT, targets_BT, filled)
    inputs["targets_BT"][len(samples) :] = IGNORED
    return inputs


@dataclass(frozen=True)
class Loader:
    """Batches of `data_rank` among `data_size`. `objective`: turns samples into the network's inputs."""

    stream: Stream
    schedule: BatchSchedule
    data_rank: int
    data_size: int
    workers: int
    objective: Objective = NextToken()
    pin_memory: bool = False

    def read(self, consumed: int) -> SampleBatch:
        """The batch of the step that starts after `consumed` samples."""
        sequences = self.schedule.at(consumed)
        positions = rank_positions(consumed, sequences, self.data_rank, self.data_size)
        shape = len(positions), self.stream.sequence_length
        tokens_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        targets_BT = torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_memory)
        self.stream.read(positions, tokens_BT.numpy(), targets_BT.numpy())
        return make_batch(positions, sequences, tokens_BT, targets_BT, self.objective, self.pin_memory)

    def validation_inputs(self, source: Samples, samples: np.ndarray, rows: int) -> dict[str, Tensor]:
        return validation_inputs(self.objective, source, samples, rows)

    def _prefetch(self, consumed: int) -> None:
        later = self.schedule.after(consumed, PREFETCH_STEPS)
        self.stream.prefetch(rank_positions(later, self.schedule.at(later), self.data_rank, self.data_size))

    def batches(self, consumed: int) -> Iterator[SampleBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""
        return read_ahead(self.read, self.schedule.at, consumed, self.workers, self._prefetch)


def read_ahead(
    read: Callable[[int], Any],
    size_at: Callable[[int], int],
    consumed: int,
    workers: int,
    prefetch: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """`read(consumed)` for step after step, by `workers` threads. A step takes `size_at(consumed)` samples."""
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
