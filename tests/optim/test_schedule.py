"""Learning rates are pure functions of the step, with known values at the joints."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrain.config.data_schema import Data
from pretrain.config.optim_schema import RateStage, Schedule
from pretrain.config.schema import Batch, BatchStage, Config, LengthStage, Run
from pretrain.data.sources import consumed_after
from pretrain.errors import ConfigError
from pretrain.optim.schedule import check_schedule, fit, goes_by_tokens, learning_rate
from pretrain.train.resolve import tokens_as_steps

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


def test_a_shape_that_is_not_computed_is_refused_before_the_first_step():
    """A name that was added to the schema alone fell as `linear` does, without a word."""
    schedule = Schedule(name="parabola", warmup_steps=40)
    for call in (lambda: learning_rate(schedule, PEAK, STEPS, 500), lambda: check_schedule(schedule, STEPS, schedule)):
        with pytest.raises(ConfigError, match="pretrain/optim/schedule.py computes no parabola schedule; AGENTS.md"):
            call()


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


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_the_shapes_of_wsds_decay_are_those_of_transformers(shape):
    from transformers import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = get_wsd_schedule(
        optimizer, num_warmup_steps=100, num_decay_steps=200, num_training_steps=STEPS, min_lr_ratio=0.1, decay_type=shape
    )
    for step in range(1, STEPS + 1):
        optimizer.step()
        reference.step()
        if step >= 100:  # its warmup begins at the least rate
            ours = rate(step, name="wsd", warmup_steps=100, decay_steps=200, min_ratio=0.1, decay_shape=shape)
            assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step


def test_an_exponential_decay_falls_by_equal_ratios_to_the_least_rate():
    rates = [rate(step, name="wsd", decay_steps=200, min_ratio=0.01, decay_shape="exponential") for step in range(800, 1001)]
    assert rates[0] == PEAK and rates[-1] == pytest.approx(PEAK * 0.01)
    reference = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=PEAK), 0.01 ** (1 / 200))
    for ours in rates:
        assert ours == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        reference.optimizer.step()
        reference.step()


def test_stages_follow_each_other():
    stages = [RateStage(100, 1.0, "constant"), RateStage(200, 0.2, "linear"), RateStage(100, 0.05, "exponential"), RateStage(50, 0.5, "cosine"), RateStage(9, 0.3, "constant"), RateStage(100, 0.1, "1-sqrt")]  # fmt: skip

    def of(step: int) -> float:
        return rate(step, name="piecewise", warmup_steps=40, stages=stages) / PEAK

    assert of(20) == 0.5 and {of(step) for step in range(40, 141)} == {1.0}
    assert of(240) == pytest.approx(0.6) and of(340) == pytest.approx(0.2)
    assert of(390) == pytest.approx(0.1) and of(440) == pytest.approx(0.05)  # the root of 0.2 * 0.05
    assert of(465) == pytest.approx(0.275) and of(490) == pytest.approx(0.5)
    assert {of(step) for step in (491, 499)} == {0.3}
    assert of(524) == pytest.approx(0.2) and {of(step) for step in (599, 1000)} == {0.1}  # half of the way after a quarter of the steps


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 997}, "schedule.warmup_steps=4 and schedule.decay_steps=997 do not fit in run.steps=1000; the decay may take at most 996 steps"),
        ({"name": "wsd", "warmup_steps": 999, "decay_steps": 2}, "the decay may take at most 1 step$"),
        ({"name": "wsd", "warmup_steps": 1000, "decay_steps": 1}, "schedule.warmup_steps=1000 and schedule.decay_steps=1 .*; shorten the warmup, or raise run.steps"),  # F13: "at most 0", which the schema refuses
        ({"name": "wsd", "min_ratio": 1}, "schedule.min_ratio=1 with schedule.name=wsd never decays; lower it, or set schedule.name=constant and remove schedule.min_ratio"),
        ({"name": "wsd", "decay_shape": "exponential", "min_ratio": 0.0}, "schedule.decay_shape=exponential never reaches schedule.min_ratio=0"),
        *(({"name": n, "min_ratio": 1}, f"schedule.min_ratio=1 with schedule.name={n} never decays; lower it, or set schedule.name=constant and remove schedule.min_ratio$") for n in ("cosine", "linear")),
        *(({"name": "piecewise", "stages": stages}, r"schedule.stages give all 1000 steps \(run.steps\) a rate of 0, so that nothing is trained") for stages in (
            [RateStage(5, 0.0, "constant")], [RateStage(1, 0.0), RateStage(2, 0.0, "cosine")], [RateStage(1000, 0.0, "constant")])),
        ({"name": "piecewise"}, "schedule.name=piecewise has no schedule.stages"),
        ({"name": "piecewise", "warmup_steps": 10, "stages": [RateStage(990, 0.5), RateStage(1, 0.1)]}, "schedule.stages.1 begins after step 1000, the end of the run"),
        ({"name": "piecewise", "stages": [RateStage(5, 0.0), RateStage(5, 0.1, "exponential")]}, "schedule.stages.1.shape=exponential neither leaves nor reaches a rate of 0"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be_are_refused(written, message):
    with pytest.raises(ConfigError, match=message):
        check_schedule(Schedule(**written), STEPS, Schedule(**written))


@pytest.mark.parametrize("stages", [[RateStage(2, 0.0)], [RateStage(5, 0.0, "constant"), RateStage(2, 0.1)]])
def test_stages_that_train_some_steps_are_taken(stages):
    check_schedule(Schedule(name="piecewise", stages=stages), STEPS, Schedule(name="piecewise", stages=stages))


@pytest.mark.parametrize("key", ["run.tokens", "schedule.stages.0.tokens"])
def test_tokens_of_more_steps_than_a_key_takes_are_refused(key):
    """They became a number of steps that the run's own config.yaml had and no start could read back."""
    many = 4 * 10**18
    given = Config(schedule=Schedule(name="piecewise", stages=[RateStage(ratio=0.5, tokens=many)]))
    if key == "run.tokens":
        given = Config(run=Run(tokens=many))
    with pytest.raises(ConfigError, match=f"{key}={many} would take [0-9]+ steps, and {10**12} is the most; lower it"):
        tokens_as_steps(given)


def test_a_schedule_that_just_fits_is_taken():
    all_warmup = Schedule(name="piecewise", warmup_steps=STEPS, stages=[RateStage(5, 0.5), RateStage(5, 0.1)])
    for schedule in (Schedule(name="wsd", warmup_steps=4, decay_steps=996), Schedule(warmup_steps=STEPS), all_warmup):
        check_schedule(schedule, STEPS, schedule)


def test_a_smoke_run_of_a_recipe_with_stages_is_all_warmup():
    """It was told to shorten the stages before the first one. Other schedules shorten their warmup."""
    recipe = Schedule(name="piecewise", warmup_steps=500, stages=[RateStage(5, 0.5)])
    shortened = fit(recipe, 20)
    check_schedule(shortened, 20, recipe)
    assert shortened.warmup_steps == 20 and learning_rate(shortened, 1.0, 20, 20) == 1.0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 64)), max_size=3),
    st.integers(1, 64),
    st.sampled_from([1, 32, 1000]),
    st.integers(1, 2**22),
    st.data(),
)
def test_numbers_of_tokens_are_the_first_steps_that_reach_them(ramp, sequences, length, tokens, draw):
    ends = sorted({until for until, _ in ramp})
    sizes = [size for _, size in ramp][: len(ends)]
    assume(all(-(-b // length) > -(-a // length) for a, b in itertools.pairwise(ends)))
    assume(all(one != other for one, other in itertools.pairwise([*sizes, sequences])))  # a stage that changes nothing is refused
    warmup, decay = draw.draw(st.integers(1, tokens)), draw.draw(st.integers(1, 2**22))
    written = Config(
        run=Run(tokens=tokens), schedule=Schedule(name="wsd", warmup_tokens=warmup, decay_tokens=decay),
        batch=Batch(sequences, ramp=[BatchStage(end, size) for end, size in zip(ends, sizes)]), data=Data(sequence_length=length),
    )  # fmt: skip
    reached, consumed = [0], 0  # step by step
    while reached[-1] < tokens:
        consumed += next((size for end, size in zip(ends, sizes) if consumed < -(-end // length)), sequences)
        reached.append(consumed * length)
    if decay > reached[-1]:
        with pytest.raises(ConfigError, match="do not fit in the run"):
            tokens_as_steps(written)
        return
    found = tokens_as_steps(written)
    assert found.run.steps == len(reached) - 1
    assert found.schedule.warmup_steps == next(step for step, sum_ in enumerate(reached) if sum_ >= warmup)
    begins = next(step for step, sum_ in enumerate(reached) if sum_ >= reached[-1] - decay)
    assert found.schedule.decay_steps == max(1, found.run.steps - begins)
    assert tokens_as_steps(found) == found
    if found.schedule.warmup_steps < found.run.steps:
        first, rest = reached[found.schedule.warmup_steps], reached[found.schedule.warmup_steps :]
        stages = [RateStage(ratio=0.5, tokens=draw.draw(st.integers(1, reached[-1]))), RateStage(2, 0.1), RateStage(ratio=0.1, tokens=1)]
        staged = dataclasses.replace(written, schedule=Schedule(name="piecewise", warmup_tokens=warmup, stages=stages))
        last, *others = [stage.steps for stage in tokens_as_steps(staged).schedule.stages]
        assert others == [2, 1]
        assert last == next((step for step, sum_ in enumerate(rest) if sum_ >= first + stages[0].tokens), last) >= 1


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


# 32 tokens in a sample: 40 steps of 64 tokens, 20 of 128 and 30 of 512.
RAMP = [BatchStage(2560, 2), BatchStage(5120, 4)]
TOKENS = [64 * step for step in range(1, 41)] + [2560 + 128 * step for step in range(1, 21)] + [5120 + 512 * step for step in range(1, 31)]  # fmt: skip
LENGTHS = [LengthStage(1280, 8), LengthStage(4096, 16)]


def half_cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def staged(tokens: int) -> float:
    if tokens <= 5120:
        return 1 - 0.5 * (tokens - 1024) / 4096
    return 0.5 * 0.2 ** ((tokens - 5120) / 5120) if tokens <= 10240 else 0.1 + 0.3 * (1 - half_cosine(min(1, (tokens - 10240) / 10240)))


# Of the tokens t after a step: the share of the peak, after a warmup of 1,024 tokens.
BY_TOKENS = {
    "cosine": ({"min_ratio": 0.1}, lambda t: 0.1 + 0.9 * half_cosine((t - 1024) / 19456)),
    "linear": ({"min_ratio": 0.1}, lambda t: 1 - 0.9 * (t - 1024) / 19456),
    "constant": ({}, lambda t: 1.0),
    "wsd": ({"min_ratio": 0.0, "decay_tokens": 16384}, lambda t: min(1, (20480 - t) / 16384)),
    "wsd by default": ({"min_ratio": 0.0}, lambda t: min(1, (20480 - t) / 2048)),
    "inverse_sqrt": ({}, lambda t: math.sqrt(1024 / t)),
    "piecewise": ({"stages": [RateStage(ratio=0.5, tokens=4096), RateStage(ratio=0.1, tokens=5120, shape="exponential"), RateStage(ratio=0.4, tokens=10240, shape="cosine")]}, staged),
}  # fmt: skip


def rates_of(config: Config) -> list[float]:
    """The share of the peak of every step, as the trainer computes it."""
    found = tokens_as_steps(config)
    assert tokens_as_steps(found) == found
    return [
        learning_rate(found.schedule, 1.0, found.run.steps, step, consumed_after(found))
        for step in range(1, found.run.steps + 1)
    ]


@pytest.mark.parametrize("lengths", [[], LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("case", BY_TOKENS)
def test_a_schedule_in_tokens_is_a_function_of_tokens_under_a_ramp(case, lengths):
    """It went by steps: a cosine had 0.42 of its peak at a quarter of the tokens, where it has 0.9."""
    values, formula = BY_TOKENS[case]
    schedule = Schedule(name=case.split()[0], warmup_tokens=1024, **values)
    config = Config(run=Run(tokens=20480), schedule=schedule, batch=Batch(16, ramp=RAMP, lengths=lengths), data=Data(sequence_length=32))
    assert rates_of(config) == pytest.approx([t / 1024 if t <= 1024 else formula(t) for t in TOKENS], rel=1e-12, abs=1e-15)


def test_parts_in_steps_go_by_steps_beside_parts_in_tokens():
    batch, data = Batch(16, ramp=RAMP), Data(sequence_length=32)

    def of(run: Run, **schedule) -> list[float]:
        return rates_of(Config(run=run, schedule=Schedule(**schedule), batch=batch, data=data))

    warmup_in_steps = of(Run(tokens=20480), name="linear", warmup_steps=50, min_ratio=0.0)
    assert warmup_in_steps == pytest.approx([s / 50 if s <= 50 else (20480 - t) / (20480 - 3840) for s, t in enumerate(TOKENS, 1)])
    fall_in_steps = of(Run(steps=90), name="linear", warmup_tokens=4096, min_ratio=0.0)
    assert fall_in_steps == pytest.approx([t / 4096 if t <= 4096 else (90 - s) / 38 for s, t in enumerate(TOKENS, 1)])
    decay_in_steps = of(Run(tokens=20480), name="wsd", decay_steps=40, min_ratio=0.0)
    assert decay_in_steps == pytest.approx([min(1, (90 - s) / 40) for s in range(1, 91)])
    stages = [RateStage(50, 0.0), RateStage(ratio=1.0, tokens=TOKENS[-1] - TOKENS[49])]
    expected = [1 - s / 50 if s <= 50 else (t - TOKENS[49]) / (TOKENS[-1] - TOKENS[49]) for s, t in enumerate(TOKENS, 1)]
    assert of(Run(tokens=20480), name="piecewise", stages=stages) == pytest.approx(expected)
    by_choice = of(Run(tokens=20480), name="linear", warmup_tokens=1024, min_ratio=0.0, warmup_by_tokens=False, decay_by_tokens=False)
    assert by_choice == [s / 16 if s <= 16 else 1 - (s - 16) / 74 for s in range(1, 91)]
    tokens_by_choice = of(Run(steps=90), name="wsd", decay_by_tokens=True, min_ratio=0.0)
    assert tokens_by_choice == pytest.approx([min(1, (20480 - t) / 2048) for t in TOKENS])


@settings(deadline=None)
@given(st.sampled_from(sorted(BY_TOKENS)), st.integers(1, 64), st.integers(1, 3000), st.integers(1, 200))
def test_with_one_batch_a_schedule_goes_by_steps_and_tokens_alike(case, sequences, warmup, steps):
    values = {name: value for name, value in BY_TOKENS[case][0].items() if name != "decay_tokens"}
    schedule = fit(tokens_as_steps(Config(schedule=Schedule(name=case.split()[0], warmup_steps=warmup, **values))).schedule, steps)
    assert not goes_by_tokens(schedule)
    marked = dataclasses.replace(
        schedule, warmup_by_tokens=True, decay_by_tokens=True, stages=[dataclasses.replace(stage, by_tokens=True) for stage in schedule.stages]
    )
    for step in range(1, steps + 1):
        by_tokens = learning_rate(marked, 1.0, steps, step, lambda s: s * sequences)
        assert by_tokens == pytest.approx(learning_rate(schedule, 1.0, steps, step), rel=1e-12, abs=1e-15)


def test_a_warmup_by_tokens_without_a_warmup_is_refused():
    with pytest.raises(ConfigError, match="schedule.warmup_by_tokens=true has no effect without a warmup; set schedule.warmup_steps, or remove it"):
        tokens_as_steps(Config(schedule=Schedule(name="constant", warmup_by_tokens=True)))
    tokens_as_steps(Config(schedule=Schedule(name="inverse_sqrt", warmup_by_tokens=True)))


def test_a_stage_by_tokens_without_a_ramp_is_refused():
    stages = [RateStage(5, 0.5, by_tokens=True)]
    constant = Config(schedule=Schedule(name="piecewise", stages=[RateStage(5, 0.5, "constant", by_tokens=False)]), batch=Batch(ramp=[BatchStage(512, 4)]))
    with pytest.raises(ConfigError, match="schedule.stages.0.by_tokens has no effect with schedule.stages.0.shape=constant; remove it"):
        tokens_as_steps(constant)
    with pytest.raises(ConfigError, match="schedule.stages.0.by_tokens has no effect without batch.ramp; remove it"):
        tokens_as_steps(Config(schedule=Schedule(name="piecewise", stages=stages)))
