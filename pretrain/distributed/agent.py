"""torchrun with messages: it says what it waits for while its nodes gather, and ends with one line in place of a
traceback. It counts the restarts since the run's newest checkpoint only.

launch/torchrun_multinode.sh starts this with torchrun's own arguments. The nodes' agents meet at the rendezvous, then start the
processes of the run; after a failure they meet again. If one node is told to stop, the run is saved and ends on all nodes, with exit code STOPPED.
With 0, a Job of Kubernetes would take the run for finished, and would not start the others again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    # Started by path, Python puts this file's folder first, where `monitor`, `switchboard`, ... would shadow other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from pretrain.config.load import load_config
from pretrain.errors import UserError, say
from pretrain.storage import read_object

STOPPED = 75
"""Exit code of a run that was told to stop and has saved its state (EX_TEMPFAIL of sysexits.h: try again)."""
GAINED = 76
"""Exit code of a run that failed, but has gained a checkpoint since this agent began. The next start may get further still."""
FIRST_WORD_SECONDS = 10.0
"""Wait after which the agent says what it waits for; then at twice the time, and so on, at most two minutes apart."""
_MOST_APART = 120.0
_GRACE_SECONDS = 5.0  # torchrun's own limit comes first
_TOLD = "a node of the run was told to stop; the run is saved, and the same command on all nodes continues it"
_speech = threading.RLock()
_spoken = threading.Event()


def main(arguments: list[str]) -> int:
    """Run torchrun. Returns 0 if the run has come to its end, STOPPED if it was told to stop and is saved, else GAINED or 1."""
    _import_quietly()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args

    options = parse_args(arguments)
    if options.log_dir is None and options.redirects == options.tee == "0":
        options.log_dir = os.devnull  # or torch leaves an empty folder in the temporary directory at each start
    gathering = Gathering(str(options.nnodes), options.rdzv_endpoint, join_seconds(options.rdzv_conf))
    left = LeftByRun(options.training_script_args)
    _wait_for_nobody_once(left.is_stopped)
    _count_restarts_without_progress(options.max_restarts, left.has_new_checkpoint)
    _Watch(gathering).start()
    try:
        problem = _run(options, gathering)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        return _fail(
            f"the process of rank {rank} (number {failure.pid} on this host) ended {how}; its last lines say why",
            left.code_of_failure(),
        )
    except SignalException as error:
        problem = f"ended by {signal.Signals(error.sigval).name}; status.json of the run says whether it was saved"
        return _fail(_TOLD, STOPPED) if left.is_stopped() else _fail(problem)
    if left.is_stopped():  # a head that was told to stop takes the rendezvous with it, which is no problem then
        return _fail(_TOLD, STOPPED)
    return 0 if problem is None else _fail(problem, left.code_of_failure())


def _run(options: argparse.Namespace, gathering: Gathering) -> str | None:
    """Run torchrun. Returns why it ended, or None if its processes have ended well. Raises ChildFailedError and SignalException."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError
    from torch.distributed.run import run

    try:
        run(options)
    except RendezvousClosedError:
        return f"the rendezvous of {gathering.where} is closed: the run has ended on the other nodes; start it again on all"
    except RendezvousConnectionError as error:
        if "is_host=1" in options.rdzv_conf:
            return f"{options.rdzv_endpoint} is taken by another program or run; choose another port for HEAD on all nodes"
        return f"{gathering.failure()} ({error})"
    except RendezvousError:
        return gathering.failure()
    return None


def _import_quietly() -> None:
    """Import torch without its C++ log of every attempt to connect. torch reads the level once; the run's processes keep theirs."""
    given = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = given or "FATAL"
    import torch.distributed  # noqa: F401

    if given is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


def join_seconds(configuration: str) -> float:
    """The limit that torchrun was given, or its default."""
    pairs = dict(item.split("=", 1) for item in configuration.split(",") if "=" in item)
    return float(pairs.get("join_timeout", 600))


@dataclass(frozen=True)
class Gathering:
    """What the agents of a run wait for: `nodes` of them, as torchrun is told, at `endpoint` within `limit` seconds."""

    nodes: str
    endpoint: str
    limit: float

    @property
    def alone(self) -> bool:
        return self.nodes in ("1", "1:1")

    @property
    def where(self) -> str:
        return f"{'1 node' if self.alone else f'{self.nodes} nodes'} at {self.endpoint}"

    def failure(self) -> str:
        """The error when the nodes do not gather."""
        return f"{self.where} did not gather within {self.limit:g} s (JOIN_SECONDS); this one is {socket.gethostname()}: {self.state()}"

    def state(self) -> str:
        """The state of the meeting point as this agent sees it, and the remedy."""
        endpoint = self.endpoint
        host, _, port = endpoint.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
        except socket.gaierror as error:
            return f"{host} cannot be resolved ({error.strerror}); set HEAD to the head node"
        except ConnectionRefusedError:
            return f"nobody listens at {endpoint}; start the head node, or set HEAD to it on every node"
        except (OSError, ValueError) as error:
            return f"{endpoint} does not answer ({error}); look at the network, or set HEAD to the head node"
        if self.alone:
            return f"another program has {endpoint}; choose another port in HEAD"
        return (
            f"{endpoint} is there; start the other nodes, with the same NODES, HEAD and RUN_ID on all, or choose another port if another "
            "program has this one"
        )


class LeftByRun:
    """What the run that torchrun starts with these arguments leaves in its directory: status.json and checkpoints."""

    def __init__(self, arguments: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--config", default="")
        parser.add_argument("overrides", nargs="*")
        self._folder: Path | None = None
        try:
            given, _ = parser.parse_known_intermixed_args(arguments)
            run = load_config(given.config, given.overrides)[0].run
            self._folder = Path(run.dir) / run.name
        except (UserError, OSError, argparse.ArgumentError):
            pass  # the processes say what is wrong
        self._before = self._status()
        self.newest = self._first = self._newest_checkpoint()
        """The step of the newest complete checkpoint that was seen; -1 if there was none."""

    def _status(self) -> dict[str, Any]:
        return {} if self._folder is None else read_object(self._folder / "status.json")

    def _newest_checkpoint(self) -> int:
        try:
            manifests = [] if self._folder is None else list(self._folder.glob("checkpoints/step-*/manifest.json"))
        except OSError:
            manifests = []
        names = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in manifests)
        return max((int(name[1]) for name in names if name), default=-1)

    def is_stopped(self) -> bool:
        """Whether the processes were told to stop, and have saved, since this object was made."""
        now = self._status()
        return now != self._before and now.get("state") == "preempted"

    def has_new_checkpoint(self) -> bool:
        """Whether the run has come further, by a checkpoint, than at any call before."""
        before, self.newest = self.newest, max(self.newest, self._newest_checkpoint())
        return self.newest > before

    def code_of_failure(self) -> int:
        """GAINED if the run has come further, by a checkpoint, since this object was made; else 1."""
        self.has_new_checkpoint()
        return GAINED if self.newest > self._first else 1


def _wait_for_nobody_once(is_stopped: Callable[[], bool]) -> None:
    """At the end torchrun waits five minutes for the agents of all nodes. That of a node that was told to stop has ended and does not come."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    # Private. It is called when the processes have ended well, and not when they are only started again.
    real = SimpleElasticAgent._exit_barrier
    SimpleElasticAgent._exit_barrier = lambda self: None if is_stopped() else real(self)


def _count_restarts_without_progress(limit: int, has_progressed: Callable[[], bool]) -> None:
    """Let torchrun start the processes again `limit` times after each progress. It counts for the life of the run, and a long run uses up any number."""
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    # Private. It is called several times a second; after a failure, torchrun then looks whether a restart is left.
    real = LocalElasticAgent._monitor_workers

    def monitored(self: Any, workers: Any) -> Any:
        result = real(self, workers)
        if result.state == WorkerState.FAILED and has_progressed():
            # torchrun numbers its starts by the difference of both, and no number may come twice.
            workers.spec.max_restarts += limit - self._remaining_restarts
            self._remaining_restarts = limit
        return result

    LocalElasticAgent._monitor_workers = monitored


class _Watch(threading.Thread):
    """Reports while this host has no processes of the run. Ends torchrun if its own limit does not work."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__(name="words", daemon=True)
        self.gathering = gathering

    def run(self) -> None:
        gathering, since, word = self.gathering, time.monotonic(), FIRST_WORD_SECONDS
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            if _has_processes():
                since, word = now, FIRST_WORD_SECONDS
            elif now - since > gathering.limit + _GRACE_SECONDS:
                # If another program than torchrun's store listens there, torch waits for its answer forever.
                _fail(gathering.failure())
                os._exit(1)
            elif now - since > word:
                word = now - since + min(now - since, _MOST_APART)
                say(
                    f"{socket.gethostname()} waits for {gathering.where} ({now - since:.0f} of {gathering.limit:g} s, JOIN_SECONDS): "
                    f"{gathering.state()}"
                )


def _has_processes(tasks: Path = Path("/proc/self/task")) -> bool:
    """Whether this process has children. If the system does not say (Linux without CONFIG_PROC_CHILDREN, a sandbox), assume that it has some. Then
    nothing is reported, and no run is ended.
    """
    try:
        children = [path.read_text() for path in tasks.glob("*/children")]
    except OSError:
        return True
    return not children or any(text.strip() for text in children)


def _fail(line: str, code: int = 1) -> int:
    """Print why this process ends; return `code`. Only the first line is printed: on a busy host torchrun and `_Watch` may come to the limit together."""
    with _speech:  # a process that ends in the middle of the line would cut it
        if not _spoken.is_set():
            _spoken.set()
            say(f"error: {line}", to_errors=True)
    return code


def _end(number: int, frame: FrameType | None) -> Any:
    """Handle a signal that comes before torchrun has its own handlers."""
    _fail(f"ended by {signal.Signals(number).name} before the nodes had gathered")
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
