"""Span corruption: T5's lengths, every sample restored from its source and target, all placements equally likely, and nothing but the seed
and the position decides.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.tasks import SpanCorruption, Spans, compositions
from pretrain.errors import ConfigError

END, START, FIRST = 1, 0, 9_999


def objective(spans: Spans, seed: int | None = 7, dropout_seed: int | None = None) -> SpanCorruption:
    return SpanCorruption(spans, FIRST, END, START, seed, dropout_seed)


def text(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens 1 (which also ends documents) to 899."""
    return np.random.default_rng(seed).integers(1, 900, (rows, length))


spans_of_any_size = st.builds(
    lambda length, density, mean: (length, density, mean),
    st.integers(2, 300),
    st.floats(0.01, 0.6),
    st.floats(1.0, 9.0),
)


def valid(length: int, density: float, mean: float) -> Spans | None:
    try:
        return Spans.of(length, density, mean)
    except ConfigError:
        return None


@pytest.mark.parametrize(
    "length, density, mean, source, target",
    [
        # random_spans_helper of T5's code: 512 inputs need 568 tokens and make 114 targets; 1,024 need 1,137 and make 229.
        (568, 0.15, 3.0, 512, 114),
        (1137, 0.15, 3.0, 1024, 229),
        (284, 0.15, 3.0, 256, 58),
    ],
)
def test_lengths_are_those_of_t5(length, density, mean, source, target):
    spans = Spans.of(length, density, mean)
    assert (spans.source_length, spans.target_length) == (source, target)
    source_BS, targets_BT = objective(spans).corrupt(text(3, length), np.arange(3))
    assert (source_BS.shape, targets_BT.shape) == ((3, source), (3, target))
    assert source_BS.dtype == targets_BT.dtype == np.int64


def restored(task: SpanCorruption, source: list[int], target: list[int]) -> list[int]:
    """The sample from which a source and a target were made."""
    sentinels = range(task.first_sentinel - task.spans.count + 1, task.first_sentinel + 1)
    lost: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in sentinels and token not in lost:
            lost[token] = current = []
        else:
            current.append(token)
    return [token for place in source[:-1] for token in lost.get(place, [place])]


@given(spans_of_any_size, st.integers(0, 2**40), st.integers(0, 2**63 - 1))
@settings(max_examples=300, deadline=None)
def test_every_sample_is_restored_from_its_source_and_target(sizes, position, seed):
    if (spans := valid(*sizes)) is None:
        return
    task, tokens = objective(spans, seed), text(4, spans.length, position % 99)
    source_BS, targets_BT = task.corrupt(tokens, position + np.arange(4))
    sentinels = list(range(FIRST, FIRST - spans.count, -1))
    for source, target, original in zip(source_BS.tolist(), targets_BT.tolist(), tokens.tolist()):
        assert restored(task, source, target) == original
        for side in (source, target):  # each sentinel once, counting down, and the end at the end
            assert [token for token in side if token > 900] == sentinels
            assert side[-1] == END
        assert target[0] == FIRST and source[0] != FIRST


@given(spans_of_any_size, st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_a_sample_is_corrupted_in_the_same_way_whatever_is_beside_it(sizes, position):
    if (spans := valid(*sizes)) is None:
        return
    task, tokens = objective(spans), text(6, spans.length)
    together = task.corrupt(tokens, position + np.arange(6))
    for i in (0, 3, 5):
        alone = task.corrupt(tokens[i : i + 1], np.array([position + i]))
        assert all(np.array_equal(part[i : i + 1], one) for part, one in zip(together, alone))


def test_another_position_or_seed_or_validation_is_corrupted_otherwise():
    spans, tokens = Spans.of(100, 0.15, 3.0), text(1, 100)

    def source(task: SpanCorruption, position: int) -> tuple[int, ...]:
        return tuple(task.corrupt(tokens, np.array([position]))[0][0].tolist())

    task = objective(spans)
    assert len({source(task, position) for position in range(200)}) == 200
    assert len({source(objective(spans, seed), 3) for seed in range(100)}) == 100
    # In validation neither the seed of the order nor that of dropout counts, so that losses of two runs can be compared.
    others = [objective(spans, seed, seed).for_validation() for seed in (1, 2)]
    assert source(others[0], 5) == source(others[1], 5) not in {source(task, position) for position in range(200)}
    assert "keys_B" not in others[0].inputs(torch.from_numpy(tokens), torch.from_numpy(tokens), np.array([0]))


def test_the_spans_of_a_position_are_what_they_were():
    """The definition of the data's order: a change makes every run under way another one."""
    masks = Spans.of(40, 0.2, 2.0).masks(7, np.array([0, 1, 10**12]))
    assert ["".join(".x"[int(lost)] for lost in row) for row in masks] == [
        ".................x...xxxx.........xx...x",
        ".....................xx......xx.x....xxx",
        ".xx.....x.xx.........................xxx",
    ]


@pytest.mark.parametrize("total, parts", [(6, 3), (7, 2), (5, 5), (5, 1)])
def test_every_composition_is_equally_likely(total, parts):
    draws = 60_000
    keys = np.random.default_rng(1).integers(0, 2**63, draws).astype(np.uint64)
    drawn = compositions(total, parts, keys)
    assert (drawn.sum(axis=1) == total).all() and drawn.min() >= 1
    counts = Counter(map(tuple, drawn.tolist()))
    kinds = comb(total - 1, parts - 1)
    assert len(counts) == kinds
    statistic = sum((n - draws / kinds) ** 2 / (draws / kinds) for n in counts.values())
    assert statistic < kinds - 1 + 5 * (2 * max(kinds - 1, 1)) ** 0.5  # chi squared, five standard deviations


def test_tokens_are_lost_as_often_as_said_and_about_evenly_over_the_sample():
    spans = Spans.of(568, 0.15, 3.0)
    masks = spans.masks(7, np.arange(20_000))
    assert (masks.sum(axis=1) == 85).all() and ((masks[:, 1:] & ~masks[:, :-1]).sum(axis=1) == 28).all()
    assert not masks[:, 0].any() and masks[:, -1].all()
    middle = masks[:, 60:500].mean(axis=0)
    assert np.abs(middle - 0.15).max() < 5 * (0.15 * 0.85 / 20_000) ** 0.5 + 0.005
    # Lengths of spans as of uniform compositions of 85 in 28: their variance is n(n-k)(k-1) / (k^2 (k+1)).
    ends = np.diff(np.pad(masks, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    lengths = np.nonzero(ends == -1)[1] - np.nonzero(ends == 1)[1]
    assert lengths.mean() == pytest.approx(85 / 28)
    assert lengths.var() == pytest.approx(85 * 57 * 27 / (28**2 * 29), rel=0.02)


def test_neighbouring_positions_have_nothing_in_common():
    spans = Spans.of(568, 0.15, 3.0)
    masks = spans.masks(7, np.arange(4000))[:, 50:500].astype(float)
    masks -= masks.mean(axis=0)
    correlation = (masks[1:] * masks[:-1]).mean() / masks.var()
    assert abs(correlation) < 5 / masks[1:].size ** 0.5 * 2  # spans make neighbours within a sample dependent


def test_the_inputs_are_those_of_an_encoder_decoder():
    spans = Spans.of(64, 0.15, 3.0)
    tokens = torch.from_numpy(text(5, 64))
    inputs = objective(spans, dropout_seed=3).inputs(tokens, tokens, np.arange(100, 105))
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
        "source_BS": (5, spans.source_length), "tokens_BT": (5, spans.target_length), "targets_BT": (5, spans.target_length), "keys_B": (5,),
    }  # fmt: skip
    assert all(tensor.dtype == torch.int64 for tensor in inputs.values())
    assert torch.equal(inputs["tokens_BT"][:, 1:], inputs["targets_BT"][:, :-1])
    assert (inputs["tokens_BT"][:, 0] == START).all() and (inputs["targets_BT"][:, -1] == END).all()
    assert len(set(inputs["keys_B"].tolist())) == 5


def test_sizes_that_leave_nothing_are_refused_by_name():
    with pytest.raises(ConfigError, match="data.sequence_length=1: data.objective=span_corruption takes at least 2 tokens"):
        Spans.of(1, 0.15, 3.0)
    with pytest.raises(ConfigError, match="90 of 100 tokens in 90 spans leave no token between the spans; lower noise_density"):
        Spans.of(100, 0.9, 1.0)
    smallest = Spans.of(2, 0.15, 3.0)
    assert dataclasses.astuple(smallest) == (2, 1, 1)
    assert objective(smallest).corrupt(np.array([[5, 6]]), np.array([0]))[0].tolist() == [[5, FIRST, END]]
