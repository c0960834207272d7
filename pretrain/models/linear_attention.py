"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): linear attention, as single-device code.

    x --query, key, value--> short convolution of each channel, SiLU --> heads; queries and keys of length one
    x --decay--> log_decay = -exp(log_decay_scale) softplus(. + decay_bias)      how fast a head forgets
    x --rate---> sigmoid                                                         how far it corrects itself
    x --gate---> SiLU                                                            what its result is multiplied with, after the norm
                 gated delta rule (delta_rule.py) --> output_norm, per head --> x the gate --output-->

It needs no positions, and its cost grows with the length of a sequence, not with its square. Between the projections everything is computed in fp32, except
the products in which queries read. Only the projections' results are stored for backward, which computes the rest again.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_schema import Model
from pretrain.models.caches import RecurrentCache
from pretrain.models.delta_rule import gated_delta_rule, short_convolution
from pretrain.models.layers import Linear, RMSNorm, at_hand, rms_norm
from pretrain.models.network import Initial

EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Between these, logarithmically, lie the initial values of softplus(decay_bias) (Mamba 2, arXiv 2405.21060)."""
LARGEST_SCALE = 16.0
"""Initial values of exp(log_decay_scale) lie between 0 and this."""


class HeadParameters(NamedTuple):
    """What heads have beside the projections; filters [C, 1, W] of the channels of queries, keys and values, and a number for each value head."""

    query_filter: Tensor
    key_filter: Tensor
    value_filter: Tensor
    log_decay_scale: Tensor
    decay_bias: Tensor


class _Sizes(NamedTuple):
    key_dim: int
    value_dim: int
    largest_rate: float
    eps: float


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule. Each key head serves `value_heads / key_heads` value heads that follow each other."""

    casts = ("query_filter", "key_filter", "value_filter")

    def __init__(self, config: Model) -> None:
        super().__init__()
        sizes, dim = config.linear_attention, config.dim
        eps = sizes.norm_eps or config.norm_eps
        self.sizes = _Sizes(sizes.key_dim, sizes.value_dim, 2.0 if sizes.negative_eigenvalues else 1.0, eps)
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.query, self.key, self.value, self.gate = (Linear(dim, width) for width in (keys, keys, values, values))
        self.decay, self.rate = (Linear(dim, sizes.value_heads, steers=True) for _ in range(2))
        self.query_filter, self.key_filter, self.value_filter = (
            nn.Parameter(torch.empty(width, 1, sizes.kernel)) for width in (keys, keys, values)
        )
        self.log_decay_scale, self.decay_bias = (nn.Parameter(torch.empty(sizes.value_heads)) for _ in range(2))
        self.output_norm = RMSNorm(sizes.value_dim, eps)
        self.output = Linear(values, dim)

    def forward(self, x_BTD: Tensor, begins_BT: Tensor | None = None, cache: RecurrentCache | None = None) -> Tensor:
        """`begins_BT`: true where a document begins; it does not see earlier positions."""
        projected = [layer(x_BTD) for layer in (self.query, self.key, self.value, self.gate, self.decay, self.rate)]
        return self.output(self.mix(projected, begins_BT, cache))

    def mix(self, projected: list[Tensor], begins_BT: Tensor | None, cache: RecurrentCache | None) -> Tensor:
        """What the heads at hand make of all positions, normed and gated, [B, T, C]. `projected`: see `_mix`."""
        inputs = (*projected, self.output_norm.gain(), *self.of_heads())
        run = functools.partial(_mix, begins_BT=begins_BT, sizes=self.sizes)
        if cache is not None:
            y_BTC, state = run(*inputs, recent=cache.recent, state=cache.state)
            count = self.query_filter.shape[-1] - 1
            recent = [_recent(x, old, begins_BT, count) for x, old in zip(projected[:3], cache.recent)]
            cache.keep(recent, state, y_BTC.shape[1])
            return y_BTC
        if torch.compiler.is_compiling():  # the compiler marks what it is to compute again
            return checkpoint(lambda *tensors: run(*tensors)[0], *inputs, use_reentrant=False, preserve_rng_state=False)
        return _ComputedAgain.apply(lambda *tensors: run(*tensors)[0], *inputs)

    def of_heads(self) -> HeadParameters:
        """The parameters of the heads at hand: of all, unless parallel/ sets others."""
        return HeadParameters(*(at_hand(self, name) for name in self.casts), self.log_decay_scale, self.decay_bias)


def _mix(
    q_BTC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    gate_BTC: Tensor,
    decay_BTH: Tensor,
    rate_BTH: Tensor,
    gain_V: Tensor,
    *of_heads: Tensor,
    begins_BT: Tensor | None,
    sizes: _Sizes,
    recent: Sequence[Tensor | None] = (None, None, None),
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Short convolutions, the delta rule, the norm and the gate; and the state after the last position."""
    wide = functools.partial(torch.Tensor.to, dtype=torch.promote_types(q_BTC.dtype, torch.float32))
    *filters, log_scale_H, bias_H = of_heads
    mixed = []
    for x_BTC, filter_C1W, recent_BLC in zip((q_BTC, k_BTC, v_BTC), filters, recent):
        # The filter in the format of the activations, as every matrix.
        filter_CW = wide(filter_C1W.to(x_BTC.dtype))[:, 0]
        mixed.append(F.silu(short_convolution(wide(x_BTC), filter_CW, begins_BT, recent_BLC)))
    q_BKTG, k_BKTG = (_of_length_one(x.unflatten(-1, (-1, sizes.key_dim)).transpose(1, 2)) for x in mixed[:2])
    keys = q_BKTG.shape[1]
    v_BKRTV = mixed[2].unflatten(-1, (keys, -1, sizes.value_dim)).permute(0, 2, 3, 1, 4)
    # Softplus by another operator: of `softplus_backward`, torch 2.13 traces other strides than it computes.
    softplus_BTH = torch.logaddexp(wide(decay_BTH) + wide(bias_H), torch.zeros_like(wide(bias_H)))
    log_decay_BTH = -wide(log_scale_H).exp() * softplus_BTH
    rate_BTH = wide(rate_BTH).sigmoid() * sizes.largest_rate
    log_decay, rate = (x.unflatten(-1, (keys, -1)).permute(0, 2, 3, 1) for x in (log_decay_BTH, rate_BTH))
    y_BKRTV, state = gated_delta_rule(
        q_BKTG * sizes.key_dim**-0.5, k_BKTG, v_BKRTV, log_decay, rate, begins_BT, state, products=q_BTC.dtype
    )
    normed_BTHV = rms_norm(y_BKRTV.permute(0, 3, 1, 2, 4).flatten(2, 3), gain_V, sizes.eps)
    return (normed_BTHV.flatten(2) * F.silu(wide(gate_BTC))).to(q_BTC.dtype), state


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _recent(x_BTC: Tensor, recent_BLC: Tensor | None, begins_BT: Tensor | None, count: int) -> Tensor:
    """The last `count` inputs of a convolution, those of earlier documents as zeros."""
    if recent_BLC is None:
        recent_BLC = x_BTC.new_zeros(len(x_BTC), count, x_BTC.shape[2])
    if begins_BT is not None:
        numbers_BS = F.pad(begins_BT.cumsum(1), (count, 0))
        alike_BS = numbers_BS == numbers_BS[:, -1:]
        return (torch.cat((recent_BLC, x_BTC), 1) * alike_BS[..., None])[:, alike_BS.shape[1] - count :]
    return torch.cat((recent_BLC, x_BTC), 1)[:, x_BTC.shape[1] :]


class _ComputedAgain(torch.autograd.Function):
    """A function of tensors that stores nothing else for backward, and is computed again there."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, needed)]
        with torch.enable_grad():
            y = ctx.function(*tensors)
        found = iter(torch.autograd.grad(y, [x for x in tensors if x.requires_grad], g))
        return None, *(next(found) if wanted else None for wanted in needed)


def delta_rule_flops(config: Model) -> int:
    """FLOPs per token of a layer's delta rule, forward and backward: S is read by the key, corrected, and read by the query. Its computation in chunks takes
    more, which do not count."""
    sizes = config.linear_attention
    return 3 * 3 * 2 * sizes.value_heads * sizes.key_dim * sizes.value_dim


def initial_values(name: str, config: Model) -> Initial | None:
    """How a parameter of linear attention begins, where it is not as in all layers: as in flash-linear-attention."""
    kind = name.rpartition("linear_attention.")[2]
    if kind == "output_norm.weight":  # no matter what the norms of the residual stream are
        return 1.0, 0.0
    if kind.endswith("_filter"):  # the deviation of a uniform distribution up to 1 / sqrt(kernel)
        return 0.0, (3 * config.linear_attention.kernel) ** -0.5
    if kind in ("log_decay_scale", "decay_bias"):
        return functools.partial(_drawn, name, config.linear_attention.value_heads)
    return None


def _drawn(name: str, count: int, seed: int) -> Tensor:
    key = hashlib.blake2b(f"{seed}/{name}/{count}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    if name.endswith("log_decay_scale"):
        return (share.clamp(min=1e-3) * LARGEST_SCALE).log().float()
    step = (math.log(SLOWEST) + share * (math.log(FASTEST) - math.log(SLOWEST))).exp()
    return (step + (-(-step).expm1()).log()).float()  # the inverse of softplus
