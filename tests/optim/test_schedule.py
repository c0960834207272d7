"""Learning rates are pure functions of the step, with known values at the joints."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.schema import Schedule
from pretrain.optim.schedule import learning_rate

PEAK, STEPS = 2e-3, 1000


def rate(step: int, **schedule) -> float:
    return learning_rate(Schedule(**schedule), PEAK, STEPS, step)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
def test_warmup_rises_linearly_from_a_first_step_above_zero_to_the_peak(name):
    rates = [rate(step, name=name, warmup_steps=40) for step in range(1, 41)]
    assert rates == pytest.approx([PEAK * step / 40 for step in range(1, 41)], rel=1e-12)
    assert rates[-1] == PEAK
    assert rate(41, name=name, warmup_steps=40) <= PEAK


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 0.5])
def test_the_last_step_has_the_least_rate(name, min_ratio):
    assert rate(STEPS, name=name, warmup_steps=40, min_ratio=min_ratio) == pytest.approx(PEAK * min_ratio, abs=1e-18)
    assert rate(STEPS - 1, name=name, warmup_steps=40, min_ratio=min_ratio) > PEAK * min_ratio


@pytest.mark.parametrize(
    "step, share",
    [(100, 1.0), (325, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))), (550, 0.55), (775, 0.1 + 0.9 * 0.5 * (1 - math.sqrt(0.5)))],
)
def test_cosine_at_the_quarters(step, share):
    assert rate(step, name="cosine", warmup_steps=100, min_ratio=0.1) == pytest.approx(PEAK * share, rel=1e-12)


def test_cosine_is_torchs_cosine_annealing():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=PEAK * 0.1)
    for step in range(1, STEPS + 1):
        optimizer.step()
        reference.step()
        assert rate(step, name="cosine", min_ratio=0.1) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


def test_linear_falls_by_the_same_amount_every_step():
    assert rate(550, name="linear", warmup_steps=100, min_ratio=0.1) == pytest.approx(PEAK * 0.55, rel=1e-12)
    falls = {
        round(rate(s, name="linear", warmup_steps=100) - rate(s + 1, name="linear", warmup_steps=100), 15)
        for s in range(100, 1000)
    }
    assert len(falls) == 1


def test_constant_stays():
    assert {rate(step, name="constant", min_ratio=0.1) for step in range(1, STEPS + 1)} == {PEAK}


def test_wsd_stays_and_then_falls_linearly():
    schedule = {"name": "wsd", "warmup_steps": 100, "decay_steps": 200, "min_ratio": 0.0}
    assert {rate(step, **schedule) for step in range(100, 801)} == {PEAK}
    assert rate(801, **schedule) == pytest.approx(PEAK * (1 - 1 / 200), rel=1e-12)
    assert rate(900, **schedule) == pytest.approx(PEAK / 2, rel=1e-12)
    assert rate(1000, **schedule) == 0


def test_wsd_decays_over_a_tenth_of_the_run_by_default():
    assert rate(900, name="wsd", min_ratio=0.0) == PEAK
    assert rate(950, name="wsd", min_ratio=0.0) == pytest.approx(PEAK / 2, rel=1e-12)
    assert learning_rate(Schedule(name="wsd", min_ratio=0.0), PEAK, 5, 4) == PEAK
    assert learning_rate(Schedule(name="wsd", min_ratio=0.0), PEAK, 5, 5) == 0


@settings(deadline=None)
@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 300),
    st.data(),
    st.floats(0, 1),
)
def test_any_schedule_stays_between_zero_and_the_peak_and_never_rises_after_the_warmup(name, steps, data, min_ratio):
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.none() | st.integers(1, max(1, steps - warmup)))
    schedule = Schedule(name=name, warmup_steps=warmup, decay_steps=decay, min_ratio=min_ratio)
    rates = [learning_rate(schedule, PEAK, steps, step) for step in range(1, steps + 1)]
    assert rates == [learning_rate(schedule, PEAK, steps, step) for step in range(1, steps + 1)]
    assert all(0 <= r <= PEAK for r in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[max(warmup - 1, 0) :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(after, after[1:]))
    if name != "constant" and warmup < steps:
        assert rates[-1] == pytest.approx(PEAK * min_ratio, abs=1e-15)


def test_inverse_square_root_is_the_transformers_schedule():
    # arXiv 1706.03762, equation 3: dim^-0.5 * min(step^-0.5, step * warmup^-1.5); its peak is at the end of the warmup.
    dim, warmup = 512, 40
    peak = dim**-0.5 * warmup**-0.5
    schedule = Schedule(name="inverse_sqrt", warmup_steps=warmup)
    for step in (1, 7, 39, 40, 41, 160, 1000):
        assert learning_rate(schedule, peak, STEPS, step) == pytest.approx(dim**-0.5 * min(step**-0.5, step * warmup**-1.5))
    assert rate(160, name="inverse_sqrt", warmup_steps=40) == pytest.approx(PEAK / 2)
    assert rate(4, name="inverse_sqrt") == pytest.approx(PEAK / 2)  # without a warmup as if that were one step
