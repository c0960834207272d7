"""The ring of context-parallel ranks: keys and values travel from rank to rank, and no rank holds all of them (arXiv 2310.01889).

    step      rank 0                rank 1                rank 2
    0         its own               its own               its own
    1         those of rank 2       those of rank 0       those of rank 1
    2         those of rank 1       those of rank 2       those of rank 0

While a rank computes with the keys and values at hand, they travel on to the next one. Each step gives attention over some of the keys, and the
logarithm of its softmax's denominator (lse). Two such parts make one: each is weighted with its share of both denominators, in fp32. A sink is one more
denominator. Parts in which no query sees a key are left out, so the stretches of `context.py` give every rank the same work.

Backward knows the lse of all keys, so each part gives its gradients by itself. Keys and values travel round once more, and their gradients follow them
home. A layer keeps for backward what is of the rank's own positions, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.distributed.shards import own_stretches
from pretrain.models.attention import largest_score
from pretrain.models.dropout import WeightMask
from pretrain.parallel.context import ContextAxis, OwnQueries
from pretrain.parallel.ring_parts import Kernel


@dataclass(frozen=True)
class RingMask:
    """Which keys are seen, by stretches of queries and of keys. Its parts are made when they are needed, and not kept."""

    numbers_BT: Tensor | None
    """Numbers of documents, also at the positions that fill up the last stretches; None where documents are not told apart."""

    window: int
    count: int
    """Positions of a stretch."""

    def is_empty(self, query: int, key: int) -> bool:
        """Whether no query of a stretch sees a key of another one, by place and window alone."""
        nearest = (query - key - 1) * self.count + 1
        return key > query or 0 < self.window <= nearest

    def seen(self, query: int, key: int, device: torch.device) -> Tensor | None:
        """Which keys the queries see, [B or 1, 1, Q, S]; None: all of them, or in the same stretch the earlier ones and itself."""
        farthest = (query - key + 1) * self.count - 1
        cut = 0 < self.window <= farthest
        if self.numbers_BT is None and not cut:
            return None
        query_Q, key_S = (torch.arange(i * self.count, (i + 1) * self.count, device=device) for i in (query, key))
        distance_QS = query_Q[:, None] - key_S
        seen = (distance_QS >= 0)[None]
        if cut:
            seen = seen & (distance_QS < self.window)
        if self.numbers_BT is not None:
            seen = seen & (self.numbers_BT[:, query_Q, None] == self.numbers_BT[:, None, key_S])
        return seen[:, None]


class RingAxis(ContextAxis):
    """The axis `context` whose keys and values travel round (`parallel.context_method: ring`)."""

    def queries(self, attention: nn.Module) -> type:
        return RingQueries

    def make_mask(
        self, length: int, device: torch.device, backend: str | None, numbers_BT: Tensor | None, window: int
    ) -> RingMask:
        rows = self.rows(length)
        if numbers_BT is not None:
            # Positions that fill up go on with the last document: each sees itself, and no real position sees them.
            numbers_BT = torch.cat((numbers_BT, numbers_BT[:, -1:].expand(-1, self.size * rows - length)), dim=1)
        return RingMask(numbers_BT, window if window < length else 0, rows // 2)

    def parts(self, owner: int, mask: RingMask) -> Iterator[tuple[int, int, bool, tuple[int, int]]]:
        """The pairs of stretches that a rank computes with these keys: the place of queries and of keys, 0 or 1; whether they are the same; numbers."""
        for i, query in enumerate(own_stretches(self.rank, self.size)):
            for j, key in enumerate(own_stretches(owner, self.size)):
                if not mask.is_empty(query, key):
                    yield i, j, query == key, (query, key)


class RingQueries(OwnQueries):
    """Attention whose queries are of the positions at hand, and meet the keys and values of all ranks in turn."""

    context: RingAxis
    own_heads = used_keys = slice(None)
    """Those of a tensor-parallel rank, see `OwnHeads`: nothing that it extends attends after this."""

    def attend(
        self,
        q_BHRG: Tensor,
        k_BKRG: Tensor,
        v_BKRG: Tensor,
        mask: RingMask,
        scale: float,
        soft_cap: float = 0.0,
        sinks_H: Tensor | None = None,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        if dropout is not None:
            raise ValueError("the ring's kernels drop no weights")
        k_BKRG, v_BKRG = k_BKRG[:, self.used_keys], v_BKRG[:, self.used_keys]
        sinks_H = None if sinks_H is None else sinks_H[self.own_heads]
        if self.watch_scores is not None:
            self.watch_scores(self._largest_score(q_BHRG, k_BKRG, mask, scale))
        kernel = Kernel.of(q_BHRG, v_BKRG, scale, soft_cap)
        return _Ring.apply(q_BHRG, k_BKRG, v_BKRG, sinks_H, mask, kernel, self.context)

    @torch.no_grad()
    def _largest_score(self, q_BHRG: Tensor, k_BKRG: Tensor, mask: RingMask, scale: float) -> Tensor:
        """See `models/attention.py`. For a look at one step, all keys are gathered."""
        context, found = self.context, []
        stretches_BKG = context.gather_heads(k_BKRG, 2 * context.size * mask.count).split(mask.count, dim=2)
        own = own_stretches(context.rank, context.size)
        for number, (queries_BHQG, query) in enumerate(zip(q_BHRG.chunk(2, dim=2), own)):
            queries_BHQG = queries_BHQG[:, :, : context.real(number)]
            for key, keys_BKSG in enumerate(stretches_BKG[: query + 1]):
                if not mask.is_empty(query, key):
                    seen = mask.seen(query, key, q_BHRG.device)
                    if seen is None and key < query:
                        seen = torch.ones(1, 1, 1, mask.count, dtype=torch.bool, device=q_BHRG.device)
                    found.append(largest_score(queries_BHQG, keys_BKSG, seen, scale))
        return torch.stack(found).amax()


class _Travelling:
    """One message to the next rank and one of the same shape from the rank before, on their way while this rank computes."""

    def __init__(self, sent: Tensor, context: RingAxis, tag: int) -> None:
        self.sent, self.received = sent, torch.empty_like(sent)
        to, source = (context.rank + 1) % context.size, (context.rank - 1) % context.size
        # In one batch, NCCL cannot wait for sends that all ranks start before they receive.
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=context.group, tag=tag, group_peer=to),
                dist.P2POp(dist.irecv, self.received, group=context.group, tag=tag, group_peer=source),
            ]
        )

    def take(self) -> Tensor:
        """What has come. What was sent has left by then, too."""
        for work in self.works:
            work.wait()
        return self.received


KEYS, GRADIENTS = 0, 1  # tags: gloo tells messages apart by them, NCCL by their order, which is the same on all ranks


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, mask: RingMask, kernel: Kernel, context: RingAxis
    ) -> Tensor:
        own, width = torch.cat((k, v), dim=-1), k.shape[-1]
        queries, found = q.chunk(2, dim=2), [None, None]
        for owner, pairs in _round(own, context):
            for i, j, same, numbers in context.parts(owner, mask):
                seen = mask.seen(*numbers, q.device)
                part = kernel.forward(queries[i], *_halves(pairs, j, width), seen, same)
                found[i] = part if found[i] is None else _merged(*found[i], *part)
        y, lse_BHR = (torch.cat(halves, dim=2) for halves in zip(*found))
        if sinks_H is not None:
            whole = torch.logaddexp(lse_BHR, sinks_H.to(lse_BHR.dtype)[:, None])
            y, lse_BHR = y * (lse_BHR - whole).exp()[..., None], whole
        y = y.to(q.dtype)
        ctx.save_for_backward(q, own, y, lse_BHR, sinks_H)
        ctx.mask, ctx.kernel, ctx.context, ctx.width = mask, kernel, context, width
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, own, y, lse_BHR, sinks_H = ctx.saved_tensors
        context, kernel, mask, width = ctx.context, ctx.kernel, ctx.mask, ctx.width
        halves = list(zip(*(x.chunk(2, dim=2) for x in (g, q, y, lse_BHR))))
        g_q = torch.zeros_like(q, dtype=lse_BHR.dtype)
        home = following = None
        for owner, pairs in _round(own, context):
            g_pairs = torch.zeros_like(pairs, dtype=lse_BHR.dtype)
            for i, j, same, numbers in context.parts(owner, mask):
                (g_i, q_i, y_i, lse_i), seen = halves[i], mask.seen(*numbers, q.device)
                parts = kernel.backward(g_i, q_i, *_halves(pairs, j, width), y_i, lse_i, seen, same)
                for total, part in zip((g_q.chunk(2, dim=2)[i], *_halves(g_pairs, j, width)), parts):
                    total += part
            if owner == context.rank:
                home = g_pairs
            else:  # what others found for these keys and values arrives, and leaves with this rank's part for their next stop
                following = _Travelling(g_pairs if following is None else following.take() + g_pairs, context, GRADIENTS)
        home += following.take()
        g_sinks = None
        if sinks_H is not None:
            weights_BHR = (sinks_H.to(lse_BHR.dtype)[:, None] - lse_BHR).exp()
            g_sinks = -(weights_BHR * (g.to(lse_BHR.dtype) * y).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        g_k, g_v = home.to(own.dtype).split((width, own.shape[-1] - width), dim=-1)
        return g_q.to(q.dtype), g_k, g_v, g_sinks, None, None, None


def _round(own: Tensor, context: RingAxis) -> Iterator[tuple[int, Tensor]]:
    """The keys and values of every rank, this one's first, and whose they are. They travel on while the caller computes."""
    at_hand = own.contiguous()
    for step in range(context.size):
        coming = _Travelling(at_hand, context, KEYS) if step < context.size - 1 else None
        yield (context.rank - step) % context.size, at_hand
        at_hand = coming and coming.take()


def _halves(pairs: Tensor, place: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one of the two stretches."""
    half = pairs.chunk(2, dim=2)[place]
    return half[..., :width], half[..., width:]


def _merged(y: Tensor, lse: Tensor, y_more: Tensor, lse_more: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two parts, from the results and denominators of each."""
    whole = torch.logaddexp(lse, lse_more)
    return y * (lse - whole).exp()[..., None] + y_more * (lse_more - whole).exp()[..., None], whole
