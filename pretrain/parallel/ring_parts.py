"""Attention over some of the keys: the part of a ring's step, with the logarithm of its denominator (lse) so that parts can be merged.

torch's fused operators return the lse as well. Their backward is given the lse and the result over all keys, and then returns what a part adds to the
gradients of the whole. Where they cannot run, matrix products do: with soft-caps, and where keys and values differ in width.

A row that sees nothing in a part has lse -inf, and so no weight in the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_cpu, _cuda = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten._scaled_dot_product_efficient_attention
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
CUDA_ALIGNED = 8  # head width, and columns of a mask, in elements
CUDA_LSE_ROWS = 32  # the operator rounds the rows of the lse up to a multiple


class Kernel(NamedTuple):
    """How parts are computed. `seen`: which keys queries see, [B or 1, 1, Q, S], None for all; `causal`: without `seen`, up to itself."""

    fused: str | None
    """The kind of device whose fused operator computes them; None: matrix products."""

    scale: float
    soft_cap: float

    @classmethod
    def of(cls, q_BHQG: Tensor, v_BKSG: Tensor, scale: float, soft_cap: float) -> Kernel:
        device, width = q_BHQG.device.type, q_BHQG.shape[-1]
        if device == "meta":  # where shapes are all there is, they are those of a GPU
            device = "cuda"
        able = (
            not soft_cap and v_BKSG.shape[-1] == width and (device == "cpu" or (device == "cuda" and width % CUDA_ALIGNED == 0))
        )
        return cls(device if able else None, scale, soft_cap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        """The attention [B, H, Q, G] and its lse [B, H, Q], both in fp32."""
        if self.fused is None:
            scores, _ = self._scores(q, k, seen, causal)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
            return _grouped(weights.to(v.dtype), k.shape[1]).matmul(v[:, :, None]).flatten(1, 2).float(), lse
        causal = causal and seen is None
        if self.fused == "cpu":
            y, lse = _cpu(q, k, v, 0.0, causal, attn_mask=_bias(seen, q), scale=self.scale)
        else:
            k, v = (_repeated(x, q) for x in (k, v))
            y, lse, *_ = _cuda(q, k, v, _aligned_bias(seen, q), True, 0.0, causal, scale=self.scale)
            lse = lse[..., : q.shape[2]]
        if seen is not None:  # of nothing seen the operators return 0, or no number
            blind = ~seen.any(-1)
            y, lse = y.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
        return y.float(), lse.float()

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values in this part. `y` and `lse` are over all keys."""
        if self.fused is None:
            return self._plain_backward(g, q, k, v, y, lse, seen, causal)
        causal = causal and seen is None
        if self.fused == "cpu":
            return _cpu_backward(g, q, k, v, y, lse, 0.0, causal, attn_mask=_bias(seen, q), scale=self.scale)
        heads = k.shape[1]
        k, v = (_repeated(x, q) for x in (k, v))
        lse = F.pad(lse, (0, -lse.shape[-1] % CUDA_LSE_ROWS), value=torch.inf)
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # state of random numbers: nothing is dropped
        wanted, bias = (True, True, True, False), _aligned_bias(seen, q)
        g_q, g_k, g_v, _ = _cuda_backward(g, q, k, v, bias, y, lse, none, none, 0.0, wanted, causal, scale=self.scale)
        return g_q, *(x.unflatten(1, (heads, -1)).sum(2) for x in (g_k, g_v))

    def _plain_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward of the softmax by hand: as for the fused operators, its denominator is that of all keys."""
        groups = k.shape[1]
        scores, slope = self._scores(q, k, seen, causal)
        weights = (scores - lse[..., None]).exp()
        g_BKRQG, q_BKRQG = (_grouped(x, groups) for x in (g, q))
        g_v = (_grouped(weights.to(g.dtype), groups).transpose(-1, -2) @ g_BKRQG).sum(2)
        g_weights = (g_BKRQG @ v.transpose(-1, -2)[:, :, None]).flatten(1, 2).float()
        g_scores = weights * (g_weights - (g.float() * y.float()).sum(-1, keepdim=True))
        g_scores = _grouped((g_scores if slope is None else g_scores * slope).to(q.dtype), groups) * self.scale
        return (g_scores @ k[:, :, None]).flatten(1, 2), (g_scores.transpose(-1, -2) @ q_BKRQG).sum(2), g_v

    def _scores(self, q: Tensor, k: Tensor, seen: Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
        """Scores [B, H, Q, S] in fp32, -inf where nothing is seen, and the slope of the soft-cap."""
        scores = (_grouped(q, k.shape[1]) @ k.transpose(-1, -2)[:, :, None] * self.scale).flatten(1, 2).float()
        slope = None
        if self.soft_cap:
            share = torch.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * share, 1 - share.square()
        if seen is None and causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf), slope


def _grouped(x_BHQX: Tensor, groups: int) -> Tensor:
    return x_BHQX.unflatten(1, (groups, -1))


def _repeated(x_BKSG: Tensor, q_BHQG: Tensor) -> Tensor:
    """One head of keys or values for each of queries. torch's operator for CUDA knows no groups."""
    return x_BKSG.repeat_interleave(q_BHQG.shape[1] // x_BKSG.shape[1], dim=1)


def _bias(seen: Tensor | None, q: Tensor, columns: int = 0) -> Tensor | None:
    """What is added to scores. `columns`: that many are made."""
    if seen is None:
        return None
    bias = torch.zeros(*seen.shape[:-1], columns or seen.shape[-1], dtype=q.dtype, device=q.device)
    bias[..., : seen.shape[-1]].masked_fill_(~seen, -torch.inf)
    return bias


def _aligned_bias(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """The operator for CUDA wants a bias for each head, and rows that begin at multiples of so many elements."""
    if seen is None:
        return None
    count = seen.shape[-1]
    bias = _bias(seen, q, count + -count % CUDA_ALIGNED)[..., :count]
    return bias.expand(q.shape[0], q.shape[1], -1, -1)
