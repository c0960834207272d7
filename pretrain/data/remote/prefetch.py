"""Files brought in the background, ahead of those who will ask for them."""

from __future__ import annotations

import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pretrain.data.remote.transfer import Cancelled
from pretrain.errors import DataError

log = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0
Item = TypeVar("Item")


class _Queue(Generic[Item]):
    """What the threads share. They hold this and not the Prefetcher, so that dropping it ends them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: collections.deque[Item] = collections.deque()
        self.running: set[Item] = set()
        self.threads: list[threading.Thread] = []
        self.closed = False


class Prefetcher(Generic[Item]):
    """Calls `fetch(item, cancelled)` in up to `threads` daemon threads, first asked first served. Safe between threads.

    At most `longest` items wait: where more are asked for, those asked for first are given up (whoever needs them fetches them).
    `fetch` should end with `Cancelled` soon after `cancelled()` is true. A DataError is logged and not raised: the reader that
    needs the file meets it. After a fork the child starts with an empty queue and threads of its own.
    """

    def __init__(self, fetch: Callable[[Item, Callable[[], bool]], None], threads: int = 2, longest: int = 64):
        self._fetch = fetch
        self._threads = threads
        self._longest = longest
        self._start()

    def add(self, items: Iterable[Item]) -> None:
        """Fetch these soon. Returns at once."""
        if os.getpid() != self._process:
            self._start()
        queue = self._queue
        with queue.changed:
            if queue.closed:
                return
            for item in items:
                if item not in queue.waiting and item not in queue.running:
                    queue.waiting.append(item)
            while len(queue.waiting) > self._longest:
                queue.waiting.popleft()
            while len(queue.threads) < min(self._threads, len(queue.waiting) + len(queue.running)):
                thread = threading.Thread(target=_work, args=(queue, self._fetch), daemon=True, name="prefetch")
                queue.threads.append(thread)
                thread.start()
            queue.changed.notify_all()

    def wait(self) -> None:
        """Until nothing is left to do."""
        if os.getpid() != self._process:
            return
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: self._queue.closed or not (self._queue.waiting or self._queue.running))

    def close(self) -> None:
        """Give up what waits, cancel what runs, and end the threads. Happens by itself when the object goes, or Python ends."""
        self._finalizer()

    def _start(self) -> None:
        self._process = os.getpid()
        self._queue: _Queue[Item] = _Queue()
        self._finalizer = weakref.finalize(self, _close, self._queue, self._process)


def _work(queue: _Queue, fetch: Callable) -> None:
    while True:
        with queue.changed:
            queue.changed.wait_for(lambda: queue.closed or queue.waiting)
            if queue.closed:
                return
            item = queue.waiting.popleft()
            queue.running.add(item)
        try:
            fetch(item, lambda: queue.closed)
        except Cancelled:
            return
        except DataError as error:
            log.warning("prefetch: %s", error)
        except Exception:  # a defect of ours or of a backend; the reader meets it again, with its own traceback
            log.exception("prefetch of %s", item)
        finally:
            with queue.changed:
                queue.running.discard(item)
                queue.changed.notify_all()


def _close(queue: _Queue, process: int) -> None:
    if os.getpid() != process:  # a forked child: the threads are the parent's
        return
    with queue.changed:
        queue.closed = True
        queue.waiting.clear()
        queue.changed.notify_all()
    for thread in queue.threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
