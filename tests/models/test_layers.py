"""Activations and norms that are written anew for CPUs compute what torch's do, to the last bit where torch is exact enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pretrain.models import activations
from pretrain.models.activations import gate, gelu_tanh
from pretrain.models.layers import LayerNorm, RMSNorm, _RMSNormByKernel

EVERY_NUMBER = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def with_gradient(function, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), *torch.autograd.grad(y, x, g)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype and one.shape == other.shape
    return bool(((one.contiguous().view(torch.int16) == other.contiguous().view(torch.int16)) | (one.isnan() & other.isnan())).all())


def torchs_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("at_once", [activations.AT_ONCE, 1 << 12])
def test_gelu_of_every_number_in_bf16_and_its_gradient_are_torchs_to_the_last_bit(at_once, one_thread, monkeypatch):
    monkeypatch.setattr(activations, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-30, 1.0, 1e30):
        g = (torch.randn(1 << 16, generator=generator) * size).bfloat16()
        for found, right in zip(with_gradient(gelu_tanh, EVERY_NUMBER, g), with_gradient(torchs_gelu, EVERY_NUMBER, g)):
            assert same_bits(found, right)


def test_gelu_takes_tables_for_bf16_on_one_thread_alone(one_thread):
    x = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    assert "Tables" in gelu_tanh(x).grad_fn.name()
    assert "Tables" not in gelu_tanh(x.float()).grad_fn.name()
    torch.set_num_threads(2)
    assert "Tables" not in gelu_tanh(x).grad_fn.name()


def test_what_stands_for_a_tensor_takes_no_tables_and_leaves_none(one_thread):
    with FakeTensorMode():
        assert gelu_tanh(torch.zeros(3, dtype=torch.bfloat16)).shape == (3,)
    assert same_bits(gelu_tanh(EVERY_NUMBER), torchs_gelu(EVERY_NUMBER))


def test_gelu_of_parts_of_a_larger_tensor_and_of_nothing(one_thread):
    whole = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (whole[:, :, ::2], whole.transpose(0, 1), whole[:0], whole[:, 1, :]):
        g = torch.ones(1, dtype=x.dtype).expand_as(x)
        # Contiguous, because torch computes others by a kernel that is not vectorised and rounds otherwise.
        right = with_gradient(torchs_gelu, x.contiguous(), g.contiguous())
        assert all(same_bits(*pair) for pair in zip(with_gradient(gelu_tanh, x, g), right))
    up = torch.randn_like(whole)
    assert same_bits(gate("gelu_tanh", whole, up), torchs_gelu(whole) * up)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_is_torchs_in_fp32_and_keeps_only_its_input(dtype, affine):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, 5, 32, generator=generator).to(dtype) for _ in range(2))
    norm = LayerNorm(32, 1e-5, affine)
    vectors = [p.data.normal_(generator=generator) for p in norm.parameters()]
    weight, bias = norm.weight, norm.bias

    def plain(x):
        return F.layer_norm(x.float(), (32,), weight, bias, 1e-5).to(dtype)

    for found, right in zip(with_gradient(norm, x, g), with_gradient(plain, x, g)):
        assert torch.equal(found, right)
    if vectors:
        for found, right in zip(torch.autograd.grad(norm(x), (weight, bias), g), torch.autograd.grad(plain(x), (weight, bias), g)):
            assert torch.equal(found, right)
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor) or tensor, lambda tensor: tensor):
        norm(x.requires_grad_())
    assert max(tensor.nbytes for tensor in stored) == x.nbytes
    assert sum(tensor.numel() == x.numel() for tensor in stored) == 1


@pytest.fixture
def kernel_on_cpus():
    """torch has this operator for GPUs alone; here by its formula."""

    def backward(g, x, shape, inverse, gain, wanted):
        normed, g_normed = x * inverse, g * gain
        grad_x = (g_normed - normed * (g_normed * normed).mean(-1, keepdim=True)) * inverse
        return grad_x if wanted[0] else None, (g * normed).flatten(0, -2).sum(0) if wanted[1] else None

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_a_gpu_is_torchs_in_fp32_and_keeps_only_its_input(dtype, kernel_on_cpus):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, 5, 32, generator=generator).to(dtype) for _ in range(2))
    gain = torch.randn(32, generator=generator).requires_grad_()

    def plain(x):
        return F.rms_norm(x.float(), (32,), gain, 1e-5).to(dtype)

    def norm(x):
        return _RMSNormByKernel.apply(x, gain, 1e-5)

    for found, right in zip(with_gradient(norm, x, g), with_gradient(plain, x, g)):
        torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(function(x), gain, g)[0] for function in (norm, plain)))
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor) or tensor, lambda tensor: tensor):
        norm(x.requires_grad_())
    assert max(tensor.nbytes for tensor in stored) == x.nbytes
    assert sum(tensor.numel() == x.numel() for tensor in stored) == 1


@pytest.mark.parametrize("norm", [RMSNorm(64, 1e-5), LayerNorm(64, 1e-5)], ids=["rms", "layer"])
def test_norms_in_bf16_sum_the_gradients_of_their_vectors_in_fp32(norm):
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(4096, 64, generator=generator).bfloat16() for _ in range(2))
    wide_x, wide = x.double().requires_grad_(), [p.detach().double().requires_grad_() for p in norm.parameters()]
    if isinstance(norm, RMSNorm):
        right = torch.autograd.grad(F.rms_norm(wide_x, (64,), *wide, 1e-5), wide, g.double())
    else:
        right = torch.autograd.grad(F.layer_norm(wide_x, (64,), *wide, 1e-5), wide, g.double())
    for found, exact in zip(torch.autograd.grad(norm(x), list(norm.parameters()), g), right):
        assert float((found - exact).norm() / exact.norm()) < 1e-5
