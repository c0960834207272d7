"""What all ranks are doing, as one small table for people: made now and then by the switchboard, written as ranks.json by the main rank."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Sequence
from typing import Any

from pretrain.distributed.standing import Standing, awaited, numbers

ROLL_SECONDS = 3.0
"""Seconds between two calls of all ranks. More than 300 ranks are called at most 100 a second."""
ANSWER_PATIENCE = 1.0
"""How long the table waits for answers. A rank that comes later is shown with its last answer and its age."""
LISTED_RANKS = 64
"""Up to so many ranks are listed one by one; of more ranks the WORST, and phases are counted."""
WORST = 16
PHASES = 12
"""Most phases that are counted apart."""
IDLE_SECONDS = 2.0
"""From here on a rank on a CPU that does nothing while ranks exchange gradients is said to wait."""


def interval(world_size: int) -> float:
    """Seconds between two calls."""
    return max(ROLL_SECONDS, world_size / 100)


def roll(standings: Sequence[Standing], now: float) -> dict[str, Any]:
    """The table at `now`, in the clock of `Standing.heard`. Its size is bounded, whatever the number of ranks."""
    waits = [s.mark.number for s in standings if s.mark is not None and s.mark.waiting and not s.is_lost]
    late = awaited(standings, max(waits)) if waits else []
    phases = {s.rank: phase_of(s, late) for s in standings}
    own = {s.rank: s.own for s in standings if s.own is not None and not s.is_lost}
    listed = list(standings)
    if len(listed) > LISTED_RANKS:
        lost, behind = {s.rank for s in standings if s.is_lost}, {s.rank for s in late}
        listed.sort(key=lambda s: (s.rank not in lost, s.rank not in behind, -(s.own or 0.0), s.rank))
        listed = listed[:WORST]
    return {
        "world_size": len(standings),
        "interval": interval(len(standings)),
        "own_median": round(statistics.median_low(own.values()), 6) if own else None,
        "awaited": numbers([s.rank for s in late]) if late else None,
        "phases": dict(collections.Counter(phases.values()).most_common(PHASES)),
        "ranks": [_entry(s, phases[s.rank], now) for s in listed],
    }


def phase_of(standing: Standing, late: Sequence[Standing] = ()) -> str:
    """A rank's phase in a few words, without the number of its step, so that equal phases can be counted."""
    mark = standing.mark
    if standing.left is not None:
        return "has ended"
    if standing.gone:
        return "gone without a word (killed?)"
    if mark is None:
        return "has not answered yet"
    name = re.sub(r"^step \d+: | (?:of|in) step \d+$", "", mark.name)
    name = {"next batch": "waiting for data", "loss": "exchange of the loss"}.get(name, name)
    if mark.waiting:
        others = [s.rank for s in late if s.rank != standing.rank]
        if others and standing not in late:
            return f"waiting for rank{'s' if len(others) > 1 else ''} {numbers(others)}"
        return re.sub(r" of step \d+$", " of a step", mark.name)
    if mark.exchanges and standing.idle >= IDLE_SECONDS:
        return f"{name}, where it waits for others"
    if mark.past and name == "loads of experts":  # the last part of every step
        return "end of the step"
    return f"after {name}" if mark.past else name


def _entry(standing: Standing, phase: str, now: float) -> dict[str, Any]:
    return {
        "rank": standing.rank,
        "host": standing.host,
        "step": standing.step,
        "phase": phase,
        "seconds": round(standing.seconds, 1),
        "own": None if standing.own is None else round(standing.own, 6),
        "heard": None if standing.heard is None else round(max(0.0, now - standing.heard), 1),
        "lost": standing.is_lost,
    }
