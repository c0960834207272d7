"""Scaled dot-product attention under a mask, with a soft-cap or sinks where a model has them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pretrain.models.masks import Mask

SHORT = 128  # positions


def attend(
    q_BHTG: Tensor,
    k_BKSG: Tensor,
    v_BKSG: Tensor,
    mask: Mask | None,
    scale: float,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention [B, H, T, G] with the back end that the mask was built for; without a mask every earlier position is seen.

    `soft_cap`: scores become cap × tanh(score / cap), 0 leaves them; `sinks_H`: per head one more logit in the softmax.
    """
    if isinstance(mask, BlockMask):
        return _flex(q_BHTG, k_BKSG, v_BKSG, mask, scale, soft_cap, sinks_H)
    if soft_cap or sinks_H is not None or _is_faster_plain(q_BHTG, k_BKSG):
        return _plain(q_BHTG, k_BKSG, v_BKSG, mask, scale, soft_cap, sinks_H)
    grouped = q_BHTG.shape[1] != k_BKSG.shape[1]
    if mask is not None and grouped and q_BHTG.is_cuda:
        # On CUDA the one fused kernel that takes a mask knows no groups: with them torch would fall back to plain
        # matrix products and keep all H x T x T scores (notes of torch's scaled_dot_product_attention).
        repeats = q_BHTG.shape[1] // k_BKSG.shape[1]
        k_BKSG, v_BKSG = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSG, v_BKSG))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTG, k_BKSG, v_BKSG, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _is_faster_plain(q_BHTG: Tensor, k_BKSG: Tensor) -> bool:
    """Whether matrix products beat the fused kernel: its backward in bf16 on a CPU costs 7 times as much at 16 positions, and as much
    at 256 (torch 2.13).
    """
    short = q_BHTG.shape[2] * k_BKSG.shape[2] <= SHORT**2
    return short and q_BHTG.device.type == "cpu" and q_BHTG.dtype == torch.bfloat16 and torch.is_grad_enabled()


def _plain(q_BHTG, k_BKSG, v_BKSG, mask: Tensor | None, scale: float, soft_cap: float, sinks_H: Tensor | None) -> Tensor:
    """Matrix products and a softmax in fp32: what no fused kernel of torch's computes on a CPU."""
    heads, length = q_BHTG.shape[1], q_BHTG.shape[2]
    q_BKRTG = q_BHTG.unflatten(1, (k_BKSG.shape[1], -1))
    scores = q_BKRTG @ k_BKSG.transpose(-1, -2)[:, :, None] * scale
    scores_BHTS = scores.flatten(1, 2).float()
    if soft_cap:
        scores_BHTS = soft_cap * torch.tanh(scores_BHTS / soft_cap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q_BHTG.device).tril()
    scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BHTS + mask
    if sinks_H is not None:
        column = sinks_H.float()[None, :, None, None].expand(*scores_BHTS.shape[:3], 1)
        weights_BHTS = torch.cat((scores_BHTS, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights_BHTS = scores_BHTS.softmax(-1)
    weights = weights_BHTS.to(v_BKSG.dtype).unflatten(1, (k_BKSG.shape[1], heads // k_BKSG.shape[1]))
    return (weights @ v_BKSG[:, :, None]).flatten(1, 2)


def _flex(q_BHTG, k_BKSG, v_BKSG, mask: BlockMask, scale: float, soft_cap: float, sinks_H: Tensor | None) -> Tensor:
    # A compiled block takes it in as it is; on CPU it is the reference only, and compiling costs more than it saves.
    compiled = q_BHTG.is_cuda and not torch.compiler.is_compiling()
    run = _compiled_flex() if compiled else flex_attention
    options = {"block_mask": mask, "scale": scale, "enable_gqa": q_BHTG.shape[1] != k_BKSG.shape[1]}
    if soft_cap:
        options["score_mod"] = _soft_capped(soft_cap)
    if sinks_H is None:
        return run(q_BHTG, k_BKSG, v_BKSG, **options)
    y_BHTG, logsumexp_BHT = run(q_BHTG, k_BKSG, v_BKSG, return_lse=True, **options)
    # The sink adds exp(sink) to the denominator: what was divided by exp(lse) is divided by exp(lse) + exp(sink) instead.
    share_BHT = torch.sigmoid(logsumexp_BHT - sinks_H.float()[:, None])
    return (y_BHTG * share_BHT[..., None]).to(y_BHTG.dtype)


@functools.cache  # one function per cap: a new one would be compiled anew
def _soft_capped(cap: float) -> Callable[..., Tensor]:
    def squash(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return squash


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)
