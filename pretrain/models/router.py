"""The router of a mixture of experts: which experts a token is sent to, with what weights, and how even the loads are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.config.model_schema import Experts, Model


class RouterReport(NamedTuple):
    """What a layer's router says of a micro-step, over the positions that carry a loss."""

    loss_B: Tensor
    """Auxiliary losses of each sequence times its target tokens, fp32: dividing by the step's target tokens gives their mean."""

    counts_E: Tensor
    """Positions sent to each expert, int64."""


class Router(nn.Module):
    """Scores of all experts from one projection, computed in fp32; the best `experts.active` are chosen.

    `correction` is added to the scores for the choice alone and gets no gradient (arXiv 2408.15664): train/balancing.py moves it.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config.experts
        count = config.experts.count
        self.weight = nn.Parameter(torch.empty(count, config.dim))
        self.bias = nn.Parameter(torch.zeros(count)) if config.experts.router_bias else None
        self.correction = nn.Parameter(torch.zeros(count), requires_grad=False) if config.experts.correction else None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None) -> tuple[Tensor, Tensor, RouterReport | None]:
        """Chosen experts [B, T, K] and their weights [B, T, K], fp32; a report over the positions that are `counted_BT`."""
        config = self.config
        # The matrix is rounded to the compute format first, as FSDP2 hands it over; the products are of fp32.
        weight_ED = self.weight.to(x_BTD.dtype).float()
        logits_BTE = F.linear(x_BTD.float(), weight_ED, None if self.bias is None else self.bias.float())
        scores_BTE = logits_BTE.softmax(-1) if config.scoring == "softmax" else logits_BTE.sigmoid()
        chosen_BTK = self._choose(scores_BTE.detach())
        weights_BTK = scores_BTE.gather(-1, chosen_BTK)
        if config.normalise:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        if config.scale != 1:
            weights_BTK = weights_BTK * config.scale
        if counted_BT is None:
            return chosen_BTK, weights_BTK, None
        return chosen_BTK, weights_BTK, report(logits_BTE, scores_BTE, chosen_BTK, counted_BT, config)

    def _choose(self, scores_BTE: Tensor) -> Tensor:
        if self.correction is not None:
            scores_BTE = scores_BTE + self.correction.to(scores_BTE)
        if self.config.groups > 1:
            scores_BTE = _best_groups(scores_BTE, self.config.groups, self.config.active_groups)
        return scores_BTE.topk(self.config.active, dim=-1).indices


def _best_groups(scores_BTE: Tensor, groups: int, active: int) -> Tensor:
    """Scores without the experts of other groups than the `active` best; a group is as good as its two best (DeepSeek-V3)."""
    scores_BTGS = scores_BTE.unflatten(-1, (groups, -1))
    best_BTA = scores_BTGS.topk(2, dim=-1).values.sum(-1).topk(active, dim=-1).indices
    kept_BTG = torch.zeros_like(scores_BTGS[..., 0], dtype=torch.bool).scatter(-1, best_BTA, True)
    return scores_BTGS.masked_fill(~kept_BTG[..., None], -torch.inf).flatten(-2)


def report(logits_BTE: Tensor, scores_BTE: Tensor, chosen_BTK: Tensor, counted_BT: Tensor, config: Experts) -> RouterReport:
    """Auxiliary losses and loads, over the counted positions, n of a sequence.

    Balance of a sequence: E x sum over experts of (share of positions sent there) x (mean score, scores of a position summing to
    one), arXiv 2101.03961 equation 4 and, of each sequence by itself, arXiv 2412.19437 equation 17: any layout that does not cut
    sequences sees the same. z-loss: mean squared log-sum-exp of the logits (arXiv 2202.08906, equation 5). Both times n.
    """
    sequences, experts = len(counted_BT), config.count
    counted_BT1 = counted_BT[..., None]
    places = chosen_BTK + experts * torch.arange(sequences, device=chosen_BTK.device)[:, None, None]
    counts = torch.zeros(sequences * experts, dtype=torch.int64, device=chosen_BTK.device)
    counts_BE = counts.index_add_(0, places.flatten(), counted_BT1.expand_as(places).flatten().long()).view(sequences, experts)
    loss_B = torch.zeros(sequences, dtype=torch.float32, device=chosen_BTK.device)
    if config.balance_loss:
        shares_BTE = scores_BTE if config.scoring == "softmax" else scores_BTE / scores_BTE.sum(-1, keepdim=True)
        summed_BE = (shares_BTE * counted_BT1).sum(1)
        positions_B = counted_BT.sum(1).clamp(min=1)
        loss_B = loss_B + config.balance_loss * experts * (counts_BE * summed_BE).sum(1) / positions_B
    if config.router_z_loss:
        loss_B = loss_B + config.router_z_loss * (logits_BTE.logsumexp(-1).square() * counted_BT).sum(1)
    return RouterReport(loss_B, counts_BE.sum(0))
