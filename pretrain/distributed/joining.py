"""From separate processes to a run: they find the main rank, agree (agreement.py), and start together, or end together with one line.

The main rank listens at MASTER_ADDR:MASTER_PORT. If torchrun's agent holds a store there, the store says where the main rank
listens. The others look for it while they open their data. A process that fails before all have come tells the rest (`leave`,
`tell`), and a process that waits says for whom.
"""

from __future__ import annotations

import contextlib
import json
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pretrain import errors
from pretrain.distributed.agreement import difference, digest_of
from pretrain.distributed.channel import SEND_SECONDS, Channel, hello
from pretrain.distributed.launcher import (
    CONNECT_SECONDS,
    MeetingPoint,
    addresses_of_this_host,
    launched_ranks,
    store_at,
    wrong_address,
)
from pretrain.distributed.monitor import Monitor
from pretrain.distributed.switchboard import Switchboard, start_switchboard
from pretrain.errors import LaunchError, LostRankError, UserError, line_of, say
from pretrain.storage import allow_open_files

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

FIRST_WORD_SECONDS = 5.0
"""Seconds after which a waiting process says for whom it waits; then at twice the time, and so on, at most _MOST_APART seconds apart."""
_MOST_APART = 60.0
HELLO_SECONDS = 60.0
"""How long the main rank may take to answer a process that comes. Thousands come at once, while it imports and plans."""
OTHER_FILES = 512
"""Files that the main rank opens besides connections: libraries, data, logs."""
TELL_SECONDS = 10.0
"""How long a process that failed tries to let the others know."""
_LINGER_SECONDS = 2.0  # how long the main rank stays at the end, after the switchboard has sent its last messages


class _NotYet(ValueError):
    """torchrun's store does not say yet where the main rank listens."""


class Meeting:
    """The control plane of one process: the connection to the switchboard, and in the main rank's process the switchboard itself.

    With `world_size` 1 it does nothing. Call `join` once the plan is made, and `leave` at the end, with the error if the
    process failed.
    """

    def __init__(self, rank: int, local_rank: int, world_size: int, join_seconds: float, timeout_seconds: float) -> None:
        global _open
        if _open is not None:
            _open.close()
        self.rank, self.local_rank, self.world_size, self.join_seconds = rank, local_rank, world_size, join_seconds
        self.monitor: Monitor | None = None
        self.switchboard: Switchboard | None = None
        self.store: dist.Store | None = None
        self.hosts: list[str] = []
        self._problem = ""
        self._refusal: LaunchError | None = None
        self._digest: str | None = None
        self._found: dict[str, Any] = {}
        self._passed_on: BaseException | None = None
        self._gave_up = False
        self._over = threading.Event()
        self._attached = threading.Event()
        self._main_address, self._token = "", ""
        if world_size == 1:
            return
        self.point = MeetingPoint.of_environment()
        limit = allow_open_files(1024 + 16 * world_size)  # the switchboard, torch's store and gloo connect ranks
        if rank == 0:
            self._refusal = _problem_of_files(limit, world_size)
            self.switchboard = start_switchboard(world_size, self.point.port if self.point.attempt is None else 0)
        _open = self
        self.monitor = Monitor(rank, local_rank, timeout_seconds, world_size)
        if self.switchboard is not None:
            self.monitor.switchboard_seconds = lambda: self.switchboard.seconds
        self.monitor.listen_to_signals()
        self.monitor.start()
        threading.Thread(target=self._look_for_switchboard, name="joining", daemon=True).start()

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Name the work before `join`, for the ranks that wait. If this rank is refused, that explains an error in the work."""
        if self._refusal is not None:
            raise self._refusal
        with self.monitor.doing(name) if self.monitor else contextlib.nullcontext():
            try:
                yield
            except UserError as error:
                if self._refusal is not None:
                    raise self._refusal from error
                raise

    # ---- the connection -----------------------------------------------------------------------------------------------

    def _look_for_switchboard(self) -> None:
        pause = 0.05
        while not self._over.is_set():
            try:
                if self.switchboard is not None and self.point.attempt is not None and self.store is None:
                    self.store = self.point.agent_store()
                    place = {
                        "port": self.switchboard.port,
                        "addresses": addresses_of_this_host(self.point),
                        "token": self.switchboard.token,
                    }
                    self.store.set("switchboard", json.dumps(place))
                channel, said = self._connect(HELLO_SECONDS)
            except LaunchError as error:
                self._refusal = error
                self._attached.set()
                return
            except (OSError, ValueError, RuntimeError) as error:
                self._problem = self._words_of(error)
            else:
                self.monitor.attach(channel, said, self._connect)
                self._attached.set()
                return
            self._over.wait(pause)
            pause = min(2 * pause, 1.0)

    def _connect(self, patience: float = SEND_SECONDS) -> tuple[Channel, list[dict[str, Any]]]:
        """A connection to the switchboard and its first messages. Raises OSError or ValueError, and LaunchError if it refuses this rank."""
        problem: Exception = ConnectionRefusedError()
        for place in self._places():
            try:
                channel = Channel(socket.create_connection(place, CONNECT_SECONDS))
            except OSError as error:
                problem = error
                continue
            self._problem = self._words_of(ValueError())  # as long as it says nothing
            self._main_address = channel.connection.getpeername()[0]
            try:
                return channel, hello(channel, self.rank, self.world_size, self._token, patience)
            except (OSError, ValueError, LaunchError) as error:
                channel.close()
                if isinstance(error, LaunchError):
                    raise
                problem = error
        raise problem

    def _places(self) -> list[tuple[str, int]]:
        if self.switchboard is not None:
            return [("127.0.0.1", self.switchboard.port)]
        if self.point.attempt is None:
            return [(self.point.host, self.point.port)]
        if self.store is None:
            self.store = self.point.agent_store()
        if not self.store.check(["switchboard"]):
            raise _NotYet("rank 0 has not come")
        found = json.loads(self.store.get("switchboard"))
        self._token = found["token"]
        return [(address, found["port"]) for address in found["addresses"]]

    def _words_of(self, error: Exception) -> str:
        where = self.point.name
        if isinstance(error, _NotYet):
            return str(error)
        if isinstance(error, socket.gaierror):
            return f"MASTER_ADDR={self.point.host} cannot be resolved ({error.strerror})"
        if isinstance(error, ConnectionRefusedError):
            return f"nobody listens at {where} (MASTER_ADDR:MASTER_PORT)"
        if isinstance(error, (ValueError, ConnectionError)):
            return f"another program, or another version, listens at {where} (MASTER_ADDR:MASTER_PORT) in place of rank 0"
        return f"{where} (MASTER_ADDR:MASTER_PORT) does not answer ({error})"

    # ---- joining ------------------------------------------------------------------------------------------------------

    def from_main(self, name: str, find: Callable[[], T]) -> T:
        """What `find` finds on the main rank, a JSON value, for all ranks: it may come out otherwise on another one. The others wait for it."""
        if self.world_size == 1:
            return find()
        with self.doing(f"wait for the main rank's {name}"):
            waiting = _Wait(self)
            if self.rank == 0:
                self._found[name] = find()
                waiting.until(self._attached.is_set)
                self.monitor.request("found", found={name: self._found[name]})
            waiting.until(lambda: name in self._found)
        return self._found[name]

    def join(
        self, facts: dict[str, Any], machine: str, on_difference: Callable[[list[str]], object] | None = None
    ) -> list[str]:
        """Wait until all ranks have come and agree. Return lines about machines that differ, which is allowed.

        `facts`: flat values that must be equal on all ranks; `on_difference` gets a line for each that is not. Afterwards `store` is
        torch's store of this run and `hosts` the host of each rank. Raises LaunchError, or the error that ended another rank.
        """
        with self.doing("wait for the other processes"):
            waiting = _Wait(self)
            waiting.until(self._attached.is_set)
            own = digest_of(facts)
            if self.rank == 0:
                self.monitor.request("facts", digest=own, facts=facts, torch=self._offer_store())
            waiting.until(lambda: self._digest is not None)
            if self._digest != own:
                self.monitor.request("want")
                main = waiting.message("facts")
                who = f"rank {self.rank} ({socket.gethostname()})"
                line, everything = difference(facts, main["facts"], who, main["of"])
                if on_difference is not None:
                    on_difference(everything)
                raise LaunchError(line)
            self.monitor.request("ready", machine=machine)
            go = waiting.message("go")
            self.monitor.requested = None
            self.hosts = go["hosts"]
            self.monitor.main_rank = f"rank 0 ({self.hosts[0]})"
            if self.store is None:
                addresses = dict.fromkeys([self._main_address, *go["torch"]["addresses"]])
                self.store = store_at(addresses, go["torch"]["port"], self.point, self.rank)
        return go["notes"]

    def _offer_store(self) -> dict[str, Any] | None:
        """torch's store, in this process, at a port of its own; None if torchrun has a store."""
        if self.point.attempt is not None:
            return None
        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return {"port": self.store.port, "addresses": addresses_of_this_host(self.point)}

    # ---- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye, with the error that ends this process, if any. The main rank stays for a moment, so that all hear of it."""
        if self.monitor is None:
            return
        if error is None:
            self.monitor.send("bye")
        else:
            error.told = True
            self._attached.wait(0 if self._gave_up else TELL_SECONDS)
            alone = not isinstance(error, LostRankError) and error is not self._passed_on
            kind, is_ours = type(error).__name__, isinstance(error, UserError)
            self.monitor.send("left", line=line_of(error), alone=alone, error=kind, traceback=not is_ours)
            if self.switchboard is not None:
                waited_long = self.switchboard.went or self._gave_up
                self.switchboard.everyone_left.wait(_LINGER_SECONDS if waited_long else TELL_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connections and end the threads."""
        global _open
        _open = None
        self._over.set()
        if self.monitor is not None:
            self.monitor.close()
        if self.switchboard is not None:
            self.switchboard.close()

    def passed_on(self, line: str, error: str) -> UserError:
        """The error that ended another rank, as this rank's error."""
        kind = getattr(errors, error, LostRankError)
        is_ours = isinstance(kind, type) and issubclass(kind, UserError)
        self._passed_on = (kind if is_ours else LostRankError)(line)
        return self._passed_on


_open: Meeting | None = None


def close_meeting() -> None:
    """Say goodbye in the meeting that is open, if there is one."""
    if _open is not None:
        _open.leave()


class _Wait:
    """The wait of `Meeting.join`: takes news, says what is missing, gives up in the end."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.monitor = meeting, meeting.monitor
        self.started = self.progress = time.monotonic()
        self.next_word = FIRST_WORD_SECONDS
        self.came = 1
        self.late = ""

    def until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self._step()

    def message(self, kind: str) -> dict[str, Any]:
        while True:
            message = self._step()
            if message is not None and message["kind"] == kind:
                return message

    def _step(self) -> dict[str, Any] | None:
        """The next message of the switchboard; None if none came within a moment. Raises the error that ends the wait."""
        meeting = self.meeting
        if meeting._refusal is not None:
            raise meeting._refusal
        message = None
        with contextlib.suppress(queue.Empty):
            message = self.monitor.news.get(timeout=0.1)
        if message is None:
            self._look(time.monotonic())
            return None
        kind = message["kind"]
        if kind in ("welcome", "digest"):
            meeting._digest = message["digest"] or meeting._digest
        if kind in ("welcome", "found"):
            meeting._found |= message["found"]
        if kind in ("left", "gone"):
            raise meeting.passed_on(message["line"], message.get("error", "LostRankError"))
        elif kind == "say":
            if meeting.rank:  # the main rank hears its own messages, which say nothing of the missing ranks
                self.progress = time.monotonic()
            if meeting.local_rank == 0:
                say(message["line"])
        elif kind == "awaited":
            self._count(message)
        return message

    def _look(self, now: float) -> None:
        meeting, seconds = self.meeting, now - self.started
        limit = f"{meeting.join_seconds:g} s (parallel.join_seconds)"
        is_found = meeting._attached.is_set()
        patience = meeting.join_seconds
        if is_found and meeting.rank:  # as long as the main rank is heard, it decides
            self.progress, patience = max(self.progress, self.monitor.heard), patience + 2 * _MOST_APART
        if now - self.progress > patience:
            meeting._gave_up = True
            missing = self.late.partition("; waiting")[0] or ("rank 0 says nothing" if is_found else meeting._problem)
            raise LaunchError(f"the processes of the run did not meet within {limit}: {missing}; {self._remedy(is_found)}")
        if seconds < self.next_word:
            return
        self.next_word = seconds + min(max(seconds, FIRST_WORD_SECONDS), _MOST_APART)
        if is_found:
            self.monitor.send("ask", number=0)
        elif meeting.local_rank == 0:
            say(f"rank {meeting.rank} waits for rank 0: {meeting._problem}; up to {limit}")

    def _remedy(self, is_found: bool) -> str:
        if is_found:
            hint = wrong_address(self.meeting.point) if self.meeting.rank == 0 else ""
            return hint or "start every process of the run, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        return "start rank 0, and set MASTER_ADDR to its host"

    def _count(self, message: dict[str, Any]) -> None:
        """Handle the switchboard's list of missing and busy ranks. Ranks that have connected and are busy may take their time."""
        now, meeting = time.monotonic(), self.meeting
        if message["came"] != self.came or not message["some_absent"]:
            self.came, self.progress = message["came"], now
        if not message["late"]:
            return
        self.late = f"{self.came} of {meeting.world_size} processes are here, {message['late']}"
        if message["some_absent"]:
            left = max(0.0, meeting.join_seconds - (now - self.progress))
            self.late += f"; waiting up to {left:.0f} s more (parallel.join_seconds)"
            if meeting.rank == 0 and (hint := wrong_address(meeting.point)):
                self.late += f"; {hint}"
        if meeting.rank == 0:
            self.monitor.send("say", line=self.late)
        elif message["main_is_busy"] and meeting.local_rank == 0:
            say(self.late)  # the main rank does not wait yet


def tell(error: UserError) -> None:
    """Tell the other processes, if they can be reached, that this one failed before it joined them."""
    if error.told:
        return
    with contextlib.suppress(UserError):
        rank, local_rank, world_size = launched_ranks()
        Meeting(rank, local_rank, world_size, TELL_SECONDS, TELL_SECONDS).leave(error)


def _problem_of_files(limit: int, world_size: int) -> LaunchError | None:
    """The error if the main rank may open too few files for the connections of the switchboard, torch's store and gloo to each rank."""
    needed = 3 * world_size + OTHER_FILES
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    return LaunchError(
        f"rank 0 ({socket.gethostname()}) may open {limit} files, and needs {needed} to be connected with {world_size} ranks; raise the hard "
        f"limit of every host, with ulimit -n {needed}, before the start"
    )
