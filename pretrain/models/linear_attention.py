"""Layers with linear attention, as single-device code: Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) and Mamba 2 (Dao and Gu, arXiv 2405.21060).

    x --query, key, value--> short convolution of each channel, SiLU --> heads
    x --decay--> softplus(. + decay_bias) = step;  log_decay = -exp(log_decay_scale) step     how fast a head forgets
    x --rate---> sigmoid                        Gated DeltaNet: how far a head corrects itself
    x --gate---> SiLU                           what the result is multiplied with

    Gated DeltaNet  queries and keys of length one --> gated delta rule --> output_norm, per head --> x gate --output-->
    Mamba 2         values x step --> state-space dual --> + values x skip --> x gate --> output_norm, per key head --output-->

It needs no positions, and its cost grows with the length of a sequence, not with its square. Between the projections everything is computed in fp32, except
the products in which queries read, and of Mamba 2 those that write. Only the projections' results are stored for backward, which computes the rest again. The
recurrences are in recurrences.py. In papers on Mamba 2, queries, keys and values are C, B and x, a key head is a group, the gate is z, skip is D, and step is dt.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_schema import Model
from pretrain.models.caches import RecurrentCache
from pretrain.models.layers import Linear, RMSNorm, at_hand, rms_norm
from pretrain.models.network import Initial
from pretrain.models.recurrences import gated_delta_rule, short_convolution, state_space_dual

EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Between these, logarithmically, lie the initial values of softplus(decay_bias) (Mamba 2)."""
SCALES = {"gated_delta": (0.0, 16.0), "mamba2": (1.0, 16.0)}
"""Between these lie the initial values of exp(log_decay_scale)."""


class LinearAttention(nn.Module):
    """What both have. Each key head serves `value_heads / key_heads` value heads that follow each other."""

    casts = ("query_filter", "key_filter", "value_filter")
    projections: ClassVar[tuple[str, ...]]
    """Those of x, queries and keys first, then values."""
    of_all_heads: ClassVar[tuple[str, ...]] = ()
    """Parameters that heads share, beside the projections."""
    of_key_heads: ClassVar[tuple[str, ...]] = ("query_filter", "key_filter")
    """Parameters of which each key head has a part of its own, along the first dimension."""
    of_value_heads: ClassVar[tuple[str, ...]] = ("value_filter", "log_decay_scale", "decay_bias")

    def __init__(self, config: Model) -> None:
        super().__init__()
        sizes, dim = config.linear_attention, config.dim
        self.key_heads, self.key_dim, self.value_dim = sizes.key_heads, sizes.key_dim, sizes.value_dim
        self.split_key_heads = sizes.key_heads
        """Those of which the projections at hand are: all, unless parallel/ splits the projections."""
        self.eps = sizes.norm_eps or config.norm_eps
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.query, self.key, self.value, self.gate = (Linear(dim, width) for width in (keys, keys, values, values))
        self.decay = Linear(dim, sizes.value_heads, steers=True)
        self.query_filter, self.key_filter, self.value_filter = (
            nn.Parameter(torch.empty(width, 1, sizes.kernel)) for width in (keys, keys, values)
        )
        self.log_decay_scale, self.decay_bias = (nn.Parameter(torch.empty(sizes.value_heads)) for _ in range(2))
        self.output = Linear(values, dim)

    def forward(self, x_BTD: Tensor, begins_BT: Tensor | None = None, cache: RecurrentCache | None = None) -> Tensor:
        """`begins_BT`: true where a document begins; it does not see earlier positions."""
        return self.output(self.mix([getattr(self, name)(x_BTD) for name in self.projections], begins_BT, cache))

    def mix(self, projected: list[Tensor], begins_BT: Tensor | None, cache: RecurrentCache | None) -> Tensor:
        """What the heads at hand make of all positions, normed and gated, [B, T, C]. `projected`: the results of `projections`."""
        given = dict(zip(self.projections, projected)) | self.shared() | self.of_heads()
        # No tensor of this pass may be in `run`, which backward keeps: recomputed blocks would not free it.
        names, inputs = tuple(given), tuple(given.values())

        def run(*tensors: Tensor) -> Tensor:
            return self.compute(dict(zip(names, tensors)), begins_BT)[0]

        if cache is not None:
            y_BTC, state = self.compute(given, begins_BT, cache.recent, cache.state)
            count = self.query_filter.shape[-1] - 1
            recent = [_recent(x, old, begins_BT, count) for x, old in zip(projected[:3], cache.recent)]
            cache.keep(recent, state, y_BTC.shape[1])
            return y_BTC
        if torch.compiler.is_compiling():  # the compiler marks what it is to compute again
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return _ComputedAgain.apply(run, *inputs)

    def compute(
        self,
        given: dict[str, Tensor],
        begins_BT: Tensor | None,
        recent: Sequence[Tensor | None] = (None, None, None),
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the heads at hand make of the results of the projections and of their parameters, by name; and the state after the last position."""
        raise NotImplementedError

    def shared(self) -> dict[str, Tensor]:
        """The parameters `of_all_heads`."""
        return {name: attrgetter(name)(self) for name in self.of_all_heads}

    def of_heads(self) -> dict[str, Tensor]:
        """The parameters `of_key_heads` and `of_value_heads` of the heads at hand: of all heads, unless parallel/ sets others."""
        names = (*self.of_key_heads, *self.of_value_heads)
        return {name: at_hand(self, name) if name in self.casts else attrgetter(name)(self) for name in names}

    def heads(
        self, given: dict[str, Tensor], begins_BT: Tensor | None, recent: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, K, T, G], and values [B, K, R, T, V], after the convolutions."""
        q_BTC, k_BTC, v_BTC = (
            _convolved(given[name], given[f"{name}_filter"], given.get(f"{name}_filter_bias"), begins_BT, old)
            for name, old in zip(("query", "key", "value"), recent)
        )
        q_BKTG, k_BKTG = (x_BTC.unflatten(-1, (-1, self.key_dim)).transpose(1, 2) for x_BTC in (q_BTC, k_BTC))
        return q_BKTG, k_BKTG, v_BTC.unflatten(-1, (q_BKTG.shape[1], -1, self.value_dim)).permute(0, 2, 3, 1, 4)


class GatedDeltaNet(LinearAttention):
    """Linear attention by the gated delta rule."""

    projections = ("query", "key", "value", "gate", "decay", "rate")
    of_all_heads = ("output_norm.weight",)

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.largest_rate = 2.0 if config.linear_attention.negative_eigenvalues else 1.0
        self.rate = Linear(config.dim, config.linear_attention.value_heads, steers=True)
        self.output_norm = RMSNorm(self.value_dim, self.eps)

    def compute(
        self,
        given: dict[str, Tensor],
        begins_BT: Tensor | None,
        recent: Sequence[Tensor | None] = (None, None, None),
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q_BKTG, k_BKTG, v_BKRTV = self.heads(given, begins_BT, recent)
        q_BKTG, k_BKTG = _of_length_one(q_BKTG), _of_length_one(k_BKTG)
        rate_BTH = _wide(given["rate"]).sigmoid() * self.largest_rate
        log_decay, rate = (_by_key_head(x, q_BKTG.shape[1]) for x in (_log_decay(given), rate_BTH))
        y_BKRTV, state = gated_delta_rule(
            q_BKTG * self.key_dim**-0.5, k_BKTG, v_BKRTV, log_decay, rate, begins_BT, state, products=given["query"].dtype
        )
        gain_V = given["output_norm.weight"].float()
        normed_BTHV = rms_norm(y_BKRTV.permute(0, 3, 1, 2, 4).flatten(2, 3), gain_V, self.eps)
        return (normed_BTHV.flatten(2) * F.silu(_wide(given["gate"]))).to(given["gate"].dtype), state


class Mamba2(LinearAttention):
    """Linear attention by the state-space dual; `skip` is how much of the values is added to what queries read."""

    projections = ("query", "key", "value", "gate", "decay")
    of_key_heads = (*LinearAttention.of_key_heads, "query_filter_bias", "key_filter_bias")
    of_value_heads = (*LinearAttention.of_value_heads, "value_filter_bias", "skip", "output_norm.weight")

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        for name in ("query", "key", "value"):
            self.register_parameter(f"{name}_filter_bias", nn.Parameter(torch.empty(getattr(self, name).out_features)))
        self.skip = nn.Parameter(torch.empty(config.linear_attention.value_heads))
        self.output_norm = RMSNorm(self.value.out_features, self.eps)

    def compute(
        self,
        given: dict[str, Tensor],
        begins_BT: Tensor | None,
        recent: Sequence[Tensor | None] = (None, None, None),
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q_BKTG, k_BKTG, v_BKRTV = self.heads(given, begins_BT, recent)
        keys = q_BKTG.shape[1]
        log_decay, step = (_by_key_head(x, keys) for x in (_log_decay(given), _step(given)))
        y_BKRTV, state = state_space_dual(
            q_BKTG, k_BKTG, v_BKRTV * step[..., None], log_decay, begins_BT, state, products=given["query"].dtype
        )
        y_BKRTV = y_BKRTV + v_BKRTV * _wide(given["skip"]).view(keys, -1, 1, 1)
        gated_BTC = y_BKRTV.permute(0, 3, 1, 2, 4).flatten(2) * F.silu(_wide(given["gate"]))
        squares_BTK1 = self.sum_of_group(gated_BTC.unflatten(-1, (keys, -1)).square().sum(-1, keepdim=True))
        inverse_BTK1 = (squares_BTK1 * (self.key_heads / self.output_norm.weight.numel()) + self.eps).rsqrt()
        normed_BTC = (gated_BTC.unflatten(-1, (keys, -1)) * inverse_BTK1).flatten(2)
        return (normed_BTC * _wide(given["output_norm.weight"])).to(given["gate"].dtype), state

    def sum_of_group(self, x_BTK1: Tensor) -> Tensor:
        """The sum over all value heads of a key head, from that over those at hand: the same, unless parallel/ shares them out."""
        return x_BTK1


def _wide(x: Tensor) -> Tensor:
    """In fp32, or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _convolved(
    x_BTC: Tensor, filter_C1W: Tensor, bias_C: Tensor | None, begins_BT: Tensor | None, recent_BLC: Tensor | None
) -> Tensor:
    # The filter in the format of the activations, as every matrix.
    y_BTC = short_convolution(_wide(x_BTC), _wide(filter_C1W.to(x_BTC.dtype))[:, 0], begins_BT, recent_BLC)
    return F.silu(y_BTC if bias_C is None else y_BTC + _wide(bias_C))


def _step(given: dict[str, Tensor]) -> Tensor:
    bias_H = _wide(given["decay_bias"])
    # Softplus by another operator: of `softplus_backward`, torch 2.13 traces other strides than it computes.
    return torch.logaddexp(_wide(given["decay"]) + bias_H, torch.zeros_like(bias_H))


def _log_decay(given: dict[str, Tensor]) -> Tensor:
    return -_wide(given["log_decay_scale"]).exp() * _step(given)


def _by_key_head(x_BTH: Tensor, keys: int) -> Tensor:
    """[B, K, R, T]."""
    return x_BTH.unflatten(-1, (keys, -1)).permute(0, 2, 3, 1)


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


def recurrence_flops(config: Model) -> int:
    """FLOPs per token of a layer's recurrence, forward and backward: S is written, and read by the query; that of the delta rule is read by the key too. Its
    computation in chunks takes more, which do not count."""
    sizes = config.linear_attention
    products = 3 if sizes.kind == "gated_delta" else 2
    return 3 * 2 * products * sizes.value_heads * sizes.key_dim * sizes.value_dim


def initial_values(name: str, config: Model) -> Initial | None:
    """How a parameter of linear attention begins, where it is not as in all layers: as in flash-linear-attention, or in the code of Mamba 2."""
    kind = name.rpartition("linear_attention.")[2]
    if kind in ("output_norm.weight", "skip"):  # no matter what the norms of the residual stream are
        return 1.0, 0.0
    if kind.endswith("_filter"):  # the deviation of a uniform distribution up to 1 / sqrt(kernel)
        return 0.0, (3 * config.linear_attention.kernel) ** -0.5
    if kind in ("log_decay_scale", "decay_bias"):
        return functools.partial(_drawn, name, config.linear_attention.value_heads, SCALES[config.linear_attention.kind])
    return None


def _drawn(name: str, count: int, scales: tuple[float, float], seed: int) -> Tensor:
    key = hashlib.blake2b(f"{seed}/{name}/{count}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    if name.endswith("log_decay_scale"):
        smallest, largest = scales
        return (smallest + share.clamp(min=1e-3) * (largest - smallest)).log().float()
    step = (math.log(SLOWEST) + share * (math.log(FASTEST) - math.log(SLOWEST))).exp()
    return (step + (-(-step).expm1()).log()).float()  # the inverse of softplus
