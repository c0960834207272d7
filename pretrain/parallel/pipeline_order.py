"""In which order each rank of a pipeline computes; how the layers are cut into stages; and the bubble.

    1f1b, gpipe          one stage per rank (arXiv 2104.04473, 1811.06965)
    interleaved          several stages per rank, one after the other in turns (arXiv 2104.04473, section 2.2)

Nothing here communicates: it is all known before anything is allocated.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

from pretrain.config.schema import Parallel

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """What a rank computes at a time: a pass of one stage over one micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def stages_of(parallel: Parallel) -> int:
    """The number of stages of a layout."""
    return parallel.pipeline * (parallel.pipeline_chunks if parallel.pipeline_schedule == "interleaved" else 1)


@functools.cache
def order(schedule: str, ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """What each rank of a pipeline computes, one after the other. Stage s is on rank s modulo `ranks`."""
    if schedule == "interleaved":
        return _interleaved(ranks, stages, micro_batches)
    return [
        _one_stage(rank, micro_batches, micro_batches if schedule == "gpipe" else ranks - 1 - rank) for rank in range(ranks)
    ]


def _one_stage(rank: int, micro_batches: int, first: int) -> list[Action]:
    """So many forward passes first, then one forward and one backward in turns. torch 2.13's own list of 1f1b begins with micro-batch 1 on the
    last rank, so it is not used.
    """
    first = min(first, micro_batches)
    actions = [Action(FORWARD, rank, number) for number in range(first)]
    for number in range(micro_batches - first):
        actions += [Action(FORWARD, rank, first + number), Action(BACKWARD, rank, number)]
    return actions + [Action(BACKWARD, rank, number) for number in range(micro_batches - first, micro_batches)]


def _interleaved(ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    # All that the schedule asks of stages before it runs.
    own = [
        SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, has_backward=False) for _ in range(stages // ranks)
    ]
    kinds = {"F": FORWARD, "B": BACKWARD}
    by_rank = ScheduleInterleaved1F1B(own, micro_batches).pipeline_order
    return [
        [Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index) for a in by_rank[rank] if a is not None]
        for rank in range(ranks)
    ]


def cut(costs: list[float], stages: int) -> list[range]:
    """The layers of each stage. The dearest stage costs as little as possible, and has as few layers as that allows. Each has one at least."""
    layers, sums = len(costs), [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(0, 0): (0.0, 0)}  # (stages, layers): the cost of the dearest stage so far, and where the last one starts
    for count in range(1, stages + 1):
        for stop in range(count, layers - (stages - count) + 1):
            starts = (start for start in range(count - 1, stop) if (count - 1, start) in best)
            best[count, stop] = min((max(best[count - 1, start][0], sums[stop] - sums[start]), start) for start in starts)
    spans, stop = [], layers
    for count in range(stages, 0, -1):
        start = best[count, stop][1]
        spans.append(range(start, stop))
        stop = start
    return spans[::-1]


def describe_stages(parallel: Parallel, costs: list[float], share: float) -> str:
    """The stages in one line. `share`: the bubble, 0 where it is not known."""
    counts = [str(len(span)) for span in cut(costs, stages_of(parallel))]
    waiting = f", a bubble of {share:.1%} by the schedule" if share else ""
    return f"{parallel.pipeline_schedule} on {parallel.pipeline} ranks: {len(counts)} stages of {', '.join(counts)} layers{waiting}"


def bubble(actions: list[list[Action]], cost: dict[str, float] | None = None) -> float:
    """The share of time in which ranks wait for each other, if all stages cost the same and messages nothing.

    `cost`: by kind of action; by default backward costs twice as much as forward. For 1f1b of P ranks and n micro-batches it is
    (P - 1) / (n + P - 1), and for v stages per rank (P - 1) / (v n + P - 1) (arXiv 2104.04473).
    """
    cost = cost or {FORWARD: 1.0, BACKWARD: 2.0}
    ranks, last = len(actions), max(action.stage for own in actions for action in own)
    ends: dict[Action, float] = {}
    clocks, places = [0.0] * ranks, [0] * ranks
    while any(place < len(own) for place, own in zip(places, actions)):
        moved = False
        for rank, own in enumerate(actions):
            while places[rank] < len(own) and all(needed in ends for needed in needs(own[places[rank]], last)):
                action = own[places[rank]]
                clocks[rank] = max(clocks[rank], *(ends[needed] for needed in needs(action, last)), 0.0) + cost[action.kind]
                ends[action], places[rank], moved = clocks[rank], places[rank] + 1, True
        if not moved:
            raise ValueError("the ranks of this order wait for each other for ever")
    busy = sum(cost[action.kind] for own in actions for action in own)
    return 1 - busy / (ranks * max(clocks))


def needs(action: Action, last: int) -> list[Action]:
    """The actions whose results it takes; `last`: the number of the last stage."""
    kind, stage, number = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, number)] if stage else []
    return [Action(FORWARD, stage, number)] + ([Action(BACKWARD, stage + 1, number)] if stage < last else [])
