"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import dataclasses
import math

from pretrain.config.schema import Schedule


def learning_rate(schedule: Schedule, peak: float, steps: int, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1, in a run of `steps` steps.

    Warmup rises linearly and reaches `peak` at step `warmup_steps`. The last step has `peak * min_ratio`, except with
    `constant` and `inverse_sqrt`. `wsd` keeps the peak until `decay_steps` before the end (arXiv 2405.18392). `inverse_sqrt` is
    peak × sqrt(warmup_steps / step) (arXiv 1706.03762, equation 3, whose peak is dim^-0.5 × warmup_steps^-0.5).
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return peak * math.sqrt(max(1, schedule.warmup_steps) / step)
    if schedule.name == "wsd":
        decay = schedule.decay_steps or max(1, steps // 10)
        start = max(schedule.warmup_steps, steps - decay)
    else:
        start = schedule.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * share)


def fit(schedule: Schedule, steps: int) -> Schedule:
    """The schedule, unless the run is shorter than its warmup, as in smoke tests: then warmup and decay share the steps."""
    if schedule.warmup_steps <= steps:
        return schedule
    if schedule.decay_steps is None or schedule.name != "wsd":
        return dataclasses.replace(schedule, warmup_steps=steps)
    warmup = steps * schedule.warmup_steps // (schedule.warmup_steps + schedule.decay_steps)
    return dataclasses.replace(schedule, warmup_steps=warmup, decay_steps=max(1, steps - warmup))
