"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable

from pretrain.config.optim_schema import FALLING, Schedule
from pretrain.errors import ConfigError


def one_each(step: int) -> int:
    """The samples that a run has consumed after a step, if each step takes one: tokens are then counted as steps are."""
    return step


def learning_rate(schedule: Schedule, peak: float, steps: int, step: int, consumed: Callable[[int], int] = one_each) -> float:
    """Learning rate of optimizer step `step`, counted from 1, in a run of `steps` steps.

    Warmup rises linearly and reaches `peak` at step `warmup_steps`. The last step after it has `peak * min_ratio`, except with
    `constant`, `inverse_sqrt` and `piecewise`. `wsd` keeps the peak until `decay_steps` before the end (arXiv 2405.18392).
    `inverse_sqrt` is peak × sqrt(warmup_steps / step) (arXiv 1706.03762, equation 3, whose peak is dim^-0.5 × warmup_steps^-0.5).

    `consumed`: the samples that the run has consumed after a step. A part that goes by tokens begins and ends at the same steps, and within it
    the rate is a function of these samples in place of steps. All samples have as many tokens, so that their ratios are those of tokens.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        at = consumed if schedule.warmup_by_tokens else one_each
        return peak * at(step) / at(warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        at = consumed if schedule.warmup_by_tokens else one_each
        return peak * math.sqrt(at(max(1, warmup)) / at(step))
    if schedule.name == "piecewise":
        return peak * _of_stages(schedule, step, consumed)
    start, shape = warmup, schedule.name
    if schedule.name == "wsd":
        start, shape = max(warmup, steps - wanted_decay(schedule, steps, consumed)), schedule.decay_shape
    at = consumed if schedule.decay_by_tokens else one_each
    progress = min(1.0, max(0.0, (at(step) - at(start)) / max(1, at(steps) - at(start))))
    return peak * _between(shape, 1.0, schedule.min_ratio, progress)


def wanted_decay(schedule: Schedule, steps: int, consumed: Callable[[int], int]) -> int:
    """The steps of `wsd`'s decay, if the warmup leaves so many: by default those of the last tenth of the run, at least one."""
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    at = consumed if schedule.decay_by_tokens else one_each
    tenth = at(steps) - at(steps) // 10
    return max(1, steps - bisect.bisect_left(range(steps), tenth, key=at))


def goes_by_tokens(schedule: Schedule) -> bool:
    """Whether any part of a schedule goes by tokens, and not by steps."""
    return bool(schedule.warmup_by_tokens or schedule.decay_by_tokens or any(stage.by_tokens for stage in schedule.stages))


def joints(schedule: Schedule, steps: int, last: int, consumed: Callable[[int], int] = one_each) -> set[int]:
    """The steps up to `last` at and beside the ends of a schedule's parts, the first step, and `last`."""
    lengths = [stage.steps for stage in schedule.stages] if schedule.name == "piecewise" else []
    ends = [*itertools.accumulate(lengths, initial=schedule.warmup_steps), steps - wanted_decay(schedule, steps, consumed)]
    beside = {end + shift for end in ends for shift in (-1, 0, 1)}
    return {1, last, *(step for step in beside if 1 <= step <= last)}


def _of_stages(schedule: Schedule, step: int, consumed: Callable[[int], int]) -> float:
    """The share of the peak at a step after the warmup."""
    begin, ratio = schedule.warmup_steps, 1.0
    for stage in schedule.stages:
        end = begin + stage.steps
        if step <= end:
            at = consumed if stage.by_tokens else one_each
            return _between(stage.shape, ratio, stage.ratio, (at(step) - at(begin)) / (at(end) - at(begin)))
        begin, ratio = end, stage.ratio
    return ratio


def _between(shape: str, start: float, end: float, progress: float) -> float:
    """A value on the way from `start` (progress 0) to `end` (1)."""
    if shape == "constant" or progress == 1:
        return end
    if shape == "exponential":
        return start * (end / start) ** progress
    left = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "1-sqrt": 1 - math.sqrt(progress),
    }
    if shape not in left:
        raise ConfigError(f"pretrain/optim/schedule.py computes no {shape} schedule; AGENTS.md says what a schedule takes")
    return end + (start - end) * left[shape]


def check_schedule(schedule: Schedule, steps: int, written: Schedule, consumed: Callable[[int], int] = one_each) -> None:
    """Raise ConfigError for values of a resolved schedule that cannot go together in a run of `steps` steps.

    `written`: the schedule as the user wrote it, whose warmup and decay may be in tokens. `consumed`: as `learning_rate` takes it.
    """
    if schedule.decay_steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        most = steps - schedule.warmup_steps
        warmup = _as_written("warmup", schedule.warmup_steps, written.warmup_tokens)
        decay = _as_written("decay", schedule.decay_steps, written.decay_tokens)
        raise ConfigError(
            f"{warmup} and {decay} do not fit in run.steps={steps}; "
            + (
                f"the decay may take at most {most} step{'s' if most > 1 else ''}"
                if most > 0
                else "shorten the warmup, or raise run.steps"
            )
        )
    if schedule.name in FALLING and math.isclose(schedule.min_ratio, 1):
        also = " and schedule.decay_*" if schedule.name == "wsd" else ""
        raise ConfigError(
            f"schedule.min_ratio=1 with schedule.name={schedule.name} never decays; lower it, or set schedule.name=constant and remove "
            f"schedule.min_ratio{also}"
        )
    if schedule.name == "wsd" and schedule.decay_shape == "exponential" and not schedule.min_ratio:
        raise ConfigError("schedule.decay_shape=exponential never reaches schedule.min_ratio=0; use 0.01, or another shape")
    if schedule.name == "piecewise":
        _check_stages(schedule, steps, consumed)
    learning_rate(schedule, 1.0, steps + 1, steps, consumed)  # of a shape that it lacks, now and not after the warmup


def _as_written(part: str, steps: int, tokens: int | None) -> str:
    return f"schedule.{part}_steps={steps}" if tokens is None else f"schedule.{part}_tokens={tokens} ({steps} steps)"


def _check_stages(schedule: Schedule, steps: int, consumed: Callable[[int], int]) -> None:
    if not schedule.stages:
        raise ConfigError("schedule.name=piecewise has no schedule.stages; write them, or use schedule.name=constant")
    first, ratio = schedule.warmup_steps, 1.0
    for i, stage in enumerate(schedule.stages):
        if i and first >= steps > schedule.warmup_steps:  # a run may be all warmup, as with other schedules
            raise ConfigError(
                f"schedule.stages.{i} begins after step {first}, the end of the run (run.steps={steps}); shorten the stages before it, "
                "or raise run.steps"
            )
        if stage.shape == "exponential" and not (ratio and stage.ratio):
            raise ConfigError(
                f"schedule.stages.{i}.shape=exponential neither leaves nor reaches a rate of 0; use another shape"
            )
        first, ratio = first + stage.steps, stage.ratio
    # Within a stage the rate only rises or only falls.
    if not any(learning_rate(schedule, 1.0, steps, step, consumed) for step in joints(schedule, steps, steps)):
        raise ConfigError(
            f"schedule.stages give all {steps} steps (run.steps) a rate of 0, so that nothing is trained; raise a ratio, or run.steps"
        )


def fit(schedule: Schedule, steps: int) -> Schedule:
    """The schedule, unless the run is shorter than its warmup, as in smoke tests: then warmup and decay share the steps."""
    if schedule.warmup_steps <= steps:
        return schedule
    if schedule.decay_steps is None or schedule.name != "wsd":
        return dataclasses.replace(schedule, warmup_steps=steps)
    warmup = steps * schedule.warmup_steps // (schedule.warmup_steps + schedule.decay_steps)
    return dataclasses.replace(schedule, warmup_steps=warmup, decay_steps=max(1, steps - warmup))
