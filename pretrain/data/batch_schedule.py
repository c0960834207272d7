"""How many samples each optimizer step takes: constant, or growing by a ramp; and how ranks share them in micro-steps. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.config.schema import Config
from pretrain.errors import ConfigError, nearest_multiples


@dataclass(frozen=True)
class BatchSchedule:
    """`ramp`: (until, sequences) in rising order: steps that begin before `until` consumed samples take so many. `sequences`
    is the size after the last of them.
    """

    sequences: int
    ramp: tuple[tuple[int, int], ...] = ()

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        return next((sequences for until, sequences in self.ramp if consumed < until), self.sequences)

    def consumed(self, steps: int) -> int:
        """Samples in the first `steps` steps of a run."""
        return self.after(0, steps)

    def after(self, consumed: int, steps: int) -> int:
        """Samples consumed `steps` steps after `consumed`."""
        for until, sequences in self._stages():
            here = steps if until is None else min(steps, max(0, -(-(until - consumed) // sequences)))
            consumed, steps = consumed + here * sequences, steps - here
        return consumed

    def step_of(self, position: int, consumed: int = 0, step: int = 0) -> int:
        """The step, counted from 1, that takes the sample at a stream position, after `step` steps that took `consumed`."""
        for until, sequences in self._stages():
            here = None if until is None else max(0, -(-(until - consumed) // sequences))
            if here is None or position < consumed + here * sequences:
                return step + (position - consumed) // sequences + 1
            consumed, step = consumed + here * sequences, step + here
        raise AssertionError("the last stage has no end")

    @property
    def sizes(self) -> list[int]:
        """Every size that occurs."""
        return [sequences for _, sequences in self._stages()]

    def _stages(self) -> Iterator[tuple[int | None, int]]:
        yield from self.ramp
        yield None, self.sequences


def check_micro_steps(config: Config, data_size: int) -> int:
    """Micro-steps of a step of `batch.sequences`. Raises ConfigError for a size, there or in the ramp, that so many ranks cannot share."""
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
