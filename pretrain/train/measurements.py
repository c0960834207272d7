"""What a run measures beside its steps, for its log lines: time, memory, energy, cost, and the loss of each source."""

from __future__ import annotations

import logging
import resource

import torch
from torch import Tensor

from pretrain.distributed.ranks import Ranks
from pretrain.observe.energy import EnergyMeter
from pretrain.observe.flops import peak_flops
from pretrain.observe.metrics import SpeedClock, StepRecord
from pretrain.parallel.strategy import Strategy
from pretrain.train.plan import Plan
from pretrain.train.queued_step import QueuedStep
from pretrain.train.run_directory import RunDirectory

log = logging.getLogger(__name__)


class Measurements:
    """Numbers that add up between log lines. All ranks call `fill` together. `samples`: those of the run before this start."""

    def __init__(self, plan: Plan, ranks: Ranks, directory: RunDirectory, strategy: Strategy, samples: int) -> None:
        self.plan, self.ranks, self.directory, self.strategy = plan, ranks, directory, strategy
        self.clock, self._samples_before = SpeedClock(), samples
        peak = peak_flops(ranks.device, plan.config.precision.compute)
        self._peak_flops = peak * ranks.world_size if peak else None
        self._flops_per_token: dict[tuple[float, ...], int] = {}
        """By lengths of sequences, which stages of a run may change."""
        self._energy = EnergyMeter(ranks.device)
        self._most_memory = 0
        self._source_losses: dict[str, tuple[float, int]] = {}
        """Summed losses and target tokens by source since the last log line."""
        self._compilations = None
        if plan.config.parallel.compile != "none":
            from pretrain.observe.compilation import Compilations  # imports the compiler

            self._compilations = Compilations()

    def begin(self) -> None:
        """The first step is about to begin."""
        self.clock = SpeedClock()
        self._energy.take()

    def flops_of_a_token(self, consumed: int) -> int:
        """In the step that begins after `consumed` samples."""
        lengths = self.plan.data.lengths(consumed)
        if lengths not in self._flops_per_token:
            self._flops_per_token[lengths] = self.plan.flops_per_token(consumed)
        return self._flops_per_token[lengths]

    def count_sources(self, step: QueuedStep, figures: dict[str, Tensor]) -> None:
        """Add the losses of a step to those of its sources."""
        for name, loss, tokens in zip(self.plan.data.source_names, figures["source_losses"].tolist(), step.source_tokens):
            before = self._source_losses.get(name, (0.0, 0))
            self._source_losses[name] = before[0] + loss, before[1] + tokens

    def fill(self, record: StepRecord, samples: int, useful_seconds: float) -> None:
        """Put what was measured since the last line into a step's record, and begin anew.

        `samples`: those of the run up to the step; `useful_seconds`: see `Progress`.
        """
        waited = self.strategy.take_wait()
        if waited is not None:
            shares = self.ranks.sum("waiting for stages", torch.tensor(waited / self.clock.computed, dtype=torch.float64))
            record.pipeline_wait = float(shares) / self.ranks.world_size
        achieved, tokens = self.clock.flops_per_second, self.clock.tokens
        seconds = self.clock.seconds
        for name, value in self.clock.take().items():
            setattr(record, name, value)
        if self._compilations is not None and (done := self._compilations.take()):
            record.compiled, words = done
            log.info("step %d: %s", record.step, words)
        record.memory, joules = self._memory_and_energy()
        if joules is not None:
            record.watts, record.joules_per_token = joules / seconds, joules / tokens
        record.mfu = achieved / self._peak_flops if self._peak_flops else None
        record.seconds_left = self._seconds_left(record.step, samples)
        record.source_loss = {name: loss / n for name, (loss, n) in self._source_losses.items() if n} or None
        self._source_losses = {}
        record.shares = self.plan.data.shares(samples) or None
        if self.ranks.is_main:
            self._add_cost(record, useful_seconds)

    def _seconds_left(self, step: int, samples: int) -> float:
        steps, after = self.plan.config.run.steps - step, self.plan.data.samples_after
        if self.plan.config.data.pairs is not None:  # their batches have a fixed number of tokens, and any number of pairs
            return self.clock.left(steps / self.clock.timed_steps)
        # A later step may take more samples than those before it (`batch.ramp`).
        return self.clock.left((after(samples, steps) - samples) / (samples - after(self._samples_before, self.clock.left_out)))

    def _memory_and_energy(self) -> tuple[dict[str, float], float | None]:
        """The most bytes that ranks have used so far, the largest and the mean; and the joules of all devices, None if some do not count them."""
        device, size = self.ranks.device, self.ranks.world_size
        on_gpu = device.type == "cuda"
        own = torch.cuda.max_memory_allocated(device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._most_memory = max(self._most_memory, own)  # a profile resets torch's count
        values = torch.zeros(size + 2, dtype=torch.float64)
        values[self.ranks.rank] = self._most_memory
        values[-2:] = torch.tensor([self._energy.take(), not self._energy.counts])
        values = self.ranks.sum("memory and energy of the ranks", values)
        memory = {"largest": float(values[:size].max()), "mean": float(values[:size].mean())}
        return memory, None if values[-1] else float(values[-2])

    def _add_cost(self, record: StepRecord, useful_seconds: float) -> None:
        spent = self.directory.device_seconds
        record.device_hours, record.goodput = spent / 3600, useful_seconds / spent
        price = self.plan.config.log.device_hour_price
        if price is not None:
            record.cost = price * record.device_hours
