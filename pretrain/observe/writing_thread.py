"""The thread that writes what observes a run, so that slow storage does not hold up a step: metrics.jsonl, TensorBoard, status.json.

main thread --put--> at most MOST_WAITING writes that wait, in order --> thread;   drain: until all of them are done
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""Writes that wait in memory. With so many, the next one waits for the storage."""
FAILED_SECONDS = 30.0
"""How long a run that failed waits for storage that may be what hangs."""


class WritingThread:
    """Makes writes one after the other, in a thread that the first one starts. `waiting`: a context for the time that the caller has to wait.

    An exception in a write is raised by the next call here; the writes after it are made all the same.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._named = waiting
        self._changed = threading.Condition()
        self._writes: collections.deque[Callable[[], object]] = collections.deque()
        """Those that wait, and first the one that is being made."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: Exception | None = None

    def put(self, write: Callable[[], object]) -> None:
        """Make a write after those before it. If too many wait, wait for the storage. A closed writer makes it at once, in the caller's thread."""
        if self._closed:
            write()
            return
        self._wait_until_fewer_than(MOST_WAITING)
        self._raise_failure()
        with self._changed:
            self._writes.append(write)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until everything is written."""
        self._wait_until_fewer_than(1)
        self._raise_failure()

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, or this time is over. Any thread may call it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writes, seconds)

    def close(self, failed: bool = False) -> None:
        """Write what waits, and end the thread. After a failure of the run, hanging storage is given up on, and a warning says so."""
        if self._closed:
            return
        if failed:
            with self._named():
                self._wait_while_it_writes()
        else:
            self._wait_until_fewer_than(1)
        with self._changed:
            self._closed, left = True, len(self._writes)
            self._writes.clear()
            self._changed.notify_all()
        if left:
            log.warning("storage hangs: no log line could be written in %g s, so %d writes were given up", FAILED_SECONDS, left)
        elif self._thread is not None:
            self._thread.join()
        self._raise_failure()

    def _wait_until_fewer_than(self, most: int) -> None:
        if len(self._writes) < most:
            return
        with self._named(), self._changed:
            self._changed.wait_for(lambda: len(self._writes) < most)

    def _wait_while_it_writes(self) -> None:
        with self._changed:
            while left := len(self._writes):
                if not self._changed.wait_for(lambda left=left: len(self._writes) < left, FAILED_SECONDS):
                    return

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._closed)
                if self._closed:
                    return
                write = self._writes[0]
            try:
                write()
            except Exception as error:
                self._failure = self._failure or error
            with self._changed:
                if self._writes:  # `close` has not given up
                    self._writes.popleft()
                self._changed.notify_all()
