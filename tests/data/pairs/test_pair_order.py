"""The order of pairs: every pair once an epoch, batches within the budget, and nothing that depends on who computes it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.data_schema import Data
from pretrain.config.schema import Batch, Config
from pretrain.conventions import IGNORED
from pretrain.data.pairs.pair_training import PairLoader, PairOrder, PairTraining, batch_ends, pair_inputs, pairs_of_ranks
from pretrain.data.pairs.prepared_pairs import PreparedPairs
from pretrain.data.stream import DIGEST_MODULUS
from pretrain.errors import ConfigError

TOKENS = 300


@pytest.fixture(scope="module")
def pairs(prepared_pairs) -> PreparedPairs:
    return PreparedPairs.open(prepared_pairs)


def batches(order: PairOrder, upto: int) -> list[np.ndarray]:
    found, consumed = [], 0
    while consumed < upto:
        found.append(order.batch(consumed))
        consumed += len(found[-1])
    return found


@pytest.mark.parametrize("window", [1 << 16, 128, 90])
def test_every_epoch_has_every_pair_once_in_another_order(pairs, window):
    order = PairOrder(pairs, TOKENS, 0, window)
    found = np.concatenate(batches(order, 2 * len(pairs)))
    first, second = found[: len(pairs)], found[len(pairs) :]
    assert np.array_equal(np.sort(first), np.arange(len(pairs))) and np.array_equal(np.sort(second), np.arange(len(pairs)))
    assert (first == second).mean() < 0.1
    assert not np.array_equal(first, np.concatenate(batches(PairOrder(pairs, TOKENS, 1, window), len(pairs))))


@pytest.mark.parametrize("window", [1 << 16, 90])
def test_batches_keep_the_budget_and_hold_pairs_of_about_one_length(pairs, window):
    found = batches(PairOrder(pairs, TOKENS, 0, window), len(pairs))
    sizes = [len(b) * sum(pairs.lengths(b).max(axis=1)) for b in found]
    assert max(sizes) <= TOKENS
    if window > len(pairs):
        assert pairs.lengths(np.arange(len(pairs))).sum() / sum(sizes) > 0.8
        means = [pairs.lengths(b)[0].mean() for b in found]
        assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.4  # batches do not come by length


def test_a_step_can_be_found_from_what_was_consumed_alone(pairs):
    whole, again = batches(PairOrder(pairs, TOKENS, 0, 90), 3 * len(pairs)), PairOrder(pairs, TOKENS, 0, 90)
    starts = np.cumsum([0, *map(len, whole)])
    for i in (len(whole) - 1, 0, len(whole) // 2, 7):
        assert np.array_equal(again.batch(int(starts[i])), whole[i]) and again.at(int(starts[i])) == len(whole[i])
    with pytest.raises(ValueError, match="no batch begins after"):
        again.batch(int(starts[1]) - 1 if starts[1] > 1 else int(starts[2]) - 1)


def test_the_number_of_pairs_in_so_many_steps_is_about_right(pairs):
    order = PairOrder(pairs, TOKENS, 0)
    steps = len(batches(order, 3 * len(pairs)))
    assert abs(order.consumed(steps) - 3 * len(pairs)) <= 3 * TOKENS


def test_a_budget_that_cannot_hold_the_longest_pair_is_refused(pairs):
    with pytest.raises(ConfigError, match="batch.tokens=30 is less than the longest source and the longest target"):
        PairOrder(pairs, 30, 0)


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60)


@given(lengths, st.integers(18, 90))
@settings(deadline=None)
def test_runs_are_within_the_budget_and_cannot_take_one_more(values, tokens):
    sources, targets = np.array(values).T
    ends = batch_ends(sources, targets, tokens)
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(values) and all(a < b for a, b in zip(starts, ends))
    for a, b in zip(starts, ends):
        assert (b - a) * (sources[a:b].max() + targets[a:b].max()) <= tokens
        if b < len(values):
            assert (b + 1 - a) * (sources[a : b + 1].max() + targets[a : b + 1].max()) > tokens


@given(lengths, st.integers(1, 5), st.sampled_from([0, 18, 40, 90]))
@settings(deadline=None)
def test_ranks_share_a_batch_in_equally_many_micro_steps(values, ranks, tokens):
    sources, targets = np.array(values).T
    parts = pairs_of_ranks(sources, targets, ranks, tokens)
    assert np.array_equal(np.concatenate([p for rank in parts for p in rank]), np.arange(len(values)))
    assert len({len(rank) for rank in parts}) == 1
    sizes = [len(p) * (sources[p].max() + targets[p].max()) for rank in parts for p in rank if len(p)]
    assert tokens == 0 or max(sizes) <= tokens
    assert tokens or len(parts[0]) == 1


def test_inputs_are_shifted_targets_and_padding_carries_no_loss(pairs):
    numbers = np.array([3, 11, 40])
    end = pairs.target.eod_id
    inputs = pair_inputs(pairs, numbers, end)
    for row, (source, target) in enumerate(zip(*pairs.read(numbers))):
        n = len(target)
        assert inputs["source_lengths_B"][row] == len(source)
        assert np.array_equal(inputs["source_BS"][row, : len(source)], source)
        assert inputs["tokens_BT"][row, 0] == end and np.array_equal(inputs["tokens_BT"][row, 1:n], target[:-1])
        assert np.array_equal(inputs["targets_BT"][row, :n], target) and (inputs["targets_BT"][row, n:] == IGNORED).all()
    nothing = pair_inputs(pairs, np.empty(0, dtype=np.int64), end)
    assert (nothing["targets_BT"] == IGNORED).all() and all(len(array) == 1 for array in nothing.values())


def loader(prepared_pairs, rank: int, ranks: int, micro: int | None, workers: int = 0) -> PairLoader:
    config = Config(data=Data(pairs=str(prepared_pairs), seed=0), batch=Batch(tokens=TOKENS, micro_tokens=micro))
    config.model.family = "transformer"
    config.data.workers = workers
    return PairTraining.open(config, None).loader(rank, ranks)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 60), (2, None), (3, 100), (4, 50)])
def test_any_number_of_ranks_computes_the_same_pairs_with_the_same_keys(prepared_pairs, ranks, micro):
    consumed = 0
    for _ in range(3):
        whole = loader(prepared_pairs, 0, 1, None).read(consumed)
        parts = [loader(prepared_pairs, rank, ranks, micro).read(consumed) for rank in range(ranks)]
        assert sum(part.digest for part in parts) % DIGEST_MODULUS == whole.digest
        assert sum(part.target_tokens for part in parts) == whole.target_tokens
        assert {part.sequences for part in parts} == {whole.sequences} and len({p.micro_steps(0) for p in parts}) == 1
        assert rows(parts) == rows([whole])
        consumed += whole.sequences


def rows(parts) -> list[tuple]:
    """Every pair of a step without its padding: position, key, source, targets."""
    found = []
    for part in parts:
        inputs = [
            [t.numpy() for t in (m["keys_B"], m["source_BS"], m["source_lengths_B"], m["targets_BT"])]
            for m in part.micro_inputs
        ]
        every = [row for micro in inputs for row in zip(*micro)]
        for position, (key, source, length, targets) in zip(part.positions.tolist(), every, strict=True):
            if position >= 0:
                found.append((position, int(key), source[:length].tolist(), targets[targets != IGNORED].tolist()))
            else:
                assert (targets == IGNORED).all()
    return sorted(found)


def test_threads_change_nothing(prepared_pairs):
    def first(workers):
        batches = loader(prepared_pairs, 1, 2, None, workers).batches(0)
        found = [(b.digest, b.positions.tolist()) for b, _ in zip(batches, range(40))]
        batches.close()
        return found

    assert first(0) == first(3)
