"""The loss is a sum (invariant 2): whoever reports or scales it divides once by the tokens it chose to divide by."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from pretrain.data.targets import IGNORED


def sequence_losses(logits_BTV: Tensor, targets_BT: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the token cross-entropies of each sequence, [B], fp32. Targets equal to IGNORED add nothing."""
    options = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": label_smoothing}
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), **options)
    return losses.view_as(targets_BT).sum(dim=1)
