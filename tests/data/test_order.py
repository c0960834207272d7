"""The order of samples is a bijection that looks random where a simple one would not."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import permute, round_keys

LARGE = [10**10, 2**32 + 1, 2**40 - 3, 3 * 2**50 + 1]
DRAWS = 64_000


def images(n: int, start: int, count: int, keys: np.ndarray, stride: int = 1) -> np.ndarray:
    return permute(start + stride * np.arange(count, dtype=np.int64), n, keys)


def assert_uniform(counts: np.ndarray, what: object) -> None:
    """Chi-square of counts against equal ones, within 5 standard deviations of its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom) + 5, (what, chi_square, freedom)


# ---- bijection --------------------------------------------------------------------------------------------------------


def test_every_size_up_to_300_and_around_powers_of_two_is_permuted():
    around = {2**k + d for k in range(9, 13) for d in (-1, 0, 1)} | {1000, 3125, 4999, 5000}
    for n in sorted(set(range(1, 301)) | around):
        assert np.array_equal(np.sort(images(n, 0, n, round_keys("test", n))), np.arange(n)), n


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64))
def test_any_size_is_permuted_under_any_key(n, seed):
    assert np.array_equal(np.sort(images(n, 0, n, round_keys(seed))), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**40) | st.integers(2**40, 2**62), st.integers(0, 2**64), st.data())
def test_a_window_of_a_large_size_maps_to_distinct_indices_in_range(n, seed, data):
    count = min(n, 3000)
    start = data.draw(st.integers(0, n - count))
    result = images(n, start, count, round_keys(seed))
    assert result.dtype == np.int64
    assert result.min() >= 0
    assert result.max() < n
    assert len(np.unique(result)) == count


def test_distant_windows_of_a_large_size_do_not_collide():
    n = 200_003
    whole = images(n, 0, n, round_keys("collide"))
    assert len(np.unique(whole)) == n


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(0, 9))
def test_an_index_has_the_same_image_alone_and_in_any_company(n, seed):
    keys = round_keys(seed)
    indices = np.random.default_rng(seed).integers(0, n, 20)
    together = permute(indices, n, keys)
    assert [int(permute(np.array([i]), n, keys)[0]) for i in indices] == together.tolist()
    assert np.array_equal(permute(indices.reshape(4, 5), n, keys), together.reshape(4, 5))


@pytest.mark.parametrize("n, indices", [(5, [5]), (5, [-1]), (0, []), (-3, []), (2**62 + 1, [0])])
def test_an_index_outside_the_range_is_refused(n, indices):
    with pytest.raises(ValueError):
        permute(np.array(indices, dtype=np.int64), n, round_keys(0))


def test_no_indices_have_no_images():
    assert permute(np.array([], dtype=np.int64), 7, round_keys(0)).tolist() == []


# ---- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("modulus", [2, 3, 4, 8, 16, 32, 64])
def test_residues_of_consecutive_images_are_uniform(n, modulus):
    for start in (0, 2**31 - 100, n // 2):
        residues = images(n, start, DRAWS, round_keys(0, n)) % modulus
        assert_uniform(np.bincount(residues, minlength=modulus), (n, modulus, start))


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("modulus", [2, 8])
def test_neighbours_are_independent_of_each_other(n, modulus):
    for stride in (1, 2, 64, 4096, 2**15):
        result = images(n, 5, DRAWS, round_keys(1, n), stride)
        residues = result % modulus
        assert_uniform(np.bincount(residues[:-1] * modulus + residues[1:], minlength=modulus**2), (n, modulus, stride))
        runs = 1 + np.count_nonzero(np.diff(result % 2))
        assert abs(runs - DRAWS / 2) < 5 * np.sqrt(DRAWS) / 2


@pytest.mark.parametrize("n", LARGE)
def test_images_are_spread_over_the_whole_range_without_serial_correlation(n):
    for stride in (1, 16, 1000):
        result = images(n, 0, DRAWS, round_keys(2, n), stride)
        assert_uniform(np.bincount((result / n * 100).astype(int), minlength=100), (n, stride))
        for lag in (1, 2, 8, 64):
            assert abs(np.corrcoef(result[:-lag], result[lag:])[0, 1]) < 5 / np.sqrt(DRAWS), (n, stride, lag)
        assert abs(np.corrcoef(np.arange(DRAWS), result)[0, 1]) < 5 / np.sqrt(DRAWS)


def test_small_sizes_have_as_few_fixed_points_as_chance_gives():
    fixed = [np.count_nonzero(images(n, 0, n, round_keys("fixed", n)) == np.arange(n)) for n in range(100, 500)]
    # One is expected of each, with a deviation of one.
    assert abs(np.mean(fixed) - 1) < 5 / np.sqrt(len(fixed))


def test_every_permutation_of_three_occurs_equally_often():
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        order = tuple(images(3, 0, 3, round_keys(seed)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert_uniform(np.array(list(seen.values())), seen)


# ---- keys -------------------------------------------------------------------------------------------------------------


def test_keys_depend_on_every_part_of_the_identity():
    identities = [(0, 1, "a"), (0, 2, "a"), (1, 1, "a"), (0, 1, "b"), (1, 0, "a"), (0, 1), ("order", 0, 1, "a")]
    keys = {tuple(round_keys(*identity).tolist()) for identity in identities}
    assert len(keys) == len(identities)
    assert np.array_equal(round_keys(np.int64(3), "x"), round_keys(3, "x"))


def test_two_keys_agree_as_rarely_as_chance():
    n = 10_000
    orders = [images(n, 0, n, round_keys("order", 0, epoch, "f")) for epoch in range(6)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 8
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(n)


def test_the_order_is_the_one_of_all_earlier_runs():
    digest = hashlib.sha256(images(10**10, 0, 1000, round_keys("order", 0, 0, "f")).astype("<i8").tobytes()).hexdigest()
    # A change of this number means that no run of before can be continued or repeated.
    assert digest == "a8e23ae37b62168ab8247a77c671f35658093762fc4035f1c396704890dfe722"
