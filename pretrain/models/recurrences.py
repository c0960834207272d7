"""Recurrences of linear attention, which are computed in chunks of positions.

A head has a matrix S [G, V], which maps keys to values. At each position it fades, is written at the key, and is read by the query:

    S = exp(log_decay) S
    S = S + key value                         by the state-space dual (Mamba 2: Dao and Gu, arXiv 2405.21060)
    S = S + key (rate (value - key S))        by the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464)
    y = query S

So by the delta rule, what S says of the key moves towards the value.

A chunk of C positions needs a few products of matrices. Let g be the sum of log_decay within the chunk up to a position, and
D[i, j] = exp(g[i] - g[j]) for j <= i. With rows of all positions of the chunk, S before it, and M = (exp(g[last] - g) K)':

    results         exp(g) Q S + (Q K' * D) X
    S after it      exp(g[last]) S + M X

X are the rows that are written: of the state-space dual the values. Of the delta rule (section 3.3, after the UT transform of arXiv 2406.06484) they are
U - W S, which gives the state after the chunk as (exp(g[last]) - M W) S + M U:

    A               the inverse of 1 + the part of rate (K K' * D) below the diagonal
    U, W            A (rate values), A (rate exp(g) K)

All that does not contain S is computed for all chunks together, so that from chunk to chunk only one product is left.

Where documents are told apart, S is zero at the beginning of each. No logarithm of a decay is infinite for it: pairs of positions in two documents are masked.

Shapes: B batch, T time, K heads of keys and queries, R heads of values for each of them, N chunks, C positions of a chunk, G key width, V value width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK = 64
"""Positions of a chunk, as in the kernels of flash-linear-attention."""


class _Sight(NamedTuple):
    """What positions of a chunk may see where documents are told apart, True or False; each is [B, 1, 1, N, ...]."""

    earlier: Tensor
    """[..., C, C]: a position and an earlier one, or itself."""
    before: Tensor
    """[..., C]: the matrix from before the chunk."""
    after: Tensor
    """[..., C]: what comes after the chunk sees the position."""
    through: Tensor
    """[...]: what comes after the chunk sees the matrix from before it."""


class _Chunks(NamedTuple):
    """Sequences in chunks, and how S fades in them."""

    q: Tensor
    """[B, K, 1, N, C, G], and so are the keys."""
    k: Tensor
    v: Tensor
    """[B, K, R, N, C, V]."""
    fading: Tensor
    """D, [B, K, R, N, C, C]; zero where a position does not see another one."""
    since: Tensor
    """What is left at a position of S before the chunk, [B, K, R, N, C, 1]."""
    until: Tensor
    """What is left after the chunk of what a position writes, [B, K, R, N, C, 1]."""
    through: Tensor
    """What is left after the chunk of S before it, [B, K, R, N, 1, 1]."""


def state_space_dual(
    q_BKTG: Tensor,
    k_BKTG: Tensor,
    v_BKRTV: Tensor,
    log_decay_BKRT: Tensor,
    begins_BT: Tensor | None = None,
    state_BKRGV: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The results [B, K, R, T, V] of all positions, and S after the last one; in the format of the arguments, which is fp32 or wider.

    `begins_BT`: true where a document begins. `state_BKRGV`: S before the first position, zero by default. `products`: the format of the factors of
    products, by default that of the arguments. S itself is in that of the arguments.
    """
    chunks = _in_chunks(q_BKTG, k_BKTG, v_BKRTV, log_decay_BKRT, begins_BT)
    multiply = functools.partial(_product, dtype=products or q_BKTG.dtype)
    q, k, v, heads = chunks.q.squeeze(2), chunks.k.squeeze(2), chunks.v, v_BKRTV.shape[2]
    # One product for all values of a key head, which are beside each other in S.
    written = multiply(k.mT, _beside(v * chunks.until))
    kept = _beside(chunks.through.expand(*chunks.through.shape[:-1], v.shape[-1]))
    states, state = _states(kept, written, None if state_BKRGV is None else _beside(state_BKRGV))
    scores = multiply(q, k.mT).unsqueeze(2) * chunks.fading
    y = multiply(scores, v) + _apart(multiply(q, states), heads) * chunks.since
    return y.flatten(3, 4)[:, :, :, : q_BKTG.shape[2]], _apart(state, heads)


def gated_delta_rule(
    q_BKTG: Tensor,
    k_BKTG: Tensor,
    v_BKRTV: Tensor,
    log_decay_BKRT: Tensor,
    rate_BKRT: Tensor,
    begins_BT: Tensor | None = None,
    state_BKRGV: Tensor | None = None,
    products: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `state_space_dual`, but that corrections are written, and `products` is the format in which queries read. What makes S is in the arguments'
    format: in bf16, errors of similar keys grow from position to position.
    """
    chunks = _in_chunks(q_BKTG, k_BKTG, v_BKRTV, log_decay_BKRT, begins_BT)
    read = functools.partial(_product, dtype=products or q_BKTG.dtype)
    q, k, fading = chunks.q, chunks.k, chunks.fading
    rate = _chunks(rate_BKRT, 3, fading.shape[-1])[..., None]
    inverse = _InverseOfLower.apply((k @ k.mT) * fading * rate)
    u, w = inverse @ (chunks.v * rate), inverse @ (k * (chunks.since * rate))
    written = (k * chunks.until).mT
    one = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    states, state = _states(chunks.through * one - written @ w, written @ u, state_BKRGV)
    scores = read(q, k.mT) * fading
    y = read(scores, u) + read(q * chunks.since - read(scores, w), states)
    return y.flatten(3, 4)[:, :, :, : q_BKTG.shape[2]], state


def _in_chunks(q_BKTG: Tensor, k_BKTG: Tensor, v_BKRTV: Tensor, log_decay_BKRT: Tensor, begins_BT: Tensor | None) -> _Chunks:
    size = min(CHUNK, q_BKTG.shape[2])
    q, k = (_chunks(x, 2, size)[:, :, None] for x in (q_BKTG, k_BKTG))
    v, log_decay = (_chunks(x, 3, size) for x in (v_BKRTV, log_decay_BKRT))
    g = log_decay.cumsum(-1)
    sight = _sight(begins_BT, size, q.device)
    return _Chunks(
        q,
        k,
        v,
        fading=(g[..., :, None] - g[..., None, :]).masked_fill(~sight.earlier, -torch.inf).exp(),
        since=(g.exp() * sight.before)[..., None],
        until=((g[..., -1:] - g).exp() * sight.after)[..., None],
        through=(g[..., -1].exp() * sight.through)[..., None, None],
    )


def _beside(x: Tensor) -> Tensor:
    """[B, K, R, ..., V] as [B, K, ..., R V]."""
    return x.movedim(2, -2).flatten(-2)


def _apart(x: Tensor, heads: int) -> Tensor:
    """[B, K, ..., R V] as [B, K, R, ..., V]."""
    return x.unflatten(-1, (heads, -1)).movedim(-2, 2)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) @ b.to(dtype)).to(a.dtype)


class _InverseOfLower(torch.autograd.Function):
    """The inverse of 1 + the part of matrices [..., C, C] below the diagonal. What is on and above it is not read."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        # From the left, it would take half as long again on a CPU.
        inverse = torch.linalg.solve_triangular(matrix, one, upper=False, unitriangular=True, left=False)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ g @ inverse.mT).neg_().tril_(-1)


def _chunks(x: Tensor, dim: int, size: int) -> Tensor:
    """[..., T, ...] as [..., N, C, ...], filled up with zeros: no decay, no rate, no key."""
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x.unflatten(dim, (-1, size))


def _sight(begins_BT: Tensor | None, size: int, device: torch.device) -> _Sight:
    earlier = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if begins_BT is None:
        always = torch.ones((), dtype=torch.bool, device=device)
        return _Sight(earlier, always, always, always)
    numbers_BNC = _chunks(begins_BT, 1, size).flatten(1).cumsum(1).unflatten(1, (-1, size))
    last_BN = numbers_BNC[..., -1]
    before_BN = F.pad(last_BN[:, :-1], (1, 0))  # the document of S before the first position is number 0
    alike = (
        earlier & (numbers_BNC[..., :, None] == numbers_BNC[..., None, :]),
        numbers_BNC == before_BN[..., None],
        numbers_BNC == last_BN[..., None],
        before_BN == last_BN,
    )
    return _Sight(*(x[:, None, None] for x in alike))


def _states(moves: Tensor, adds: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S before each chunk, [..., N, G, V], and after the last one: from one to the next, S becomes moves S + adds. Moves [..., N, 1, V] are factors of
    columns.
    """
    heads = moves.shape[:-3]
    if state is None:
        state = torch.zeros_like(adds.select(-3, 0))
    states_HNGV, state_HGV = _chunk_states(*(x.reshape(-1, *x.shape[len(heads) :]) for x in (moves, adds, state)))
    return states_HNGV.unflatten(0, heads), state_HGV.unflatten(0, heads)


def _are_matrices(moves: Tensor, states: Tensor) -> bool:
    return moves.shape[-2] == moves.shape[-1] == states.shape[-2]


def _next(adds_HGV: Tensor, moves: Tensor, state_HGV: Tensor, out: Tensor | None = None) -> Tensor:
    """moves S + adds: the next S; or, of transposed moves, the gradient of an earlier one."""
    if _are_matrices(moves, state_HGV):
        return torch.baddbmm(adds_HGV, moves, state_HGV, out=out)
    return torch.addcmul(adds_HGV, moves, state_HGV, out=out)


@torch.library.custom_op("pretrain::chunk_states", mutates_args=())
def _chunk_states(moves_HNGG: Tensor, adds_HNGV: Tensor, state_HGV: Tensor) -> tuple[Tensor, Tensor]:
    """`_states` of H heads, as one operator: a compiler would write the loop out, and needs minutes for a long sequence."""
    states_HNGV = torch.empty_like(adds_HNGV)
    states_HNGV[:, 0] = state_HGV
    for n in range(adds_HNGV.shape[1] - 1):
        _next(adds_HNGV[:, n], moves_HNGG[:, n], states_HNGV[:, n], out=states_HNGV[:, n + 1])
    return states_HNGV, _next(adds_HNGV[:, -1], moves_HNGG[:, -1], states_HNGV[:, -1])


@torch.library.custom_op("pretrain::chunk_states_backward", mutates_args=())
def _chunk_states_backward(g_states_HNGV: Tensor, g_HGV: Tensor, moves_HNGG: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of S after each chunk, and of S before the first one. `moves_HNGG`: transposed, if they are matrices."""
    after_HNGV = torch.empty_like(g_states_HNGV)
    after_HNGV[:, -1] = g_HGV
    for n in reversed(range(1, g_states_HNGV.shape[1])):
        _next(g_states_HNGV[:, n], moves_HNGG[:, n], after_HNGV[:, n], out=after_HNGV[:, n - 1])
    return after_HNGV, _next(g_states_HNGV[:, 0], moves_HNGG[:, 0], after_HNGV[:, 0])


@_chunk_states.register_fake
def _(moves_HNGG: Tensor, adds_HNGV: Tensor, state_HGV: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(adds_HNGV), torch.empty_like(state_HGV)


@_chunk_states_backward.register_fake
def _(g_states_HNGV: Tensor, g_HGV: Tensor, moves_HNGG: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g_states_HNGV), torch.empty_like(g_HGV)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[0])


def _gradients(ctx: Any, g_states_HNGV: Tensor, g_HGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    moves_HNGG, states_HNGV = ctx.saved_tensors
    matrices = _are_matrices(moves_HNGG, states_HNGV)
    after_HNGV, before_HGV = _chunk_states_backward(g_states_HNGV, g_HGV, moves_HNGG.mT if matrices else moves_HNGG)
    of_moves = after_HNGV @ states_HNGV.mT if matrices else (after_HNGV * states_HNGV).sum(-2, keepdim=True)
    return of_moves, after_HNGV, before_HGV


_chunk_states.register_autograd(_gradients, setup_context=_save)


def short_convolution(
    x_BTC: Tensor, filter_CW: Tensor, begins_BT: Tensor | None = None, recent_BLC: Tensor | None = None
) -> Tensor:
    """Each channel's sum over the last W positions, itself included, each with its weight; the last weight is of the position itself.

    `begins_BT`: true where a document begins; it does not see positions before. `recent_BLC`: the W - 1 positions before the first one, zeros by default.
    """
    length, width = x_BTC.shape[1], filter_CW.shape[1]
    if recent_BLC is None:
        padded = F.pad(x_BTC, (0, 0, width - 1, 0))
    else:
        padded = torch.cat((recent_BLC.to(x_BTC.dtype), x_BTC), dim=1)
    y_BTC = x_BTC * filter_CW[:, -1]
    numbers_BT = None if begins_BT is None else F.pad(begins_BT.cumsum(1), (width - 1, 0))
    for back in range(1, width):
        earlier_BTC = padded[:, width - 1 - back : width - 1 - back + length]
        term = earlier_BTC * filter_CW[:, -1 - back]
        if numbers_BT is not None:
            alike_BT = numbers_BT[:, width - 1 :] == numbers_BT[:, width - 1 - back : width - 1 - back + length]
            term = term * alike_BT[..., None]
        y_BTC = y_BTC + term
    return y_BTC
