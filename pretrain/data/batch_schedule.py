"""How many samples each optimizer step takes: constant, or growing by a ramp. A pure function of the samples consumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
