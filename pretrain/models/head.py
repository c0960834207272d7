"""The output head: the projection to the vocabulary, and the loss that is fused with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.models.loss import CROSS_ENTROPY, Losses, LossOptions, finish_logits, fused_losses_and_entropy


class OutputHead(nn.Module):
    """Logits, or with targets the summed loss of each sequence, of final hidden states.

    Its weight `weight` [V, D] is cast to the activations' format where it is used; its gradient is of fp32. A tied head has none, and is given the embedding's in every call. Where no gradient is taken, as in validation, it leaves out z-loss and label
    smoothing: what it returns is the cross-entropy alone.
    """

    def __init__(self, dim: int, vocab_size: int, options: LossOptions = CROSS_ENTROPY, tied: bool = False) -> None:
        super().__init__()
        self.options = options
        # Values are drawn by name (parallel/initialise.py), so that they depend on nothing else.
        self.register_parameter("weight", None if tied else nn.Parameter(torch.empty(vocab_size, dim)))

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None = None,
        weight: Tensor | None = None,
        sequence_weights_B: Tensor | None = None,
        with_cross_entropy: bool = False,
    ) -> Tensor | Losses:
        """Logits [B, T, V] in the format of x; with targets the summed token losses of each sequence, [B], fp32.

        `weight` is the embedding's, for a tied head only. `sequence_weights_B` multiplies the losses: in here, so that
        gradients keep the fast path (models/loss.py). `with_cross_entropy`: return that beside them.
        """
        if (weight is None) == (self.weight is None):
            raise ValueError("a tied head is called with the embedding's weight, and no other head is")
        weight = self.weight if weight is None else weight
        if targets_BT is None:
            return finish_logits(F.linear(x_BTD, weight.to(x_BTD.dtype)), self.options)
        options = self.options if torch.is_grad_enabled() else self.options.cross_entropy_only()
        losses = fused_losses_and_entropy(x_BTD, weight, targets_BT, options, sequence_weights_B)
        return losses if with_cross_entropy else losses.objective_B
