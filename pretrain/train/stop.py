"""Turns Ctrl-C and a scheduler's notice into a flag. The loop looks at it between steps, and long evaluations look at it inside."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

import torch

from pretrain.distributed.monitor import STOP_SIGNALS
from pretrain.distributed.ranks import Ranks


class StopRequest:
    """While active, each of STOP_SIGNALS asks for a stop; a SIGINT after any of them interrupts at once.

    `alone`: no other rank waits for this one.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self.reason: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup, to outlive its terminal
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.alone:
            return  # the launcher ends the others when one rank fails, and must not cut off this rank's last message
        while self._before:  # a script may call `main` again
            signal.signal(*self._before.popitem())

    def ignore(self) -> None:
        """The run is over and says so: nothing is left to stop. Its process may take seconds to end, and must not turn its success into a failure."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name


class Stopped(Exception):
    """An evaluation was abandoned because a rank was asked to stop. All ranks raise it at the same point."""


class StopPoll:
    """Whether any rank was asked to stop. The ranks agree on it about once a second, in work that all do in the same pieces."""

    SECONDS = 1.0

    def __init__(self, stop: StopRequest, ranks: Ranks) -> None:
        self._stop, self._ranks = stop, ranks
        self.begin()

    def begin(self) -> None:
        """Begin other work, whose pieces take an unknown time."""
        self._every = self._left = 1
        self._asked = time.monotonic()

    def check(self) -> None:
        """Call after each piece, on all ranks. Raises Stopped on all of them."""
        self._left -= 1
        if self._left:
            return
        seconds = torch.tensor([float(self._stop.reason is not None), time.monotonic() - self._asked], dtype=torch.float64)
        stops, total = self._ranks.sum("requests to stop", seconds).tolist()
        if stops:
            raise Stopped
        # The numbers are equal on every rank, so all do the same number of pieces until they ask again.
        mean = max(total / self._ranks.world_size, 1e-6)
        self._every = max(1, min(2 * self._every, int(self._every * self.SECONDS / mean)))
        self._left, self._asked = self._every, time.monotonic()
