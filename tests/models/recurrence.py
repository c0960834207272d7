"""The gated delta rule as the paper writes it (arXiv 2412.06464, equation 10), position by position: a reference for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def position_by_position(
    q_BKTG: Tensor,
    k_BKTG: Tensor,
    v_BKRTV: Tensor,
    log_decay_BKRT: Tensor,
    rate_BKRT: Tensor,
    begins_BT: Tensor | None = None,
    state_BKRGV: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `gated_delta_rule` of models/delta_rule.py, but that `products` change nothing."""
    batch, keys, repeats, length, width = v_BKRTV.shape
    state = state_BKRGV
    if state is None:
        state = v_BKRTV.new_zeros(batch, keys, repeats, q_BKTG.shape[-1], width)
    results = []
    for t in range(length):
        if begins_BT is not None:
            state = state * ~begins_BT[:, t, None, None, None, None]
        q, k = (x[:, :, None, t, None] for x in (q_BKTG, k_BKTG))  # rows [B, K, 1, 1, G]
        q, k = (x.expand(-1, -1, repeats, -1, -1) for x in (q, k))
        state = state * log_decay_BKRT[..., t, None, None].exp()
        correction = (v_BKRTV[:, :, :, t, None] - k @ state) * rate_BKRT[..., t, None, None]
        state = state + k.mT @ correction
        results.append(q @ state)
    return torch.cat(results, 3), state
