"""The stream of samples is a pure function of seed and sources: nobody's share, batch size or worker count is in it."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import BLOCK, Mixture, Stage
from pretrain.data.samples import Windows
from pretrain.data.shards.reader import PreparedData
from pretrain.data.stream import DIGEST_MODULUS, BatchSchedule, Shuffle, Stream, digest, rank_positions
from pretrain.data.tasks import NextToken
from pretrain.data.training_data import PREFETCH_STEPS, Loader
from pretrain.errors import DataError


@dataclass
class Tokens:
    """Stands for prepared data of which token i has id i."""

    tokens: int
    fingerprint: str = "a"
    path: str = "data/a"
    eod_id: int = -1

    documents_fingerprint: str = "ends"

    def read_joined(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        assert 0 <= starts.min() and (starts + lengths).max() <= self.tokens
        return np.concatenate([np.arange(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist())])


def source(tokens: int, name: str = "a", length: int = 8) -> Windows:
    return Windows(name, Tokens(tokens, fingerprint=name), length)


def stream_of(sources: list[Windows], weights: list[float], seed: int) -> Stream:
    mixture = Mixture([Stage(None, tuple(weights))], [len(source) for source in sources], [None] * len(sources), seed)
    return Stream(sources, mixture, Shuffle(seed))


def read(stream: Stream, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.empty((2, len(positions), stream.sequence_length), dtype=np.int64)
    stream.read(positions, tokens, targets)
    return tokens, targets


def loader(stream: Stream, sequences: int, rank: int, size: int, workers: int) -> Loader:
    return Loader(stream, BatchSchedule(sequences), rank, size, workers)


@pytest.fixture
def real(prepared) -> Stream:
    return stream_of([Windows("train", PreparedData.open(prepared), 32)], [1.0], seed=3)


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_windows_that_overlap_by_one_token_so_that_every_token_but_the_first_is_a_target_once():
    samples = source(8 * 5 + 1)
    tokens, targets = np.empty((2, len(samples), 8), dtype=np.int64)
    samples.fill(np.arange(5), np.arange(5), tokens, targets)
    assert len(samples) == 5
    assert tokens.ravel().tolist() == list(range(40))
    assert targets.ravel().tolist() == list(range(1, 41))


@pytest.mark.parametrize("tokens, count", [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_a_tail_that_fills_no_sample_is_left_out(tokens, count):
    samples = source(tokens)
    assert len(samples) == count
    read, targets = np.empty((2, 1, 8), dtype=np.int64)
    samples.fill(np.array([count - 1]), np.array([0]), read, targets)
    assert targets[0, -1] == count * 8


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_data_with_less_than_one_sample_is_refused_with_its_size(tokens):
    with pytest.raises(DataError, match=rf"data/a: {tokens} tokens are less than one sample of data.sequence_length=8 \+ 1"):
        source(tokens)


def test_samples_of_prepared_data_are_slices_of_its_token_stream(prepared):
    data = PreparedData.open(prepared)
    samples = Windows("train", data, 100)
    assert len(samples) == (60_000 - 1) // 100
    tokens, targets = np.full((2, 4, 100), -1)
    samples.fill(np.array([249, 7]), np.array([3, 1]), tokens, targets)  # 249 lies across two shards
    for row, sample in ((3, 249), (1, 7)):
        assert np.array_equal(tokens[row], data.read(sample * 100, 100))
        assert np.array_equal(targets[row], data.read(sample * 100 + 1, 100))
    assert (tokens[[0, 2]] == -1).all() and (targets[[0, 2]] == -1).all()


# ---- stream -----------------------------------------------------------------------------------------------------------


def test_every_epoch_of_every_source_is_a_permutation_of_its_samples_of_its_own():
    stream = stream_of([source(8 * 300 + 1, "a"), source(8 * 77 + 1, "b")], [2, 1], 0)
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
        return stream_of([source(8 * 500 + 1, name)], [1.0], seed).locate(np.arange(500))[1]

    one = order(0, "a")
    assert np.array_equal(one, order(0, "a"))
    assert (one == order(1, "a")).sum() < 10
    assert (one == order(0, "b")).sum() < 10


def test_the_order_of_a_source_does_not_depend_on_the_other_sources():
    alone = stream_of([source(8 * 500 + 1, "a")], [1.0], 4)
    mixed = stream_of([source(8 * 90 + 1, "b"), source(8 * 500 + 1, "a")], [1.0, 3.0], 4)
    sources, samples, _ = mixed.locate(np.arange(2 * BLOCK))
    _, numbers = mixed.mixture.locate(np.arange(2 * BLOCK))
    kept = sources == 1
    assert np.array_equal(samples[kept], alone.locate(numbers[kept])[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 50))
def test_any_position_is_found_directly(position, count):
    stream = stream_of([source(8 * 300 + 1, "a"), source(8 * 77 + 1, "b")], [2, 1], 0)
    together = stream.locate(np.arange(position, position + count))
    alone = [stream.locate(np.array([p])) for p in range(position, position + count)]
    for column in range(3):
        assert together[column].tolist() == [int(one[column][0]) for one in alone]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.sampled_from([None, 2]))
def test_a_sample_is_found_back_at_its_position(position, window):
    sources = [source(8 * 300 + 1, "a"), source(8 * 77 + 1, "b")]
    for one in sources:
        one.data.manifest = SimpleNamespace(shards=[None] * 5)
    mixture = Mixture([Stage(1000, (2.0, 1.0)), Stage(None, (1.0, 5.0))], [300, 77], [None, None], 0)
    stream = Stream(sources, mixture, Shuffle(0, window))
    where = stream.locate(np.arange(position, position + 5))
    for i, (which, sample, epoch) in enumerate(zip(*(column.tolist() for column in where))):
        assert stream.positions(which, np.array([sample]), epoch).tolist() == [position + i]


def test_a_sample_is_read_from_where_it_is_located(real):
    positions = np.array([0, 7, 5000, 123_456])
    _, samples, _ = real.locate(positions)
    tokens, targets = read(real, positions)
    assert np.array_equal(tokens, np.stack([real.sources[0].data.read(int(i) * 32, 32) for i in samples]))
    assert np.array_equal(targets, np.stack([real.sources[0].data.read(int(i) * 32 + 1, 32) for i in samples]))


def test_the_identity_names_everything_that_decided_the_samples_so_far():
    def identity(seed=0, length=8, weights=(2, 1), names=("a", "b"), until=100):
        return stream_of([source(8 * 99 + 1, name, length) for name in names], list(weights), seed).identity(until)

    others = [
        identity(seed=1),
        identity(length=4),
        identity(weights=(1, 1)),
        identity(names=("a", "c")),
        identity(names=("b", "a")),
    ]
    assert all(other != identity() for other in others)
    assert identity(weights=(4, 2)) == identity()
    # Before the first sample only what is the same for every sample.
    assert identity(weights=(1, 1), names=("a", "c"), until=0) == identity(until=0)


def test_the_shares_of_the_samples_so_far_are_reported_by_name():
    stream = stream_of([source(8 * 99 + 1, "a"), source(8 * 99 + 1, "b")], [3, 1], 0)
    assert stream.shares(0) == {"a": 0.0, "b": 0.0}
    assert stream.shares(4 * BLOCK) == {"a": 0.75, "b": 0.25}
    assert abs(stream.shares(1000)["a"] - 0.75) < 0.05


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
    ranks = [take(loader(real, 16, rank, data_size, workers), 32, 20) for rank in range(data_size)]
    for step in range(20):
        tokens, targets = read(real, np.arange(32 + 16 * step, 32 + 16 * (step + 1)))
        assert torch.cat([rank[step].inputs["tokens_BT"] for rank in ranks]).tolist() == tokens.tolist()
        assert torch.cat([rank[step].inputs["targets_BT"] for rank in ranks]).tolist() == targets.tolist()
        assert np.concatenate([rank[step].positions for rank in ranks]).tolist() == list(range(32 + 16 * step, 48 + 16 * step))
        assert sum(rank[step].target_tokens for rank in ranks) == 16 * 32


@pytest.mark.parametrize("workers", [0, 3])
def test_a_ramp_gives_every_step_its_size_without_gap(real, workers):
    ramp = Loader(real, BatchSchedule(16, ((8, 4), (32, 8))), 1, 2, workers)
    batches = take(ramp, 0, 8)
    assert [batch.sequences for batch in batches] == [4, 4, 8, 8, 8, 16, 16, 16]
    assert [batch.positions[0] for batch in batches] == [2, 6, 12, 20, 28, 40, 56, 72]
    resumed = take(ramp, 16, 3)
    assert [batch.digest for batch in resumed] == [batch.digest for batch in batches[3:6]]


@pytest.mark.parametrize("workers", [0, 3])
def test_samples_are_cut_into_rows_in_the_stages_of_shorter_sequences(real, workers):
    """The same tokens, targets and digests; documents and keys of dropout belong to rows."""
    plain = Loader(real, BatchSchedule(8), 1, 2, workers, NextToken(256, dropout_seed=1))
    cut = dataclasses.replace(plain, schedule=BatchSchedule(8, cuts=((16, 4), (24, 2))))
    keys = []
    for rows, whole, batch in zip((4, 4, 2, 1, 1), take(plain, 0, 5), take(cut, 0, 5)):
        assert batch.rows_per_sample == rows and batch.digest == whole.digest and batch.target_tokens == whole.target_tokens
        assert batch.micro_steps(2) == 2 and batch.positions.tolist() == whole.positions.tolist()
        for name in ("tokens_BT", "targets_BT"):
            assert torch.equal(batch.inputs[name], whole.inputs[name].reshape(4 * rows, 32 // rows))
        documents = batch.inputs["documents_BT"]
        assert documents.shape == (4 * rows, 32 // rows) and not documents[:, 0].any()
        keys += batch.inputs["keys_B"].tolist()
        assert torch.equal(batch.micro(1, 2, torch.device("cpu"))["tokens_BT"], batch.inputs["tokens_BT"][2 * rows :])
    assert len(set(keys)) == len(keys) == 4 * (4 + 4 + 2 + 1 + 1)  # rows of a later stage had keys of an earlier one


def test_what_is_read_after_a_point_does_not_depend_on_where_reading_began(real):
    whole = torch.cat([batch.inputs["tokens_BT"] for batch in take(loader(real, 16, 0, 1, 1), 0, 12)])
    later = torch.cat([batch.inputs["tokens_BT"] for batch in take(loader(real, 16, 0, 1, 2), 96, 6)])
    other_size = torch.cat([batch.inputs["tokens_BT"] for batch in take(loader(real, 24, 0, 1, 0), 0, 8)])
    assert torch.equal(whole[96:], later)
    assert torch.equal(whole, other_size)


def test_micro_steps_of_a_batch_are_its_rows_in_order(real):
    batch = loader(real, 16, 1, 2, 0).read(0)
    parts = [batch.micro(i, 2, torch.device("cpu")) for i in range(4)]
    assert torch.equal(torch.cat([part["tokens_BT"] for part in parts]), batch.inputs["tokens_BT"])
    assert torch.equal(torch.cat([part["targets_BT"] for part in parts]), batch.inputs["targets_BT"])
    assert not any("documents_BT" in part for part in parts)
    masked = dataclasses.replace(loader(real, 16, 1, 2, 0), objective=NextToken(256)).read(0)
    documents = torch.cat([masked.micro(i, 2, torch.device("cpu"))["documents_BT"] for i in range(4)])
    ends = (masked.inputs["tokens_BT"] == 256).long()
    assert torch.equal(documents, ends.cumsum(1) - ends)


def test_closing_the_batches_stops_their_threads_and_an_error_of_a_thread_is_raised_in_its_step(real, monkeypatch):
    import threading

    before = threading.active_count()
    batches = loader(real, 16, 0, 1, 3).batches(0)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before

    read = Stream.read

    def broken(self, positions, *out):
        if positions[0] == 32:
            raise DataError("shard-00001.bin: cannot be read")
        return read(self, positions, *out)

    monkeypatch.setattr(Stream, "read", broken)
    batches = loader(real, 16, 0, 1, 3).batches(0)
    assert [next(batches).positions[0], next(batches).positions[0]] == [0, 16]
    with pytest.raises(DataError, match="shard-00001.bin"):
        next(batches)
    assert threading.active_count() == before


def test_what_later_steps_read_is_asked_for_ahead_where_it_is_remote(real, monkeypatch):
    asked = []
    monkeypatch.setattr(PreparedData, "is_remote", True)
    monkeypatch.setattr(PreparedData, "prefetch", lambda self, start, count: asked.append((start, count)))
    take(loader(real, 16, 1, 2, 1), 0, 1)
    _, samples, _ = real.locate(rank_positions(16 * (1 + PREFETCH_STEPS), 16, 1, 2))
    assert asked[:8] == [(int(sample) * 32, 33) for sample in samples]


# ---- digest -----------------------------------------------------------------------------------------------------------


def test_digests_of_ranks_add_up_to_the_digest_of_the_batch(real):
    whole = loader(real, 16, 0, 1, 0).read(48).digest
    for size in (2, 4):
        assert sum(loader(real, 16, rank, size, 0).read(48).digest for rank in range(size)) % DIGEST_MODULUS == whole
    assert loader(real, 16, 0, 1, 0).read(64).digest != whole


def test_a_digest_changes_with_a_token_or_with_two_samples_exchanged(real):
    positions = np.arange(8)
    tokens, targets = read(real, positions)
    exchanged, altered = [1, 0, *range(2, 8)], np.zeros_like(tokens)
    altered[5, 7] = 1
    names = [
        digest(positions, tokens, targets),
        digest(positions, tokens[exchanged], targets[exchanged]),
        digest(positions, tokens + altered, targets),
        digest(positions, tokens, targets - altered),
        digest(positions + 1, tokens, targets),
    ]
    assert len(set(names)) == 5
    assert all(0 <= name < DIGEST_MODULUS for name in names)


def test_a_stream_can_be_read_by_many_threads_at_once(real):
    def batch(number):
        return read(real, np.arange(number * 16, number * 16 + 16))[0]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(batch, range(40)))
    assert all(np.array_equal(one, batch(i)) for i, one in enumerate(together))
