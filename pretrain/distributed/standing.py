"""The known state of each rank at a moment, and the sentences that report it.

This file writes everything that a user reads about a rank that is late, silent or gone: from plain values, without sockets or
clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LISTED = 3
"""How many ranks a sentence names; it only counts the others."""
SURE_SECONDS = 10.0
"""How long a rank must leave calls unanswered before it counts as silent: a long call into a library may hold it up."""


@dataclass
class Mark:
    """The current work of a process: a control operation (`waiting`) or a part of its own work, or it is `past` one of the two.

    `number` counts the control operations that it has begun; every rank has the same order. `device`: the ranks exchange gradients or
    weights in this part, so it may wait for another rank without saying so. `exchanges`: on a CPU it sleeps only to wait for them.
    `storage`: this part reads, writes or removes files, and may wait for storage without a sign.
    """

    number: int = 0
    name: str = "start of the process"
    waiting: bool = False
    device: bool = False
    storage: bool = False
    past: bool = False
    exchanges: bool = False

    def __str__(self) -> str:
        return f"{'waiting at' if self.waiting else 'past' if self.past else 'in'} '{self.name}'"


@dataclass
class Standing:
    """One rank, as the switchboard sees it.

    Its last answer was `heard` at that time. It gave the `mark`, the `seconds` in it, the `idle` seconds, its `step`, and its `own` seconds in
    a step (pace.py).

    `gone`: its connection broke off. `silent`: it does not answer, for `unheard` seconds so far. `left`: its last message,
    with `left_alone` if it does not end because of another rank. `broken`: its own collective failed.
    """

    rank: int
    host: str = ""
    process: int = 0
    came: bool = False
    ready: bool = False
    gone: bool = False
    silent: bool = False
    unheard: float = 0.0
    left: str | None = None
    left_alone: bool = False
    broken: bool = False
    mark: Mark | None = None
    seconds: float = 0.0
    idle: float = 0.0
    step: int = 0
    own: float | None = None
    heard: float | None = None

    @property
    def title(self) -> str:
        return f"rank {self.rank} ({self.host})" if self.host else f"rank {self.rank}"

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, or has not answered."""
        return self.gone or self.silent or self.left is not None

    @property
    def is_surely_lost(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self.gone or self.left is not None or (self.silent and self.unheard >= SURE_SECONDS)


def describe(standing: Standing) -> str:
    """A rank and its state, as a part of a sentence."""
    title, last = standing.title, f", last seen {standing.mark}" if standing.mark else ""
    if standing.left is not None:
        words = standing.left
        return words if words.startswith(("rank ", "'")) else f"{title} has ended: {words}"
    if standing.gone:
        return f"{title} is gone without a word (killed?){last}"
    if not standing.came:
        return f"{title} is missing"
    if standing.silent:
        return f"{title} does not answer (stopped, or its host or network is down){last}"
    if standing.mark is None:
        return f"{title} has not reported what it does"
    return f"{title} has been {standing.mark} for {standing.seconds:.0f} s"


def listing(standings: Sequence[Standing]) -> str:
    """Several ranks in one sentence; ranks in the same state are named together."""
    missing = [s for s in standings if not s.came and s.left is None]
    others = [s for s in standings if s not in missing]
    parts = []
    if len(missing) > 1:
        parts.append(f"ranks {numbers([s.rank for s in missing])} are missing")
    else:
        parts += [describe(s) for s in missing]
    parts += [describe(s) for s in others[:LISTED]]
    if len(others) > LISTED:
        more = others[LISTED:]
        parts.append(f"{len(more)} more like them (ranks {numbers([s.rank for s in more])})")
    return "; ".join(parts)


def numbers(ranks: Sequence[int]) -> str:
    """Rank numbers as text, with runs of neighbours as FIRST-LAST."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more stretches" if len(shown) > 8 else "")


def machines_that_differ(machines: Mapping[int, str]) -> list[str]:
    """A line about the machines of the ranks if they differ, which is allowed."""
    kinds: dict[str, list[int]] = {}
    for rank, machine in sorted(machines.items()):
        kinds.setdefault(machine, []).append(rank)
    if len(kinds) < 2:
        return []
    parts = [f"{kind} on rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}" for kind, ranks in kinds.items()]
    return [f"the machines differ: {'; '.join(parts)}: the slowest sets the pace, and last bits may differ between them"]


def misplaced(standings: Sequence[Standing], rank: int, process: tuple[str, int], world_size: int) -> str | None:
    """Why a process, by host and number, cannot be this rank of so many; None if it can."""
    main, (host, number) = standings[0], process
    if world_size != len(standings):
        return (
            f"rank {rank} ({host}) has WORLD_SIZE={world_size}, {main.title} {len(standings)}; "
            "start all nodes with the same command and the same number of nodes and processes"
        )
    known = standings[rank]
    if not known.came or (known.host, known.process) == process:
        return None
    if known.gone:
        return listing([known])
    return (
        f"RANK={rank} was given to two processes: {known.process} on {known.host} and {number} on {host}; give each "
        "process a RANK of its own, and each run a MASTER_PORT of its own"
    )


def awaited(standings: Sequence[Standing], number: int) -> list[Standing]:
    """The ranks that have not come to control operation `number`, or never will."""
    return [s for s in standings if s.is_lost or s.mark is None or s.mark.number < number]


def culprits(standings: Sequence[Standing], reporter: Mark) -> list[Standing]:
    """The ranks that made a collective of the rank at `reporter` fail. The first kind that is found counts.

    The order is: ranks that ended for their own reason, are gone, do not answer, or have not come to the operation. For an
    operation of the step, ranks that noticed nothing come last.
    """
    for found in (
        [s for s in standings if s.left_alone],
        [s for s in standings if s.gone and s.left is None],
        [s for s in standings if s.silent and s.left is None],
        [s for s in standings if s.left is None and not s.broken and s.mark is not None and s.mark.number < reporter.number],
        [s for s in standings if s.left is None and not s.broken and not (s.mark and s.mark.waiting)],
    ):
        if found:
            return found
    return []


def verdict(standings: Sequence[Standing], report: dict[str, Any], logs: str | None) -> str:
    """One line on a collective that failed. `report`: the first rank's {name, number, waiting, timed_out, seconds, reason}."""
    name = report["name"]
    found = culprits(standings, Mark(report["number"], name, report["waiting"]))
    if not found:
        return f"'{name}' failed between ranks that are all there: {report['reason']}; look at the network between the hosts"
    if any(s.left_alone for s in found):
        return listing(found)
    where = pointer(found, logs)
    if report["timed_out"]:
        verb = "was not reached by every rank" if report["waiting"] else "did not come to an end"
        return f"'{name}' {verb} within {report['seconds']:g} s (parallel.timeout_seconds): {listing(found)}{where}"
    return f"'{name}' broke off: {listing(found)}{where}"


def pointer(standings: Sequence[Standing], logs: str | None) -> str:
    """The end of a sentence: where to read more about these ranks."""
    if not logs:
        return ""
    return f"; look at {logs}/rank-{standings[0].rank if len(standings) == 1 else 'N'}.log"


def hung(standings: Sequence[Standing], idle_seconds: float) -> list[Standing]:
    """The ranks that block a stop, if it is certain that they hang; else an empty list.

    It is certain if every rank that the others wait for is lost, or has not computed, read or written for `idle_seconds`. A busy
    rank is merely slow.
    """
    newest = max((s.mark.number for s in standings if s.mark is not None), default=0)
    if any(s.mark is not None and s.mark.waiting and s.mark.number < newest and not s.is_lost for s in standings):
        return []  # another rank is past that operation already, so this one goes on too: it answered a moment earlier
    behind = [s for s in standings if s.is_lost or s.mark is None or not s.mark.waiting]
    idle = [s for s in behind if s.is_surely_lost or (not s.is_lost and s.mark is not None and s.idle >= idle_seconds)]
    return behind if len(idle) == len(behind) else []
