"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import dataclasses
import itertools
import math

from pretrain.config.optim_schema import RateStage, Schedule
from pretrain.errors import ConfigError


def learning_rate(schedule: Schedule, peak: float, steps: int, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1, in a run of `steps` steps.

    Warmup rises linearly and reaches `peak` at step `warmup_steps`. The last step after it has `peak * min_ratio`, except with
    `constant`, `inverse_sqrt` and `piecewise`. `wsd` keeps the peak until `decay_steps` before the end (arXiv 2405.18392).
    `inverse_sqrt` is peak × sqrt(warmup_steps / step) (arXiv 1706.03762, equation 3, whose peak is dim^-0.5 × warmup_steps^-0.5).
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return peak * math.sqrt(max(1, schedule.warmup_steps) / step)
    if schedule.name == "piecewise":
        return peak * _of_stages(schedule.stages, step - schedule.warmup_steps)
    start, shape = schedule.warmup_steps, schedule.name
    if schedule.name == "wsd":
        start, shape = _decay_start(schedule, steps), schedule.decay_shape
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    return peak * _between(shape, 1.0, schedule.min_ratio, progress)


def _decay_start(schedule: Schedule, steps: int) -> int:
    """The last step of `wsd` before its decay."""
    return max(schedule.warmup_steps, steps - (schedule.decay_steps or max(1, steps // 10)))


def joints(schedule: Schedule, steps: int, last: int) -> set[int]:
    """The steps up to `last` at and beside the ends of a schedule's parts, the first step, and `last`."""
    lengths = [stage.steps for stage in schedule.stages] if schedule.name == "piecewise" else []
    ends = [*itertools.accumulate(lengths, initial=schedule.warmup_steps), _decay_start(schedule, steps)]
    beside = {end + shift for end in ends for shift in (-1, 0, 1)}
    return {1, last, *(step for step in beside if 1 <= step <= last)}


def _of_stages(stages: list[RateStage], step: int) -> float:
    """The share of the peak at a step, counted from 1 after the warmup."""
    ratio = 1.0
    for stage in stages:
        if step <= stage.steps:
            return _between(stage.shape, ratio, stage.ratio, step / stage.steps)
        step, ratio = step - stage.steps, stage.ratio
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


def check(schedule: Schedule, steps: int, written: Schedule) -> None:
    """Raise ConfigError for values of a resolved schedule that cannot go together in a run of `steps` steps.

    `written`: the schedule as the user wrote it, whose warmup and decay may be in tokens.
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
    if schedule.name in ("cosine", "linear", "wsd") and math.isclose(schedule.min_ratio, 1):
        also = " and schedule.decay_*" if schedule.name == "wsd" else ""
        raise ConfigError(
            f"schedule.min_ratio=1 with schedule.name={schedule.name} never decays; lower it, or set schedule.name=constant and remove "
            f"schedule.min_ratio{also}"
        )
    if schedule.name == "wsd" and schedule.decay_shape == "exponential" and not schedule.min_ratio:
        raise ConfigError("schedule.decay_shape=exponential never reaches schedule.min_ratio=0; use 0.01, or another shape")
    if schedule.name == "piecewise":
        _check_stages(schedule, steps)
    learning_rate(schedule, 1.0, steps + 1, steps)  # of a shape that it lacks, now and not after the warmup


def _as_written(part: str, steps: int, tokens: int | None) -> str:
    return f"schedule.{part}_steps={steps}" if tokens is None else f"schedule.{part}_tokens={tokens} ({steps} steps)"


def _check_stages(schedule: Schedule, steps: int) -> None:
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
    if not any(learning_rate(schedule, 1.0, steps, step) for step in joints(schedule, steps, steps)):
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
