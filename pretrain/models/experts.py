"""Mixture of experts (Shazeer et al., arXiv 1701.06538; Switch, arXiv 2101.03961), as single-device code.

    x_ND --router--> K experts per token, K weights
    rows (token, choice) sorted by expert --> experts, each on its stretch of rows --> back to tokens, weighted, summed over K

No expert has a capacity: every token reaches all its experts, and what a token gets does not depend on the others around it. N tokens,
K choices of each, R = N x K rows, E experts, D model, F width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.config.model_schema import Model
from pretrain.models.mlp import ACTIVATIONS, Mlp, gate
from pretrain.models.router import Router, RouterReport


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones that every token passes through, in place of an MLP."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        width, mlp = config.experts.ffn_dim, config.mlp
        self.router = Router(config)
        self.experts = Experts(config.experts.count, config.dim, width, mlp.activation, mlp.gated, mlp.bias)
        shared = config.experts.shared
        self.shared = Mlp(config.dim, shared * width, mlp.activation, mlp.gated, mlp.bias) if shared else None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None) -> tuple[Tensor, RouterReport | None]:
        """The sublayer's output; the router's report where there are positions to count (`Router`)."""
        chosen_BTK, weights_BTK, report = self.router(x_BTD, counted_BT)
        y_ND = dispatch(self.experts, x_BTD.flatten(0, 1), chosen_BTK.flatten(0, 1), weights_BTK.flatten(0, 1))
        y_BTD = y_ND.view_as(x_BTD)
        return (y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)), report


class Experts(nn.Module):
    """MLPs of one shape whose weights are stacked: gate and up [E, F, D], down [E, D, F], biases [E, F] and [E, D]."""

    def __init__(self, count: int, dim: int, ffn_dim: int, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(count, ffn_dim, dim)) if gated else None
        self.up = nn.Parameter(torch.empty(count, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(count, dim, ffn_dim))
        self.gate_bias = nn.Parameter(torch.empty(count, ffn_dim)) if gated and bias else None
        self.up_bias = nn.Parameter(torch.empty(count, ffn_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, dim)) if bias else None

    def forward(self, x_RD: Tensor, experts_R: Tensor) -> Tensor:
        """Each row through its expert; `experts_R` says which, and is sorted."""
        count = len(self.up)
        ends_E = torch.searchsorted(experts_R, torch.arange(count, device=x_RD.device), right=True)
        project = _grouped if _has_grouped_kernel(x_RD, self.up) else _one_by_one

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = project(x, weight.to(x.dtype), ends_E)
            # An embedding look-up: its gradient is a sum per expert, of zero rows too, in a fixed order.
            return y if bias is None else y + F.embedding(experts_R, bias.to(x.dtype))

        up_RF = run(x_RD, self.up, self.up_bias)
        if self.gate is None:
            return run(ACTIVATIONS[self.activation](up_RF), self.down, self.down_bias)
        return run(gate(self.activation, run(x_RD, self.gate, self.gate_bias), up_RF), self.down, self.down_bias)


def _has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matrix product takes it: bf16 on CUDA, rows of whole 16 bytes."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _grouped(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """All stretches of rows in one kernel; where they end is never brought to the host."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the name before it was made public
    return product(x_RI, weight_EOI.transpose(1, 2), offs=ends_E.int())


@torch.compiler.disable  # sizes that change in every step: compiled, it would be compiled anew for ever
def _one_by_one(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """An expert after the other. One without rows multiplies nothing, so that its weights get a gradient of zeros."""
    parts = zip(x_RI.split(_stretches(ends_E, len(x_RI))), weight_EOI.unbind())
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


def _stretches(ends_E: Tensor, rows: int) -> list[int]:
    if ends_E.is_meta:  # where shapes are all there is, loads are even
        ends = [rows * (i + 1) // len(ends_E) for i in range(len(ends_E))]
    else:
        ends = ends_E.tolist()
    return [end - begin for begin, end in zip([0, *ends], ends)]


def dispatch(experts: Experts, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Sum over a token's chosen experts of weight x output, [N, D]; always added up in the order of `chosen_NK`. N may be 0."""
    choices = chosen_NK.shape[1]
    experts_R, order_R = chosen_NK.flatten().sort(stable=True)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    y_RD = experts(_Gather.apply(x_ND, order_R, place_R, choices), experts_R)
    y_NKD = _Permute.apply(y_RD, place_R, order_R).unflatten(0, chosen_NK.shape)
    return (y_NKD * weights_NK.to(y_NKD.dtype)[..., None]).sum(1)


class _Gather(torch.autograd.Function):
    """Rows of tokens, each as often as it has choices. Backward adds a token's rows in the order of its choices, without the
    atomic additions of an index's own backward, whose order, and so the last bit, changes from run to run on CUDA.
    """

    @staticmethod
    def forward(ctx, x_ND: Tensor, order_R: Tensor, place_R: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.choices = choices
        return x_ND[order_R // choices]

    @staticmethod
    def backward(ctx, g_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        return g_RD[place_R].unflatten(0, (len(place_R) // ctx.choices, ctx.choices)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[order], whose gradient is g[inverse]."""

    @staticmethod
    def forward(ctx, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx, g_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return g_RD[inverse_R], None, None
