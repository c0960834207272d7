"""Self-attention, as single-device code: the scores under a mask, grouped queries, and latent attention.

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) makes keys and values from one vector per position:

    x --query_down--> query_norm --query_up--> q = [plain | turned] per head
    x --kv_down--> latent | turned key --------------+
                   kv_norm --kv_up--> plain key | value per head
                                       k = [plain key | the one turned key, shared by all heads]

Its cache holds the latent and the turned key, which is all that keys and values are made from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pretrain.config.model_schema import Model
from pretrain.models.attention_ways import repeats_groups, way_of
from pretrain.models.caches import LayerCache
from pretrain.models.causal_blocks import causal_attention
from pretrain.models.causal_blocks_fp32 import causal_attention_fp32
from pretrain.models.compiling import compile_strictly
from pretrain.models.dropout import WeightMask, drop
from pretrain.models.layers import Linear, RMSNorm, make_norm
from pretrain.models.masks import Mask, PackedDocuments
from pretrain.models.positions import Tables, rotate, yarn_mscale


def attend(
    q_BHTG: Tensor,
    k_BKSG: Tensor,
    v_BKSG: Tensor,
    mask: Mask | None,
    scale: float,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    dropout: WeightMask | None = None,
) -> Tensor:
    """Attention [B, H, T, G] with the back end that the mask was built for; without a mask every earlier position is seen.

    `soft_cap`: scores become cap × tanh(score / cap), 0 leaves them; `sinks_H`: per head one more logit in the softmax. `dropout`: which weights
    become zero after it.
    """
    if isinstance(mask, BlockMask):
        if dropout is not None:
            raise ValueError("FlexAttention drops no weights")
        return _flex(q_BHTG, k_BKSG, v_BKSG, mask, scale, soft_cap, sinks_H)
    if isinstance(mask, PackedDocuments):
        if soft_cap or sinks_H is not None or dropout is not None:
            raise ValueError("varlen knows no soft-cap, no sinks, and drops no weights")
        return _varlen(q_BHTG, k_BKSG, v_BKSG, mask, scale)
    way = way_of(q_BHTG, k_BKSG, mask is not None, bool(soft_cap) or sinks_H is not None or dropout is not None)
    if way == "products":
        return _plain(q_BHTG, k_BKSG, v_BKSG, mask, scale, soft_cap, sinks_H, dropout)
    if way == "blocks":
        return causal_attention(q_BHTG, k_BKSG, v_BKSG, scale)[0]
    if way == "blocks_fp32":
        return causal_attention_fp32(q_BHTG, k_BKSG, v_BKSG, scale)
    if repeats_groups(q_BHTG, k_BKSG, mask is not None):
        repeats = q_BHTG.shape[1] // k_BKSG.shape[1]
        k_BKSG, v_BKSG = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSG, v_BKSG))
    grouped = q_BHTG.shape[1] != k_BKSG.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTG, k_BKSG, v_BKSG, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _plain(
    q_BHTG: Tensor,
    k_BKSG: Tensor,
    v_BKSG: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float,
    sinks_H: Tensor | None,
    dropout: WeightMask | None,
) -> Tensor:
    """Matrix products, and between them a softmax in fp32: what no fused kernel of torch's computes on a CPU.

    In bf16 scores are rounded, as every product is. Those of a fused kernel are not.
    """
    heads, length = q_BHTG.shape[1], q_BHTG.shape[2]
    q_BKRTG = q_BHTG.unflatten(1, (k_BKSG.shape[1], -1))
    scores = (q_BKRTG @ k_BKSG.transpose(-1, -2)[:, :, None]).flatten(1, 2)
    scores_BHTS = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if soft_cap:
        scores_BHTS = soft_cap * torch.tanh(scores_BHTS / soft_cap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q_BHTG.device).tril()
    scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BHTS + mask
    if sinks_H is not None:
        column = sinks_H.to(scores_BHTS.dtype)[None, :, None, None].expand(*scores_BHTS.shape[:3], 1)
        weights_BHTS = torch.cat((scores_BHTS, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights_BHTS = scores_BHTS.softmax(-1)
    weights_BHTS = drop(weights_BHTS, dropout)
    weights = weights_BHTS.to(v_BKSG.dtype).unflatten(1, (k_BKSG.shape[1], heads // k_BKSG.shape[1]))
    return (weights @ v_BKSG[:, :, None]).flatten(1, 2)


def _flex(q_BHTG, k_BKSG, v_BKSG, mask: BlockMask, scale: float, soft_cap: float, sinks_H: Tensor | None) -> Tensor:
    # A compiled block takes it in as it is; on CPU it is the reference only, and compiling costs more than it saves.
    compiled = q_BHTG.is_cuda and not torch.compiler.is_compiling()
    run = _compiled_flex(torch.is_grad_enabled()) if compiled else flex_attention
    options = {"block_mask": mask, "scale": scale, "enable_gqa": q_BHTG.shape[1] != k_BKSG.shape[1]}
    if soft_cap:
        options["score_mod"] = _soft_capped(soft_cap)
    if sinks_H is None:
        return run(q_BHTG, k_BKSG, v_BKSG, **options)
    y_BHTG, logsumexp_BHT = run(q_BHTG, k_BKSG, v_BKSG, return_lse=True, **options)
    # The sink adds exp(sink) to the denominator: what was divided by exp(lse) is divided by exp(lse) + exp(sink) instead.
    share_BHT = torch.sigmoid(logsumexp_BHT - sinks_H.float()[:, None])
    return (y_BHTG * share_BHT[..., None]).to(y_BHTG.dtype)


def _varlen(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTG: Tensor, mask: PackedDocuments, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # it brings torch's compiler with it, which other models do not need

    heads, groups, (ends_N, longest, window, knows_groups) = q_BHTG.shape[1], k_BKTG.shape[1], mask
    options = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if heads != groups and knows_groups:
        options["enable_gqa"] = True
    elif heads != groups:
        k_BKTG, v_BKTG = (x.repeat_interleave(heads // groups, dim=1) for x in (k_BKTG, v_BKTG))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTG, k_BKTG, v_BKTG))
    y = varlen_attn(q, k, v, ends_N, ends_N, longest, longest, **options)
    return y.unflatten(0, (len(q_BHTG), -1)).transpose(1, 2)


@functools.cache  # one function per cap: a new one would be compiled anew
def _soft_capped(cap: float) -> Callable[..., Tensor]:
    def squash(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return squash


@functools.cache
def _compiled_flex(trains: bool) -> Callable[..., Tensor]:
    """Training has few lengths, each with a version of its own. Evaluation has many, which share one version from the second on."""
    return compile_strictly(flex_attention, "set model.attention_backend=sdpa", dynamic=False if trains else None)


SCORES_AT_ONCE = 1 << 24


@torch.no_grad()
def largest_score(q_BHTG: Tensor, k_BKSG: Tensor, mask: Mask | None, scale: float) -> Tensor:
    """The largest score of a query and a key that it sees, a scalar; -inf if no query sees any. Soft-cap and biases are not in it."""
    batch, _, length, _ = q_BHTG.shape
    rows = max(1, SCORES_AT_ONCE // (batch * q_BHTG.shape[1] * k_BKSG.shape[2]))
    found = [q_BHTG.new_full((), -torch.inf)]
    for start in range(0, length, rows):
        part = slice(start, min(start + rows, length))
        q_BKRPG = q_BHTG[:, :, part].unflatten(1, (k_BKSG.shape[1], -1))
        scores_BHPS = (q_BKRPG @ k_BKSG.transpose(-1, -2)[:, :, None]).flatten(1, 2)
        seen = _seen_by(mask, part, k_BKSG.shape[2], batch, q_BHTG.device)
        found.append(scores_BHPS.masked_fill_(~seen, -torch.inf).amax())
    return torch.stack(found).amax().float() * scale


def _seen_by(mask: Mask | None, queries: slice, keys: int, batch: int, device: torch.device) -> Tensor:
    """Which keys some of the queries see, in a shape that fits [B, H, queries, keys]."""
    if isinstance(mask, PackedDocuments):
        places_BT = torch.arange(batch * keys, device=device, dtype=torch.int32).view(batch, keys)
        document_BT = torch.searchsorted(mask.ends_N, places_BT, right=True)
        distance_BQS = places_BT[:, queries, None] - places_BT[:, None]
        seen_BQS = (distance_BQS >= 0) & (document_BT[:, queries, None] == document_BT[:, None])
        return (seen_BQS & (distance_BQS < mask.window) if mask.window else seen_BQS)[:, None]
    if mask is None or isinstance(mask, BlockMask):
        query_Q = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key_S = torch.arange(keys, device=device)
        if mask is None:
            return key_S <= query_Q
        number_B = torch.arange(batch, device=device)[:, None, None, None]
        return mask.mask_mod(number_B, torch.zeros_like(number_B), query_Q, key_S)
    mask = mask if mask.shape[-2] == 1 else mask[..., queries, :]
    return mask if mask.dtype == torch.bool else mask != -torch.inf


class Scored(nn.Module):
    """What has attention. `attend` is the function above, unless parallel/ puts another before it."""

    watch_scores: Callable[[Tensor], None] | None = None
    """Is given the largest score of each call, if somebody watches."""
    real_queries: slice | Tensor = slice(None)
    """Which queries of a call are real, where others fill it up: the first ones, or with a mask of one row any."""

    def attend(
        self,
        q_BHTG: Tensor,
        k_BKSG: Tensor,
        v_BKSG: Tensor,
        mask: Mask | None,
        scale: float,
        *options: Any,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        if self.watch_scores is not None:
            self.watch_scores(largest_score(q_BHTG[:, :, self.real_queries], k_BKSG, mask, scale))
        return attend(q_BHTG, k_BKSG, v_BKSG, mask, scale, *options, dropout=dropout)


class Attention(Scored):
    """Causal self-attention with grouped queries (arXiv 2305.13245), over the positions that the mask leaves, all earlier ones
    without one. Queries and keys are rotated where there are tables. The result may be gated, component by component (Qiu et al., arXiv 2505.06708).
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        dim, head_dim, switches = config.dim, config.head_dim, config.attention
        self.head_dim = head_dim
        self.layout = config.rope.layout
        self.scale = switches.query_scalar**-0.5
        self.soft_cap = switches.soft_cap
        self.query = Linear(dim, config.heads * head_dim, "query" in switches.bias)
        self.key = Linear(dim, config.kv_heads * head_dim, "key" in switches.bias)
        self.value = Linear(dim, config.kv_heads * head_dim, "value" in switches.bias)
        self.output = Linear(config.heads * head_dim, dim, "output" in switches.bias)
        self.gate = Linear(dim, config.heads * head_dim) if switches.output_gate else None
        self.query_norm, self.key_norm = _query_key_norms(config)
        self.per_head = config.norm.qk == "head"
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if switches.sinks else None

    def forward(
        self,
        x_BTD: Tensor,
        rope: Tables | None = None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        q_BHTG = self._heads(self.query(x_BTD), self.query_norm)
        k_BKTG = self._heads(self.key(x_BTD), self.key_norm)
        v_BKTG = self._heads(self.value(x_BTD), None)
        if rope is not None:
            q_BHTG, k_BKTG = rotate(q_BHTG, rope, self.layout), rotate(k_BKTG, rope, self.layout)
        if cache is not None:
            k_BKTG, v_BKTG = cache.append(k_BKTG, v_BKTG)
        y_BHTG = self.attend(q_BHTG, k_BKTG, v_BKTG, mask, self.scale, self.soft_cap, self.sinks, dropout=dropout)
        y_BTC = y_BHTG.transpose(1, 2).flatten(2)
        return self.output(y_BTC if self.gate is None else y_BTC * self.gate(x_BTD).sigmoid())

    def _heads(self, x_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and not self.per_head:
            x_BTD = norm(x_BTD)
        x_BTHG = x_BTD.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head:
            x_BTHG = norm(x_BTHG)
        return x_BTHG.transpose(1, 2)


def _query_key_norms(config: Model) -> tuple[nn.Module | None, nn.Module | None]:
    if config.norm.qk == "none":
        return None, None
    widths = (1, 1) if config.norm.qk == "head" else (config.heads, config.kv_heads)
    if config.norm.kind in ("rms", "rms_offset"):
        return tuple(make_norm(config, n * config.head_dim) for n in widths)
    return tuple(RMSNorm(n * config.head_dim, config.norm_eps) for n in widths)


class LatentAttention(Scored):
    """Causal self-attention whose keys and values come from one vector of `latent.kv_rank` per position. Called as `Attention`."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        latent, dim, heads = config.latent, config.dim, config.heads
        self.widths = [latent.plain_dim, latent.rope_dim]
        self.value_dim, self.kv_rank = latent.value_dim, latent.kv_rank
        self.layout = config.rope.layout
        self.scale = _scale(config)
        self.soft_cap = config.attention.soft_cap
        width = heads * sum(self.widths)
        if latent.query_rank:
            self.query_down = Linear(dim, latent.query_rank)
            self.query_norm = RMSNorm(latent.query_rank, latent.norm_eps)
            self.query_up = Linear(latent.query_rank, width)
        else:
            self.query = Linear(dim, width)
        self.kv_down = Linear(dim, latent.kv_rank + latent.rope_dim, fused_rows=(latent.kv_rank, latent.rope_dim))
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        rows = latent.plain_dim, latent.value_dim  # of each head
        self.kv_up = Linear(latent.kv_rank, heads * sum(rows), fused_rows=rows)
        self.output = Linear(heads * latent.value_dim, dim)
        self.compressed = latent.query_rank > 0

    def forward(
        self,
        x_BTD: Tensor,
        rope: Tables | None = None,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        q_BTQ = self.query_up(self.query_norm(self.query_down(x_BTD))) if self.compressed else self.query(x_BTD)
        q_BHTG = q_BTQ.unflatten(-1, (-1, sum(self.widths))).transpose(1, 2)
        plain_BHTG, turned_BHTR = q_BHTG.split(self.widths, dim=-1)
        latent_BTC, turned_BTR = self.kv_down(x_BTD).split([self.kv_rank, self.widths[1]], dim=-1)
        latent_B1TC, key_B1TR = self.kv_norm(latent_BTC)[:, None], turned_BTR[:, None]
        if rope is not None:
            turned_BHTR, key_B1TR = rotate(turned_BHTR, rope, self.layout), rotate(key_B1TR, rope, self.layout)
        if cache is not None:
            latent_B1TC, key_B1TR = cache.append(latent_B1TC, key_B1TR)
        both_BSHG = self.kv_up(latent_B1TC[:, 0]).unflatten(-1, (-1, self.widths[0] + self.value_dim))
        k_BHSG, v_BHSG = both_BSHG.transpose(1, 2).split([self.widths[0], self.value_dim], dim=-1)
        q_BHTG = torch.cat((plain_BHTG, turned_BHTR), dim=-1)
        k_BHSG = torch.cat((k_BHSG, key_B1TR.expand(-1, k_BHSG.shape[1], -1, -1)), dim=-1)
        y_BHTG = self.attend(q_BHTG, k_BHSG, v_BHSG, mask, self.scale, self.soft_cap, dropout=dropout)
        return self.output(y_BHTG.transpose(1, 2).flatten(2))


def _scale(config: Model) -> float:
    """Factor on the scores. Of `yarn` with `mscale_all_dim` queries and keys, plain parts included, are each longer by mscale."""
    scale = config.attention.query_scalar**-0.5
    if config.rope.scaling == "yarn" and config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale
