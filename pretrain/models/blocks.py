"""The parts of a transformer block, as single-device code.

Weights are stored in the master format and cast to the format of the activations where they are used, so the format of the
residual stream alone decides in which precision a model computes, under every parallel strategy alike (FSDP2 hands the
weights over already cast; the cast is then free). Shapes: B batch, T time, D model, H query heads, K key/value heads,
G head width, F MLP width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.models.masks import Mask, masked_attention


class Linear(nn.Linear):
    """A projection without bias that computes in the format of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def reset_parameters(self) -> None:
        """Weights are drawn by name (parallel/initialise.py), so that they depend on nothing else."""


class Embedding(nn.Module):
    """Rows of a table by token id, in the format that the rest of the network computes in.

    The whole table is cast, not the rows looked up: its gradient then accumulates in the compute format, as it does where
    FSDP2 gathers the table already cast.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight.to(self.compute_dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, G] of rotary position embedding (arXiv 2104.09864), in fp32, halves repeated."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.int64).float() / head_dim
    angle_TG = torch.outer(torch.arange(length, device=device).float(), 1.0 / theta**exponent)
    angle_TG = torch.cat((angle_TG, angle_TG), dim=-1)
    return angle_TG.cos(), angle_TG.sin()


def rotate(x_BHTG: Tensor, cos_TG: Tensor, sin_TG: Tensor) -> Tensor:
    """Rotate queries or keys by position; the two halves of a head form the pairs, as in Hugging Face's Llama."""
    first, second = x_BHTG.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHTG * cos_TG.to(x_BHTG.dtype) + turned * sin_TG.to(x_BHTG.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv 2305.13245) and rotary positions, over all earlier positions or those
    that a document mask leaves. The tables are [T, G], or [B, 1, T, G] where sequences differ in their positions.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = Linear(dim, heads * head_dim)
        self.key = Linear(dim, kv_heads * head_dim)
        self.value = Linear(dim, kv_heads * head_dim)
        self.output = Linear(heads * head_dim, dim)

    def forward(self, x_BTD: Tensor, cos_TG: Tensor, sin_TG: Tensor, mask: Mask | None = None) -> Tensor:
        q_BHTG = rotate(self._heads(self.query(x_BTD)), cos_TG, sin_TG)
        k_BKTG = rotate(self._heads(self.key(x_BTD)), cos_TG, sin_TG)
        v_BKTG = self._heads(self.value(x_BTD))
        if mask is None:
            grouped = q_BHTG.shape[1] != k_BKTG.shape[1]
            y_BHTG = F.scaled_dot_product_attention(q_BHTG, k_BKTG, v_BKTG, is_causal=True, enable_gqa=grouped)
        else:
            y_BHTG = masked_attention(q_BHTG, k_BKTG, v_BKTG, mask)
        return self.output(y_BHTG.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, heads, kv_heads, head_dim)
        self.mlp_norm = RMSNorm(dim, norm_eps)
        self.mlp = SwiGLU(dim, ffn_dim)

    def forward(self, x_BTD: Tensor, cos_TG: Tensor, sin_TG: Tensor, mask: Mask | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TG, sin_TG, mask)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))
