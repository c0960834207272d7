"""Initial weights are a pure function of (seed, parameter name, shape)."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.schema import Model
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.parallel import initialise as module
from pretrain.parallel.initialise import draw_rows, initialise

MODEL = complete(Model(dim=64, layers=2, heads=4, ffn_dim=128, vocab_size=300), 32)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 64 values instead of a million, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ELEMENTS", 64)
        yield patch


def filled(model: Model, seed: int) -> dict[str, torch.Tensor]:
    decoder = Decoder(model)
    initialise(decoder, seed)
    return {name: p.detach().clone() for name, p in decoder.named_parameters()}


@st.composite
def shape_and_cuts(draw):
    rows = draw(st.integers(1, 60))
    shape = (rows, *draw(st.lists(st.sampled_from([1, 2, 7, 20, 65]), max_size=2)))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    return shape, [0, *cuts, rows]


@settings(deadline=None)
@given(shape_and_cuts(), st.integers(0, 2**63), st.text(max_size=10))
def test_any_rows_drawn_alone_are_those_of_the_whole(shape_and_cuts, seed, name):
    shape, cuts = shape_and_cuts
    whole = draw_rows(seed, name, shape, 0, shape[0])
    assert whole.shape == shape
    assert whole.dtype == np.float32
    parts = [draw_rows(seed, name, shape, start, stop) for start, stop in zip(cuts, cuts[1:])]
    assert np.array_equal(np.concatenate(parts), whole)


def test_values_depend_on_seed_name_and_shape_only():
    one = draw_rows(1, "a", (40, 8), 0, 40)
    np.random.seed(3)
    torch.manual_seed(3)
    assert np.array_equal(draw_rows(1, "a", (40, 8), 0, 40), one)
    for other in (draw_rows(2, "a", (40, 8), 0, 40), draw_rows(1, "b", (40, 8), 0, 40), draw_rows(1, "a", (41, 8), 0, 40)):
        assert not np.any(other == one)


def test_blocks_of_rows_do_not_repeat_each_other():
    values = draw_rows(0, "w", (64, 64), 0, 64)
    assert len(np.unique(values)) > 0.999 * values.size


def test_the_values_are_those_of_all_earlier_runs(small_blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ELEMENTS", 1 << 20)
        digest = hashlib.sha256(draw_rows(7, "layers.0.mlp.up.weight", (1100, 1000), 0, 1100).tobytes()).hexdigest()
    # A change of this number changes every run that starts from it: a run of yesterday could not be repeated.
    assert digest == "5173af3ed48f129a6dbec5922e9f4e4604a3d05e9351e080d1f4260fd97c0ae9"


def test_mean_and_deviation_are_those_of_the_standard_normal_distribution():
    values = draw_rows(0, "w", (400, 500), 0, 400).astype(np.float64).ravel()
    n = values.size
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(n)


def test_parameters_have_the_deviation_of_their_kind():
    for name, values in filled(MODEL, 0).items():
        if "norm" in name:
            assert torch.equal(values, torch.ones_like(values)), name
            continue
        into_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(4) if into_residual else 0.02
        assert abs(values.mean()) < 5 * std / math.sqrt(values.numel()), name
        assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * values.numel())), name


def test_no_two_parameters_are_alike():
    values = {name: v for name, v in filled(MODEL, 0).items() if "norm" not in name}
    for name, one in values.items():
        for other_name, other in values.items():
            if name < other_name:
                count = min(one.numel(), other.numel())
                correlation = torch.corrcoef(torch.stack((one.flatten()[:count], other.flatten()[:count])))[0, 1]
                assert abs(correlation) < 5 / math.sqrt(count), (name, other_name)


def test_a_seed_gives_the_same_model_whatever_was_there_and_another_seed_another():
    one = filled(MODEL, 4)
    torch.manual_seed(123)
    assert all(torch.equal(v, one[name]) for name, v in filled(MODEL, 4).items())
    assert not any(torch.equal(v, one[name]) for name, v in filled(MODEL, 5).items() if "norm" not in name)


def test_a_deeper_or_tied_model_starts_from_the_same_values_where_they_have_the_same_names():
    deeper = complete(Model(dim=64, layers=3, heads=4, ffn_dim=128, vocab_size=300, tie_embeddings=True), 32)
    one, other = filled(MODEL, 4), filled(deeper, 4)
    assert torch.equal(other["layers.1.mlp.up.weight"], one["layers.1.mlp.up.weight"])
    assert torch.equal(other["embedding.weight"], one["embedding.weight"])
    assert torch.allclose(other["layers.1.mlp.down.weight"] * math.sqrt(3 / 2), one["layers.1.mlp.down.weight"])


def test_every_parameter_is_filled():
    decoder = Decoder(MODEL)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(float("nan"))
    initialise(decoder, 0)
    assert all(torch.isfinite(p).all() for p in decoder.parameters())
