"""What the modules of a network compute on tensor-parallel ranks (`tensor.py`): extensions of them, and functions of parts of tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from pretrain.distributed.shards import own_part
from pretrain.models.dropout import WeightMask
from pretrain.models.experts import RouterReport
from pretrain.models.layers import table_gradient
from pretrain.models.linear_attention import LinearAttention
from pretrain.parallel.collectives import gather, scatter, total


class Positions:
    """How the positions of a kind of sequences are spread: each rank has R = T / ranks of them, rounded up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.length = 0
        """T of the forward pass that runs."""

    def gather(self, x_BRX: Tensor) -> Tensor:
        """All positions [B, T, X]. In backward each rank gets the sum of its positions' gradients."""
        return gather(x_BRX, self.group)[:, : self.length]

    def scatter(self, y_BTX: Tensor) -> Tensor:
        """The sum over ranks of this rank's positions [B, R, X]."""
        return scatter(self._filled(y_BTX), self.group)

    def own(self, x_BTX: Tensor) -> Tensor:
        """This rank's positions [B, R, X]."""
        filled = self._filled(x_BTX)
        return filled[:, own_part(filled.shape[1], self.rank, self.size)]

    def _filled(self, x_BTX: Tensor) -> Tensor:
        missing = -x_BTX.shape[1] % self.size
        return F.pad(x_BTX, (0, 0) * (x_BTX.dim() - 2) + (0, missing)) if missing else x_BTX


# ---- extensions of modules (see `extend`) -----------------------------------------------------------------------------------


class Sublayer:
    """A sublayer between `gather` and `scatter`. Experts return a report beside the result."""

    positions: Positions

    def forward(self, x_BRD: Tensor, *arguments: Any) -> Any:
        result = super().forward(self.positions.gather(x_BRD), *arguments)
        if isinstance(result, tuple):
            return self.positions.scatter(result[0]), *result[1:]
        return self.positions.scatter(result)


class CrossSublayer:
    """Cross-attention: the encoder's output has positions of its own."""

    sources: Positions

    def keys_values(self, memory_BRD: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys_values(self.sources.gather(memory_BRD))


class OwnHeads:
    """Attention of some query heads. `used_keys`: which of the key heads at hand they need."""

    own_heads: slice
    used_keys: slice

    def attend(
        self,
        q_BHTG: Tensor,
        k_BKSG: Tensor,
        v_BKSG: Tensor,
        mask: Any,
        scale: float,
        soft_cap: float = 0.0,
        sinks_H: Tensor | None = None,
        dropout: WeightMask | None = None,
    ) -> Tensor:
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:  # a bias of positions, by head
            mask = mask[:, self.own_heads]
        sinks_H = None if sinks_H is None else sinks_H[self.own_heads]
        dropout = dropout and dropout.of_heads(self.own_heads)
        k_BKSG, v_BKSG = k_BKSG[:, self.used_keys], v_BKSG[:, self.used_keys]
        return super().attend(q_BHTG, k_BKSG, v_BKSG, mask, scale, soft_cap, sinks_H, dropout=dropout)


class OwnLinearHeads:
    """Linear attention of this rank's share of the heads. A single key head is on every rank, with its share of the value heads."""

    group: dist.ProcessGroup

    def of_heads(self) -> dict[str, Tensor]:
        return share_of_heads(self, super().of_heads(), self.key_heads, self.group)

    def sum_of_group(self, x_BTK1: Tensor) -> Tensor:
        x_BTK1 = super().sum_of_group(x_BTK1)
        return total(x_BTK1, self.group) if self.key_heads == 1 else x_BTK1


class NormOfAllHeads:
    """A root-mean-square norm over the components of all ranks. This rank has `own` of them."""

    group: dist.ProcessGroup
    own: slice

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC, gain_D = x_BTC.float(), self.gain()
        square_BT1 = total(y_BTC.square().sum(-1, keepdim=True), self.group) / len(gain_D)
        return (y_BTC * (square_BT1 + self.eps).rsqrt() * gain_D[self.own]).to(x_BTC.dtype)


class SharedRouter:
    """A router that every rank runs alike: each keeps one part of the gradient of its losses."""

    ranks: int

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None) -> tuple[Tensor, Tensor, RouterReport | None]:
        chosen_BTK, weights_BTK, report = super().forward(x_BTD, counted_BT)
        if report is not None:
            report = report._replace(loss_B=Shared.apply(report.loss_B, self.ranks))
        return chosen_BTK, weights_BTK, report


class HeadOfAllPositions:
    """An output head, whose ranks have rows of the vocabulary and not positions."""

    positions: Positions

    def forward(self, x_BRD: Tensor, *arguments: Any, **named: Any) -> Any:
        return super().forward(self.positions.gather(x_BRD), *arguments, **named)


class AllTokens:
    """Multi-token prediction, which shifts the embedded tokens along the sequence."""

    positions: Any

    def forward(self, hidden_BRD: Tensor, embedded_BRD: Tensor, *arguments: Any) -> Any:
        return super().forward(hidden_BRD, self.positions.gather(embedded_BRD), *arguments)


class OwnTokens:
    """A depth of multi-token prediction, which gets the shifted tokens."""

    positions: Any

    def forward(self, hidden_BRD: Tensor, embedded_BTD: Tensor, *arguments: Any) -> Any:
        return super().forward(hidden_BRD, self.positions.own(embedded_BTD), *arguments)


def share_of_heads(
    module: LinearAttention, whole: dict[str, Tensor], key_heads: int, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """This rank's part of parameters that heads have. `whole`: those of all heads of the group; `key_heads`: how many key heads the group has."""
    kept = module.of_key_heads if key_heads == 1 else ()
    rank, ranks = group.rank(), group.size()
    return {name: x if name in kept else x[own_part(len(x), rank, ranks)] for name, x in whole.items()}


# ---- parts of tensors ---------------------------------------------------------------------------------------------------------


class Shared(torch.autograd.Function):
    """A value that every rank computes alike, with all of its gradient: each rank keeps one part of as many as there are ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.clone()  # not a view, of which FSDP2 warns

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.size, None


class LookUpPart(torch.autograd.Function):
    """Rows of the part of a table that is at hand, zeros for other ids. It takes the DTensor itself: between functions, autograd would
    round the gradient to the table's format.
    """

    @staticmethod
    def forward(ctx, table_VD: Tensor, ids: Tensor, dtype: torch.dtype, first: int) -> Tensor:
        part = table_VD.to_local()
        here = (ids >= first) & (ids < first + len(part))
        ids = (ids - first).where(here, 0)
        ctx.save_for_backward(table_VD, ids, here)
        return F.embedding(ids, part).to(dtype).mul_(here[..., None])

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None, None]:
        table_VD, ids, here = ctx.saved_tensors
        gradient = table_gradient(g * here[..., None], ids, len(table_VD.to_local()))
        return like_whole(gradient, table_VD), None, None, None


def like_whole(part: Tensor, whole: DTensor) -> DTensor:
    """This rank's part of a tensor that is spread as another one is."""
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def first_row(count: int, size: int, rank: int) -> int:
    """The first of `count` rows that a rank holds; DTensor gives the last ranks fewer."""
    return min(count, rank * -(-count // size))
