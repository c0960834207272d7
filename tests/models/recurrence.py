"""The recurrences of linear attention as papers write them, position by position: references for tests."""

from __future__ import annotations

from collections.abc import Callable

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
    """As `gated_delta_rule` of models/recurrences.py, but that `products` change nothing (arXiv 2412.06464, equation 10)."""

    def correction(t: int, k: Tensor, state: Tensor) -> Tensor:
        return (v_BKRTV[:, :, :, t, None] - k @ state) * rate_BKRT[..., t, None, None]

    return _recurrence(q_BKTG, k_BKTG, v_BKRTV, log_decay_BKRT, begins_BT, state_BKRGV, correction)


def written_position_by_position(
    q_BKTG: Tensor,
    k_BKTG: Tensor,
    v_BKRTV: Tensor,
    log_decay_BKRT: Tensor,
    begins_BT: Tensor | None = None,
    state_BKRGV: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `state_space_dual` of models/recurrences.py, but that `products` change nothing (arXiv 2405.21060, equation 1)."""
    return _recurrence(q_BKTG, k_BKTG, v_BKRTV, log_decay_BKRT, begins_BT, state_BKRGV, lambda t, k, state: v_BKRTV[:, :, :, t, None])


def _recurrence(
    q_BKTG: Tensor,
    k_BKTG: Tensor,
    v_BKRTV: Tensor,
    log_decay_BKRT: Tensor,
    begins_BT: Tensor | None,
    state_BKRGV: Tensor | None,
    written: Callable[[int, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
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
        state = state + k.mT @ written(t, k, state)
        results.append(q @ state)
    return torch.cat(results, 3), state
