"""Gradients of weights that are computed apart from a backward pass, for pipelines whose ranks would wait otherwise (arXiv 2401.10241).

    backward      the gradients of activations, biases, norms and tables; each projection keeps its input and the gradient of its result
    compute       the product of those two: the gradient of the projection's weight

The products are those that a backward pass makes, so the gradients are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretrain.models.experts import Experts, add_biases, multiply_rows, outer_products
from pretrain.models.layers import Linear, project


class WeightGradients:
    """What backward passes leave to be computed, by the stage and micro-batch that `passing` names."""

    def __init__(self) -> None:
        self.passing = (0, 0)
        self.left: dict[tuple[int, int], list[tuple[Tensor, Callable[[], Tensor]]]] = {}
        """Weights, and what computes the gradient of each."""

    def split(self, network: nn.Module) -> None:
        """Let the projections of a network leave the gradients of their weights. What other axes set is set afterwards."""
        for module in network.modules():
            if isinstance(module, Linear):
                module.product = self._project
            elif isinstance(module, Experts):
                module.product = self._project_rows

    def compute(self, stage: int, micro_batch: int) -> None:
        """Add the gradients that the backward pass of a stage over a micro-batch left."""
        for weight, gradient in self.left.pop((stage, micro_batch), []):
            torch.autograd.backward(weight, gradient().to(weight.dtype))

    def _leave(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self.left.setdefault(self.passing, []).append((weight, gradient))

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`project`. Where nothing before it needs a gradient, there is nothing to put off."""
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return project(x, weight, bias)
        return _Project.apply(x, bias, weight.detach(), lambda gradient: self._leave(weight, gradient))

    def _project_rows(
        self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, experts_R: Tensor, ends_E: Tensor
    ) -> Tensor:
        """`project_rows`, likewise."""
        if not (torch.is_grad_enabled() and x_RI.requires_grad and weight_EOI.requires_grad):
            y_RO = multiply_rows(x_RI, weight_EOI, ends_E)
        else:
            y_RO = _MultiplyRows.apply(x_RI, ends_E, weight_EOI.detach(), lambda gradient: self._leave(weight_EOI, gradient))
        return add_biases(y_RO, bias_EO, experts_R)


class _Project(torch.autograd.Function):
    """See `project`. The weight is not stored: where it is gathered in turns, it is at hand again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, leave: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.leave, ctx.bias_dtype = weight, leave, None if bias is None else bias.dtype
        return project(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.leave(lambda: g.flatten(0, -2).T @ x.flatten(0, -2))
        g_bias = g.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return g @ ctx.weight.to(g.dtype), g_bias, None, None


class _MultiplyRows(torch.autograd.Function):
    """See `multiply_rows`."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, leave: Callable) -> Tensor:
        ctx.save_for_backward(x_RI, ends_E)
        ctx.weight_EOI, ctx.leave = weight_EOI, leave
        return multiply_rows(x_RI, weight_EOI, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RO: Tensor) -> tuple[Tensor, None, None, None]:
        x_RI, ends_E = ctx.saved_tensors
        ctx.leave(lambda: outer_products(g_RO, x_RI, ends_E))
        return multiply_rows(g_RO, ctx.weight_EOI.transpose(1, 2), ends_E), None, None, None
