"""The number of samples of a step follows from the samples consumed before it, and steps are found from positions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.stream import BatchSchedule


@st.composite
def schedules(draw) -> BatchSchedule:
    ends = sorted(draw(st.sets(st.integers(1, 500), max_size=4)))
    return BatchSchedule(draw(st.integers(1, 40)), tuple((until, draw(st.integers(1, 40))) for until in ends))


@settings(max_examples=200, deadline=None)
@given(schedules(), st.integers(1, 80))
def test_steps_follow_each_other_without_gap_and_are_found_back(schedule, steps):
    consumed = 0
    for step in range(1, steps + 1):
        assert schedule.after(0, step - 1) == consumed
        size = schedule.at(consumed)
        assert {schedule.step_of(position) for position in (consumed, consumed + size - 1)} == {step}
        assert schedule.step_of(consumed + size - 1, consumed, step - 1) == step
        assert schedule.after(consumed, 1) == consumed + size
        consumed += size


def test_a_ramp_takes_the_sizes_of_its_stages_until_their_ends():
    schedule = BatchSchedule(16, ((8, 4), (32, 8)))
    assert [schedule.at(n) for n in (0, 4, 7, 8, 16, 24, 31, 32, 1000)] == [4, 4, 4, 8, 8, 8, 8, 16, 16]
    assert schedule.after(0, 2) == 8
    assert schedule.after(0, 5) == 32
    assert schedule.after(0, 7) == 64
    assert schedule.sizes == [4, 8, 16]
