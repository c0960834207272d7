"""A sink in a thread of its own: a slow or broken network never holds up a step."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
import traceback
from pathlib import Path

from pretrain.config.schema import Config
from pretrain.observe.logs import TRACEBACKS
from pretrain.observe.metrics import StepRecord
from pretrain.observe.sinks import Sink

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Records that wait in memory. After that the oldest is dropped for each new one."""
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for the last records to be sent."""


class InBackground(Sink):
    """Gives the records to another sink, in a thread. While that sink fails they wait in memory, and it is tried again every 30 s."""

    def __init__(self, sink: Sink, retry_seconds: float = RETRY_SECONDS, close_seconds: float = CLOSE_SECONDS) -> None:
        self.sink, self.name = sink, sink.name
        self._retry, self._close = retry_seconds, close_seconds
        self._waiting: collections.deque[StepRecord] = collections.deque()
        self._changed, self._ends, self._dropped = threading.Condition(), False, 0
        self._is_open = self._fails = False

    def open(self, directory: Path, config: Config, step: int) -> None:
        self._start = directory, config, step
        self._thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(record)
            self._changed.notify()

    def close(self) -> None:
        if not hasattr(self, "_thread"):
            return
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(self._close)
        lost = len(self._waiting) + self._dropped
        if self._thread.is_alive():
            log.warning("%s: has not ended within %g s; the run ends without it", self.name, self._close)
        if lost:
            log.warning("%s: %d log lines could not be sent; metrics.jsonl has them", self.name, lost)

    def _work(self) -> None:
        """The thread: open the sink, send what waits, close it."""
        while True:
            with self._changed:
                until = time.monotonic() + self._retry
                while not self._ends and (self._fails or not self._waiting):
                    left = until - time.monotonic() if self._fails else None
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(left)
                ends = self._ends
            self._send()
            if ends:
                break
        if self._is_open:
            self.sink.failed = self.failed
            try:
                self.sink.close()
            except Exception as error:
                self._warn(error, "its end could not be recorded")

    def _send(self) -> None:
        try:
            if not self._is_open:
                self._open()
            while (record := self._take()) is not None:
                try:
                    self.sink.write(record)
                except Exception:
                    self._waiting.appendleft(record)
                    raise
        except Exception as error:
            if not self._fails:
                self._warn(error, f"the run goes on; log lines wait in memory, and it is tried again every {self._retry:g} s")
            self._fails = True
            return
        if self._fails:
            log.warning("%s: works again; all log lines that waited were sent", self.name)
            self._fails = False

    def _take(self) -> StepRecord | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _open(self) -> None:
        try:
            self.sink.open(*self._start)
        except Exception:
            with contextlib.suppress(Exception):  # what it took before it failed
                self.sink.close()
            raise
        self._is_open = True

    def _warn(self, error: Exception, what: str) -> None:
        log.warning("%s: %s: %s; %s", self.name, type(error).__name__, " ".join(str(error).split())[:300], what)
        logging.getLogger(TRACEBACKS).error("%s", "".join(traceback.format_exception(error)))
