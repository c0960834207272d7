"""The stream of samples is a pure function of seed and sources: nobody's share, batch size or worker count is in it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.loader import Loader
from pretrain.data.mixture import BLOCK, Mixture
from pretrain.data.shards import PreparedData
from pretrain.data.stream import DIGEST_MODULUS, Samples, Stream, digest, rank_positions
from pretrain.errors import ConfigError, DataError


@dataclass
class Tokens:
    """Stands for prepared data of which token i has id i."""

    tokens: int
    fingerprint: str = "a"
    path: str = "data/a"
    reads: list = field(default_factory=list)

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start and start + count <= self.tokens
        return np.arange(start, start + count, dtype=np.int64)


def source(tokens: int, name: str = "a", length: int = 8) -> Samples:
    return Samples(name, Tokens(tokens, fingerprint=name), length)


@pytest.fixture
def real(prepared) -> Stream:
    return Stream([Samples("train", PreparedData.open(prepared), 32)], [1.0], seed=3)


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_windows_that_overlap_by_one_token_so_that_every_token_but_the_first_is_a_target_once():
    samples = source(8 * 5 + 1)
    windows = [samples.read(i) for i in range(len(samples))]
    assert len(samples) == 5
    assert all(len(window) == 9 for window in windows)
    assert all(one[-1] == other[0] for one, other in itertools.pairwise(windows))
    assert np.concatenate([window[1:] for window in windows]).tolist() == list(range(1, 41))


@pytest.mark.parametrize("tokens, count", [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_a_tail_that_fills_no_sample_is_left_out(tokens, count):
    samples = source(tokens)
    assert len(samples) == count
    assert samples.read(count - 1)[-1] == count * 8


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_data_with_less_than_one_sample_is_refused_with_its_size(tokens):
    with pytest.raises(DataError, match=rf"data/a: {tokens} tokens are less than one sample of data.sequence_length=8 \+ 1"):
        source(tokens)


def test_samples_of_prepared_data_are_slices_of_its_token_stream(prepared):
    data = PreparedData.open(prepared)
    samples = Samples("train", data, 100)
    assert len(samples) == (60_000 - 1) // 100
    assert np.array_equal(samples.read(249), data.read(24_900, 101))  # across two shards


# ---- mixture ----------------------------------------------------------------------------------------------------------

weights = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(weights, st.integers(0, 2**32), st.integers(0, 10**6))
def test_every_block_has_each_sources_slots_exactly_and_numbers_go_on_without_loss_or_repetition(weights, seed, block):
    mixture = Mixture.of(weights, seed)
    assert sum(mixture.slots) == BLOCK
    positions = np.arange(block * BLOCK, (block + 2) * BLOCK)
    sources, numbers = mixture.locate(positions)
    for part in (slice(0, BLOCK), slice(BLOCK, None)):
        assert np.bincount(sources[part], minlength=len(weights)).tolist() == list(mixture.slots)
    for which, slots in enumerate(mixture.slots):
        assert np.array_equal(np.sort(numbers[sources == which]), np.arange(block * slots, (block + 2) * slots))


@settings(max_examples=100, deadline=None)
@given(weights)
def test_shares_are_those_of_the_weights_to_half_a_percent(weights):
    slots = np.array(Mixture.of(weights, 0).slots)
    wanted = np.array(weights) / sum(weights)
    assert np.abs(slots / BLOCK - wanted).max() <= 1 / BLOCK
    assert np.abs(slots / BLOCK - wanted).max() < 0.005


def test_within_a_block_the_sources_are_spread():
    mixture = Mixture.of([3, 1], 5)
    sources, _ = mixture.locate(np.arange(BLOCK))
    share = sources.reshape(-1, 256).mean(axis=1)
    # Sixteen draws of 256 with probability 1/4: deviation 0.027.
    assert np.abs(share - 0.25).max() < 0.12
    assert share.std() > 0.005
    other, _ = Mixture.of([3, 1], 6).locate(np.arange(BLOCK))
    later, _ = mixture.locate(np.arange(BLOCK, 2 * BLOCK))
    assert abs(np.corrcoef(sources, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(sources, later)[0, 1]) < 0.1


def test_the_unit_of_the_weights_does_not_matter_and_equal_ones_are_equal():
    assert Mixture.of([3, 1], 0) == Mixture.of([0.75, 0.25], 0) == Mixture.of([3e9, 1e9], 0)
    assert Mixture.of([1, 1, 1, 1], 0).slots == (1024,) * 4
    assert max(Mixture.of([1, 1, 1], 0).slots) - min(Mixture.of([1, 1, 1], 0).slots) == 1


def test_a_weight_too_small_to_be_drawn_is_refused_by_its_key():
    with pytest.raises(
        ConfigError, match=r"data.sources.1.weight=1e-05 is below 1/4096 of the sum .* and would never be drawn"
    ):
        Mixture.of([1.0, 1e-5], 0)


# ---- stream -----------------------------------------------------------------------------------------------------------


def test_every_epoch_of_every_source_is_a_permutation_of_its_samples_of_its_own():
    stream = Stream([source(8 * 300 + 1, "a"), source(8 * 77 + 1, "b")], [2, 1], seed=0)
    sources, samples, epochs = stream.locate(np.arange(4 * BLOCK))
    for which, size in ((0, 300), (1, 77)):
        mixed = (sources == which).sum()
        _, numbers = stream.mixture.locate(np.arange(4 * BLOCK))
        order = samples[sources == which][np.argsort(numbers[sources == which])]
        whole = order[: mixed // size * size].reshape(-1, size)
        assert len(whole) > 10
        assert np.array_equal(np.sort(whole), np.tile(np.arange(size), (len(whole), 1)))
        assert len({tuple(epoch) for epoch in whole}) == len(whole)
        assert sorted(set(epochs[sources == which])) == list(range(-(-mixed // size)))


def test_the_order_depends_on_the_seed_and_on_the_content_of_a_source():
    def order(seed, name):
        return Stream([source(8 * 500 + 1, name)], [1.0], seed).locate(np.arange(500))[1]

    one = order(0, "a")
    assert np.array_equal(one, order(0, "a"))
    assert (one == order(1, "a")).sum() < 10
    assert (one == order(0, "b")).sum() < 10


def test_the_order_of_a_source_does_not_depend_on_the_other_sources():
    alone = Stream([source(8 * 500 + 1, "a")], [1.0], 4)
    mixed = Stream([source(8 * 90 + 1, "b"), source(8 * 500 + 1, "a")], [1.0, 3.0], 4)
    sources, samples, _ = mixed.locate(np.arange(2 * BLOCK))
    _, numbers = mixed.mixture.locate(np.arange(2 * BLOCK))
    kept = sources == 1
    assert np.array_equal(samples[kept], alone.locate(numbers[kept])[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 50))
def test_any_position_is_found_directly(position, count):
    stream = Stream([source(8 * 300 + 1, "a"), source(8 * 77 + 1, "b")], [2, 1], seed=0)
    together = stream.locate(np.arange(position, position + count))
    alone = [stream.locate(np.array([p])) for p in range(position, position + count)]
    for column in range(3):
        assert together[column].tolist() == [int(one[column][0]) for one in alone]


def test_a_sample_is_read_from_where_it_is_located(real):
    positions = np.array([0, 7, 5000, 123_456])
    _, samples, _ = real.locate(positions)
    expected = [real.sources[0].data.read(int(i) * 32, 33) for i in samples]
    assert np.array_equal(real.read(positions), np.stack(expected))


def test_the_identity_names_everything_that_decides_the_order():
    def identity(seed=0, length=8, weights=(2, 1), names=("a", "b")):
        return Stream([source(8 * 99 + 1, name, length) for name in names], list(weights), seed).identity()

    others = [
        identity(seed=1),
        identity(length=4),
        identity(weights=(1, 1)),
        identity(names=("a", "c")),
        identity(names=("b", "a")),
    ]
    assert all(other != identity() for other in others)
    assert identity(weights=(4, 2)) == identity()


# ---- ranks and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_the_ranks_partition_every_global_batch_in_order(data_size):
    for consumed in (0, 16, 4096 - 16, 10**9):
        shares = [rank_positions(consumed, 16, rank, data_size) for rank in range(data_size)]
        assert {len(share) for share in shares} == {16 // data_size}
        assert np.concatenate(shares).tolist() == list(range(consumed, consumed + 16))


def take(loader: Loader, consumed: int, count: int) -> list:
    batches = loader.batches(consumed)
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


@pytest.mark.parametrize("data_size", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_batches_are_the_same_for_any_number_of_workers_and_ranks(real, workers, data_size):
    ranks = [take(Loader(real, 16, rank, data_size, workers), 32, 20) for rank in range(data_size)]
    for step in range(20):
        windows = real.read(np.arange(32 + 16 * step, 32 + 16 * (step + 1)))
        assert torch.cat([rank[step].tokens_BT for rank in ranks]).tolist() == windows[:, :-1].tolist()
        assert torch.cat([rank[step].targets_BT for rank in ranks]).tolist() == windows[:, 1:].tolist()
        assert np.concatenate([rank[step].positions for rank in ranks]).tolist() == list(range(32 + 16 * step, 48 + 16 * step))
        assert sum(rank[step].target_tokens for rank in ranks) == 16 * 32


def test_what_is_read_after_a_point_does_not_depend_on_where_reading_began(real):
    whole = torch.cat([batch.tokens_BT for batch in take(Loader(real, 16, 0, 1, 1), 0, 12)])
    later = torch.cat([batch.tokens_BT for batch in take(Loader(real, 16, 0, 1, 2), 96, 6)])
    other_size = torch.cat([batch.tokens_BT for batch in take(Loader(real, 24, 0, 1, 0), 0, 8)])
    assert torch.equal(whole[96:], later)
    assert torch.equal(whole, other_size)


def test_micro_steps_of_a_batch_are_its_rows_in_order(real):
    batch = Loader(real, 16, 1, 2, 0).read(0)
    parts = [batch.micro(i, 2, torch.device("cpu")) for i in range(4)]
    assert torch.equal(torch.cat([tokens for tokens, _ in parts]), batch.tokens_BT)
    assert torch.equal(torch.cat([targets for _, targets in parts]), batch.targets_BT)


def test_closing_the_batches_stops_their_threads_and_an_error_of_a_thread_is_raised_in_its_step(real, monkeypatch):
    import threading

    before = threading.active_count()
    batches = Loader(real, 16, 0, 1, 3).batches(0)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before

    read = Stream.read

    def broken(self, positions):
        if positions[0] == 32:
            raise DataError("shard-00001.bin: cannot be read")
        return read(self, positions)

    monkeypatch.setattr(Stream, "read", broken)
    batches = Loader(real, 16, 0, 1, 3).batches(0)
    assert [next(batches).positions[0], next(batches).positions[0]] == [0, 16]
    with pytest.raises(DataError, match="shard-00001.bin"):
        next(batches)
    assert threading.active_count() == before


# ---- digest -----------------------------------------------------------------------------------------------------------


def test_digests_of_ranks_add_up_to_the_digest_of_the_batch(real):
    whole = Loader(real, 16, 0, 1, 0).read(48).digest
    for size in (2, 4):
        assert sum(Loader(real, 16, rank, size, 0).read(48).digest for rank in range(size)) % DIGEST_MODULUS == whole
    assert Loader(real, 16, 0, 1, 0).read(64).digest != whole


def test_a_digest_changes_with_a_token_or_with_two_samples_exchanged(real):
    positions = np.arange(8)
    windows = real.read(positions)
    exchanged, altered = windows[[1, 0, *range(2, 8)]], windows.copy()
    altered[5, 7] += 1
    names = [digest(positions, w) for w in (windows, exchanged, altered)] + [digest(positions + 1, windows)]
    assert len(set(names)) == 4
    assert all(0 <= name < DIGEST_MODULUS for name in names)


def test_a_stream_can_be_read_by_many_threads_at_once(real):
    def read(number):
        return real.read(np.arange(number * 16, number * 16 + 16))

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(read, range(40)))
    assert all(np.array_equal(one, read(i)) for i, one in enumerate(together))
