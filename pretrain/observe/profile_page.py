"""The page on a step: where each millisecond goes, and what memory is for at the peak."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pretrain.observe.profile_time import GRADIENTS, GROUPS, HOST, WAITING, Event, spent


@dataclass(frozen=True)
class Held:
    """Bytes that a rank held: before the step, and the whole process (CPU) or all tensors (GPU) at the peak."""

    weights: int
    state: int
    gradients: Sequence[dict[int, int]]
    """Those that existed at each moment of the step when they were noted, by the address of their storage."""
    peak: int
    on_gpu: bool


@dataclass(frozen=True)
class Usage:
    """Seconds by group and by operator, bytes by what they are for."""

    seconds: float
    groups: dict[str, float]
    operators: dict[tuple[str, str], tuple[float, int]]
    """By name and group: seconds and how often it was called."""
    collectives: float
    """Seconds in which a collective was under way, hidden behind other work or not."""
    memory: dict[str, int]
    peak: int


def usage_of(events: Sequence[Event], waited: float, held: Held) -> Usage:
    """The parts of the step that a trace holds. `waited`: seconds for its batch, before the trace began."""
    took = spent(events, held.on_gpu)
    groups = dict.fromkeys(GROUPS, 0.0)
    operators: dict[tuple[str, str], float] = defaultdict(float)
    for piece in took.pieces:
        groups[piece.group] += (piece.end - piece.start) / 1e6
        operators[piece.name, piece.group] += (piece.end - piece.start) / 1e6
    whole = (took.end - took.start) / 1e6
    groups[HOST] = whole - sum(groups.values())
    groups[WAITING] = waited
    named = {key: (seconds, took.calls[key]) for key, seconds in operators.items()}
    collectives = sum(end - start for start, end in took.collectives) / 1e6
    return Usage(whole + waited, groups, named, collectives, _memory(events, took.start, took.end, held), held.peak)


def _memory(events: Iterable[Event], start: float, end: float, held: Held) -> dict[str, int]:
    """What the bytes are for, when the step holds the most."""
    changes = [(float(event["ts"]), event["args"]) for event in events if event.get("name") == "[memory]"]
    changes = [change for change in changes if (change[1]["Device Type"] == 1) == held.on_gpu and start <= change[0] <= end]
    changes.sort(key=lambda change: change[0])
    more, most, at = 0, 0, start
    for moment, change in changes:
        more += change["Bytes"]
        if more > most:
            most, at = more, moment
    of_gradients: dict[tuple[int, float], int] = {}
    by_address: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for moment, change in changes:
        by_address[change["Addr"]].append((moment, change["Bytes"]))
    for moment, sizes in _noted(events, held.gradients):
        for address, size in sizes.items():
            begin, end = _life(by_address[address], moment)
            if begin <= at < end:
                of_gradients[address, begin] = max(size, of_gradients.get((address, begin), 0))
    made = sum(size for (_, begin), size in of_gradients.items() if begin > -math.inf)
    kept = sum(size for (_, begin), size in of_gradients.items() if begin == -math.inf)  # as in the buckets of DDP
    rest = held.peak - held.weights - held.state - kept - most
    return {
        "weights": held.weights,
        "gradients": made + kept,
        "optimizer state": held.state,
        "activations and temporary tensors": most - made,
        "other": max(0, rest),
    }


def _noted(events: Iterable[Event], gradients: Sequence[dict[int, int]]) -> Iterator[tuple[float, dict[int, int]]]:
    """The moments at which gradients were noted, and what they were."""
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith(GRADIENTS) and event.get("cat") == "user_annotation":
            yield float(event["ts"]), gradients[int(event["name"].removeprefix(GRADIENTS))]


def _life(changes: Sequence[tuple[float, int]], moment: float) -> tuple[float, float]:
    """From when to when an address has what it has at a moment. `changes`: when it was given or taken away, and how many bytes."""
    begin = max((at for at, size in changes if size > 0 and at <= moment), default=-math.inf)
    return begin, min((at for at, size in changes if size < 0 and at > moment), default=math.inf)


# ---- the page ---------------------------------------------------------------------------------------------------------


def page(step: int, trace: str, usage: Usage) -> str:
    """The page as Markdown."""
    lines = [
        f"# Step {step}, rank 0",
        "",
        f"{usage.seconds * 1e3:.1f} ms, under the profiler, which slows small operators down.",
        f"The trace is {trace}: open it on ui.perfetto.dev.",
        f"A collective was under way for {usage.collectives * 1e3:.1f} ms; what other work hides of that does not count below.",
        "",
        "| what | ms | share |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {seconds * 1e3:.2f} | {seconds / usage.seconds:.1%} |" for name, seconds in usage.groups.items()]
    lines += ["", "| operator | group | calls | ms | share |", "|---|---|---:|---:|---:|"]
    ranked = sorted(usage.operators.items(), key=lambda one: -one[1][0])[:10]
    for (name, group), (seconds, calls) in ranked:
        shown = name.replace("|", "/").replace("\n", " ")[:80]
        lines.append(f"| `{shown}` | {group} | {calls} | {seconds * 1e3:.2f} | {seconds / usage.seconds:.1%} |")
    whole = sum(usage.memory.values())
    if whole > usage.peak:
        lines += [
            "",
            f"At most {usage.peak / 1e6:.1f} MB were in use. The parts add up to more: not all were there at once, or some memory was never written to.",
        ]
    lines += ["", "| memory at the peak | MB | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {size / 1e6:.1f} | {size / whole:.1%} |" for name, size in usage.memory.items()]
    return "\n".join(lines) + "\n"
