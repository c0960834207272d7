"""The fused loss takes as much memory for a large vocabulary as for a small one, beside the weight and its gradient."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.conventions import IGNORED
from pretrain.models.loss import LossOptions, sequence_losses
from pretrain.models.output_head import fused_losses_and_entropy

MEGABYTE = 1 << 20


class Tensors(TorchDispatchMode):
    """The largest tensor that operations give, in bytes, but for those of a given shape."""

    def __init__(self, apart_from: torch.Size) -> None:
        super().__init__()
        self.apart_from, self.largest = apart_from, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for value in tree_leaves(results):
            if isinstance(value, torch.Tensor) and value.shape not in (self.apart_from, self.apart_from[::-1]):
                self.largest = max(self.largest, value.nbytes)
        return results


def problem(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 32, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (4, 64), generator=generator)
    targets[0, :5] = IGNORED
    return x, weight, targets


@pytest.mark.parametrize("upstream", ["common", "of each sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [4_096, 65_536])
def test_no_tensor_exceeds_the_budget_in_forward_or_backward(vocabulary, dtype, upstream):
    x, weight, targets = problem(vocabulary, dtype)
    options = LossOptions(z_loss=1e-4, label_smoothing=0.1, soft_cap=30.0, chunk_bytes=MEGABYTE)
    logits_bytes = targets.numel() * vocabulary * 4
    with Tensors(weight.shape) as seen:
        losses = fused_losses_and_entropy(x, weight, targets, options).objective_B
        (losses.sum() if upstream == "common" else (losses * torch.arange(4.0)).sum()).backward()
    assert seen.largest <= MEGABYTE / 2 <= logits_bytes / 8
    with Tensors(weight.shape) as seen:
        sequence_losses(x @ weight.T, targets, options)
    assert seen.largest == logits_bytes


PEAK = """
import re, sys, torch
from pretrain.models.loss import LossOptions, sequence_losses
from pretrain.models.output_head import fused_losses_and_entropy
torch.set_num_threads(1)
kind, vocabulary, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
x = torch.randn(2, 1024, 32).to(dtype).requires_grad_()
def peak():  # not ru_maxrss: that of a new process begins at its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
def run(vocabulary, tokens):
    weight = torch.ones(vocabulary, 32, dtype=dtype, requires_grad=True)
    targets = torch.zeros(2, tokens, dtype=torch.int64)
    before = peak()
    if kind == "fused":
        losses = fused_losses_and_entropy(x[:, :tokens], weight, targets, LossOptions(chunk_bytes=8 << 20)).objective_B
    else:
        losses = sequence_losses(x[:, :tokens] @ weight.T, targets)
    losses.sum().backward()
    return peak() - before
run(64, 8)  # what is loaded and set up once
print(run(vocabulary, 1024))
"""


def peak_growths(*cases: tuple[str, int, str]) -> list[float]:
    """MB by which forward and backward raise the peak of a process that already has activations and weight."""
    commands = [[sys.executable, "-c", PEAK, kind, str(vocabulary), dtype] for kind, vocabulary, dtype in cases]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return [int(process.communicate()[0]) / 1024 for process in processes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype, gradient_bytes", [pytest.param(*case, marks=pytest.mark.slow) for case in (("float32", 4), ("bfloat16", 6))])
def test_the_peak_of_a_process_is_flat_in_the_vocabulary_but_for_the_gradient(dtype, gradient_bytes):
    """In bf16 the gradient of the weight exists in fp32, where it is summed, and in bf16 when it is done."""
    vocabularies = 4_096, 65_536
    growths = peak_growths(*(("fused", vocabulary, dtype) for vocabulary in vocabularies))
    small, large = (growth - gradient_bytes * v * 32 / MEGABYTE for growth, v in zip(growths, vocabularies))
    assert abs(large - small) <= 4 and max(small, large) <= 16


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_the_peak_of_a_process_shows_the_logits_of_the_plain_loss():
    assert peak_growths(("plain", 16_384, "float32"))[0] > 2048 * 16_384 * 4 / MEGABYTE
