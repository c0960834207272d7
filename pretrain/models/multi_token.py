"""Multi-token prediction: extra losses on tokens further ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k = 1, 2, ... predicts the token k + 1 places ahead, from the depth before and the tokens up to k places ahead:

    h(0)_t = the trunk's final hidden state
    h(k)_t = block_k(projection_k([norm(h(k-1)_t); norm(embedding of token_(t+k))]))        predicts token_(t+k+1)
    loss   = L(0) + weight / depths * sum of L(k),   with the embedding and the output head of the trunk

The shared modules are called once in a pass. The trunk embeds the tokens, which are shifted here; the head gets the hidden states of
all depths in one batch, so its gradients are formed in one go. A second call would run into FSDP2's bookkeeping of grouped modules,
which knows one use per pass (pytorch#183702).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.conventions import IGNORED
from pretrain.models.dropout import BlockDropout, Dropout
from pretrain.models.experts import RouterReport
from pretrain.models.layer_specs import LayerSpec
from pretrain.models.layers import at_hand, project
from pretrain.models.loss import Losses
from pretrain.models.masks import Mask, document_numbers
from pretrain.models.output_head import OutputHead
from pretrain.models.positions import Tables


class MultiTokenDepth(nn.Module):
    """One depth: what it is told of the past and of one more token, a block, and the norm before the shared head."""

    casts = ("projection",)

    def __init__(self, dim: int, block: nn.Module, make_norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.hidden_norm = make_norm()
        self.token_norm = make_norm()
        self.projection = nn.Parameter(torch.empty(dim, 2 * dim))
        self.block = block
        self.norm = make_norm()

    def forward(
        self,
        hidden_BTD: Tensor,
        embedded_BTD: Tensor,
        rope: Tables | None,
        mask: Mask | None,
        counted_BT: Tensor | None,
        dropout: BlockDropout | None = None,
    ) -> tuple[Tensor, Tensor, RouterReport | None]:
        """Hidden states for the next depth, the same normed for the head, and what the block's router reports.

        `embedded_BTD` are the tokens this depth adds; the others are what the trunk gives its blocks.
        """
        both = torch.cat((self.hidden_norm(hidden_BTD), self.token_norm(embedded_BTD)), dim=-1)
        entering_BTD = project(both, at_hand(self, "projection"), None)
        hidden_BTD, report = self.block(entering_BTD, rope, mask, None, counted_BT, dropout)
        return hidden_BTD, self.norm(hidden_BTD), report


class MultiTokenPrediction(nn.Module):
    """`depths` further tokens predicted in training; nothing of it is used in evaluation or generation."""

    def __init__(
        self, blocks: list[nn.Module], dim: int, spec: LayerSpec, make_norm: Callable[[], nn.Module], weight: float
    ) -> None:
        super().__init__()
        if not blocks or weight <= 0:
            raise ValueError(f"multi-token prediction of {len(blocks)} depths with weight {weight}: both must be positive")
        self.weight, self.spec = weight, spec
        self.depths = nn.ModuleList(MultiTokenDepth(dim, block, make_norm) for block in blocks)

    def forward(
        self,
        hidden_BTD: Tensor,
        embedded_BTD: Tensor,
        rope: Tables | None,
        mask: Mask | None,
        counted_BT: Tensor | None,
        dropout: Dropout | None = None,
    ) -> tuple[list[Tensor], list[RouterReport | None]]:
        """Hidden states of every depth, normed for the head, and the reports of their routers.

        `hidden_BTD` are the trunk's, before its final norm; `embedded_BTD` the embedded tokens that entered the trunk; the others are
        what the trunk gives a block of `spec`.
        """
        normed, reports = [], []
        for k, depth in enumerate(self.depths, start=1):
            # The last k positions are told of no token; later ones see nothing of them, and their targets are ignored.
            dropped = dropout and dropout.of_block(f"multi_token.{k}")
            hidden_BTD, out_BTD, report = depth(hidden_BTD, shift(embedded_BTD, k, 0.0), rope, mask, counted_BT, dropped)
            normed.append(out_BTD)
            reports.append(report)
        return normed, reports

    def losses(
        self,
        head: OutputHead,
        main_BTD: Tensor,
        depths_BTD: list[Tensor],
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        weight: Tensor | None = None,
        sequence_weights_B: Tensor | None = None,
    ) -> Losses:
        """Weighted losses [1 + depths, B] in one call of the head: their sum over rows is what to train on, row 0 the main one. The
        cross-entropies beside them are not weighted.

        `main_BTD`: the trunk's normed output. `documents_BT`: as in `Decoder.forward`, None where documents are not masked. `weight`: the
        embedding's, for a tied head. `sequence_weights_B`: factors on all losses of a sequence.
        """
        count = len(depths_BTD)
        targets = torch.cat([targets_BT, *(targets_ahead(targets_BT, k, documents_BT) for k in range(1, count + 1))])
        weights = torch.full((1 + count, len(targets_BT)), self.weight / count, device=targets_BT.device)
        weights[0] = 1.0
        if sequence_weights_B is not None:
            weights = weights * sequence_weights_B
        losses = head(torch.cat([main_BTD, *depths_BTD]), targets, weight, weights.flatten(), with_cross_entropy=True)
        return Losses(*(part.view(weights.shape) for part in losses))


def shift(x_BT: Tensor, k: int, fill: float) -> Tensor:
    """What is k places ahead along the second axis, and `fill` past the end."""
    ahead = x_BT[:, k:]
    missing = x_BT.new_full((x_BT.shape[0], x_BT.shape[1] - ahead.shape[1], *x_BT.shape[2:]), fill)
    return torch.cat((ahead, missing), dim=1)


def targets_ahead(targets_BT: Tensor, k: int, documents_BT: Tensor | None = None) -> Tensor:
    """Targets of depth k: those k places ahead, IGNORED past the end.

    With `documents_BT` also where the depth would be told of a token of another document than its own.
    """
    ahead_BT = shift(targets_BT, k, IGNORED)
    if documents_BT is None:
        return ahead_BT
    numbers_BT = document_numbers(documents_BT)
    return ahead_BT.where(shift(numbers_BT, k, -1) == numbers_BT, IGNORED)
