"""Activation functions of MLPs and experts, and gates made with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

AT_ONCE = 1 << 18
"""Elements that are looked up at a time. Each has a place of 8 bytes meanwhile."""


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""
    # torch shares the elements out to its threads, and a look-up is by one of them: with two, torch's own is faster.
    if x.dtype == torch.bfloat16 and type(x) is Tensor and _is_on_one_thread(x):
        return _GeluFromTables.apply(x)
    return F.gelu(x, approximate="tanh")


def _is_on_one_thread(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and torch.get_num_threads() == 1


class _GeluFromTables(torch.autograd.Function):
    """What torch's vectorised kernel computes, to the last bit: it takes a tanh for each element. But bf16 has only 65,536 numbers, and looking one up
    takes less than half as long. (In the last elements of a tensor, and with gaps between them, torch's other kernel differs for four numbers near -5.1.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        values, _ = _gelu_tables()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for places, of_y in _places(x, y):
            torch.index_select(values, 0, places, out=of_y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        _, slopes = _gelu_tables()
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        for places, of_g, of_grad_x in _places(x, g, grad_x):
            of_grad_x.copy_(slopes.index_select(0, places).mul_(of_g))
        return grad_x


def _places(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Where elements of x stand in a table of all numbers in bf16, and the same elements of other tensors."""
    parts = [tensor.contiguous().view(-1).split(AT_ONCE) for tensor in (x, *others)]
    for numbers, *same in zip(*parts):
        yield numbers.view(torch.uint16).to(torch.int64), *same


@functools.cache
def _gelu_tables() -> tuple[Tensor, Tensor]:
    """GELU of every number in bf16, by its bits, in bf16; and its derivative, in fp32."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    slopes = torch.ops.aten.gelu_backward(torch.ones_like(numbers, dtype=torch.float32), numbers.float(), approximate="tanh")
    return F.gelu(numbers, approximate="tanh"), slopes


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def gate(activation: str, gate_F: Tensor, up_F: Tensor) -> Tensor:
    """activation(gate) × up; of `silu_clamped` both are clamped, the sigmoid is steeper and up is shifted by one (gpt-oss)."""
    if activation == "silu_clamped":
        gate_F, up_F = gate_F.clamp(max=7.0), up_F.clamp(-7.0, 7.0)
        return (up_F + 1) * gate_F * (gate_F * 1.702).sigmoid()
    return ACTIVATIONS[activation](gate_F) * up_F
