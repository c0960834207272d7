"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), as single-device code.

    x --query_down--> query_norm --query_up--> q = [plain | turned] per head
    x --kv_down--> latent | turned key --------------+
                   kv_norm --kv_up--> plain key | value per head
                                       k = [plain key | the one turned key, shared by all heads]

A cache holds the latent and the turned key, which is all that keys and values are made from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.models.attend import attend
from pretrain.models.cache import LayerCache
from pretrain.models.layers import Linear, RMSNorm
from pretrain.models.masks import Mask
from pretrain.models.rotary import Tables, rotate, yarn_mscale


class LatentAttention(nn.Module):
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
        self.kv_down = Linear(dim, latent.kv_rank + latent.rope_dim)
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        self.kv_up = Linear(latent.kv_rank, heads * (latent.plain_dim + latent.value_dim))
        self.output = Linear(heads * latent.value_dim, dim)
        self.compressed = latent.query_rank > 0

    def forward(
        self, x_BTD: Tensor, rope: Tables | None = None, mask: Mask | None = None, cache: LayerCache | None = None
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
        y_BHTG = attend(q_BHTG, k_BHSG, v_BHSG, mask, self.scale, self.soft_cap)
        return self.output(y_BHTG.transpose(1, 2).flatten(2))


def _scale(config: Model) -> float:
    """Factor on the scores. Of `yarn` with `mscale_all_dim` queries and keys, plain parts included, are each longer by mscale."""
    scale = config.attention.query_scalar**-0.5
    if config.rope.scaling == "yarn" and config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale
