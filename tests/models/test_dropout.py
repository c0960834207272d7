"""Dropout by hashing looks random in every direction: its rate, its neighbours, its layers, its samples."""

import numpy as np
import pytest
import torch

from pretrain.conventions import sample_keys
from pretrain.models.dropout import Dropout, make_dropout

SAMPLES, LENGTH, DIM = 400, 24, 64


def zeroed(rate: float, name: str = "layer", seed: int = 0, samples: int = SAMPLES, length: int = LENGTH, dim: int = DIM):
    keys = torch.from_numpy(sample_keys(seed, np.arange(samples)))
    return (~Dropout(rate, keys).kept(name, length, dim)).double()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """In standard errors of that of independent values."""
    pair = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))
    return float(pair[0, 1]) * one.numel() ** 0.5


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_kept_and_the_mean_too(rate):
    mask = zeroed(rate)
    error = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - rate) < 4 * error
    dropout = Dropout(rate, torch.from_numpy(sample_keys(0, np.arange(SAMPLES))))
    assert dropout.scale == pytest.approx(1 / (1 - rate), rel=2e-4)
    mean = dropout(torch.ones(SAMPLES, LENGTH, DIM), "layer").double().mean()
    assert abs(float(mean) - 1) < 4 * error / (1 - rate) + 1e-6


def test_neighbours_layers_samples_and_seeds_are_independent():
    mask = zeroed(0.3)
    shifted = {f"{k} components on": (mask[..., k:], mask[..., :-k]) for k in (1, 2, 3, 4, 8, 16)}
    shifted |= {f"{k} positions on": (mask[:, k:], mask[:, :-k]) for k in (1, 2, 3)}
    shifted |= {f"{k} samples on": (mask[k:], mask[:-k]) for k in (1, 2, 3)}
    shifted |= {"another layer": (mask, zeroed(0.3, "layeR")), "another seed": (mask, zeroed(0.3, seed=1))}
    for what, (one, other) in shifted.items():
        assert abs(correlation(one, other)) < 4, what


def test_columns_rows_and_pairs_of_columns_are_distributed_like_coin_throws():
    rate, rows = 0.3, SAMPLES * LENGTH
    mask = zeroed(rate).flatten(0, 1)
    of_columns = (((mask.mean(0) - rate) ** 2) * rows / (rate * (1 - rate))).sum()
    assert abs(float(of_columns) - DIM) < 4 * (2 * DIM) ** 0.5  # chi-squared
    of_rows = float(mask.sum(1).var() / (DIM * rate * (1 - rate)))
    assert abs(of_rows - 1) < 4 * (2 / rows) ** 0.5
    pairs = torch.corrcoef(mask.T)[~torch.eye(DIM, dtype=torch.bool)] * rows**0.5
    assert pairs.abs().max() < 5 and abs(float(pairs.std()) - 1) < 0.1


def test_the_mask_does_not_depend_on_padding_or_on_the_other_samples():
    whole = zeroed(0.5)
    assert torch.equal(zeroed(0.5, samples=7, length=5), whole[:7, :5])
    assert torch.equal(zeroed(0.5, dim=DIM - 1), whole[..., :-1])  # an odd width


def test_gradients_pass_where_values_do():
    keys = torch.from_numpy(sample_keys(3, np.arange(2)))
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = Dropout(0.5, keys)(x, "a")
    y.sum().backward()
    assert torch.equal(x.grad, Dropout(0.5, keys).kept("a", 3, 8) * 2.0) and torch.equal(y, x * x.grad)


def test_a_sample_has_another_key_in_every_epoch_and_run():
    keys = sample_keys(0, np.arange(10_000))
    assert len(np.unique(np.concatenate([keys, sample_keys(1, np.arange(10_000))]))) == 20_000
    assert np.array_equal(sample_keys(0, np.array([77])), keys[77:78])


def test_nothing_is_dropped_without_keys_or_at_rate_0():
    assert make_dropout(0.1, None) is None and make_dropout(0.0, torch.zeros(1, dtype=torch.int64)) is None
