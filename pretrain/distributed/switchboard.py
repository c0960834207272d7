"""How the processes of a run hear of each other: every rank keeps a connection to a thread of the main rank's process.

    rank                                 switchboard
    hello    who I am            ──▶     welcome, or refused (a RANK given twice, another WORLD_SIZE)
    found    by the main rank    ──▶     found     to everyone: take it over
    facts    of the main rank    ──▶     digest    to everyone: compare yourself with it (agreement.py)
    want     my digest differs   ──▶     facts     of the main rank, to find the difference
    ready    I agree             ──▶     go        when all are
    say      who is missing      ──▶     say       to everyone, by the main rank, as long as it waits
    left     my last words       ──▶     left      to everyone
    bye      I have finished
    (the connection breaks off)          gone      to everyone; back, if the rank comes again
    logs     where our logs are
    ask      who is awaited?     ──▶     call      to everyone ──▶ at (what I am doing) ──▶ answer
    broken   my collective failed ─▶     verdict   to everyone: one line, and who is to blame
    stuck    told to stop, and cannot ▶  verdict   if it is certain that a rank hangs
    (every 3 s, once the run has logs)   call      to everyone ──▶ at ──▶ ranks, to the main rank: what all do (roll_call.py)

Messages are lines of JSON, and nothing in them is executed.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrain.distributed.channel import LONGEST_HELLO, PROTOCOL, Channel, listen
from pretrain.distributed.roll_call import ANSWER_PATIENCE, interval, roll
from pretrain.distributed.standing import Mark, Standing, awaited, hung, listing, numbers, pointer, verdict

log = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""How long a rank may take to say what it is doing before it counts as silent."""


_ROLL = -1
"""`call` of a roll call: its answers conclude no inquiry."""


@dataclass
class _Inquiry:
    """A question to the ranks. The switchboard concludes it when they have told what they do, or at `deadline`."""

    deadline: float
    conclude: Callable[[], None]
    is_enough: Callable[[], bool] | None
    """None: when all have answered."""


class Switchboard(threading.Thread):
    """Listens at `port`. All state belongs to the thread; other threads read `went`, `seconds` and `everyone_left`, and call `close`."""

    def __init__(self, world_size: int, port: int) -> None:
        super().__init__(name="switchboard", daemon=True)
        self.world_size = world_size
        self.server = listen(port)
        self.port = self.server.getsockname()[1]
        self.token = secrets.token_hex(8)
        """Tells this switchboard from another one, if its address was found in a store and not given."""
        self.everyone_left = threading.Event()
        """Set when every other rank has sent its last message, or is lost."""
        self._standings = [Standing(0, socket.gethostname()), *(Standing(rank) for rank in range(1, world_size))]
        self._channels: dict[int, Channel] = {}
        self._machines: dict[int, str] = {}
        self._found: dict[str, Any] = {}
        self._facts: dict[str, Any] | None = None
        self._failure: dict[str, str] | None = None  # of the start
        self.went = False
        self.seconds = 0.0  # of a processor, that the thread has used
        self._verdict: str | None = None
        self._logs: str | None = None
        self._calls = 0
        self._answered: set[int] = set()
        self._silent_since: dict[int, float] = {}
        self._inquiries: list[_Inquiry] = []
        self._next_roll, self._roll_ends = 0.0, None  # when the ranks are called again; until when they may answer
        self._called: set[int] = set()  # those that have not answered the last roll call
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()

    def run(self) -> None:
        self._selector.register(self.server, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        closing = False
        while not closing:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self.server:
                    self._accept()
                elif isinstance(key.fileobj, Channel):
                    self._hear(key.fileobj, key.data)
                else:  # the other end of _wake is closed
                    closing = True
            self._conclude()
            self._call_the_roll()
            self.seconds = time.thread_time()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def close(self) -> None:
        """Close every connection. It raises nothing, whatever state the thread is in."""
        self._waker.close()  # wakes the thread; a message could come too late, when it has closed its end
        self.join(5.0)

    # ---- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self.server.accept()
        except OSError:  # gone again
            return
        self._selector.register(Channel(connection, LONGEST_HELLO), selectors.EVENT_READ, [])

    def _hear(self, channel: Channel, who: list[int]) -> None:
        """`who`: the rank at the other end, once it has said hello."""
        if channel.fileno() < 0:  # dropped a moment ago
            return
        try:
            for message in channel.receive():
                if not who:
                    self._on_hello(channel, who, message)
                else:
                    handler = getattr(self, f"_on_{message['kind']}", None)
                    if handler is not None:
                        handler(self._standings[who[0]], message)
        except OSError:
            self._drop(channel, who)
        except Exception:  # this thread must survive any exception, or nobody hears of a lost rank
            if who:  # a stranger may send anything, a rank only valid messages
                log.exception("rank %d sent a message that cannot be understood; its connection is closed", who[0])
            self._drop(channel, who)

    def _drop(self, channel: Channel, who: list[int]) -> None:
        if channel.fileno() < 0:  # dropped a moment ago
            return
        self._selector.unregister(channel)
        channel.close()
        if who and self._channels.get(who[0]) is channel:
            del self._channels[who[0]]
            standing = self._standings[who[0]]
            if standing.left is None:
                standing.gone = True
                line = listing([standing]) + pointer([standing], self._logs)
                self._broadcast("gone", line=line, rank=standing.rank)
                self._fail(line, "LostRankError")
        self._look_who_left()

    def _send(self, rank: int, kind: str, /, **values: Any) -> None:
        channel = self._channels.get(rank)
        if channel is not None:
            try:
                channel.send(kind, **values)
            except OSError:
                self._drop(channel, [rank])

    def _broadcast(self, kind: str, /, **values: Any) -> None:
        for rank in list(self._channels):
            self._send(rank, kind, **values)

    def _look_who_left(self) -> None:
        if all(s.is_lost for s in self._standings[1:]):
            self.everyone_left.set()

    # ---- the start ----------------------------------------------------------------------------------------------------

    def _on_hello(self, channel: Channel, who: list[int], message: dict[str, Any]) -> None:
        if message["kind"] != "hello" or message["protocol"] != PROTOCOL or message["token"] not in ("", self.token):
            raise ValueError("a stranger")
        rank, host, process = int(message["rank"]), str(message["host"]), int(message["process"])
        if rank < 0:
            raise ValueError("a stranger")
        problem = self._problem_of(rank, host, process, int(message["world_size"]))
        if problem:
            channel.send("refused", line=problem)
            self._fail(problem, "LaunchError")
            return
        standing = self._standings[rank]
        again = standing.came
        standing.came, standing.host, standing.process, standing.gone = True, host, process, False
        self._called.discard(rank)
        who.append(rank)
        channel.trust()
        self._channels[rank] = channel
        channel.send("welcome", digest=self._facts and self._facts["digest"], found=self._found)
        if again:
            self._broadcast("back", rank=rank)
        if self._failure is not None:
            channel.send("left", **self._failure)

    def _fail(self, line: str, error: str) -> None:
        """Fail the start: every rank that is here, and every one that comes later, ends with `line`."""
        if not self.went and self._failure is None:
            self._failure = {"line": line, "error": error}
            self._broadcast("left", **self._failure)

    def _problem_of(self, rank: int, host: str, process: int, world_size: int) -> str | None:
        main = self._standings[0]
        if world_size != self.world_size:
            return (
                f"rank {rank} ({host}) has WORLD_SIZE={world_size}, {main.title} {self.world_size}; "
                "start all nodes with the same command and the same number of nodes and processes"
            )
        known = self._standings[rank]
        if known.came and (known.host, known.process) != (host, process):
            return (
                f"RANK={rank} was given to two processes: {known.process} on {known.host} and {process} on {host}; give each "
                "process a RANK of its own, and each run a MASTER_PORT of its own"
            )
        return None

    def _on_found(self, standing: Standing, message: dict[str, Any]) -> None:
        self._found |= message["found"]
        self._broadcast("found", found=self._found)

    def _on_facts(self, standing: Standing, message: dict[str, Any]) -> None:
        self._facts = {"digest": message["digest"], "facts": message["facts"], "torch": message["torch"]}
        self._broadcast("digest", digest=message["digest"])

    def _on_want(self, standing: Standing, message: dict[str, Any]) -> None:
        self._send(standing.rank, "facts", facts=self._facts["facts"], of=self._standings[0].title)

    def _on_ready(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.ready = True
        self._machines[standing.rank] = message["machine"]
        self._go_if_all_are_ready()

    def _go_if_all_are_ready(self) -> None:
        if not self.went and all(s.ready and not s.is_lost for s in self._standings):
            self.went = True
            hosts = [s.host for s in self._standings]
            self._broadcast("go", hosts=hosts, notes=self._notes(), torch=self._facts["torch"])

    def _notes(self) -> list[str]:
        """A line about machines that differ, which is allowed."""
        kinds: dict[str, list[int]] = {}
        for rank, machine in sorted(self._machines.items()):
            kinds.setdefault(machine, []).append(rank)
        if len(kinds) < 2:
            return []
        parts = [f"{kind} on rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}" for kind, ranks in kinds.items()]
        return [f"the machines differ: {'; '.join(parts)}: the slowest sets the pace, and last bits may differ between them"]

    def _on_say(self, standing: Standing, message: dict[str, Any]) -> None:
        self._broadcast("say", line=message["line"])

    # ---- what the ranks are doing -------------------------------------------------------------------------------------

    def _on_logs(self, standing: Standing, message: dict[str, Any]) -> None:
        self._logs = message["folder"]

    def _on_at(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.mark = Mark(**message["mark"])
        standing.seconds, standing.idle, standing.silent = message["seconds"], message["idle"], False
        standing.step, standing.own, standing.heard = message["step"], message["own"], time.monotonic()
        self._silent_since.pop(standing.rank, None)
        self._called.discard(standing.rank)
        if message["call"] == self._calls:
            self._answered.add(standing.rank)
        self._go_if_all_are_ready()  # it may have been silent for a moment when the last one became ready

    def _on_ask(self, standing: Standing, message: dict[str, Any]) -> None:
        """Answer who is awaited: at control operation `number`, or for the start (`number` 0)."""

        def conclude() -> None:
            number = message["number"]
            late = awaited(self._standings, number) if number else [s for s in self._standings if not s.ready or s.is_lost]
            late = [s for s in late if s.rank != standing.rank]
            came = sum(s.came and not s.gone for s in self._standings)
            absent = [s.rank for s in late if not s.came or s.is_lost]
            busy = [s.rank for s in late if s.rank not in absent]
            self._send(standing.rank, "awaited", late=listing(late), came=came, absent=absent, busy=busy, number=number)

        self._inquire(conclude)

    def _on_broken(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.broken = True
        if self._verdict is not None:
            self._send(standing.rank, "verdict", line=self._verdict)
            return

        def is_enough() -> bool:
            # A killed process is known as soon as its connection closes, and one that failed has said so. In a part of a step all
            # ranks get their time: those that notice nothing are the suspects.
            if any(s.left_alone or s.gone for s in self._standings):
                return True
            late = [s for s in self._standings if s.mark and s.mark.number < message["number"]]
            return message["waiting"] and bool(late) and self._all_answered()

        def conclude() -> None:
            if self._verdict is None:
                self._judge(verdict(self._standings, message, self._logs))

        self._inquire(conclude, is_enough)

    def _on_stuck(self, standing: Standing, message: dict[str, Any]) -> None:
        """Handle a rank that was told to stop and cannot, or has waited as long as it may for work on the device."""
        self._send(standing.rank, "heard")

        def conclude() -> None:
            if self._verdict is not None:
                return
            if message["idle"]:
                found = hung(self._standings, message["idle"])
            else:
                late = awaited(self._standings, message["number"])
                found = [s for s in late if s.rank != standing.rank and (s.is_surely_lost or not s.is_lost)]
            if found:
                self._judge(f"{message['line']}: {listing(found)}{pointer(found, self._logs)}")

        self._inquire(conclude)

    def _judge(self, line: str) -> None:
        self._verdict = line
        self._broadcast("verdict", line=line)
        self._look_who_left()

    def _inquire(self, conclude: Callable[[], None], is_enough: Callable[[], bool] | None = None) -> None:
        """Call every rank, and `conclude` when the answers are enough (`is_enough`; by default all), or after ANSWER_SECONDS."""
        if not self._inquiries:
            self._calls += 1
            self._answered.clear()
            self._broadcast("call", call=self._calls)
        deadline = time.monotonic() + ANSWER_SECONDS
        self._inquiries.append(_Inquiry(deadline, conclude, is_enough))

    def _all_answered(self) -> bool:
        return all(s.rank in self._answered for s in self._standings if self._is_expected(s))

    def _is_expected(self, standing: Standing) -> bool:
        return standing.came and standing.left is None and not standing.gone

    def _patience(self) -> float | None:
        times = [inquiry.deadline for inquiry in self._inquiries]
        if self._logs is not None:
            times.append(self._roll_ends if self._roll_ends is not None else self._next_roll)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _call_the_roll(self) -> None:
        """Call all ranks now and then, and tell the main rank what they do. It judges nobody: a rank that does not answer is only shown."""
        now = time.monotonic()
        if self._logs is None:
            return
        if self._roll_ends is None and now >= self._next_roll:
            self._next_roll, self._roll_ends = now + interval(self.world_size), now + ANSWER_PATIENCE
            for rank in [rank for rank in self._channels if rank not in self._called]:  # a stopped rank's calls do not pile up
                self._called.add(rank)
                self._send(rank, "call", call=_ROLL)
        elif self._roll_ends is not None and (now >= self._roll_ends or not self._called & self._channels.keys()):
            self._roll_ends = None
            self._send(0, "ranks", roll=roll(self._standings, now))

    def _conclude(self) -> None:
        # Once for all of them: a thousand ranks that wait ask at the same time.
        have_all_answered = bool(self._inquiries) and self._all_answered()
        for inquiry in list(self._inquiries):
            is_over = time.monotonic() >= inquiry.deadline
            if is_over or (inquiry.is_enough() if inquiry.is_enough else have_all_answered):
                self._inquiries.remove(inquiry)
                for standing in self._standings:
                    if is_over and self._is_expected(standing) and standing.rank not in self._answered:
                        since = self._silent_since.setdefault(standing.rank, time.monotonic() - ANSWER_SECONDS)
                        standing.silent, standing.unheard = True, time.monotonic() - since
                inquiry.conclude()

    def _on_left(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.left, standing.left_alone = message["line"], message["alone"]
        if message["traceback"]:
            standing.left += pointer([standing], self._logs)
        if message["alone"]:
            self._fail(listing([standing]), message["error"])
            if self.went:
                self._broadcast("left", line=listing([standing]), error="LostRankError")
        self._look_who_left()

    def _on_bye(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.left = "finished"
        self._look_who_left()
