"""Worker processes that stay alive between tests, so that `import torch` is paid once.

`launch(world_size, function, *arguments)` runs a module-level function on that many ranks, with the environment that torchrun
would give them, and returns their results in rank order. A failure in any rank raises RankFailure with its traceback, and the
workers, which may be stuck in a collective with a rank that is gone, are replaced.

`start_ranks` starts processes for one test that may hang, be killed, or end each other; they too come from a server that has
imported torch already.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 240
OTHERS_SECONDS = 3
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUBLAS_WORKSPACE_CONFIG")
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pretrain.train.session"]


class RankFailure(AssertionError):
    """A rank raised; the message is its traceback, and those of others that raised because of it."""


class LaunchPool:
    """At most `size` ranks, started when first needed."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.workers: list[tuple[multiprocessing.Process, Connection]] = []

    def launch(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.workers:
            self._start()
        port = _free_port()
        for rank, (_, connection) in enumerate(self.workers[:world_size]):
            values = (rank, rank, world_size, "127.0.0.1", port)
            environment = dict(zip(_ENVIRONMENT, map(str, values))) if world_size > 1 else {}
            connection.send((environment, list(sys.path), function.__module__, function.__qualname__, arguments))
        try:
            return self._collect(world_size)
        except BaseException:  # pytest's time limit too: the next test would take what these ranks still answer for its own
            self.close()
            raise

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.workers[:world_size])}
        deadline = time.monotonic() + LIMIT_SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                stacks = self._stacks(sorted(waiting.values()))
                self.close()
                raise RankFailure(
                    f"ranks {sorted(waiting.values())} did not answer in {LIMIT_SECONDS} s; they were in\n{stacks}"
                )
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    succeeded, value = False, "the process ended"
                if succeeded:
                    results[rank] = value
                    continue
                failures[rank] = str(value)
                # Which rank failed first is not known: others that lost it say so a moment later, or have said so before.
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        if failures:
            self.close()
            raise RankFailure("\n".join(f"rank {rank}:\n{value}" for rank, value in sorted(failures.items())))
        return [results[rank] for rank in range(world_size)]

    def _stacks(self, ranks: list[int]) -> str:
        """Where all threads of these ranks are."""
        for rank in ranks:
            os.kill(self.workers[rank][0].pid, signal.SIGUSR2)
        time.sleep(1.0)
        return "\n".join(f"rank {rank}:\n{Path(self.folder.name, str(rank)).read_text()}" for rank in ranks)

    def _start(self) -> None:
        context = _server()
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, Path(self.folder.name, str(rank))), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        if self.workers:
            self.folder.cleanup()
        self.workers = []


@dataclass
class RankProcess:
    """A process that was started for one test; what it prints is in a file."""

    process: multiprocessing.Process
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.exitcode

    def printed(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def wait(self, seconds: float) -> int:
        """Its exit code; -9 after SIGKILL. AssertionError with what it printed if it does not end in time."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s:\n{self.printed()}"
        return self.process.exitcode


def start_ranks(
    folder: Path, world_size: int, function: Callable[..., Any], *arguments: Any, only: Sequence[int] | None = None
) -> list[RankProcess]:
    """Start `function(*arguments)` on all ranks, or `only` on some; its result is the exit code. Kill what is left at the end."""
    context, port, ranks = _server(), _free_port(), []
    for rank in range(world_size) if only is None else only:
        values = dict(zip(_ENVIRONMENT, map(str, (rank, rank, world_size, "127.0.0.1", port))))
        output = folder / f"rank-{rank}.out"
        process = context.Process(target=_run_once, args=(values, list(sys.path), output, function, arguments), daemon=True)
        process.start()
        ranks.append(RankProcess(process, output))
    return ranks


def _run_once(
    environment: dict[str, str], paths: list[str], output: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    sys.path[:] = paths
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    _end_with_pytest()
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.exit(function(*arguments))


def _end_with_pytest() -> None:
    """End this process when pytest's has ended, also while it computes, and however pytest ended. The server that forks it would live on with it."""

    def wait_and_end() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()


def _server() -> multiprocessing.context.ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(connection: Connection, stacks: Path) -> None:
    import torch
    import torch.distributed as dist

    from pretrain.distributed.joining import close_meeting
    from pretrain.distributed.ranks import forget_meshes

    _end_with_pytest()
    torch.set_num_threads(1)
    os.fsync = lambda file: None  # tests kill processes; none of them cuts the power
    gc.freeze()  # a run ends with a collection, which need not look at modules
    faulthandler.register(signal.SIGUSR2, stacks.open("w"))
    while True:
        try:
            environment, paths, module, name, arguments = connection.recv()
        except EOFError:
            return
        for variable in _ENVIRONMENT:
            os.environ.pop(variable, None)
        os.environ.update(environment)
        sys.path[:] = paths
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            # A monitor that outlives its run would take the next one's start for the main rank's death, and end this process.
            close_meeting()
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
