"""Causal attention in bf16 on a CPU, from matrix products over blocks of queries.

torch's fused kernel for CPUs multiplies small blocks one by one. There bf16 reaches a fraction of the speed that `bmm` has with the same
sizes, most of all in backward. Here a block of queries meets all the keys that it sees in one product:

    queries 0..127     keys 0..127          products in bf16, sums inside them in fp32
    queries 128..255   keys 0..255          scores of a few heads exist at a time, never T x T of all
    ...

A product's result is rounded to bf16, which for a score of 20 is an error of 0.06. So what is to be subtracted becomes more columns of the
product, and only the difference is rounded. Forward subtracts the row's largest score, first as bf16 has it, then what is left of it. Backward
computes the scores again, as FlashAttention does (arXiv 2205.14135, algorithm 4), and subtracts their logsumexp and the mean of the gradient. It
counts weights in units of a power of two near the row's largest one, and multiplies rows of the gradient by it instead. So a weight that is
exp(-x) times the largest one has a relative error of about x / 512, plus the largest score / 2^17.

Heads become rows [B x K, T x R, G] of B sequences, K groups of keys and values, and R heads of queries per group. The R heads of a position
are neighbours. Rows of a block are contiguous, because bmm would copy them otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES = 128
"""Positions in a block. Fewer cost more calls; with more, more scores are computed that the mask removes."""
ROWS = 1024
"""In a block, at most, where many heads share keys and values."""
SHAPES = 16
"""Numbers of keys that blocks have, at most. The library behind bmm keeps some megabytes for each that it has seen."""
MOST = 1.0
"""Logarithm of a weight in backward, at most. In its unit the largest one is between 0.7 and 1.5. Where scores are above 100,000, its error may be
larger than that, and without a bound the gradients would not be finite."""
BYTES_AT_ONCE = 1 << 20
"""Scores of a thread at a time, so that they stay in its core's cache."""


@torch.library.custom_op("pretrain::causal_attention", mutates_args=())
def causal_attention(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [B, H, T, V] to all earlier positions and the own one; keys and values have K heads, and H is R times K.

    Also, for backward, of each row [B x K, T x R, 1] in fp32: the logsumexp of its scores, and its largest weight to a power of two.
    """
    groups = k_BKTG.shape[1]
    check_lengths(q_BHTG, k_BKTG)
    y_BHTV, sums = empty_heads(q_BHTG, v_BKTV.shape[3]), []
    for queries, keys in _blocks(q_BHTG, groups):
        q, k = (_rows(x, groups, 2) for x in (q_BHTG[:, :, queries], k_BKTG[:, :, keys]))
        v = _rows(v_BKTV[:, :, keys], groups)
        q[..., -2:], k[..., -2:] = 0, -1  # two columns: an odd width is slow
        later, largest = _later(q_BHTG, groups, queries, keys), q[..., -2:-1]
        y, rest = q.new_empty(*q.shape[:2], v.shape[2]), torch.empty_like(largest)
        total = torch.empty_like(largest, dtype=torch.float32)
        for i in _parts(q, k):
            largest[i] = _largest(hide(torch.bmm(q[i], k[i].mT), later))
            scores = hide(product(q[i], k[i].mT, scale), later)
            rest[i] = _largest(scores)
            weights = scores.sub_(rest[i]).exp_()
            total[i] = weights.sum(-1, keepdim=True, dtype=torch.float32)
            torch.bmm(weights, v[i], out=y[i])
        _put(y_BHTV[:, :, queries], y / total, groups)
        sums.append((largest.float() * scale + rest.float() + total.log(), torch.exp2(-total.log2().round())))
    return y_BHTV, *(torch.cat(parts, dim=1) for parts in zip(*sums))


@torch.library.custom_op("pretrain::causal_attention_backward", mutates_args=())
def _backward(
    g_BHTV: Tensor, q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, y_BHTV: Tensor, lse: Tensor, power: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    groups = k_BKTG.shape[1]
    heads = q_BHTG.shape[1] // groups
    g_q_BHTG = empty_heads(q_BHTG, q_BHTG.shape[3])
    g_k, g_v = (x.new_empty(len(x) * groups, *x.shape[2:], dtype=torch.float32) for x in (k_BKTG, v_BKTV))
    for queries, keys in reversed(list(_blocks(q_BHTG, groups))):  # the last queries see all keys, so the sums begin with them
        q, g, y = (_rows(x[:, :, queries], groups) for x in (q_BHTG, g_BHTV, y_BHTV))
        k, v_less = _rows(k_BKTG[:, :, keys], groups), _rows(v_BKTV[:, :, keys], groups, 4)
        rows = slice(heads * queries.start, heads * queries.stop)
        g = g * power[:, rows].bfloat16()  # exact
        less_lse = torch.cat((q, _in_parts((lse[:, rows] + power[:, rows].log()) / scale)), dim=-1)
        less_mean = torch.cat((g, _in_parts((g.float() * y).sum(-1, keepdim=True))), dim=-1)
        k_less = torch.cat((k, k.new_full((*k.shape[:2], 4), -1)), dim=-1)
        v_less[..., -4:] = -1
        later, g_q = _later(q_BHTG, groups, queries, keys), torch.empty_like(q)
        for i in _parts(q, k):
            weights = hide(product(less_lse[i], k_less[i].mT, scale), later).clamp_(max=MOST).exp_()
            g_scores = torch.bmm(less_mean[i], v_less[i].mT).mul_(weights)
            g_q[i] = product(g_scores, k[i], scale)
            for total, part in ((g_v, torch.bmm(weights.mT, g[i])), (g_k, product(g_scores.mT, q[i], scale))):
                if queries.stop == q_BHTG.shape[2]:
                    total[i] = part
                else:
                    total[i, : keys.stop] += part
        _put(g_q_BHTG[:, :, queries], g_q, groups)
    g_k_BKTG, g_v_BKTV = (empty_heads(x, x.shape[3]) for x in (k_BKTG, v_BKTV))
    _put(g_k_BKTG, g_k, groups)
    _put(g_v_BKTV, g_v, groups)
    return g_q_BHTG, g_k_BKTG, g_v_BKTV


@causal_attention.register_fake
def _(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTV: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = q_BHTG.shape
    groups = k_BKTG.shape[1]
    lse = q_BHTG.new_empty(batch * groups, length * (heads // groups), 1, dtype=torch.float32)
    return empty_heads(q_BHTG, v_BKTV.shape[3]), lse, torch.empty_like(lse)


@_backward.register_fake
def _(g_BHTV, q_BHTG, k_BKTG, v_BKTV, y_BHTV, lse, power, scale):
    return tuple(empty_heads(x, x.shape[3]) for x in (q_BHTG, k_BKTG, v_BKTV))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, g_BHTV: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_backward(g_BHTV, *ctx.saved_tensors, ctx.scale), None


causal_attention.register_autograd(_gradients, setup_context=_save)


def check_lengths(q_BHTG: Tensor, k_BKTG: Tensor) -> None:
    """Raise ValueError unless there are as many keys as queries."""
    if q_BHTG.shape[2] != k_BKTG.shape[2]:
        raise ValueError(
            f"{q_BHTG.shape[2]} queries cannot have {k_BKTG.shape[2]} keys here: causal attention is of a sequence to itself"
        )


def empty_heads(x_BHTG: Tensor, width: int) -> Tensor:
    """[B, H, T, width] in the memory of [B, T, H, width], in which the next product reads it. It is no view, which autograd would not let change."""
    batch, heads, length, _ = x_BHTG.shape
    return x_BHTG.new_empty_strided((batch, heads, length, width), (length * heads * width, width, heads * width, 1))


def _rows(x_BHTG: Tensor, groups: int, columns: int = 0) -> Tensor:
    """Rows of heads, with so many more columns that are not filled."""
    batch, heads, length, width = x_BHTG.shape
    made = x_BHTG.new_empty(batch * groups, length * (heads // groups), width + columns)
    x_BKTRG = x_BHTG.unflatten(1, (groups, -1)).transpose(2, 3)
    made.view(*x_BKTRG.shape[:4], width + columns)[..., :width] = x_BKTRG
    return made


def _put(into_BHTG: Tensor, rows: Tensor, groups: int) -> None:
    """Rows back as heads."""
    batch, heads, length, width = into_BHTG.shape
    into_BHTG.unflatten(1, (groups, -1)).copy_(rows.view(batch, groups, length, heads // groups, width).transpose(2, 3))


def _blocks(q_BHTG: Tensor, groups: int) -> Iterator[tuple[slice, slice]]:
    """Positions of queries, and of all keys that they see, and some more where that saves shapes."""
    heads, length = q_BHTG.shape[1:3]
    count = max(1, min(QUERIES, ROWS * groups // heads))
    step = QUERIES * -(-length // (QUERIES * SHAPES))
    for start in range(0, length, count):
        stop = min(start + count, length)
        yield slice(start, stop), slice(0, min(length, -(-stop // step) * step))


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of rows' first dimension."""
    at_once = max(1, torch.get_num_threads() * BYTES_AT_ONCE // (q.element_size() * q.shape[1] * k.shape[1]))
    for first in range(0, len(q), at_once):
        yield slice(first, first + at_once)


def _later(q_BHTG: Tensor, groups: int, queries: slice, keys: slice) -> Tensor:
    """What hides later positions from queries, to be added to the scores of the last keys: -inf there, else 0."""
    shape = queries.stop - queries.start, keys.stop - queries.start
    later = torch.full(shape, -torch.inf, dtype=q_BHTG.dtype, device=q_BHTG.device).triu_(1)
    return later.repeat_interleave(q_BHTG.shape[1] // groups, dim=0)


def hide(scores: Tensor, later: Tensor) -> Tensor:
    """The scores, changed in place: -inf for the last keys where `later` says so."""
    scores[..., -later.shape[1] :] += later
    return scores


def _largest(scores: Tensor) -> Tensor:
    """The largest score of each row. Found in bf16, it would take torch more than twice as long."""
    return scores.float().amax(-1, keepdim=True)


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale x a x b, rounded once."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _in_parts(x: Tensor) -> Tensor:
    """fp32 [..., 1] as [..., 4] in bf16: three numbers whose sum has all 24 bits, and zero, since products of an odd width are slow."""
    high = x.bfloat16()
    middle = (x - high).bfloat16()
    return torch.cat((high, middle, (x - high - middle).bfloat16(), torch.zeros_like(high)), dim=-1)
