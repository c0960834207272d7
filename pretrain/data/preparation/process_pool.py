"""Independent jobs over processes that notice each other's death.

    parent ──job──▶ child        one pipe per child
    parent ◀─reports, result── child

If the parent is killed, a child reads the end of its pipe and exits. If a child is killed, the work ends with an error. (The
standard library's pools leave children behind forever in the first case.) Jobs and results are small, because the data is in
files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from pretrain.errors import DataError

_THREADS = "TOKENIZERS_PARALLELISM"  # "false" keeps `tokenizers` from starting threads: the processes already use all cores


def usable_cores() -> int:
    """The cores that this process may compute on: a share of the host's, where Slurm, a container or `taskset` says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessPool:
    """Up to `count` spawned processes, started on first use. With a `count` of 1, this process itself.

    The calling script needs a main guard. Use it in a `with` block.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._children: dict[Connection, Any] = {}

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._children.items():
            connection.close()
            process.terminate()
        for process in self._children.values():
            process.join()

    def run(
        self, function: Callable[[Any, Callable[[Any], None]], Any], jobs: Sequence[Any], on_report: Callable[[Any], None]
    ) -> Iterator[tuple[int, Any]]:
        """(number of the job, `function(job, report)`) in the order in which they finish.

        Values that a job passes to `report` reach `on_report` here. Jobs start in order. The first error ends the work and is
        raised here. Raises DataError if a process dies.
        """
        if self._count == 1 or len(jobs) <= 1:
            with _one_thread():
                for number, job in enumerate(jobs):
                    yield number, function(job, on_report)
            return
        self._start(min(self._count, len(jobs)))
        waiting, free = enumerate(jobs), list(self._children)
        under_way: dict[Connection, int] = {}
        while True:
            for connection, (number, job) in zip(free, waiting):
                under_way[connection] = number
                with contextlib.suppress(BrokenPipeError):  # it died: the next read from it shows that
                    connection.send((function, job))
            if not under_way:
                return
            free = []
            for connection in wait(list(under_way)):
                kind, value = self._receive(connection)
                if kind == "report":
                    on_report(value)
                elif kind == "error":
                    error, text = value
                    raise error from RuntimeError(text)
                else:
                    free.append(connection)
                    yield under_way.pop(connection), value

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # pyarrow's threads do not survive a fork
        while len(self._children) < count:
            ours, theirs = context.Pipe()
            self._children[ours] = process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError) as error:
            process = self._children[connection]
            process.join(10)
            raise DataError(
                f"a worker process died (exit code {process.exitcode}), most likely because memory ran out: use fewer --workers;"
                " finished work is kept, and the same command continues it"
            ) from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        yield
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its children
    os.environ[_THREADS] = "false"
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            function, job = connection.recv()
            try:
                message = "result", function(job, lambda value: connection.send(("report", value)))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                text = traceback.format_exc()
                try:
                    pickle.loads(pickle.dumps(error))
                except Exception:  # an error that cannot be pickled is sent as text
                    error = RuntimeError(text)
                message = "error", (error, text)
            connection.send(message)
