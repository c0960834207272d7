"""Projections, tables and norms.

Weights are stored in the master format. Which precision a model computes in follows from the residual stream's format and three rules,
the same under every parallel strategy (docs/parallelism.md, "Precision", says why):

- Matrices are cast to the format of the activations where they are used. FSDP2 hands them over already cast, and under other strategies there may
  be copies (`at_hand`); the cast is then free.
- Norms and attention sinks are applied in fp32, with their vectors in fp32, and the result is rounded once.
- The gradient of a table, which sums over all tokens and over both uses of a tied table, is formed and summed in fp32.

Shapes: B batch, T time, D model, H query heads, K key/value heads, G head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.config.model_schema import Model
from pretrain.models.activations import ACTIVATIONS, gate
from pretrain.models.compiling import new_name


def at_hand(module: nn.Module, name: str = "weight") -> Tensor:
    """A matrix of a module for a product: the copy in the compute format, if parallel/weight_copies.py has handed one out. Otherwise it is the stored
    matrix, which the product casts. Modules list in `casts` what they ask for.
    """
    stored, copy = getattr(module, name), copy_at_hand(module, name)
    return stored if copy is None else _Copy.apply(stored, copy)


def copy_at_hand(module: nn.Module, name: str = "weight") -> Tensor | None:
    """The copy by itself, or None. No gradient flows through it."""
    return getattr(module, "copies", {}).get(name)


class _Copy(torch.autograd.Function):
    """A copy in the place of a stored matrix, which gets its gradient."""

    @staticmethod
    def forward(ctx, stored: Tensor, copy: Tensor) -> Tensor:
        return new_name(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return g, None  # autograd casts it to the format that the gradient is kept in


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, in the format of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Linear(nn.Linear):
    """A projection that computes in the format of its input. `product` is `project`, unless parallel/ sets another.

    `fused_rows`: where the weight holds several projections, the rows of each, in an order that repeats (for every head). Empty: it is one.
    `steers`: its results are single numbers, of a position or a head, that decide about vectors. They are never computed in fp8.
    """

    casts = ("weight",)
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(project)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        fused_rows: tuple[int, ...] = (),
        steers: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.fused_rows, self.steers = fused_rows, steers

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, at_hand(self), self.bias)

    def reset_parameters(self) -> None:
        """Weights are drawn by name (parallel/initialise.py), so that they depend on nothing else."""


def look_up(table_VD: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table by id, in a format. The gradient of the table is formed in fp32."""
    return _LookUp.apply(table_VD, ids, dtype)


class Embedding(nn.Module):
    """Rows of a table by token id or position, in the format that the rest of the network computes in. `rows` is `look_up`, unless
    parallel/ sets another.
    """

    rows: Callable[[Tensor, Tensor, torch.dtype], Tensor] = staticmethod(look_up)

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.weight = nn.Parameter(torch.empty(count, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(self.weight, ids, self.compute_dtype)


class _LookUp(torch.autograd.Function):
    """Rows of a table [V, D] by id, in a format. A frequent token adds thousands of rows to one row of the gradient, so they are added
    in fp32 whatever the formats of table and rows.
    """

    @staticmethod
    def forward(ctx, table_VD: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count = len(table_VD)
        return new_name(F.embedding(ids, table_VD).to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        return table_gradient(g, ids, ctx.count), None, None


def table_gradient(g: Tensor, ids: Tensor, count: int) -> Tensor:
    """The gradient [count, D] of a table whose rows `ids` were looked up, added in fp32 (fp64 from fp64)."""
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    return torch.ops.aten.embedding_dense_backward(g, ids, count, -1, False)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def gain(self) -> Tensor:
        """What normed components are multiplied with, [D], fp32."""
        return self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain(), self.eps)


def rms_norm(x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) × gain over the last dimension, computed in fp32 and rounded once to the format of x. `gain_D`: fp32."""
    if torch.compiler.is_compiling():
        return F.rms_norm(x.float(), x.shape[-1:], gain_D, eps).to(x.dtype)
    return (_RMSNormByKernel if x.device.type == "cuda" else _RMSNorm).apply(x, gain_D, eps)


class _RMSNormByKernel(torch.autograd.Function):
    """torch's in fp32 by its kernel for CUDA, which keeps x instead of a copy in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        y, inverse = torch.ops.aten._fused_rms_norm(x.float(), x.shape[-1:], gain_D, eps)
        ctx.save_for_backward(x, gain_D, inverse)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain_D, inverse = ctx.saved_tensors
        grad_x, grad_gain_D = torch.ops.aten._fused_rms_norm_backward(
            g.float(), x.float(), x.shape[-1:], inverse, gain_D, list(ctx.needs_input_grad[:2])
        )
        return None if grad_x is None else grad_x.to(x.dtype), grad_gain_D, None


class _RMSNorm(torch.autograd.Function):
    """What torch composes on a CPU of some twenty passes over the activations, in eight; and it keeps x instead of copies in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        y = x.float()
        inverse = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain_D, inverse)
        return (y * inverse).mul_(gain_D).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain_D, inverse = ctx.saved_tensors
        normed, g = x.float() * inverse, g.float()
        products_ND = (g * normed).flatten(0, -2)
        mean = torch.mv(products_ND, gain_D).div_(-x.shape[-1]).view(inverse.shape)
        grad_x = normed.mul_(mean).addcmul_(g, gain_D).mul_(inverse)
        return grad_x.to(x.dtype), products_ND.sum(0), None


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose gain is one plus the weight, applied in fp32 (Gemma, arXiv 2403.08295)."""

    def gain(self) -> Tensor:
        return 1.0 + self.weight.float()


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al., arXiv 1607.06450), computed in fp32; `affine`: with gain and bias."""

    def __init__(self, dim: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return layer_norm(x, weight, bias, self.eps)


def layer_norm(x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension, computed in fp32 and rounded once to the format of x. `weight_D`, `bias_D`: fp32."""
    if torch.compiler.is_compiling():
        return F.layer_norm(x.float(), x.shape[-1:], weight_D, bias_D, eps).to(x.dtype)
    return _LayerNorm.apply(x, weight_D, bias_D, eps)


class _LayerNorm(torch.autograd.Function):
    """torch's in fp32, which keeps x instead of a copy in fp32. Given bf16, torch's own would add up the gradients of weight and bias in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, eps: float) -> Tensor:
        y, mean, inverse = torch.native_layer_norm(x.float(), x.shape[-1:], weight_D, bias_D, eps)
        ctx.save_for_backward(x, weight_D, bias_D, mean, inverse)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight_D, bias_D, mean, inverse = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        gradients = torch.ops.aten.native_layer_norm_backward(
            g.float(), x.float(), x.shape[-1:], mean, inverse, weight_D, bias_D, needs
        )
        grad_x, grad_weight, grad_bias = (gradient if needed else None for gradient, needed in zip(gradients, needs))
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias, None


def make_norm(config: Model, dim: int | None = None) -> nn.Module:
    """The norm of a model's kind over `dim` components, those of the residual stream by default."""
    dim, eps = dim or config.dim, config.norm_eps
    match config.norm.kind:
        case "rms":
            return RMSNorm(dim, eps)
        case "rms_offset":
            return OffsetRMSNorm(dim, eps)
        case kind:
            return LayerNorm(dim, eps, affine=kind == "layer")


class Mlp(nn.Module):
    """down(activation(up(x))), or gated (Shazeer, arXiv 2002.05202): down(activation(gate(x)) × up(x))."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(dim, ffn_dim, bias) if gated else None
        self.up = Linear(dim, ffn_dim, bias)
        self.down = Linear(ffn_dim, dim, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(ACTIVATIONS[self.activation](self.up(x_BTD)))
        return self.down(gate(self.activation, self.gate(x_BTD), self.up(x_BTD)))
