"""Shares are exact, cursors lose and repeat nothing, and what lies before a position depends on nothing after it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import BLOCK, Mixture, Stage
from pretrain.errors import ConfigError

weights = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


def constant(weights, seed=0, sizes=None, max_epochs=None) -> Mixture:
    sources = len(weights)
    return Mixture([Stage(None, tuple(weights))], sizes or [1000] * sources, max_epochs or [None] * sources, seed)


@st.composite
def stages(draw, sources: int) -> list[Stage]:
    """Up to four stages that end anywhere; in each at least one source takes part."""
    ends = sorted(draw(st.sets(st.integers(1, 60_000), max_size=3)))
    result = []
    for until in [*ends, None]:
        chosen = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=sources, max_size=sources).filter(any))
        result.append(Stage(until, tuple(chosen)))
    return result


@settings(max_examples=40, deadline=None)
@given(weights, st.integers(0, 2**32), st.integers(0, 10**12))
def test_after_any_number_of_blocks_every_source_is_within_one_sample_of_its_share(weights, seed, blocks):
    counts = np.array(constant(weights, seed).counts(blocks * BLOCK), dtype=object)
    assert sum(counts) == blocks * BLOCK
    shares = constant(weights, seed).segments[0].shares
    assert all(abs(count * 2**32 - blocks * BLOCK * share) < 2**32 for count, share in zip(counts.tolist(), shares))
    assert np.abs(np.array(shares) / 2**32 - np.array(weights) / sum(weights)).max() < 1e-9


@settings(max_examples=100, deadline=None)
@given(weights, st.integers(1, 300))
def test_achieved_shares_are_those_of_the_weights_to_half_a_percent(weights, blocks):
    achieved = np.array(constant(weights).counts(blocks * BLOCK)) / (blocks * BLOCK)
    assert np.abs(achieved - np.array(weights) / sum(weights)).max() < 0.005


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_sample_is_lost_or_repeated_where_weights_change_in_mid_block(data):
    sources = data.draw(st.integers(1, 4))
    epochs = data.draw(st.lists(st.sampled_from([None, 1, 3]), min_size=sources, max_size=sources))
    mixture = Mixture(data.draw(stages(sources)), [5000, 300, 7000, 1200][:sources], epochs, 5)
    end = min(80_000, mixture.length if mixture.length is not None else 80_000)
    drawn, numbers = mixture.locate(np.arange(end))
    for source in range(sources):
        own = numbers[drawn == source]
        assert np.array_equal(own, np.arange(len(own)))
        if epochs[source] is not None:
            assert len(own) <= epochs[source] * [5000, 300, 7000, 1200][source]
        sample = np.arange(0, len(own), max(1, len(own) // 20))
        assert np.array_equal(mixture.positions(source, sample), np.flatnonzero(drawn == source)[sample])
    for position in (0, 1, end // 3, end):
        assert mixture.counts(position) == np.bincount(drawn[:position], minlength=sources).tolist()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_later_stages_and_new_sources_change_nothing_of_what_was(data):
    before = Mixture([Stage(None, (1.0, 2.0))], [900, 900], [None, None], 3)
    cut = data.draw(st.integers(1, 30_000))
    new = data.draw(st.sampled_from([0.5, 9.0]))
    after = Mixture([Stage(cut, (1.0, 2.0, 0.0)), Stage(None, (1.0, 0.0, new))], [900, 900, 50], [None, None, None], 3)
    for one, other in zip(before.locate(np.arange(cut)), after.locate(np.arange(cut))):
        assert np.array_equal(one, other)
    assert before.history(cut) == after.history(cut)
    assert before.history(cut + 1) != after.history(cut + 1)


def test_positions_beyond_32_bits_are_found_and_found_back():
    mixture = constant([3, 1], 7, [10**10, 10**10])
    positions = np.array([2**32 - 1, 2**32, 2**33 + 12345, 10**13])
    sources, numbers = mixture.locate(positions)
    for position, source, number in zip(positions.tolist(), sources.tolist(), numbers.tolist()):
        assert mixture.positions(source, np.array([number])).tolist() == [position]
        assert number == mixture.counts(position)[source]


def test_a_source_leaves_when_it_has_come_as_often_as_it_may_and_its_share_goes_to_the_others():
    mixture = constant([2, 1, 1], 0, [100, 5000, 9000], [3, None, None])
    sources, numbers = mixture.locate(np.arange(20_000))
    assert (sources == 0).sum() == 300
    last = np.flatnonzero(sources == 0)[-1]
    assert mixture.segments[0].end > last
    assert mixture.segments[1].shares == (0, 2**31, 2**31)
    rest = sources[mixture.segments[1].start :]
    assert abs((rest == 1).mean() - 0.5) < 0.01
    assert mixture.positions(0, np.array([299, 300])).tolist() == [last, -1]


def test_a_mixture_of_sources_that_are_all_used_up_ends_there():
    mixture = constant([1, 3], 0, [100, 200], [1, 2])
    assert mixture.length == 500
    sources, _ = mixture.locate(np.arange(500))
    assert np.bincount(sources).tolist() == [100, 400]
    with pytest.raises(IndexError, match="beyond the 500 samples"):
        mixture.locate(np.array([500]))


def test_within_a_block_the_sources_are_spread():
    sources, _ = constant([3, 1], 5).locate(np.arange(BLOCK))
    share = sources.reshape(-1, 256).mean(axis=1)
    # Sixteen draws of 256 with probability 1/4: deviation 0.027.
    assert np.abs(share - 0.25).max() < 0.12
    assert share.std() > 0.005
    other, _ = constant([3, 1], 6).locate(np.arange(BLOCK))
    later, _ = constant([3, 1], 5).locate(np.arange(BLOCK, 2 * BLOCK))
    assert abs(np.corrcoef(sources, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(sources, later)[0, 1]) < 0.1


def test_the_unit_of_the_weights_does_not_matter_and_equal_ones_are_equal():
    shares = [constant(weights).segments[0].shares for weights in ([3, 1], [0.75, 0.25], [3e9, 1e9])]
    assert shares[0] == shares[1] == shares[2]
    assert constant([1, 1, 1, 1]).counts(BLOCK) == [1024] * 4
    for blocks in range(1, 8):
        counts = constant([1, 1, 1]).counts(blocks * BLOCK)
        assert max(counts) - min(counts) <= 1


def test_the_order_of_positions_does_not_matter():
    mixture = constant([1, 2, 3], 9)
    positions = np.random.default_rng(0).integers(0, 10 * BLOCK, 500)
    sources, numbers = mixture.locate(positions)
    for position, source, number in itertools.islice(zip(positions, sources, numbers), 50):
        assert [int(x[0]) for x in mixture.locate(np.array([position]))] == [source, number]


def test_shares_are_those_of_the_numbers_as_they_are_written():
    # 0.94 + 0.10 + 0.88 as floats depends on the version of Python and is not a hundredth of 94 + 10 + 88.
    assert constant([0.94, 0.10, 0.88]).segments[0].shares == constant([94, 10, 88]).segments[0].shares
    assert (
        constant([0.45, 0.39, 0.41, 0.73, 0.03, 0.23]).segments[0].shares
        == constant([45, 39, 41, 73, 3, 23]).segments[0].shares
    )
    assert constant([1e308, 1e308]).segments[0].shares == (2**31, 2**31)


def test_many_sources_with_limits_are_mixed_in_time():
    random = np.random.default_rng(0)
    sizes = random.integers(2000, 9000, 200).tolist()
    began = time.process_time()
    mixture = constant(random.uniform(1, 2, 200).tolist(), 0, sizes, [1] * 200)
    assert time.process_time() - began < 10  # 19 s when every limit was searched for in every segment
    assert mixture.length == sum(sizes)
    ends = [segment.end for segment in mixture.segments]
    assert ends == sorted(ends) and mixture.counts(mixture.length) == sizes


def test_a_weight_too_small_to_be_drawn_is_refused_by_its_source():
    with pytest.raises(ConfigError, match=r"data.sources: source 1: its weight 1e-05 is below 1/4096 of the sum"):
        constant([1.0, 1e-5])


def test_a_stage_without_any_weight_is_refused():
    with pytest.raises(ConfigError, match=r"data.stages.1.weights: no source has a weight above 0"):
        Mixture([Stage(10, (1.0,)), Stage(None, (0.0,))], [5], [None], 0)
