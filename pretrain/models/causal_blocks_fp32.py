"""Causal attention in fp32 on a CPU, from matrix products over blocks of queries, as `causal_blocks.py` does it in bf16.

    queries 0..63      keys 0..63           scores of some heads of one sequence at a time
    queries 64..127    keys 0..127          weights = softmax of what they see
    ...

fp32 needs none of the care of bf16, because scores are rounded little. Backward makes the weights again by the same softmax, and only queries,
keys and values are stored. Products read heads [T, G] where they lie in [B, T, H, G], without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.models.causal_blocks import check_lengths, empty_heads, hide, product
from pretrain.models.compiling import constant_when_compiled

QUERIES = 64
"""Positions in a block. With 32 or 128, forward and backward took up to 20% longer."""
BYTES_AT_ONCE = 1 << 20
"""Scores at a time, so that they stay in the core's cache."""
SHORTEST, LONGEST = 129, 1536
"""Positions with which blocks are faster than torch's fused kernel."""
NARROW = 32
"""Heads up to this width are faster in torch's kernel."""
HAS_MKL = torch.backends.mkl.is_available()
"""The library of products with which all of this was measured."""


def is_faster(q_BHTG: Tensor, k_BKSG: Tensor) -> bool:
    """Whether attention, forward and backward, is faster with these blocks than with torch's fused kernel.

    It is for a process of one thread, by 4 to 55%. With two threads it is slower for many shapes.
    """
    length, width = q_BHTG.shape[2:]
    return HAS_MKL and _threads() == 1 and SHORTEST <= length <= LONGEST and length == k_BKSG.shape[2] and width > NARROW


@constant_when_compiled
def _threads() -> int:
    return torch.get_num_threads()


@torch.library.custom_op("pretrain::causal_attention_fp32", mutates_args=())
def causal_attention_fp32(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, scale: float) -> Tensor:
    """Attention [B, H, T, V] to all earlier positions and the own one; keys and values have K heads, and H is R times K."""
    check_lengths(q_BHTG, k_BKTG)
    y_BHTV = empty_heads(q_BHTG, v_BKTV.shape[3])
    for queries, keys, later in _parts(q_BHTG, k_BKTG):
        torch.bmm(_weights(q_BHTG[queries], k_BKTG[keys], later, scale), v_BKTV[keys], out=y_BHTV[queries])
    return y_BHTV


@torch.library.custom_op("pretrain::causal_attention_fp32_backward", mutates_args=())
def _backward(g_BHTV: Tensor, q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    g_q_BHTG, g_k_BKTG, g_v_BKTV = (empty_heads(x, x.shape[3]) for x in (q_BHTG, k_BKTG, v_BKTV))
    g_k_BKTG.zero_()
    g_v_BKTV.zero_()
    for queries, keys, later in _parts(q_BHTG, k_BKTG):
        q, k, v, g = q_BHTG[queries], k_BKTG[keys], v_BKTV[keys], g_BHTV[queries]
        weights = _weights(q, k, later, scale)
        g_v_BKTV[keys].baddbmm_(weights.mT, g)
        g_scores = torch._softmax_backward_data(torch.bmm(g, v.mT), weights, -1, weights.dtype)
        g_q_BHTG[queries] = product(g_scores, k, scale)
        g_k_BKTG[keys].baddbmm_(g_scores.mT, q, alpha=scale)
    return g_q_BHTG, g_k_BKTG, g_v_BKTV


def _weights(q: Tensor, k: Tensor, later: Tensor, scale: float) -> Tensor:
    return hide(product(q, k.mT, scale), later).softmax(-1)


def _parts(q_BHTG: Tensor, k_BKTG: Tensor) -> Iterator[tuple[tuple, tuple, Tensor]]:
    """Indices of queries [heads, rows, G] and of the keys [heads, positions, G] that they see, and what hides the later ones.

    All are of one sequence, and each head of queries has a head of keys of its own.
    """
    batch, heads, length, _ = q_BHTG.shape
    groups = k_BKTG.shape[1]
    each = heads // groups
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        later = q_BHTG.new_full((stop - start, stop - start), -torch.inf).triu_(1)
        at_once = max(1, BYTES_AT_ONCE // (q_BHTG.element_size() * (stop - start) * stop))
        for sequence in range(batch):
            for first in range(0, groups, at_once):
                last = min(first + at_once, groups)
                for head in range(each):
                    queries = sequence, slice(first * each + head, last * each, each), slice(start, stop)
                    yield queries, (sequence, slice(first, last), slice(0, stop)), later


@causal_attention_fp32.register_fake
def _(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, scale: float) -> Tensor:
    return empty_heads(q_BHTG, v_BKTV.shape[3])


@_backward.register_fake
def _(g_BHTV, q_BHTG, k_BKTG, v_BKTV, scale):
    return tuple(empty_heads(x, x.shape[3]) for x in (q_BHTG, k_BKTG, v_BKTV))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, g_BHTV: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_backward(g_BHTV, *ctx.saved_tensors, ctx.scale), None


causal_attention_fp32.register_autograd(_gradients, setup_context=_save)
