"""Matrix products in fp8 (Micikevicius et al., arXiv 2209.05433): of activations, weights and gradients that are scaled into its range.

    forward               y = x W'         x and W in e4m3
    gradient of x         g W              tensorwise: g in e5m2, which has a wider range; rowwise, mxfp8: e4m3
    gradient of W         g' x             tensorwise, mxfp8: likewise; rowwise: in bf16, because its rows run over all tokens

`tensorwise` has a scale per tensor, and `rowwise` one per row and column of a product, so that one outlier costs only its own row precision. `mxfp8` has
one per 32 numbers along the sum of the product (OCP Microscaling Formats, version 1.0). It is found as in arXiv 2506.08027: the smallest scale that leaves
none of them above 448. A CPU has no such product, but the numbers are exact in bf16, in which it multiplies them.

Scales are powers of two: a value is rounded alike whatever stands beside it, unless the largest of them all moves by a factor of two. So layouts with
other micro-batches compute nearly the same. Weights are stored in `precision.master`, as without fp8. They are rounded to bf16 on the way, because
FSDP2 gathers them in it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.config.parallel_schema import Precision
from pretrain.errors import ConfigError
from pretrain.models.layers import Linear

BLOCK = 32
"""Numbers that share a scale in MXFP8."""
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "mxfp8": BLOCK}
"""What sizes of a product must be multiples of (torch._scaled_mm)."""
NARROW, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
_BITS_BELOW = {NARROW: 7, WIDE: 14}
"""The largest value becomes 2 to this power, or up to twice as much: within the format's range, and the next power would not be."""
_EXPONENT = 0x7F800000
_SMALLEST = 2.0**-100


def set_fp8(network: nn.Module, precision: Precision, ranks: int = 1) -> None:
    """Let projections compute in fp8. `ranks`: those that will share each of them. Raises ConfigError for sizes that fp8 does not have.

    Ranks split one of a projection's sizes. Both must divide, so that the rule does not depend on which.
    """
    product, multiple = Fp8Product(precision.fp8), MULTIPLES[precision.fp8] * ranks
    for name, linear in projections(network, precision.fp8_modules).items():
        for size in (linear.in_features, linear.out_features):
            if size % multiple:
                over = f" over {ranks} tensor-parallel ranks" if ranks > 1 else ""
                raise ConfigError(
                    f"precision.fp8={precision.fp8}: {name} is {linear.in_features} x {linear.out_features}{over}, and fp8 needs multiples of "
                    f"{multiple}; leave it out of precision.fp8_modules"
                )
        linear.product = product


def projections(network: nn.Module, patterns: list[str]) -> dict[str, Linear]:
    """The projections of blocks whose names match, by name. Raises ConfigError for a pattern that matches none."""
    inside = {id(m) for unit in network.units() if unit.role == "block" for module in unit.modules for m in module.modules()}
    names = {name: m for name, m in network.named_modules() if isinstance(m, Linear) and not m.steers and id(m) in inside}
    if not patterns:
        raise ConfigError(
            "precision.fp8_modules=[] leaves no projection for fp8; set precision.fp8=none, or name some, such as layers.*"
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"precision.fp8_modules: {pattern} matches no projection of a block; there are {', '.join(list(names)[:6])}, ..."
            )
    return {name: m for name, m in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


class Fp8Product:
    """`project` (models/layers.py) in fp8. `scaling`: tensorwise, rowwise or mxfp8."""

    def __init__(self, scaling: str) -> None:
        self.scaling = scaling

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _Product.apply(x.flatten(0, -2), weight, self.scaling).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x [N, I] @ weight [O, I]'. Backward keeps x and the weight themselves, which others keep as well."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, weight_OI: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.scaling = scaling
        return multiply(x_NI, weight_OI.to(x_NI.dtype), scaling, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_x = grad_weight = None
        scaling = ctx.scaling
        kind = WIDE if scaling == "tensorwise" else NARROW
        if ctx.needs_input_grad[0]:
            grad_x = multiply(g_NO, weight_OI.to(x_NI.dtype).mT, scaling, kind, dtype=x_NI.dtype)
        if ctx.needs_input_grad[1]:
            if scaling == "rowwise":
                grad_weight = g_NO.mT @ x_NI
            else:
                missing = -len(g_NO) % MULTIPLES[scaling]
                g_ON, x_IN = (F.pad(tensor, (0, 0, 0, missing)).mT for tensor in (g_NO, x_NI))
                grad_weight = multiply(g_ON, x_IN, scaling, kind, dtype=x_NI.dtype)
        return grad_x, grad_weight, None


def multiply(
    left_MK: Tensor,
    right_NK: Tensor,
    scaling: str,
    kind: torch.dtype = NARROW,
    fast: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """left @ right', whose factors are rounded to fp8: the left one to `kind`, the right one to e4m3. `fast`: with sums of fewer bits."""
    dtype, by_row = dtype or left_MK.dtype, scaling == "rowwise"
    if scaling == "mxfp8":
        return _multiply_blocks(to_mxfp8(left_MK), to_mxfp8(right_NK), dtype)
    left, left_scale = to_fp8(left_MK, kind, by_row)
    right, right_scale = to_fp8(right_NK, NARROW, by_row)
    return torch._scaled_mm(
        left, right.mT, left_scale, right_scale.mT if by_row else right_scale, out_dtype=dtype, use_fast_accum=fast
    )


def takes_scales_of_rows() -> bool:
    """Whether this torch multiplies in fp8 on a CPU with a scale per row."""
    try:
        multiply(torch.ones(16, 16), torch.ones(16, 16), "rowwise", dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def to_fp8(x_RK: Tensor, kind: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The tensor over its scales in fp8, row after row in memory, and the scales, fp32: one, or one per row [R, 1]."""
    largest = x_RK.abs().amax(1, keepdim=True) if by_row else x_RK.abs().amax()
    scale = _power_below(largest) * 2.0 ** -_BITS_BELOW[kind]
    return (x_RK / scale.to(x_RK.dtype)).to(kind).contiguous(), scale


def _power_below(largest: Tensor) -> Tensor:
    """The power of two below a size, fp32: its exponent alone. One that is not finite stays so."""
    return (largest.float().clamp(min=_SMALLEST).view(torch.int32) & _EXPONENT).view(torch.float32)


# ---- MXFP8 ------------------------------------------------------------------------------------------------------------------


def to_mxfp8(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in e4m3 over a scale for each 32 numbers of a row, and the scales [R, K / 32] in e8m0, which has exponents alone."""
    x_RBS = x_RK.unflatten(1, (-1, BLOCK))
    largest = x_RBS.abs().amax(2, keepdim=True).float()
    power = _power_below(largest)
    scale = torch.where(largest > 1.75 * power, power * 2.0**-7, power * 2.0**-8)  # 448 is 1.75 * 2^8
    return (x_RBS / scale.to(x_RK.dtype)).to(NARROW).flatten(1).contiguous(), scale.squeeze(2).to(torch.float8_e8m0fnu)


def _multiply_blocks(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    (left_MK, left_scale), (right_NK, right_scale) = left, right
    if left_MK.device.type == "cpu":
        return (from_mxfp8(left_MK, left_scale) @ from_mxfp8(right_NK, right_scale).mT).to(dtype)
    recipe, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    scales = [tiled(scale) for scale in (left_scale, right_scale)]
    return F.scaled_mm(left_MK, right_NK.mT, scales[0], recipe, scales[1], recipe, order, order, output_dtype=dtype)


def from_mxfp8(x_RK: Tensor, scale_RB: Tensor) -> Tensor:
    """The numbers that `to_mxfp8` made, in bf16, which has all of them."""
    return (x_RK.to(torch.bfloat16).unflatten(1, (-1, BLOCK)) * scale_RB.to(torch.bfloat16)[..., None]).flatten(1)


def tiled(scale_RB: Tensor) -> Tensor:
    """Scales in the order that cuBLAS wants: tiles of 128 rows and 4 blocks; in a tile row r stands at (r % 32, r // 32). Zeros fill up tiles."""
    rows, blocks = scale_RB.shape
    whole = F.pad(scale_RB.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = whole.view(len(whole) // 128, 4, 32, whole.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(torch.float8_e8m0fnu)
