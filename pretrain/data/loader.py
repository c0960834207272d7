"""Batches of a rank, read ahead by threads. The number of threads changes nothing but speed: what a step reads is decided by
its position in the stream, and steps are handed out in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pretrain.data.stream import Stream, digest, rank_positions
from pretrain.models.loss import IGNORED


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one optimizer step, on the host.

    `positions`: of its samples in the stream; `digest`: see stream.digest; `target_tokens`: targets that carry a loss.
    """

    positions: np.ndarray
    digest: int
    target_tokens: int
    tokens_BT: Tensor
    targets_BT: Tensor

    def micro(self, index: int, sequences: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a micro-step, on the device."""
        part = slice(index * sequences, (index + 1) * sequences)
        return self.tokens_BT[part].to(device, non_blocking=True), self.targets_BT[part].to(device, non_blocking=True)


@dataclass(frozen=True)
class Loader:
    """Batches of `data_rank` among `data_size`, `sequences` samples per step over all ranks."""

    stream: Stream
    sequences: int
    data_rank: int
    data_size: int
    workers: int
    pin_memory: bool = False

    def read(self, consumed: int) -> StepBatch:
        """The batch of the step that starts after `consumed` samples."""
        positions = rank_positions(consumed, self.sequences, self.data_rank, self.data_size)
        windows = torch.from_numpy(self.stream.read(positions))
        name = digest(positions, windows.numpy())
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if self.pin_memory:
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return StepBatch(positions, name, int((targets != IGNORED).sum()), tokens, targets)

    def batches(self, consumed: int) -> Iterator[StepBatch]:
        """Batches from `consumed` samples on, without end. Close the iterator to stop its threads."""
        if self.workers == 0:
            while True:
                yield self.read(consumed)
                consumed += self.sequences
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="loader")
        ahead: deque[Future[StepBatch]] = deque()
        try:
            while True:
                while len(ahead) < self.workers + 1:
                    ahead.append(pool.submit(self.read, consumed))
                    consumed += self.sequences
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
