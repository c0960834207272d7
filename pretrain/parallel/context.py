"""Context parallelism: ranks share the positions of every sequence, so that a sequence may be longer than one device can hold.

    hidden states [B, R, D]     each rank has R = T / ranks positions, through the whole network
    attention                   its queries are of these positions; keys and values of all positions are gathered (Llama 3, arXiv 2407.21783, 3.3.2),
                                or travel round (`ring.py`)

A causal mask gives later positions more work. So the sequence is cut into 2 x ranks stretches. Rank i has
stretches i and 2 x ranks - 1 - i, which together are equal work on every rank. Queries of a stretch are multiplied with the keys up to its end alone.

Linear attention goes through the positions in order. So ranks exchange positions for heads there, as DeepSpeed Ulysses does in attention (arXiv
2309.14509): each computes some heads of all positions.

Every rank is given the whole sequence of tokens, which are small. Rotary tables and documents are therefore those of the whole sequence, and each rank
takes the rows of its positions. It makes only these rows of a mask, once for all layers. Every rank has a part of each gradient and of each
sequence's loss; the parts add up.

Where the stretches do not divide T, the last positions are filled up, and what is computed from them is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.conventions import IGNORED
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import own_stretches, stretch_length
from pretrain.models.attention import Attention, LatentAttention
from pretrain.models.dropout import WeightMask
from pretrain.models.experts import MixtureOfExperts, Router, RouterReport
from pretrain.models.layers import Embedding
from pretrain.models.linear_attention import LinearAttention
from pretrain.models.loss import Losses
from pretrain.models.multi_token import MultiTokenDepth, MultiTokenPrediction
from pretrain.models.output_head import OutputHead
from pretrain.models.positions import RelativeBias
from pretrain.parallel.collectives import exchange, extend, gather, total
from pretrain.parallel.tensor_modules import AllTokens, OwnTokens, share_of_heads


class ContextAxis:
    """Spreads the positions of a network's sequences over the ranks of the mesh's axis `context`."""

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.context_group
        self.size, self.rank = mesh.sizes["context"], mesh.coordinates["context"]
        self.length = 0
        """T of the forward pass that runs."""
        self.dtype = torch.float32
        """The format of its hidden states."""

    def queries(self, attention: nn.Module) -> type:
        """What attention computes instead, see `extend`."""
        return OwnLatentQueries if isinstance(attention, LatentAttention) else OwnQueries

    def split(self, network: nn.Module) -> None:
        """Set what the modules of a network compute with. All parameters stay whole. What tensor-parallel ranks set is set before."""
        inner = network.rows_at_hand
        network.rows_at_hand = lambda x_BTX: inner(self.own(x_BTX))
        network.make_mask = self.make_mask
        network.register_forward_pre_hook(self._note_pass, with_kwargs=True)
        biases = {module.table for module in network.modules() if isinstance(module, RelativeBias)}
        for module in network.modules():
            match module:
                case Attention() | LatentAttention():
                    extend(module, self.queries(module), context=self)
                case LinearAttention():
                    extend(module, HeadsForPositions, context=self)
                case MixtureOfExperts():
                    extend(module, OwnCounted, context=self)
                case Router():
                    extend(module, WholeReport, context=self)
                case Embedding() if module not in biases:
                    module.rows = partial(self._look_up, module.rows)
                case OutputHead():
                    extend(module, OwnTargets, context=self)
                case MultiTokenPrediction():
                    extend(module, AllTokens, positions=self)
                case MultiTokenDepth():
                    extend(module, OwnTokens, positions=self)

    def sum_losses(self, losses_B: Tensor) -> Tensor:
        """The losses of whole sequences from those of the positions at hand. No gradient flows through it."""
        losses_B = losses_B.clone()
        dist.all_reduce(losses_B, group=self.group)
        return losses_B

    # ---- positions ----------------------------------------------------------------------------------------------------

    def own(self, x_BTX: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """This rank's positions along a dimension of T."""
        x = x_BTX.movedim(dim, 0)
        missing = -len(x) % (2 * self.size)
        if missing:
            x = torch.cat((x, x.new_full((missing, *x.shape[1:]), fill)))
        stretches = x.unflatten(0, (2 * self.size, -1))
        return torch.cat((stretches[self.rank], stretches[-1 - self.rank])).movedim(0, dim)

    def rows(self, length: int) -> int:
        """How many positions of a sequence of a length a rank has."""
        return 2 * stretch_length(length, self.size)

    def gather(self, x_BRX: Tensor, length: int = 0) -> Tensor:
        """All positions [B, T, X], in order; T is that of the targets unless given. In backward each rank gets the sum of its positions' gradients."""
        return self._in_order(gather(x_BRX, self.group).unflatten(1, (self.size, -1)), length or self.length)

    def _in_order(self, x_BNRX: Tensor, length: int) -> Tensor:
        """The positions [B, T, X] of all ranks in order."""
        stretches = x_BNRX.unflatten(2, (2, -1))
        ordered = torch.cat((stretches[:, :, 0], stretches[:, :, 1].flip(1)), dim=1)
        return ordered.flatten(1, 2)[:, :length]

    def _by_rank(self, x_BTX: Tensor) -> Tensor:
        """The positions of each rank, [B, N, R, X]; zeros fill up."""
        missing = 2 * self.size * stretch_length(x_BTX.shape[1], self.size) - x_BTX.shape[1]
        stretches = F.pad(x_BTX, (0, 0, 0, missing)).unflatten(1, (2 * self.size, -1))
        return torch.cat((stretches[:, : self.size], stretches[:, self.size :].flip(1)), dim=2)

    def to_heads(self, channels: list[Tensor]) -> list[Tensor]:
        """All positions [B, T, C / ranks] of this rank's share of the channels, from all channels [B, R, C] of its positions."""
        parts = [x_BRC.unflatten(-1, (self.size, -1)) for x_BRC in channels]
        came_NBRX = exchange(torch.cat(parts, -1).movedim(2, 0), self.group)
        return list(self._in_order(came_NBRX.movedim(0, 1), self.length).split([part.shape[-1] for part in parts], -1))

    def to_positions(self, x_BTC: Tensor) -> Tensor:
        """All channels [B, R, C] of this rank's positions, from all positions [B, T, C / ranks] of its share of the channels."""
        return exchange(self._by_rank(x_BTC).movedim(1, 0), self.group).movedim(0, 2).flatten(2)

    def gather_heads(self, x_BKRG: Tensor, length: int = 0) -> Tensor:
        """All positions [B, K, T, G]."""
        return self.gather(x_BKRG.transpose(1, 2), length).transpose(1, 2)

    def stretches(self, length: int) -> list[tuple[int, int]]:
        """This rank's two stretches: where each begins, and where it ends (excluded)."""
        count = stretch_length(length, self.size)
        return [(i * count, (i + 1) * count) for i in own_stretches(self.rank, self.size)]

    def real(self, number: int, length: int = 0) -> int:
        """How many positions of this rank's first or second stretch are real. `length`: of the sequences, by default that of the targets."""
        length = length or self.length
        first, last = self.stretches(length)[number]
        return max(0, min(last, length) - first)

    # ---- what modules compute -----------------------------------------------------------------------------------------

    def _note_pass(self, network: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        if named.get("cache") is not None:
            raise ValueError(
                "a cache of generation holds all positions of a sequence; with context-parallel ranks there is none"
            )
        self.length = (arguments[0] if arguments else named["tokens_BT"]).shape[1]
        self.dtype = network.compute_dtype

    def make_mask(
        self, length: int, device: torch.device, backend: str | None, numbers_BT: Tensor | None, window: int
    ) -> tuple[Tensor, ...]:
        """This rank's rows of what `attention_mask` makes, by stretch. Without a back end, of the causal mask."""
        if backend is None:
            return tuple(_causal(first, last, length, self.dtype, device) for first, last in self.stretches(length))
        seen = (_seen(first, last, length, device, numbers_BT, window) for first, last in self.stretches(length))
        return tuple(_added(rows, self.dtype) for rows in seen)

    def _look_up(self, rows: Callable[..., Tensor], table_VD: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return rows(table_VD, self.own(ids, dim=ids.dim() - 1), dtype)


class OwnQueries:
    """Attention whose queries are of the positions at hand, and whose keys and values are of all."""

    context: ContextAxis

    def forward(
        self, x_BRD: Tensor, rope: Any = None, mask: Any = None, cache: Any = None, dropout: WeightMask | None = None
    ) -> Tensor:
        own = None if rope is None else tuple(self.context.own(table, dim=table.dim() - 2) for table in rope)
        dropout = dropout and dropout.of_queries(self.context.own(dropout.steps_R, dim=0))
        return super().forward(x_BRD, own, mask, cache, dropout)

    def attend(
        self, q_BHRG: Tensor, k_BKRG: Tensor, v_BKRG: Tensor, masks: tuple[Tensor, ...], *options: Any, **named: Any
    ) -> Tensor:
        k_BKTG, v_BKTG = (self.context.gather_heads(x) for x in (k_BKRG, v_BKRG))
        return self.attend_rows(q_BHRG, k_BKTG, v_BKTG, masks, *options, **named)

    def attend_rows(
        self,
        q_BHRG: Tensor,
        k_BKTG: Tensor,
        v_BKTG: Tensor,
        masks: tuple[Tensor, ...],
        *options: Any,
        length: int = 0,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        """Each stretch of queries meets the keys up to its end. `length`: of the sequences, where it is not that of the targets."""
        found = []
        for number, (q_BHQG, mask) in enumerate(zip(q_BHRG.chunk(2, dim=2), masks)):
            stop = mask.shape[-1]
            if self.watch_scores is not None:
                self.real_queries = slice(self.context.real(number, length))
            dropped = dropout and dropout.of_queries(dropout.steps_R.chunk(2)[number])
            found.append(super().attend(q_BHQG, k_BKTG[:, :, :stop], v_BKTG[:, :, :stop], mask, *options, dropout=dropped))
        return torch.cat(found, dim=2)


class OwnLatentQueries(OwnQueries):
    """Latent attention that gathers what keys and values are made from, which is much smaller, and makes those of all positions itself."""

    def forward(
        self, x_BRD: Tensor, rope: Any = None, mask: Any = None, cache: Any = None, dropout: WeightMask | None = None
    ) -> Tensor:
        return super().forward(x_BRD, rope, mask, AllLatents(self.context), dropout)

    def attend(
        self, q_BHRG: Tensor, k_BHTG: Tensor, v_BHTG: Tensor, masks: tuple[Tensor, ...], *options: Any, **named: Any
    ) -> Tensor:
        return self.attend_rows(q_BHRG, k_BHTG, v_BHTG, masks, *options, **named)


class HeadsForPositions:
    """Linear attention that goes through all positions with some of the heads. A single key head is on every rank, with its share of the value heads."""

    context: ContextAxis

    def mix(self, projected: list[Tensor], begins_BT: Tensor | None, cache: Any) -> Tensor:
        if self.split_key_heads == 1:
            keys = self.context.gather(torch.cat(projected[:2], -1)).chunk(2, -1)
            projected = [*keys, *self.context.to_heads(projected[2:])]
        else:
            projected = self.context.to_heads(projected)
        return self.context.to_positions(super().mix(projected, begins_BT, cache))

    def of_heads(self) -> dict[str, Tensor]:
        return share_of_heads(self, super().of_heads(), self.split_key_heads, self.context.group)

    def sum_of_group(self, x_BTK1: Tensor) -> Tensor:
        x_BTK1 = super().sum_of_group(x_BTK1)
        return total(x_BTK1, self.context.group) if self.split_key_heads == 1 else x_BTK1


class AllLatents(NamedTuple):
    """In the place of a layer's cache: it turns the latents and turned keys at hand into those of all positions."""

    context: ContextAxis

    def append(self, latent_B1RC: Tensor, key_B1RG: Tensor) -> tuple[Tensor, Tensor]:
        return self.context.gather_heads(latent_B1RC), self.context.gather_heads(key_B1RG)


class OwnCounted:
    """Experts that count the positions at hand."""

    context: ContextAxis

    def forward(self, x_BRD: Tensor, counted_BT: Tensor | None = None) -> Any:
        return super().forward(x_BRD, None if counted_BT is None else self.context.own(counted_BT))


class WholeReport:
    """A router whose report is of whole sequences. Every rank makes it alike, and each takes one part of the loss."""

    context: ContextAxis

    def report(self, *of_positions: Tensor) -> RouterReport:
        whole = super().report(*(self.context.gather(x_BRX) for x_BRX in of_positions))
        return RouterReport(whole.loss_B / self.context.size, whole.counts_E * (self.context.rank == 0))


class OwnTargets:
    """An output head for the positions at hand. Logits are those of all positions."""

    context: ContextAxis

    def forward(self, x_BRD: Tensor, targets_BT: Tensor | None = None, *arguments: Any, **named: Any) -> Tensor | Losses:
        if targets_BT is None:
            return self.context.gather(super().forward(x_BRD, None, *arguments, **named))
        return super().forward(x_BRD, self.context.own(targets_BT, fill=IGNORED), *arguments, **named)


def _seen(
    first: int, last: int, length: int, device: torch.device, numbers_BT: Tensor | None = None, window: int = 0
) -> Tensor:
    """Which keys the queries [first, last) see, of those up to their end; [B or 1, 1, Q, S]. Queries that fill up see what the last real one
    sees: nothing is made of their results.
    """
    query_Q = torch.arange(first, last, device=device).clamp(max=length - 1)
    key_S = torch.arange(min(length, last), device=device)
    seen = (key_S <= query_Q[:, None])[None]
    if 0 < window < length:
        seen = seen & (key_S > query_Q[:, None] - window)
    if numbers_BT is not None:
        seen = seen & (numbers_BT[:, query_Q, None] == numbers_BT[:, None, : len(key_S)])
    return seen[:, None]


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: -inf where nothing is seen. All layers share it; of a Boolean mask, torch would make and keep a copy for each."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


@functools.lru_cache(8)
def _causal(first: int, last: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Without documents and windows the rows are the same in every step."""
    return _added(_seen(first, last, length, device), dtype)
