"""The order of samples is a bijection that looks random where a simple one would not."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import ChunkedOrder, FullOrder, permute, round_keys, unpermute

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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**40) | st.integers(2**40, 2**62), st.integers(0, 2**64), st.data())
def test_every_image_is_taken_back_to_its_index(n, seed, data):
    count = min(n, 2000)
    start = data.draw(st.integers(0, n - count))
    indices, keys = start + np.arange(count), round_keys(seed)
    assert np.array_equal(unpermute(permute(indices, n, keys), n, keys), indices)
    assert np.array_equal(permute(unpermute(indices, n, keys), n, keys), indices)


# ---- two levels -------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**32))
def test_the_order_by_shards_is_a_bijection_of_any_size_and_has_an_inverse(size, chunk, window, seed):
    chunk = max(chunk, size // 50)  # every window costs a call
    order = ChunkedOrder(size, chunk, window, (seed,))
    samples = order.samples(np.arange(size))
    assert np.array_equal(np.sort(samples), np.arange(size))
    assert np.array_equal(order.places(samples), np.arange(size))


@pytest.mark.parametrize("n", LARGE)
def test_the_order_by_shards_holds_beyond_32_bits_and_touches_few_chunks_at_a_time(n):
    order = ChunkedOrder(n, 65_536, 8, (1, "f"))
    for start in (0, 2**31 - 1000, n - 70_000):
        places = start + np.arange(70_000)
        samples = order.samples(places)
        assert len(np.unique(samples)) == len(samples)
        assert np.array_equal(order.places(samples), places)
        # 70,000 places lie in at most two windows of 8 chunks, of which one chunk of a window may be two at its ends.
        assert len(np.unique(samples // 65_536)) <= 2 * (8 + 1)


def test_within_a_window_of_shards_samples_are_spread_evenly_and_shards_come_in_another_order_each_epoch():
    order = ChunkedOrder(64 * 1000, 1000, 8, ("order", 0, 0, "f"))
    samples = order.samples(np.arange(64_000))
    first = samples[:8000]
    chunks = np.unique(first // 1000)
    assert len(chunks) == 8
    assert not np.array_equal(np.diff(chunks), np.ones(7))
    for part in first.reshape(8, 1000):
        assert_uniform(np.bincount(np.searchsorted(chunks, part // 1000), minlength=8), "one eighth of a window")
    for lag in (1, 2, 8):
        assert abs(np.corrcoef(first[:-lag] % 1000, first[lag:] % 1000)[0, 1]) < 5 / np.sqrt(8000)
    other = ChunkedOrder(64 * 1000, 1000, 8, ("order", 0, 1, "f")).samples(np.arange(8000))
    assert set((other // 1000).tolist()) != set(chunks.tolist())


def test_the_full_order_is_the_permutation_of_its_identity():
    order = FullOrder(999, ("order", 3, 1, "f"))
    assert np.array_equal(order.samples(np.arange(999)), images(999, 0, 999, round_keys("order", 3, 1, "f")))
    assert np.array_equal(order.places(order.samples(np.arange(999))), np.arange(999))


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
