"""Where a step's time goes, from its chrome trace.

On a CPU each moment belongs to the innermost operator of the thread that trains. A gap between operators in which a collective
ends was a wait for it. Other gaps are the host's: Python, and the engine of autograd.

On a GPU each moment belongs to the kernel that runs, those of collectives last. Where no kernel runs, the GPU waits for the host.
So the parts add up to the step, and what overlaps counts once.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
STEP = "pretrain: the step"
"""The span in the trace that is profiled."""
GRADIENTS = "pretrain: gradients "
"""The beginning of the name of a moment at which gradients were noted, before its number."""
COMMUNICATION, WAITING, HOST, OTHER = "communication", "waiting for data", "host", "other operators"
LOSS, PRODUCTS = "loss", "matrix products"
GROUPS = (
    PRODUCTS, "attention", "norms", "activations", "casts and copies", LOSS, "optimizer", OTHER, COMMUNICATION, WAITING, HOST,
)  # fmt: skip
_PATTERNS = {
    COMMUNICATION: r"c10d|nccl|gloo:|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all",
    "optimizer": r"Optimizer\.step|_fused_ada|_fused_sgd|FusedAdam|_foreach_|multi_tensor",
    LOSS: r"loss|cross_entropy|log_softmax|logsumexp",
    "attention": r"attention|attn|flash_|bmm|softmax|masked_fill",  # composed: batched products, where layers make flat ones
    "norms": r"rms_?norm|layer_?norm",
    PRODUCTS: r"(^|[:_])(linear|matmul|addmm|mm|addmv|mv|grouped_mm|scaled_mm)(_|$|\b)|gemm|cutlass|nvjet",
    "activations": r"gelu|silu|relu|sigmoid|tanh|swiglu",
    "casts and copies": r"copy|::to$|clone|contiguous|::cat$|::stack$|zero_|fill_|memcpy|memset|Memcpy|Memset|::zeros|::ones",
}
"""By group: what its operators and kernels are called. The first that fits counts."""
_COMPILED = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in _PATTERNS.items()}
_REGIONS = ("attention", "norms", LOSS, "optimizer")
"""Groups to which everything belongs that their operators call, and its backward pass."""
_ENGINE = "autograd::engine::evaluate_function: "
_LATE = 50.0
"""Microseconds by which the profiler may see the end of a collective after the thread that waited for it."""
_ASYNCHRONOUS = ("gloo:", "nccl:")
"""Collectives under way, which the profiler shows as spans that no thread works on."""


@dataclass(frozen=True)
class Interval:
    """A stretch of time, in microseconds, with the group and the operator that it belongs to."""

    start: float
    end: float
    group: str
    name: str


@dataclass(frozen=True)
class Spent:
    """A step in microseconds of the trace: pieces that do not overlap, and when collectives were under way."""

    start: float
    end: float
    pieces: list[Interval]
    collectives: list[tuple[float, float]]
    calls: dict[tuple[str, str], int]
    """By operator and group."""


def spent(events: Sequence[Event], on_gpu: bool) -> Spent:
    """What the step of a trace spends its time on. What no piece covers is the host's."""
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation")
    start, end = float(step["ts"]), float(step["ts"]) + float(step["dur"])
    operators = _operators(spans, step)
    under_way = _union(_collectives(spans, on_gpu))
    if on_gpu:
        pieces = list(_one_at_a_time(_kernels(spans, operators)))
    else:
        pieces = [piece for piece in operators.main if piece.group != HOST]
        taken = _union((piece.start, piece.end) for piece in pieces)
        waits = [Interval(a, b, COMMUNICATION, "waiting for ranks") for a, b in _waits(spans, _without([(start, end)], taken))]
        operators.calls["waiting for ranks", COMMUNICATION] = len(waits)
        pieces += waits
    pieces = [Interval(max(one.start, start), min(one.end, end), one.group, one.name) for one in pieces]
    under_way = [(max(a, start), min(b, end)) for a, b in under_way if a < end and b > start]
    return Spent(start, end, [one for one in pieces if one.end > one.start], under_way, operators.calls)


@dataclass
class _Operators:
    """Pieces of the training thread, the group and name of each operator by its id, and how often each was called."""

    main: list[Interval]
    by_id: dict[int, tuple[str, str]]
    calls: dict[tuple[str, str], int]


def group_of(name: str) -> str | None:
    """The group of an operator or kernel by its name; None for one that says nothing."""
    return next((group for group, pattern in _COMPILED.items() if pattern.search(name)), None)


def _operators(spans: Sequence[Event], step: Event) -> _Operators:
    """Walk the operators of each thread, in which a caller encloses what it calls."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in spans:
        if event.get("cat") in ("cpu_op", "user_annotation") and not event["name"].startswith(
            (STEP, GRADIENTS, *_ASYNCHRONOUS)
        ):
            threads[event["pid"], event["tid"]].append(event)
    found = _Operators([], {}, defaultdict(int))
    regions: dict[int, str | None] = {}
    main = step["pid"], step["tid"]
    for thread in sorted(threads, key=lambda one: one != main):  # the one that runs forward comes first
        pieces = list(_walk(threads[thread], regions, found))
        if thread == main:
            found.main = pieces
    return found


@dataclass
class _Call:
    """An operator that has not returned yet."""

    end: float
    name: str
    region: str | None
    group: str | None


def _walk(events: list[Event], regions: dict[int, str | None], found: _Operators) -> Iterator[Interval]:
    """Pieces of one thread by their innermost operator. `regions`: of forward operators by sequence number, for backward."""
    stack: list[_Call] = []
    now = 0.0

    def until(time: float) -> Iterator[Interval]:
        nonlocal now
        while stack and stack[-1].end <= time:
            call = stack.pop()
            if call.end > now:
                yield Interval(now, call.end, call.group or HOST, call.name)
                now = call.end
        if stack and time > now:
            yield Interval(now, time, stack[-1].group or HOST, stack[-1].name)
        now = max(now, time)

    for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        begin = float(event["ts"])
        yield from until(begin)
        end = begin + float(event["dur"])
        stack.append(_called(event, stack[-1] if stack else None, min(end, stack[-1].end) if stack else end, regions))
        if not event["name"].startswith(_ENGINE):  # it encloses the operator's own event of that name
            found.calls[stack[-1].name, stack[-1].group or HOST] += 1
        if (number := event.get("args", {}).get("External id")) is not None:
            found.by_id[number] = stack[-1].group or OTHER, stack[-1].name
    yield from until(float("inf"))


def _called(event: Event, caller: _Call | None, end: float, regions: dict[int, str | None]) -> _Call:
    name, number = event["name"], event.get("args", {}).get("Sequence number", -1)
    is_node = name.startswith(_ENGINE)
    own, region = group_of(name.removeprefix(_ENGINE)), caller.region if caller else None
    if region is None:
        region = own if own in _REGIONS else regions.get(number) if is_node else None
    if not is_node and number >= 0 and not (caller and "Backward" in caller.name):
        regions[number] = region
    if own == COMMUNICATION or region is None or (region == LOSS and own == PRODUCTS):
        group = own or (caller.group if caller and caller.group != HOST else None)
    else:
        group = region
    # Operators and compiled graphs work. What autograd, an annotation or Python's dispatch does is the host's.
    if name.startswith("Python"):
        group = HOST
    elif group is None and not is_node and ("::" in name or "CompiledFxGraph" in name) and event.get("cat") == "cpu_op":
        group = OTHER
    return _Call(end, name.removeprefix(_ENGINE), region, group)


def _kernels(spans: Iterable[Event], operators: _Operators) -> list[Interval]:
    found = []
    for event in spans:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            own = group_of(event["name"])
            by_operator = operators.by_id.get(event.get("args", {}).get("External id"), (None, ""))[0]
            group = own if own == COMMUNICATION or by_operator in (None, OTHER, HOST) else by_operator
            begin = float(event["ts"])
            found.append(Interval(begin, begin + float(event["dur"]), group or OTHER, event["name"]))
            operators.calls[event["name"], group or OTHER] += 1
    return found


def _one_at_a_time(pieces: list[Interval]) -> Iterator[Interval]:
    """Give each moment to one piece: to the first that began, and to a collective only where nothing else runs."""
    computing = sorted((one for one in pieces if one.group != COMMUNICATION), key=lambda one: one.start)
    now = float("-inf")
    taken = []
    for one in computing:
        if one.end > now:
            taken.append(Interval(max(one.start, now), one.end, one.group, one.name))
            now = one.end
    yield from taken
    busy, now = _union((one.start, one.end) for one in taken), float("-inf")
    for one in sorted((one for one in pieces if one.group == COMMUNICATION), key=lambda one: one.start):
        for begin, end in _without([(max(one.start, now), one.end)], busy):
            yield Interval(begin, end, one.group, one.name)
        now = max(now, one.end)


def _collectives(spans: Iterable[Event], on_gpu: bool) -> Iterator[tuple[float, float]]:
    for event in spans:
        is_kernel = event.get("cat") == "kernel" and group_of(event["name"]) == COMMUNICATION
        if is_kernel if on_gpu else event["name"].startswith(_ASYNCHRONOUS):
            begin = float(event["ts"])
            yield begin, begin + float(event["dur"])


def _waits(spans: Iterable[Event], gaps: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The part of each gap between operators in which a collective was waited for: until the last one that ended there.

    A collective that goes on behind a gap was not what the thread waited for.
    """
    ended = sorted((end, begin) for begin, end in _collectives(spans, False))
    for begin, end in gaps:
        first, last = bisect_right(ended, (begin, math.inf)), bisect_right(ended, (end + _LATE, math.inf))
        if first < last:
            start = max(begin, min(one[1] for one in ended[first:last]))
            if start < end:
                yield start, min(end, ended[last - 1][0])


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _without(stretches: Iterable[tuple[float, float]], taken: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What `taken` leaves of stretches. Both are sorted; `taken` does not overlap itself."""
    first = 0
    for begin, end in stretches:
        while first < len(taken) and taken[first][1] <= begin:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > begin:
                yield begin, taken[at][0]
            begin, at = max(begin, taken[at][1]), at + 1
        if begin < end:
            yield begin, end
