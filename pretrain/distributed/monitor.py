"""A thread of every rank that knows what the rank is doing, answers the switchboard, and ends the process when nothing else can.

While the main thread waits in a collective it can neither speak nor look at a signal. This thread can:

    the main rank waits for 10 s          it says for whom, again after 20 s, 40 s, ...
    a collective fails                    the switchboard finds out why, and every rank ends with the same line (`explain`)
    a rank has ended, or is gone          a rank that makes no progress for 30 s after that ends with a line
    told to stop, no progress for 15 s    the stacks of all threads go to the log; where it is certain that a rank hangs, the run ends

It is certain when each rank that the others wait for is gone, does not answer, or has not computed, read or written for a minute. A
busy rank is never ended, however long it takes. A rank that saves or loads counts as busy for `timeout_seconds`, because storage may let it
wait without a sign.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.distributed.channel import Channel, is_communication
from pretrain.distributed.inquiries import ANSWER_SECONDS
from pretrain.distributed.pace import Pace, bytes_moved, waits_for_storage
from pretrain.distributed.roll_call import interval
from pretrain.distributed.standing import Mark
from pretrain.errors import LostRankError, UserError, flush_output, print_error

log = logging.getLogger(__name__)

SAY_SECONDS = 10.0
"""Seconds after which the main rank says for whom it waits; then at twice the time, and so on."""
LOST_SECONDS = 30.0
"""How long a rank goes on without progress after another one has ended."""
STOP_SECONDS = 15.0
"""Time without progress after which a rank that was told to stop writes its stacks to the log and asks the switchboard who hangs."""
IDLE_SECONDS = 60.0
"""How long a rank must have done nothing at all to count as hanging, once a rank was told to stop."""
LEAVE_SECONDS = 60.0
"""How long a rank whose collective has failed may take to end by itself."""
_VERDICT_SECONDS = 8.0
_TICK_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What tells a run to stop. SIGHUP: its terminal was closed, or the connection to it is lost."""

SWITCHBOARD = -1
"""`Doom.of`, if this rank has lost its connection to the switchboard."""


@dataclass
class Doom:
    """The reason to end this process at `deadline`, unless it makes progress before. `final`: end it in any case; `of`: the rank
    that is gone, or SWITCHBOARD.
    """

    line: str
    patience: float
    deadline: float
    final: bool = False
    of: int | None = None


class Monitor(threading.Thread):
    """This rank's end of the switchboard's connection. `attach` gives it one; `start` and `close` are called by the main thread."""

    def __init__(self, rank: int, local_rank: int, timeout_seconds: float, world_size: int = 1) -> None:
        super().__init__(name="monitor", daemon=True)
        self.rank, self.local_rank, self.timeout_seconds, self.world_size = rank, local_rank, timeout_seconds, world_size
        self.news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """The switchboard's messages while the ranks are joining (joining.py)."""
        self.on_end: Callable[[str], None] | None = None
        """Called with the line before this thread ends the process: status.json, the log."""
        self.on_ranks: Callable[[dict[str, Any]], None] | None = None
        """Called on the main rank with what all ranks do, every few seconds (roll_call.py). It must not wait for anything."""
        self.pace = Pace()
        self.switchboard_seconds: Callable[[], float] = lambda: 0.0
        """Processor time of this process's switchboard: it serves all ranks also where this one hangs."""
        self.log_file: Path | None = None
        self.main_rank = "rank 0"
        self.heard = 0.0
        """When the switchboard last said something."""
        self.mark, self.since = Mark(), time.monotonic()
        self._parts: list[Mark] = []
        self._channel: Channel | None = None
        self.requested: dict[str, Any] | None = None
        """The `request` that has not been answered yet."""
        self._reconnect: Callable[[], tuple[Channel, list[dict[str, Any]]]] | None = None
        self._verdict: str | None = None
        self._judged = threading.Event()
        self._doom: Doom | None = None
        self._stop_asked: float | None = None
        self._stop_name = ""
        self._stacks_dumped = False
        self._said = 0.0  # how long the wait was when it was last said
        self._asked_stuck = 0.0
        self._activity, self._active = (0.0, 0), time.monotonic()
        self._looked = 0.0
        self._closed = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._signal_before = -1

    # ---- what the main thread says ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def doing(
        self, name: str, waiting: bool = False, device: bool = False, storage: bool = False, exchanges: bool = False
    ) -> Iterator[None]:
        """Name an operation, so that all can know that this rank is in it. A collective that fails in it is explained."""
        mark = Mark(self.mark.number + waiting, name, waiting, device, storage, exchanges=exchanges)
        self._set(mark)
        self._parts.append(mark)
        entered = self.pace.enter(mark)
        try:
            yield
        except RuntimeError as error:
            if not is_communication(error):
                raise
            raise self.explain(error) from error
        finally:
            self._parts.pop()
            self.pace.leave(mark, entered)
            outside = self._parts[-1] if self._parts else Mark(name=name, past=True)
            self._set(replace(outside, number=self.mark.number, waiting=False))

    def _set(self, mark: Mark) -> None:
        self.mark, self.since, self._said = mark, time.monotonic(), 0.0

    def explain(self, error: BaseException) -> LostRankError:
        """The line that every rank ends with after a collective failed here. It asks the switchboard for the reason."""
        mark, text = self.mark, str(error)
        timed_out = "imed out" in text or "imeout" in text
        reason = text.splitlines()[0].rpartition("] ")[2] if text else type(error).__name__
        if self._verdict is None:
            self.send(
                "broken",
                number=mark.number,
                name=mark.name,
                waiting=mark.waiting,
                timed_out=timed_out,
                seconds=self.timeout_seconds,
                reason=reason,
            )
            self._judged.wait(_VERDICT_SECONDS)
        line = self._verdict
        if line is None:
            verb = f"did not come to an end within {self.timeout_seconds:g} s" if timed_out else "broke off"
            line = f"'{mark.name}' {verb}: {self._doom.line if self._doom else self._silence()}"
        self._doom = Doom(line, LEAVE_SECONDS, time.monotonic() + LEAVE_SECONDS, final=True)
        return LostRankError(line)

    def attach(
        self, channel: Channel, said: list[dict[str, Any]], reconnect: Callable[[], tuple[Channel, list[dict[str, Any]]]]
    ) -> None:
        """Use this connection to the switchboard. `said`: the messages that came already; `reconnect` opens another connection, and
        returns the same two, if this one breaks off.
        """
        self._reconnect = reconnect
        self._channel = channel  # first: what came may be a call, which is answered
        self._take(said)
        self._poke()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the switchboard, if there is a connection."""
        channel = self._channel  # the thread may set it to None meanwhile
        if channel is not None:
            with contextlib.suppress(OSError):  # the thread notices, and looks for the switchboard
                channel.send(kind, **values)

    def request(self, kind: str, **values: Any) -> None:
        """Send a message that must arrive: as long as it is `requested`, it is sent again whenever the connection had broken off."""
        self.requested = {"kind": kind, **values}
        self.send(**self.requested)

    def keep_record(self, folder: Path, on_end: Callable[[str], None]) -> None:
        """Set the directory of this rank's log. `on_end` records the line if this thread has to end the process."""
        self.log_file, self.on_end = folder / f"rank-{self.rank}.log", on_end
        if self.rank == 0:
            self.send("logs", folder=str(folder))

    def listen_to_signals(self) -> None:
        """Notice signals even while the main thread is inside a collective. Call it from the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._signal_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Say goodbye: from now on failures of other ranks no longer matter here."""
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            now = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._signal_before if now == self._waker.fileno() else now)
        self._poke()
        self.join(2 * _TICK_SECONDS)
        if self._channel is not None:
            self._channel.close()
        if not self.is_alive():
            self._wake.close()
            self._waker.close()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._closed:
            channel, poll = self._channel, select.poll()  # select() knows no descriptor above 1023
            for source in (self._wake, channel):
                if source is not None:
                    poll.register(source, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(1000 * _TICK_SECONDS)]
            if self._closed:
                return
            if self._wake.fileno() in ready:
                self._hear_signals()
            if channel is not None and channel.fileno() in ready:
                self._hear(channel)
            if time.monotonic() - self._looked >= 0.9 * _TICK_SECONDS:
                self._looked = time.monotonic()
                self._look(self._looked)

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wake.recv(64):
                if number in STOP_SIGNALS and self._stop_asked is None:
                    self._stop_asked, self._stop_name = time.monotonic(), signal.Signals(number).name
                    if self._doom and not self._doom.final:
                        self._doom.patience = min(self._doom.patience, STOP_SECONDS / 5)
                        self._doom.deadline = min(self._doom.deadline, time.monotonic() + self._doom.patience)

    def _hear(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except (OSError, ValueError):
            channel.close()
            self._channel = None
            self._find_switchboard_again()
            return
        self._take(messages)

    def _take(self, messages: list[dict[str, Any]]) -> None:
        self.heard = time.monotonic()
        for message in messages:
            kind = message["kind"]
            if kind == "call":
                more = {"step": self.pace.step, "own": self.pace.own_seconds}
                self.send(
                    "at", call=message["call"], mark=asdict(self.mark), seconds=self._seconds(), idle=self._idle(), **more
                )
            elif kind == "ranks":
                if (tell := self.on_ranks) is not None:
                    tell(message["roll"])
            elif kind == "verdict":
                self._verdict = message["line"]
                self._judged.set()
                self._expect_end(message["line"])
            elif kind in ("left", "gone"):
                self._expect_end(message["line"], message.get("rank"))
                self.news.put(message)
            elif kind == "back" and self._doom is not None and self._doom.of == message["rank"]:
                self._doom = None  # only the connection was lost
            elif kind == "awaited" and message["number"]:
                self._say(message)
            else:
                self.news.put(message)

    def _find_switchboard_again(self) -> None:
        """Look for the switchboard once a second. If only the connection broke, nothing is lost; else its process has ended."""
        if self._reconnect is not None and not self._closed:
            try:
                channel, said = self._reconnect()
            except (OSError, ValueError, RuntimeError, UserError):
                pass
            else:
                if self._doom is not None and self._doom.of == SWITCHBOARD and not self._doom.final:
                    self._doom = None
                    self._judged.clear()
                self._channel = channel
                self._take(said)
                if (requested := self.requested) is not None:
                    self.send(**requested)
                return
        self._expect_end(f"{self.main_rank} is gone without a word (killed?)", SWITCHBOARD)
        self._judged.set()

    def _expect_end(self, line: str, of: int | None = None) -> None:
        if self._doom is None:
            patience = STOP_SECONDS / 5 if self._stop_asked else LOST_SECONDS
            self._doom = Doom(line, patience, time.monotonic() + patience, of=of)

    def _seconds(self) -> float:
        return time.monotonic() - self.since

    def _idle(self) -> float:
        """Seconds for which this process has done nothing. Work on a GPU cannot be seen, nor can an interruptible wait for storage
        (FUSE, Lustre), so both count as busy. A wait for storage does so for `timeout_seconds` at most: no rank waits longer for a
        save or a load.
        """
        if self.mark.device and self.pace.on_gpu:
            return 0.0
        if self.mark.storage and self._seconds() < self.timeout_seconds:
            return 0.0
        return min(time.monotonic() - self._active, self._seconds())

    def _look(self, now: float) -> None:
        """Once a second: look for what has lasted too long."""
        activity = time.process_time() - self.switchboard_seconds(), bytes_moved()
        is_busy = activity[0] - self._activity[0] > 0.02 or activity[1] - self._activity[1] > 1 << 16
        if is_busy or waits_for_storage():
            self._active = now
        self._activity = activity
        if self._channel is None and self._doom is not None and self._doom.of == SWITCHBOARD:
            self._find_switchboard_again()
        if self._doom is not None:
            if not self._doom.final and self.since > self._doom.deadline - self._doom.patience:
                self._doom.deadline = self.since + self._doom.patience  # it still makes progress
            if now > self._doom.deadline:
                self._end(self._doom.line)
            return
        self._look_at_wait()
        self._look_at_stop(now)

    def _look_at_wait(self) -> None:
        mark, seconds = self.mark, self._seconds()
        # Nobody can say whether a part on the device computes or waits. So ask all the same, and report ranks that are late or silent.
        if self.rank == 0 and (mark.waiting or mark.device) and seconds >= max(SAY_SECONDS, 2 * self._said):
            self._said = seconds
            self.send("ask", number=mark.number)
        is_over = mark.device and self.pace.on_gpu and seconds > self.timeout_seconds
        if is_over and time.monotonic() - self._asked_stuck > STOP_SECONDS:
            # gloo's collectives fail by themselves. NCCL's would end the process without a message a little later.
            self._asked_stuck = time.monotonic()
            line = f"'{mark.name}' did not come to an end within {self.timeout_seconds:g} s (parallel.timeout_seconds)"
            self.send("stuck", line=line, number=mark.number, idle=0)

    def _say(self, message: dict[str, Any]) -> None:
        mark, seconds = self.mark, self._seconds()
        if message["number"] != mark.number or not (mark.waiting or mark.device):
            return  # it has gone on meanwhile
        if message["late"]:
            log.warning("waiting %.0f s at '%s': %s", seconds, mark.name, message["late"])
        elif mark.waiting:
            log.warning(
                "waiting %.0f s at '%s', where all ranks are: the network between the hosts is slow or down", seconds, mark.name
            )

    def _look_at_stop(self, now: float) -> None:
        if self._stop_asked is None or now - max(self._stop_asked, self.since) < STOP_SECONDS:
            return
        if not self._stacks_dumped:
            self._stacks_dumped = True
            self._dump_stacks(f"told to stop by {self._stop_name}, and still in '{self.mark.name}'")
        # All ranks are told to stop at once, and each asks as long as the last checkpoint is saved; a launcher gives them 100 s or so.
        if now - self._asked_stuck > max(STOP_SECONDS / 2, 2 * ANSWER_SECONDS, min(interval(self.world_size), 20.0)):
            line = f"told to stop by {self._stop_name}, and the run hangs"
            if self._asked_stuck > max(self.heard, self._stop_asked):
                self._expect_end(f"{line}: {self._silence()}")  # a live main rank's switchboard would have answered
            self._asked_stuck = now
            self.send("stuck", line=line, number=self.mark.number, idle=IDLE_SECONDS)

    def _silence(self) -> str:
        return f"{self.main_rank} does not answer (stopped, or its host or network is down)"

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _dump_stacks(self, line: str) -> None:
        if self.log_file is None:
            return
        with contextlib.suppress(OSError), self.log_file.open("a", encoding="utf-8") as file:
            file.write(f"{line}; the stacks of all threads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _end(self, line: str) -> None:
        """Record the line and end the process, because the main thread cannot."""

        def record() -> None:
            self._dump_stacks(line)
            if self.on_end is not None:
                self.on_end(line)

        self.send("left", line=line, alone=False, error="LostRankError", traceback=False)
        recording = threading.Thread(target=record, daemon=True)
        recording.start()
        recording.join(10.0)  # storage may be what hangs
        print_error(LostRankError(line))
        flush_output()
        os._exit(LostRankError.exit_code)
