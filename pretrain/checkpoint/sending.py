"""Several transfers at a time, in threads that do not keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pretrain.transfer import Cancelled

AT_ONCE = 4


def all_at_once(jobs: list[Callable[[Callable[[], bool]], object]]) -> None:
    """Call the jobs, `AT_ONCE` at a time, each with a function that says whether to stop. The first failure stops the others, and is raised."""
    waiting: queue.SimpleQueue[Callable[[Callable[[], bool]], object]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                waiting.get_nowait()(stop.is_set)
            except queue.Empty:
                return
            except Cancelled:
                return
            except BaseException as error:
                failures.append(error)
                stop.set()

    threads = [threading.Thread(target=work, name="upload of a file", daemon=True) for _ in range(min(AT_ONCE, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
