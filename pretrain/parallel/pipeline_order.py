"""In which order each rank of a pipeline computes; how the layers are cut into stages; and the bubble.

    1f1b, gpipe          one stage per rank (arXiv 2104.04473, 1811.06965)
    interleaved          several stages per rank, one after the other in turns (arXiv 2104.04473, section 2.2)
    zero_bubble          one stage per rank; gradients of weights wait until there is nothing else to do (ZB-H1 of arXiv 2401.10241)
    zero_bubble_v        so too, with two stages per rank: down the ranks and up again (ZB-V of arXiv 2405.15362)
    dualpipev            on the same stages, forward and backward in turns (a cut DualPipe, arXiv 2412.19437)

Nothing here communicates: it is all known before anything is allocated.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import NamedTuple

from torch import nn

from pretrain.config.parallel_schema import Parallel

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
_V_SHAPED = {"zero_bubble_v": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}
DEFERRING = ("zero_bubble", *_V_SHAPED)
"""Schedules in which gradients of weights are computed apart from the backward pass."""


class Action(NamedTuple):
    """What a rank computes at a time: a pass of one stage over one micro-batch. `WEIGHT`: the gradients of weights that its backward left."""

    kind: str
    stage: int
    micro_batch: int


def stages_of(parallel: Parallel) -> int:
    """The number of stages of a layout."""
    if parallel.pipeline_schedule == "interleaved":
        return parallel.pipeline * parallel.pipeline_chunks
    return parallel.pipeline * (2 if parallel.pipeline_schedule in _V_SHAPED else 1)


def stage_ranks(schedule: str, ranks: int, stages: int) -> list[int]:
    """The rank of each stage."""
    if schedule in _V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def share_layers(network: nn.Module, spans: list[range], rank_of: list[int]) -> tuple[list[list[range]], dict[str, list[int]]]:
    """The layers of each rank, from the layers and the rank of each stage. And by name of a whole network's parameters, the ranks that hold each:
    several where stages share a table.
    """
    by_rank = [[span for span, holder in zip(spans, rank_of) if holder == rank] for rank in sorted(set(rank_of))]
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(by_rank):
        for name, _ in copy.deepcopy(network).keep(own).named_parameters():
            holders.setdefault(name, []).append(rank)
    return by_rank, holders


def loss_rank(parallel: Parallel) -> int:
    """The rank of the pipeline that has the last stage."""
    return stage_ranks(parallel.pipeline_schedule, parallel.pipeline, stages_of(parallel))[-1]


@functools.cache
def places(schedule: str, ranks: int, stages: int, micro_batches: int) -> list[dict[Action, int]]:
    """Which one of its actions each one is for the rank that computes it, by rank."""
    return [{action: place for place, action in enumerate(own)} for own in order(schedule, ranks, stages, micro_batches)]


@functools.cache
def order(schedule: str, ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    """What each rank of a pipeline computes, one after the other."""
    if schedule == "interleaved" or schedule in _V_SHAPED:
        return _by_torch(_V_SHAPED.get(schedule, "ScheduleInterleaved1F1B"), ranks, stages, micro_batches)
    if schedule == "zero_bubble":
        return [_weights_later(rank, ranks, micro_batches) for rank in range(ranks)]
    return [
        _one_stage(rank, micro_batches, micro_batches if schedule == "gpipe" else ranks - 1 - rank) for rank in range(ranks)
    ]


def _one_stage(rank: int, micro_batches: int, first: int) -> list[Action]:
    """`first` forward passes, then one forward and one backward in turns. The list of torch 2.13 for 1f1b is not used: on the last rank it begins
    with micro-batch 1.
    """
    first = min(first, micro_batches)
    actions = [Action(FORWARD, rank, number) for number in range(first)]
    for number in range(micro_batches - first):
        actions += [Action(FORWARD, rank, first + number), Action(BACKWARD, rank, number)]
    return actions + [Action(BACKWARD, rank, number) for number in range(micro_batches - first, micro_batches)]


def _weights_later(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1f1b, with the gradients of weights `rank` micro-batches behind. So every rank holds as many micro-batches as the first one of 1f1b."""
    actions = []
    for action in _one_stage(rank, micro_batches, ranks - 1 - rank):
        actions.append(action)
        if action.kind == BACKWARD and action.micro_batch >= rank:
            actions.append(Action(WEIGHT, rank, action.micro_batch - rank))
    return actions + [Action(WEIGHT, rank, number) for number in range(max(micro_batches - rank, 0), micro_batches)]


def _by_torch(name: str, ranks: int, stages: int, micro_batches: int) -> list[list[Action]]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    # All that a schedule asks of stages before it runs.
    facts = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "has_backward": False, "submod": None}
    own = [SimpleNamespace(**facts) for _ in range(stages // ranks)]
    whole = (BACKWARD, WEIGHT) if name in _V_SHAPED.values() else (BACKWARD,)  # the gradient of activations is sent on first
    kinds = {"F": (FORWARD,), "I": (BACKWARD,), "B": whole, "W": (WEIGHT,)}
    kind_of = getattr(pipelining, name, None) or getattr(schedules, name)
    by_rank = kind_of(own, micro_batches).pipeline_order
    return [
        [
            Action(kind, part.stage_index, part.microbatch_index)
            for action in by_rank[rank]
            if action is not None
            for part in action.sub_actions or (action,)  # a forward and a backward that could run at the same time
            for kind in kinds[part.computation_type.value]
        ]
        for rank in range(ranks)
    ]


def cut(costs: list[float], stages: int) -> list[range]:
    """The layers of each stage. The most expensive stage is as cheap as possible; among such cuts it has the fewest layers. Each has one at least."""
    layers, sums = len(costs), [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(0, 0): (0.0, 0)}  # (stages, layers): the cost of the most expensive stage so far, and where the last one starts
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


def bubble(actions: list[list[Action]]) -> float:
    """The share of time in which ranks wait for each other, if all stages cost the same and messages nothing.

    Backward costs twice as much as forward, half of it for the gradients of weights. The share is then, for P ranks and n micro-batches:

        1f1b             (P - 1) / (n + P - 1)
        interleaved      (P - 1) / (v n + P - 1) with v stages per rank (arXiv 2104.04473)
        zero_bubble      (P - 1) / (3 n + P - 1) if n is at least P (arXiv 2401.10241)
    """
    ranks, last = len(actions), max(action.stage for own in actions for action in own)
    ends: dict[Action, int] = {}
    clocks, places = [0] * ranks, [0] * ranks
    apart = any(action.kind == WEIGHT for own in actions for action in own)
    cost = {FORWARD: 1, BACKWARD: 1 if apart else 2, WEIGHT: 1}
    while any(place < len(own) for place, own in zip(places, actions)):
        moved = False
        for rank, own in enumerate(actions):
            while places[rank] < len(own) and all(needed in ends for needed in needs(own[places[rank]], last)):
                action = own[places[rank]]
                clocks[rank] = max(clocks[rank], *(ends[needed] for needed in needs(action, last)), 0) + cost[action.kind]
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
    if kind == WEIGHT:
        return [Action(BACKWARD, stage, number)]
    return [Action(FORWARD, stage, number)] + ([Action(BACKWARD, stage + 1, number)] if stage < last else [])
