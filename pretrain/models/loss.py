"""Token losses, plain: what is minimised, and its parts. output_head.py has them fused with the output projection.

The loss is a sum: whoever reports or scales it divides once by the tokens it chose to divide by.

    z = soft_cap * tanh(scale * (x @ W.T) / soft_cap)          logits; without a soft-cap, scale * (x @ W.T)
    L = lse(z) - (1 - s) z[target] - s mean(z) + zeta lse(z)^2  label smoothing s, z-loss zeta; 0 where the target is IGNORED

The *objective* is L. The *cross-entropy* H = lse(z) - z[target] comes beside it on request, from the same logits: it is what other
programs call the loss, and what validation reports. Gradients are of L alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pretrain.config.schema import Loss
from pretrain.conventions import IGNORED


@dataclass(frozen=True)
class LossOptions:
    """How logits are finished, and what is added to their cross-entropy.

    `logit_scale` and `soft_cap` belong to the model and shape its logits everywhere; the rest matters in training only.
    """

    z_loss: float = 0.0
    """Coefficient of the squared log-partition function of each token (PaLM, arXiv 2204.02311, section 5: 1e-4)."""

    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary, in [0, 1] (arXiv 1512.00567, section 7)."""

    soft_cap: float | None = None
    """Logits are squeezed into (-cap, cap) by cap * tanh(logit / cap) (Gemma 2, arXiv 2408.00118, section 2)."""

    logit_scale: float = 1.0
    """Factor on the logits, before the soft-cap."""

    chunk_bytes: int | None = None
    """Memory for the logits that exist at one time; None: what is good for the device."""

    compiled: bool = False
    """Whether the arithmetic on logits is compiled. Where ranks share the vocabulary, it is not."""

    @classmethod
    def of(cls, loss: Loss | None, soft_cap: float = 0.0, logit_scale: float = 1.0) -> LossOptions:
        """What the configuration says, by default cross-entropy alone, of a model with this soft-cap (0: none) and scale."""
        loss = loss or Loss()
        chunk_bytes = loss.chunk_mb and loss.chunk_mb * 10**6
        return cls(loss.z_loss, loss.label_smoothing, soft_cap or None, logit_scale, chunk_bytes)

    def cross_entropy_only(self) -> LossOptions:
        """The same options without what only training adds, because validation reports the cross-entropy itself."""
        return replace(self, z_loss=0.0, label_smoothing=0.0)


CROSS_ENTROPY = LossOptions()


class VocabularyShard(Protocol):
    """A stretch of the output weight's rows, where other ranks hold the rest. parallel/ makes it; here nobody knows of ranks.

    Each rank has the logits of its own rows. Every rank calls every method together with the others.
    """

    start: int
    """The token of the first row at hand."""
    largest: int
    """The most rows that a rank holds."""
    vocabulary: int
    """The rows of all ranks."""

    def part(self, weight_VD: Tensor) -> Tensor:
        """The rows at hand, as a plain tensor."""

    def whole(self, gradient: Tensor, weight_VD: Tensor) -> Tensor:
        """A gradient of the rows at hand as one of the weight."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, [ranks, ...]."""

    def join(self, logits_BTV: Tensor) -> Tensor:
        """The logits of the whole vocabulary from those of the rows at hand."""


class Losses(NamedTuple):
    """Summed over the target tokens of each sequence, [B], fp32 (fp64 from fp64). Multi-token prediction has [1 + depths, B]: the next token first."""

    objective_B: Tensor
    """What is minimised."""

    cross_entropy_B: Tensor
    """The cross-entropy alone, unweighted. No gradient flows through it."""


def sequence_losses(logits_BTV: Tensor, targets_BT: Tensor, options: LossOptions = CROSS_ENTROPY) -> Tensor:
    """Sum of the token losses of each sequence, [B], fp32 (fp64 from fp64). Targets equal to IGNORED add nothing.

    The logits are final: scale and soft-cap are in them already. This is the plain form, for models that bring logits of
    their own, and the reference for `fused_losses_and_entropy` of output_head.py.
    """
    logits_NV = logits_BTV.to(loss_dtype(logits_BTV)).flatten(0, 1)
    targets_N = targets_BT.flatten()
    losses_N = F.cross_entropy(
        logits_NV, targets_N, ignore_index=IGNORED, reduction="none", label_smoothing=options.label_smoothing
    )
    if options.z_loss:
        losses_N = losses_N + options.z_loss * logits_NV.logsumexp(dim=1).square() * (targets_N != IGNORED)
    return losses_N.view_as(targets_BT).sum(dim=1)


def sequence_losses_and_entropy(logits_BTV: Tensor, targets_BT: Tensor, options: LossOptions) -> Losses:
    """`sequence_losses`, and the cross-entropy beside it."""
    objective_B = sequence_losses(logits_BTV, targets_BT, options)
    if not options.z_loss and not options.label_smoothing:
        return Losses(objective_B, objective_B.detach())
    with torch.no_grad():
        return Losses(objective_B, sequence_losses(logits_BTV, targets_BT))


def finish_logits(raw: Tensor, options: LossOptions) -> Tensor:
    """Logits from the product with the output weight: scaled and soft-capped, in the format of `raw`, computed in fp32."""
    if options.logit_scale == 1.0 and options.soft_cap is None:
        return raw
    logits = raw.to(loss_dtype(raw)) * options.logit_scale
    if options.soft_cap is not None:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    return logits.to(raw.dtype)


def loss_dtype(x: Tensor) -> torch.dtype:
    """The format that losses of these logits or activations are computed in: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
