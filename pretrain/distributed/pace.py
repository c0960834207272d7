"""How long a rank works for itself in a step, without waiting for another rank, and whether its process does anything.

The ranks exchange nothing to know it.
"""

from __future__ import annotations

import collections
import os
import time

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
        self.on_gpu = False
        """Whether the parts of a step run on a GPU, and not in this thread."""
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
        looks = mark.exchanges and not self.on_gpu
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


# ---- what Linux counts of this process ---------------------------------------------------------------------------------


def waits_for_storage() -> bool:
    """Whether the main thread is inside a read, write or flush that the system has not finished (state D)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"D"
    except (OSError, IndexError):
        return False


def bytes_moved() -> int:
    """Bytes that this process has read and written, where the system counts them."""
    try:
        with open("/proc/self/io", "rb") as file:
            fields = dict(line.split(b":") for line in file.read().splitlines())
        return int(fields[b"rchar"]) + int(fields[b"wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def awake_seconds() -> float | None:
    """Seconds for which the main thread ran or waited for a processor. A processor that others use too makes a rank slow, so that counts."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            running, runnable, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(running) + int(runnable)) / 1e9
