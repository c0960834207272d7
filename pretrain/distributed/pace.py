"""How long a rank works for itself in a step, without waiting for another rank. The ranks exchange nothing to know it."""

from __future__ import annotations

import collections
import time

from pretrain.distributed.activity import awake_seconds
from pretrain.distributed.standing import Mark

STEPS = 16
"""How many steps the mean covers."""


class Pace:
    """The time between the starts of two steps, less what the main thread waited for other ranks.

    It waits in control operations. On a CPU it also waits whenever it sleeps in a part that exchanges gradients (`Mark.exchanges`). On a GPU
    the host does not see that wait, so the time includes it.
    """

    def __init__(self) -> None:
        self.step = 0
        """The step that this rank is in, or that it is about to begin."""
        self.sees_sleep = True
        """Whether this thread computes itself, as on a CPU."""
        self._own: collections.deque[float] = collections.deque(maxlen=STEPS)
        self._begun: float | None = None
        self._waited = 0.0

    def begin_step(self, number: int) -> None:
        """Called by the main thread before the ranks agree on a step."""
        now = time.monotonic()
        if self._begun is not None and number == self.step + 1:
            self._own.append(max(0.0, now - self._begun - self._waited))
        self.step, self._begun, self._waited = number, now, 0.0

    def enter(self, mark: Mark) -> tuple[float, float | None]:
        """Called by the main thread at the begin of an operation. Pass the result to `leave`."""
        looks = mark.exchanges and self.sees_sleep
        return time.monotonic(), awake_seconds() if looks else None

    def leave(self, mark: Mark, entered: tuple[float, float | None]) -> None:
        """Called by the main thread at the end of the operation."""
        begun, awake = entered
        passed = time.monotonic() - begun
        if mark.waiting:
            self._waited += passed
        elif awake is not None and (now := awake_seconds()) is not None:
            self._waited += max(0.0, passed - (now - awake))

    @property
    def own_seconds(self) -> float | None:
        """The mean of the last steps; None before the first one is over."""
        own = list(self._own)
        return sum(own) / len(own) if own else None
