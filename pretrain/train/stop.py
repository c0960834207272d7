"""Ctrl-C and a scheduler's notice, turned into a flag that the loop looks at between steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """While active, SIGINT, SIGTERM and SIGUSR1 ask for a stop; a second SIGINT interrupts at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            return  # the launcher, which ends the others when one rank fails, must not cut off this one's last words
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
