"""Self-attention with grouped queries, as single-device code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.models.attend import attend
from pretrain.models.cache import LayerCache
from pretrain.models.layers import Linear, RMSNorm, make_norm
from pretrain.models.masks import Mask
from pretrain.models.rotary import Tables, rotate


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv 2305.13245), over the positions that the mask leaves, all earlier ones
    without one. Queries and keys are rotated where there are tables.
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
        self.query_norm, self.key_norm = _query_key_norms(config)
        self.per_head = config.norm.qk == "head"
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if switches.sinks else None

    def forward(
        self, x_BTD: Tensor, rope: Tables | None = None, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        q_BHTG = self._heads(self.query(x_BTD), self.query_norm)
        k_BKTG = self._heads(self.key(x_BTD), self.key_norm)
        v_BKTG = self._heads(self.value(x_BTD), None)
        if rope is not None:
            q_BHTG, k_BKTG = rotate(q_BHTG, rope, self.layout), rotate(k_BKTG, rope, self.layout)
        if cache is not None:
            k_BKTG, v_BKTG = cache.append(k_BKTG, v_BKTG)
        y_BHTG = attend(q_BHTG, k_BKTG, v_BKTG, mask, self.scale, self.soft_cap, self.sinks)
        return self.output(y_BHTG.transpose(1, 2).flatten(2))

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
