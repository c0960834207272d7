"""Commands of the program in processes of their own that start in a moment, that can be killed, and whose memory is bounded."""

from __future__ import annotations

import functools
import importlib.util
import io
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

BYTES = 6 << 30


class Command:
    """`tool` is `run` (pretrain/run.py) or the name of a file in tools/. What it starts is killed with it."""

    def __init__(self, tool: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, tool, arguments, dict(environment or {})))
        self.process.start()
        theirs.close()

    def wait(self, seconds: float) -> tuple[int, str] | None:
        """Exit code and what was printed; None where it is not done by then. What a process printed that ended at once is lost."""
        try:
            return self.connection.recv() if self.connection.poll(seconds) else None
        except EOFError:
            self.process.join(10)
            return self.process.exitcode, f"the process ended with {self.process.exitcode}"

    def kill(self) -> None:
        """SIGKILL to the process and to what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


@functools.cache
def _context() -> Any:
    """The server that processes are forked from has imported what they need; a first one waits for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "pretrain.train.session", "pretrain.train.trainer"])
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def outcome(tool: str, *arguments: str, seconds: float) -> tuple[int, str]:
    """Exit code and what was printed; code -1 where it is not done after `seconds`, or died."""
    command = Command(tool, *arguments)
    try:
        return command.wait(seconds) or (-1, f"not done after {seconds:g} s")
    finally:
        command.kill()


def is_refusal(code: int, printed: str) -> bool:
    """Whether a command said no as it should: exit code 1 or 2, a last line with `error:`, no traceback."""
    lines = printed.strip().splitlines()
    return code in (1, 2) and bool(lines) and "error: " in lines[-1] and "Traceback (most recent" not in printed


def _run(connection: Any, tool: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    import torch

    os.setpgrp()
    os.environ.update(environment)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            code = _main(tool)(list(arguments))
        connection.send((code or 0, printed.getvalue()))
    except SystemExit as end:
        connection.send((end.code if isinstance(end.code, int) else 1, f"{printed.getvalue()}\n{end.code}"))
    except BaseException:
        connection.send((-1, printed.getvalue() + traceback.format_exc()))


def _main(tool: str) -> Any:
    if tool == "run":
        from pretrain.run import main

        return main
    path = Path(__file__).resolve().parents[2] / "tools" / f"{tool}.py"
    spec = importlib.util.spec_from_file_location(tool, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main
