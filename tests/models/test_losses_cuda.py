"""The fused loss on a GPU: `bash tests/run.sh --cuda` on a host that has one. Not run in continuous integration."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pretrain.conventions import IGNORED
from pretrain.models.loss import LossOptions, finish_logits, sequence_losses
from pretrain.models.output_head import fused_losses_and_entropy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {
    "plain": LossOptions(),
    "chunks": LossOptions(chunk_bytes=1 << 20),
    "everything": LossOptions(z_loss=1e-4, label_smoothing=0.1, soft_cap=30.0, logit_scale=0.5, chunk_bytes=1 << 20),
}


def problem(dtype: torch.dtype, vocabulary: int = 5003, length: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, length, 128, generator=generator).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 128, generator=generator) / 11).to("cuda", dtype).requires_grad_()
    targets = torch.randint(vocabulary, (4, length), generator=generator)
    targets[1, 3:90] = IGNORED
    return x, weight, targets.cuda()


def plain(x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    return sequence_losses(finish_logits(x @ weight.T, options), targets, options)


def fused_losses(*arguments) -> Tensor:
    return fused_losses_and_entropy(*arguments).objective_B


def relative_difference(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("one_upstream", [True, False])
def test_losses_and_gradients_are_those_of_the_plain_loss(name, one_upstream):
    x, weight, targets = problem(torch.float32)
    upstream = torch.tensor(0.3, device="cuda").expand(4) if one_upstream else torch.linspace(0.1, 2, 4, device="cuda")
    wide = [value.detach().double().requires_grad_() for value in (x, weight)]
    found, usual, right = (
        (losses, *torch.autograd.grad(losses, inputs, upstream.to(losses.dtype)))
        for inputs, losses in (
            ((x, weight), fused_losses(x, weight, targets, OPTIONS[name])),
            ((x, weight), plain(x, weight, targets, OPTIONS[name])),
            (wide, plain(*wide, targets, OPTIONS[name])),
        )
    )
    # How a GPU splits a sum of 5,003 products is up to its library: one after the other, it is off by 1.2e-6 in fp32.
    for ours, theirs, exact in zip(found, usual, right):
        assert relative_difference(ours, exact) <= max(1e-6, 2 * relative_difference(theirs, exact))


@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_is_as_exact_as_the_plain_loss(name, monkeypatch):
    # The chunks are smaller products, which alone might be split into sums that are rounded to bf16.
    if "REHEARSAL_LIBRARY" not in os.environ:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    x, weight, targets = problem(torch.bfloat16)
    wide = [value.detach().double().requires_grad_() for value in (x, weight)]
    exact = torch.autograd.grad(plain(*wide, targets, OPTIONS[name]).sum() / 3, wide)
    usual = torch.autograd.grad(plain(x, weight, targets, OPTIONS[name]).sum() / 3, (x, weight))
    fused = torch.autograd.grad(fused_losses(x, weight, targets, OPTIONS[name]).sum() / 3, (x, weight))
    for found, other, right in zip(fused, usual, exact):
        assert relative_difference(found, right) <= 1.02 * relative_difference(other, right)


@pytest.mark.timeout(1800)  # the rehearsal multiplies in bf16 on the CPU
def test_memory_is_flat_in_the_vocabulary_and_nothing_waits_for_the_device():
    peaks = []
    for vocabulary in (8_192, 131_072):
        x, weight, targets = problem(torch.bfloat16, vocabulary, 1024)
        options = LossOptions(chunk_bytes=32 << 20)
        fused_losses(x, weight, targets, options).sum().backward()  # what is set up once
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            (fused_losses(x, weight, targets, options).sum() / 3).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated() - before - 6 * weight.numel())
    # The gradient in both formats, which is subtracted, exists only when the chunks are freed. So the larger vocabulary may show less.
    assert max(peaks) <= 48 << 20 and peaks[1] <= peaks[0] + (12 << 20)
