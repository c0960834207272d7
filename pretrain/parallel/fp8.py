"""Matrix products in fp8 (Micikevicius et al., arXiv 2209.05433): of activations, weights and gradients that are scaled into its range.

    forward               y = x W'         x and W in e4m3
    gradient of x         g W              tensorwise: g in e5m2, which has a wider range; rowwise: e4m3
    gradient of W         g' x             tensorwise: likewise; rowwise: in bf16, because its rows run over all tokens

`tensorwise` has a scale per tensor, and `rowwise` one per row and column of a product, so that one outlier costs only its own row precision. Scales
are powers of two: a value is rounded alike whatever stands beside it, unless the largest of them all moves by a factor of two. So layouts with
other micro-batches compute nearly the same. Weights are stored in `precision.master`, as without fp8. They are rounded to bf16 on the way, because
FSDP2 gathers them in it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.config.schema import Precision
from pretrain.errors import ConfigError
from pretrain.models.layers import Linear

MULTIPLE = 16
"""What sizes of a product must be multiples of (torch._scaled_mm)."""
NARROW, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
_BITS_BELOW = {NARROW: 7, WIDE: 14}
"""The largest value becomes 2 to this power, or up to twice as much: within the format's range, and the next power would not be."""
_EXPONENT = 0x7F800000
_SMALLEST = 2.0**-100


def set_fp8(network: nn.Module, precision: Precision, ranks: int = 1) -> None:
    """Let projections compute in fp8. `ranks`: those that will share each of them. Raises ConfigError for sizes that fp8 does not have."""
    product = Fp8Product(precision.fp8)
    for name, linear in projections(network, precision.fp8_modules).items():
        for size in (linear.in_features, linear.out_features):
            if size % (MULTIPLE * ranks):
                over = f" over {ranks} tensor-parallel ranks" if ranks > 1 else ""
                raise ConfigError(
                    f"precision.fp8={precision.fp8}: {name} is {linear.in_features} x {linear.out_features}{over}, and fp8 needs multiples of "
                    f"{MULTIPLE}; leave it out of precision.fp8_modules"
                )
        linear.product = product


def projections(network: nn.Module, patterns: list[str]) -> dict[str, Linear]:
    """The projections of blocks whose names match, by name. Raises ConfigError for a pattern that matches none."""
    inside = {id(m) for unit in network.units() if unit.role == "block" for module in unit.modules for m in module.modules()}
    names = {name: m for name, m in network.named_modules() if isinstance(m, Linear) and id(m) in inside}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"precision.fp8_modules: {pattern} matches no projection of a block; there are {', '.join(list(names)[:6])}, ..."
            )
    return {name: m for name, m in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


class Fp8Product:
    """`project` (models/layers.py) in fp8. `scaling`: tensorwise or rowwise."""

    def __init__(self, scaling: str) -> None:
        self.by_row = scaling == "rowwise"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _Product.apply(x.flatten(0, -2), weight, self.by_row).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x [N, I] @ weight [O, I]'. Kept for backward are x and the weight themselves, of which others have use as well."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, weight_OI: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.by_row = by_row
        return multiply(x_NI, weight_OI.to(x_NI.dtype), by_row, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_x = grad_weight = None
        kind = NARROW if ctx.by_row else WIDE
        if ctx.needs_input_grad[0]:
            grad_x = multiply(g_NO, weight_OI.to(x_NI.dtype).mT, ctx.by_row, kind, dtype=x_NI.dtype)
        if ctx.needs_input_grad[1]:
            if ctx.by_row:
                grad_weight = g_NO.mT @ x_NI
            else:
                missing = -len(g_NO) % MULTIPLE
                g_ON, x_IN = (F.pad(tensor, (0, 0, 0, missing)).mT for tensor in (g_NO, x_NI))
                grad_weight = multiply(g_ON, x_IN, False, kind, dtype=x_NI.dtype)
        return grad_x, grad_weight, None


def multiply(
    left_MK: Tensor,
    right_NK: Tensor,
    by_row: bool,
    kind: torch.dtype = NARROW,
    fast: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """left @ right', whose factors are rounded to fp8: the left one to `kind`, the right one to e4m3. `fast`: with sums of fewer bits."""
    dtype = dtype or left_MK.dtype
    left, left_scale = to_fp8(left_MK, kind, by_row)
    right, right_scale = to_fp8(right_NK, NARROW, by_row)
    return torch._scaled_mm(
        left, right.mT, left_scale, right_scale.mT if by_row else right_scale, out_dtype=dtype, use_fast_accum=fast
    )


def to_fp8(x_RK: Tensor, kind: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The tensor over its scales in fp8, row after row in memory, and the scales, fp32: one, or one per row [R, 1]."""
    largest = x_RK.abs().amax(1, keepdim=True) if by_row else x_RK.abs().amax()
    # The power of two below the largest: its exponent alone. One that is not finite makes the result so.
    power = (largest.float().clamp(min=_SMALLEST).view(torch.int32) & _EXPONENT).view(torch.float32)
    scale = power * 2.0 ** -_BITS_BELOW[kind]
    return (x_RK / scale.to(x_RK.dtype)).to(kind).contiguous(), scale
