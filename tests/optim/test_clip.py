"""Clipping is torch's, and reports the norm before it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.optim.optimizer import clip_gradients


def parameters(seed: int, scale: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in ((7, 5), (3,), (1,), (4, 2, 2)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = scale * torch.randn(shape, generator=generator)
        found.append(parameter)
    return found


@settings(deadline=None)
@given(st.integers(0, 2**20), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_gradients_and_norm_are_those_of_torch(seed, scale, max_norm):
    ours, theirs = parameters(seed, scale), parameters(seed, scale)
    norm = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert (norm.dtype, norm.dim()) == (torch.float64, 0)
    torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


def test_the_norm_is_that_of_all_gradients_together_before_clipping():
    found = parameters(0, scale=10.0)
    exact = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in found))
    assert clip_gradients(found, 1.0).item() == pytest.approx(exact, rel=1e-6)
    after = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in found))
    assert after == pytest.approx(1.0, rel=1e-5)
    assert after <= 1.0


def test_gradients_below_the_limit_are_left_bit_for_bit():
    found = parameters(0, scale=0.01)
    before = [p.grad.clone() for p in found]
    clip_gradients(found, 1.0)
    assert all(torch.equal(p.grad, b) for p, b in zip(found, before))


def test_a_limit_of_zero_leaves_gradients_and_still_reports_the_norm():
    found = parameters(0, scale=100.0)
    before = [p.grad.clone() for p in found]
    assert clip_gradients(found, 0.0).item() > 100
    assert all(torch.equal(p.grad, b) for p, b in zip(found, before))


def test_a_parameter_without_gradient_is_passed_over_and_a_generator_is_taken():
    found = [*parameters(0), torch.nn.Parameter(torch.zeros(3))]
    assert torch.equal(clip_gradients((p for p in found), 0.5), clip_gradients(parameters(0), 0.5))
    assert found[-1].grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_shows_in_the_norm(value):
    found = parameters(0)
    found[2].grad[0] = value
    assert not torch.isfinite(clip_gradients(found, 1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_copy_that_is_no_number_shows_in_the_norm_though_another_rank_counts_it(value):
    """A stage of a pipeline took a step that made its copy of a tied table NaN."""
    found = parameters(0)
    finite = clip_gradients(found, 0.0, copies=[found[2]])
    assert torch.equal(finite, clip_gradients([found[0], found[1], found[3]], 0.0))
    found[2].grad[0] = value
    assert not torch.isfinite(clip_gradients(found, 1.0, copies=[found[2]]))


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e17])
@pytest.mark.parametrize("shape", [(7, 300), (3, 5, 64), (50,)])
def test_the_norm_is_that_of_fp64_from_tiny_gradients_to_huge_ones(size, shape):
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(p.grad.double()))
    assert float(clip_gradients([p], 0.0)) == pytest.approx(exact, rel=1e-6)
