"""The page on a step: where each millisecond goes, and what memory is for at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.observe.profile_time import GROUPS, HOST, WAITING, Event, spent


@dataclass(frozen=True)
class Held:
    """Bytes that a rank held: before the step, and the whole process (CPU) or all tensors (GPU) at the peak."""

    weights: int
    state: int
    gradients: dict[int, int]
    """Those of the step, by the address of their storage."""
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
    inside = [event for event in events if event.get("name") == "[memory]" and start <= float(event["ts"]) <= end]
    inside = [event["args"] for event in sorted(inside, key=lambda one: float(one["ts"]))]
    inside = [change for change in inside if (change["Device Type"] == 1) == held.on_gpu]
    more, most, at = 0, 0, -1
    for index, change in enumerate(inside):
        more += change["Bytes"]
        if more > most:
            most, at = more, index
    born: dict[int, int] = {}
    for index, change in enumerate(inside):
        if change["Bytes"] > 0:
            born[change["Addr"]] = index
    made = sum(size for address, size in held.gradients.items() if -1 < born.get(address, -1) <= at)
    kept = sum(size for address, size in held.gradients.items() if address not in born)  # as in the buckets of DDP
    rest = held.peak - held.weights - held.state - kept - most
    return {
        "weights": held.weights,
        "gradients": made + kept,
        "optimizer state": held.state,
        "activations and temporary tensors": most - made,
        "other": max(0, rest),
    }


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
