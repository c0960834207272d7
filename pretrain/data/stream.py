"""The stream of training samples: position -> tokens, a pure function of the seed and the sources; and how steps take it.

    position --mixture--> source, n-th sample of it --epoch = n // size--> order of the epoch --> sample --> tokens, targets

The only cursor is the number of samples consumed. This file does not import torch, so that tools which look at data answer at once.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.config.schema import Config
from pretrain.conventions import scramble
from pretrain.data.order import UNIT, ChunkedOrder, FullOrder, Mixture
from pretrain.data.samples import Samples
from pretrain.data.shards.reader import Holding, PreparedData
from pretrain.errors import ConfigError, DataError, nearest_multiples

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DIGEST_MODULUS = 1 << 52  # so that the sum over 2,000 ranks fits in an int64
_DIGEST_KEY = np.uint64(0x9E3779B97F4A7C15)
_ORDERS = 256


@dataclass(frozen=True)
class BatchSchedule:
    """The number of samples of each optimizer step: constant, or growing by a ramp. It is a pure function of the consumed samples.

    `ramp`: (until, sequences) in rising order. A step that begins before `until` consumed samples takes that many `sequences`.
    The field `sequences` is the size after the last ramp. `cuts`: (until, rows), in the same way. Such a step cuts each of its samples into
    `rows` rows; after the last cut, a sample is one row.
    """

    sequences: int
    ramp: tuple[tuple[int, int], ...] = ()
    cuts: tuple[tuple[int, int], ...] = ()

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        return next((sequences for until, sequences in self.ramp if consumed < until), self.sequences)

    def rows_at(self, consumed: int) -> int:
        """Rows that a sample is cut into in the step that begins after `consumed` samples."""
        return next((rows for until, rows in self.cuts if consumed < until), 1)

    @property
    def most_rows(self) -> int:
        """Rows of a sample in the stage that cuts it into most."""
        return max((rows for _, rows in self.cuts), default=1)

    def after(self, consumed: int, steps: int) -> int:
        """Samples consumed `steps` steps after `consumed`."""
        for sequences, length in self._stages(consumed):
            taken = min(steps, length)
            consumed, steps = consumed + taken * sequences, steps - taken
        return consumed

    def step_of(self, position: int, consumed: int = 0, step: int = 0) -> int:
        """The step, counted from 1, that takes the sample at a stream position. The first `step` steps took `consumed` samples."""
        for sequences, length in self._stages(consumed):
            if position < consumed + length * sequences:
                return step + (position - consumed) // sequences + 1
            consumed, step = consumed + length * sequences, step + length
        raise AssertionError("the last stage has no end")

    @property
    def sizes(self) -> list[int]:
        """Every size that occurs."""
        return [sequences for sequences, _ in self._stages(0)]

    def _stages(self, consumed: int) -> Iterator[tuple[int, float]]:
        """The samples per step, and the number of steps, of each stage from `consumed` samples on; the last has no end."""
        for until, sequences in self.ramp:
            steps = max(0, -(-(until - consumed) // sequences))
            yield sequences, steps
            consumed += steps * sequences
        yield self.sequences, math.inf


def micro_steps_of(config: Config, data_size: int) -> int:
    """Micro-steps of a step of `batch.sequences`. Raises ConfigError for a size, there or in the ramp, that the ranks cannot share."""
    if config.data.pairs is not None:
        return 0
    micro_steps = _micro_steps(config, "batch.sequences", config.batch.sequences, data_size)
    for i, stage in enumerate(config.batch.ramp):
        _micro_steps(config, f"batch.ramp.{i}.sequences", stage.sequences, data_size)
    return micro_steps


def _micro_steps(config: Config, key: str, sequences: int, data_size: int) -> int:
    micro = config.batch.micro_sequences
    unit = data_size * micro
    if sequences % unit == 0:
        return sequences // unit
    micros = [n for n in range(1, sequences // data_size + 1) if sequences % (n * data_size) == 0]
    remedy = f"nearest legal {key}: {nearest_multiples(sequences, unit)}"
    if micros:
        remedy += f"; nearest legal batch.micro_sequences: {min(micros, key=lambda n: (abs(n - micro), n))}"
    raise ConfigError(
        f"{key}={sequences} is not divisible by batch.micro_sequences={micro} times {data_size} data-parallel ranks; {remedy}"
    )


@dataclass(frozen=True)
class Shuffle:
    """How the samples of an epoch are ordered. `window_shards`: the number of shards to mix at a time; None: all."""

    seed: int
    window_shards: int | None = None

    def order(self, samples: Samples, epoch: int) -> FullOrder | ChunkedOrder:
        """The order of one epoch of a source; it differs in every epoch."""
        identity = ("order", self.seed, epoch, samples.data.fingerprint)
        if self.window_shards is None:
            return FullOrder(len(samples), identity)
        chunk = -(-len(samples) // len(samples.data.manifest.shards))  # as many samples as a shard has on average
        return ChunkedOrder(len(samples), chunk, self.window_shards, identity)


class Stream:
    """Training samples in their global order."""

    def __init__(self, sources: list[Samples], mixture: Mixture, shuffle: Shuffle) -> None:
        self.sources, self.mixture, self.shuffle = sources, mixture, shuffle
        self.sequence_length = sources[0].sequence_length
        self._order = functools.lru_cache(_ORDERS)(lambda source, epoch: shuffle.order(sources[source], epoch))

    @property
    def data(self) -> PreparedData:
        """The data of the first source; all have its tokenizer and its end-of-document token."""
        return self.sources[0].data

    @property
    def holdings(self) -> list[tuple[str, Holding]]:
        return [(f"data.sources.{number}", held) for number, source in enumerate(self.sources) for held in source.holdings]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, sample in the source, epoch of the source) of each position."""
        sources, numbers = self.mixture.locate(np.asarray(positions, dtype=np.int64))
        sizes = np.array([len(source) for source in self.sources])[sources]
        epochs, places = numbers // sizes, numbers % sizes
        samples = np.empty_like(numbers)
        for source, epoch in set(zip(sources.tolist(), epochs.tolist())):
            here = (sources == source) & (epochs == epoch)
            samples[here] = self._order(source, epoch).samples(places[here])
        return sources, samples, epochs

    def positions(self, source: int, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Stream positions of a source's samples in its `epoch`-th repetition: the inverse of `locate`; -1: never."""
        numbers = epoch * len(self.sources[source]) + self._order(source, epoch).places(samples)
        return self.mixture.positions(source, numbers)

    def read(self, positions: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> np.ndarray:
        """Write the inputs and targets of the samples at these positions into int64 arrays [len(positions), sequence_length].

        Return the source of each, by number.
        """
        try:
            sources, samples, _ = self.locate(positions)
        except IndexError as error:
            raise DataError(f"the data are used up: {error}; lower run.steps, or give the data more") from error
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            self.sources[source].fill(samples[rows], rows, tokens_BT, targets_BT)
        return sources

    def prefetch(self, positions: np.ndarray) -> None:
        """Download the remote shards of the samples at these positions in the background; positions may lie beyond the end."""
        if not any(source.data.is_remote for source in self.sources):
            return
        if self.mixture.length is not None:
            positions = positions[positions < self.mixture.length]
        sources, samples, _ = self.locate(positions)
        for source in np.unique(sources):
            self.sources[source].prefetch(samples[sources == source])

    def shares(self, until: int) -> dict[str, float]:
        """Share of each source in the samples before position `until`; empty for a single source."""
        if len(self.sources) == 1:
            return {}
        counts = self.mixture.counts(until)
        return {source.name: count / max(1, sum(counts)) for source, count in zip(self.sources, counts)}

    def describe(self, until: int) -> list[str]:
        """A line for each source, with how often the samples before position `until` repeat it and its share of them, and for each change of shares."""
        lines, shares = [], self.shares(until)
        for source, count in zip(self.sources, self.mixture.counts(until)):
            share = f", {shares[source.name]:.1%} of the run's samples" if shares else ""
            lines.append(
                f"data     {source.name}: {len(source):,} samples of {self.sequence_length} tokens{source.describe()}, "
                f"{count / len(source):.2f} epochs{share}"
            )
        for segment in self.mixture.segments[1:]:
            if segment.start < until:
                shares = ", ".join(f"{s.name} {share / UNIT:.1%}" for s, share in zip(self.sources, segment.shares) if share)
                lines.append(f"data     from {segment.start * self.sequence_length:,} tokens on: {shares}")
        return lines

    def identity(self, until: int) -> dict[str, Any]:
        """Everything that decided the samples before position `until`, to compare with a checkpoint."""
        segments = self.mixture.history(until)
        drawn = sorted({int(source) for segment in segments for source in segment["shares"]})
        return {
            "seed": self.shuffle.seed,
            "shuffle_shards": self.shuffle.window_shards,
            "sequence_length": self.sequence_length,
            "mixture": segments,
            **{name: value for number in drawn for name, value in self.sources[number].identity(number).items()},
        }


def rank_positions(consumed: int, sequences: int, data_rank: int, data_size: int) -> np.ndarray:
    """Stream positions of this rank's share of the global batch that starts after `consumed` samples, in order."""
    share = sequences // data_size
    return np.arange(share, dtype=np.int64) + consumed + data_rank * share


@functools.lru_cache(8)
def _multipliers(length: int) -> tuple[np.ndarray, np.ndarray]:
    # Random odd 64-bit numbers, the same everywhere: multilinear hashing (Lemire and Kaser, "Strongly universal string
    # hashing is fast", 2014).
    stream = hashlib.shake_128(b"pretrain/digest").digest(16 * length)
    numbers = np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)
    return numbers[:length], numbers[length:]


def digest(positions: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> int:
    """52 bits that identify these samples at these positions: a sum of their hashes, so that ranks can add up their shares.

    Two runs whose steps have equal digests saw the same samples, with the same targets, in the same order.
    """
    by_token, by_target = _multipliers(tokens_BT.shape[1])
    contents = tokens_BT.view(np.uint64) @ by_token + targets_BT.view(np.uint64) @ by_target
    keys = scramble(positions.astype(np.uint64) + _DIGEST_KEY)  # so that two samples in exchanged places give another sum
    return int(scramble(contents + keys).sum()) % DIGEST_MODULUS


# ---- steps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepBatch(ABC):
    """The samples of one rank in one optimizer step, on the host; each kind of data adds the network's inputs.

    `positions`: the places of its samples in the stream; `sequences`: samples of the step over all ranks; `digest`: see
    `digest`; `target_tokens`: targets that carry a loss.
    """

    positions: np.ndarray
    sequences: int
    digest: int
    target_tokens: int
    sources_B: Tensor | None = field(default=None, kw_only=True)
    """The source of each sequence, by number; None if the data have one source."""
    source_tokens: list[int] = field(default_factory=list, kw_only=True)
    """`target_tokens` by source; empty if the data have one source."""

    @property
    def rows_per_sample(self) -> int:
        """Sequences that the network sees of a sample."""
        return 1

    @abstractmethod
    def micro_steps(self, sequences: int) -> int:
        """The number of micro-steps of `sequences` samples in the batch; equal on all ranks."""

    @abstractmethod
    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """The network's inputs of a micro-step, by name, on the device."""


def read_ahead(
    read: Callable[[int], Any],
    size_at: Callable[[int], int],
    consumed: int,
    workers: int,
    prefetch: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """`read(consumed)` for step after step, by `workers` threads. A step takes `size_at(consumed)` samples.

    The number of threads changes only the speed: steps are handed out in order.
    """
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
