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
    (the connection breaks off)          gone      to everyone; back, if the rank comes again. Before the start (go) the rank has
                                                   RETURN_SECONDS for that, then everyone ends
    logs     where our logs are
    ask      who is awaited?     ──▶     call      to everyone ──▶ at (what I am doing) ──▶ answer
    broken   my collective failed ─▶     verdict   to everyone: one line, and who is to blame
    stuck    told to stop, and cannot ▶  verdict   if it is certain that a rank hangs
    (every 3 s, once the run has logs)   call      to everyone ──▶ at ──▶ ranks, to the main rank: what all do (roll_call.py)

Messages are lines of JSON, and nothing in them is executed.
"""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from pretrain.distributed.channel import LONGEST_HELLO, PROTOCOL, Channel, encoded, listen
from pretrain.distributed.inquiries import Inquiries
from pretrain.distributed.roll_call import ANSWER_PATIENCE, interval, roll
from pretrain.distributed.standing import (
    Mark,
    Standing,
    awaited,
    hung,
    listing,
    machines_that_differ,
    misplaced,
    pointer,
    verdict,
)
from pretrain.errors import LaunchError

log = logging.getLogger(__name__)

RETURN_SECONDS = 5.0
"""How long a rank whose connection broke off before the start may take to come back. A rank that lives tries at once, and then every second."""
_ROLL = -1
"""`call` of a roll call: its answers conclude no inquiry."""


def start_switchboard(world_size: int, port: int) -> Switchboard:
    """Start the switchboard of this process at `port` (0: at any free one). Raises LaunchError."""
    try:
        switchboard = Switchboard(world_size, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"rank 0: port {port} of {socket.gethostname()} (MASTER_PORT) is taken by another program or another run; set "
                "MASTER_PORT to a free port on all nodes"
            ) from error
        raise LaunchError(
            f"rank 0: MASTER_PORT={port} cannot be listened at ({error.strerror}); set it to a free port"
        ) from error
    switchboard.start()
    return switchboard


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
        self._failure: dict[str, str] | None = None  # the first of a rank
        self._ended: set[int] = set()  # ranks that are gone, or ended for their own reason
        self._missed: dict[int, float] = {}  # ranks that are gone before the start, and until when they may come back
        self._go: dict[str, Any] = {}
        self.went = False
        self.seconds = 0.0  # of a processor, that the thread has used
        self._verdict: str | None = None
        self._logs: str | None = None
        self._is_full = False  # it could open no more files
        self._broken_off: list[tuple[Channel, list[int]]] = []  # where sending failed
        self._reported: set[tuple[int, bool]] = set()
        self._inquiries = Inquiries(self._standings, self._channels.keys(), lambda number: self._broadcast("call", call=number))
        self._next_roll, self._roll_ends = 0.0, None  # when the ranks are called again; until when they may answer
        self._called: set[int] = set()  # those that have not answered the last roll call
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()

    def run(self) -> None:
        self._selector.register(self.server, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        closing = False
        while not closing:
            ready = self._selector.select(self._patience())
            somebody_comes = not all(key.data for key, _ in ready)
            for key, _ in ready:
                if key.fileobj is self.server:
                    self._accept()
                elif isinstance(key.fileobj, Channel):
                    self._hear(key.fileobj, key.data)
                else:  # the other end of _wake is closed
                    closing = True
            if not somebody_comes:  # else it may be a rank that is missed
                self._look_who_returned()
            self._inquiries.take_turn()
            self._go_if_all_are_ready()
            self._call_the_roll()
            while self._broken_off:
                self._drop(*self._broken_off.pop())
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
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._run_out_of_files(error)
            return  # else it is gone again
        self._selector.register(Channel(connection, LONGEST_HELLO), selectors.EVENT_READ, [])

    def _run_out_of_files(self, error: OSError) -> None:
        line = f"{self._standings[0].title} cannot take the connection of another rank: {error.strerror}; raise the limit with ulimit -n"
        if not self.went:
            self._fail(line, "LaunchError")
        elif not self._is_full:
            log.error(line)
        self._is_full = True
        time.sleep(0.1)  # the rank still waits there, and the next look comes at once

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
            self._inquiries.forget(standing.rank)
            if standing.left is None:
                standing.gone = True
                self._ended.add(standing.rank)
                if self.went:
                    self._broadcast("gone", line=self._line_of([standing]), rank=standing.rank)
                else:
                    self._missed[standing.rank] = time.monotonic() + RETURN_SECONDS
        self._look_who_left()

    def _send(self, rank: int, kind: str, /, **values: Any) -> None:
        self._pass_on([rank], kind, **values)

    def _broadcast(self, kind: str, /, **values: Any) -> None:
        self._pass_on(list(self._channels), kind, **values)

    def _pass_on(self, ranks: Iterable[int], kind: str, /, **values: Any) -> None:
        data = encoded(kind, **values)  # once for all of them
        for rank in ranks:
            channel = self._channels.get(rank)
            if channel is not None:
                try:
                    channel.write(data)
                except OSError:  # dropped later: to tell the others may fail as well, hundreds of times
                    self._broken_off.append((channel, [rank]))

    def _line_of(self, standings: list[Standing]) -> str:
        return listing(standings) + pointer(standings, self._logs)

    def _look_who_returned(self) -> None:
        now = time.monotonic()
        lost = [self._standings[rank] for rank, until in self._missed.items() if now >= until]
        if lost:
            self._missed.clear()
            self._fail(self._line_of(lost), "LostRankError")

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
        problem = misplaced(self._standings, rank, (host, process), int(message["world_size"]))
        if problem:
            channel.send("refused", line=problem)
            if not self.went:
                self._fail(problem, "LaunchError")
            return
        standing, again = self._standings[rank], self._standings[rank].came
        standing.came, standing.host, standing.process, standing.gone, standing.silent = True, host, process, False, False
        self._called.discard(rank)
        self._inquiries.forget(rank)  # a call through an earlier connection may be lost
        self._missed.pop(rank, None)
        if not standing.left_alone:
            self._ended.discard(rank)
        who.append(rank)
        channel.trust()
        self._channels[rank] = channel
        channel.send("welcome", digest=self._facts and self._facts["digest"], found=self._found)
        if again and self.went:
            self._broadcast("back", rank=rank)
        if self._failure is not None:  # to all: whoever ended because this rank was gone has just heard that it is back
            self._broadcast("left", **self._failure)
        if self._verdict is not None:
            channel.send("verdict", line=self._verdict)

    def _fail(self, line: str, error: str) -> None:
        """End every rank that is here, and every one that comes later, with `line`. Only the first counts: all ranks may fail alike."""
        if self._failure is None:
            self._failure = {"line": line, "error": error}
            self._broadcast("left", **self._failure)

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
        if self.went:  # its connection broke off before it heard so
            self._send(standing.rank, "go", **self._go)

    def _go_if_all_are_ready(self) -> None:
        if not self.went and len(self._machines) == self.world_size and not any(s.is_lost for s in self._standings):
            self.went = True
            hosts, notes = [s.host for s in self._standings], machines_that_differ(self._machines)
            self._go = {"hosts": hosts, "notes": notes, "torch": self._facts["torch"]}
            self._broadcast("go", **self._go)

    def _on_say(self, standing: Standing, message: dict[str, Any]) -> None:
        self._broadcast("say", line=message["line"])

    # ---- what the ranks are doing -------------------------------------------------------------------------------------

    def _on_logs(self, standing: Standing, message: dict[str, Any]) -> None:
        self._logs = message["folder"]

    def _on_at(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.mark = Mark(**message["mark"])
        standing.seconds, standing.idle, standing.silent = message["seconds"], message["idle"], False
        standing.step, standing.own, standing.heard = message["step"], message["own"], time.monotonic()
        self._called.discard(standing.rank)
        self._inquiries.hear(standing.rank, message["call"])

    def _on_ask(self, standing: Standing, message: dict[str, Any]) -> None:
        number = message["number"]
        self._inquiries.ask(("ask", number), standing.rank, partial(self._answer, number))

    def _answer(self, number: int, askers: set[int]) -> None:
        """Answer who is awaited: at control operation `number`, or for the start (0). Nobody waits for a rank that asks, as it waits itself."""
        late = awaited(self._standings, number) if number else [s for s in self._standings if not s.ready or s.is_lost]
        late = [s for s in late if s.rank not in askers]
        busy = {s.rank for s in late if s.came and not s.is_lost}
        came = sum(s.came and not s.gone for s in self._standings)
        answer = {"late": listing(late), "came": came, "some_absent": len(busy) < len(late), "main_is_busy": 0 in busy}
        self._pass_on(askers, "awaited", number=number, **answer)

    def _on_broken(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.broken = True
        if self._verdict is not None:
            self._send(standing.rank, "verdict", line=self._verdict)
            return

        question = message["number"], message["waiting"]
        if question in self._reported:  # a collective fails on all ranks at once
            return
        self._reported.add(question)

        def is_enough() -> bool:
            # A killed process is known as soon as its connection closes, and one that failed has said so. In a part of a step all
            # ranks get their time: those that notice nothing are the suspects.
            if self._ended:
                return True
            if not message["waiting"] or not self._inquiries.all_answered:
                return False
            return any(s.mark and s.mark.number < message["number"] for s in self._standings)

        def conclude() -> None:
            if self._verdict is None:
                self._judge(verdict(self._standings, message, self._logs))

        self._inquiries.put(conclude, is_enough)

    def _on_stuck(self, standing: Standing, message: dict[str, Any]) -> None:
        """Handle a rank that was told to stop and cannot, or has waited as long as it may for work on the device."""
        self._send(standing.rank, "heard")
        question = ("stuck", message["line"], message["number"], message["idle"])
        self._inquiries.ask(question, standing.rank, partial(self._look_who_hangs, message))

    def _look_who_hangs(self, message: dict[str, Any], askers: set[int]) -> None:
        if self._verdict is not None:
            return
        if message["idle"]:
            found = hung(self._standings, message["idle"])
        else:
            late = awaited(self._standings, message["number"])
            found = [s for s in late if s.rank not in askers and (s.is_surely_lost or not s.is_lost)]
        if found:
            self._judge(f"{message['line']}: {self._line_of(found)}")

    def _judge(self, line: str) -> None:
        self._verdict = line
        self._broadcast("verdict", line=line)
        self._look_who_left()

    def _patience(self) -> float | None:
        times = [*self._inquiries.times(), *self._missed.values()]
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
            ranks = [rank for rank in self._channels if rank not in self._called]  # a stopped rank's calls do not pile up
            self._called.update(ranks)
            self._pass_on(ranks, "call", call=_ROLL)
        elif self._roll_ends is not None and (now >= self._roll_ends or self._called.isdisjoint(self._channels)):
            self._roll_ends = None
            self._send(0, "ranks", roll=roll(self._standings, now))

    def _on_left(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.left, standing.left_alone = message["line"], message["alone"]
        if message["traceback"]:
            standing.left += pointer([standing], self._logs)
        if message["alone"]:
            self._ended.add(standing.rank)
            self._fail(listing([standing]), "LostRankError" if self.went else message["error"])
        self._inquiries.forget(standing.rank)
        self._look_who_left()

    def _on_bye(self, standing: Standing, message: dict[str, Any]) -> None:
        standing.left = "finished"
        self._inquiries.forget(standing.rank)
        self._look_who_left()
