"""The arithmetic on a chunk's logits as one function for torch's compiler: two passes over the logits, where one operation after another takes ten.

It is `_ChunkLogits` of loss.py without its buffers, for a whole vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.conventions import IGNORED


@functools.cache
def compiled_chunk_losses() -> Callable[..., tuple[Tensor, Tensor]]:
    """`chunk_losses`, compiled once in a process for each set of options."""
    return torch.compile(chunk_losses)


def chunk_losses(
    raw_NV: Tensor,
    targets_N: Tensor,
    wants_gradient: bool,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Token losses and cross-entropies [N] of products with the output weight. With `wants_gradient`, the gradient of the losses' sum with respect
    to scaled logits before the cap takes the place of the products. fp32 (fp64 from fp64); options as in `LossOptions`.
    """
    logits = (raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float()) * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    counted = targets_N != IGNORED
    columns = targets_N.where(counted, 0)
    log_partition = torch.logsumexp(logits, dim=1)
    target_logits = logits.gather(1, columns[:, None]).squeeze(1)
    losses = log_partition - (1 - label_smoothing) * target_logits
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(dim=1)
    if z_loss:
        losses = losses + z_loss * log_partition.square()
    if wants_gradient:
        factor = 1 + 2 * z_loss * log_partition if z_loss else torch.ones_like(log_partition)
        gradient = (logits - log_partition[:, None]).exp() * factor[:, None]
        if label_smoothing:
            gradient = gradient - label_smoothing / logits.shape[1]
        # In the format of the gradient: a Boolean times a number would be of fp32, whatever the rest is.
        here = (torch.arange(logits.shape[1], device=logits.device) == columns[:, None]).to(gradient.dtype)
        gradient = (gradient - (1 - label_smoothing) * here) * counted[:, None]
        if soft_cap is not None:
            gradient = gradient * (1 - (logits / soft_cap).square())
        raw_NV.copy_(gradient)
    return losses.where(counted, 0), (log_partition - target_logits).where(counted, 0)
