"""Token losses, plain and fused with the output projection.

The loss is a sum (invariant 2): whoever reports or scales it divides once by the tokens it chose to divide by.

    z = soft_cap * tanh(scale * (x @ W.T) / soft_cap)          logits; without a soft-cap, scale * (x @ W.T)
    L = lse(z) - (1 - s) z[target] - s mean(z) + zeta lse(z)^2  label smoothing s, z-loss zeta; 0 where the target is IGNORED

The *objective* is L. The *cross-entropy* H = lse(z) - z[target] comes beside it on request, from the same logits: it is what other
programs call the loss, and what validation reports. Gradients are of L alone.

`sequence_losses` takes logits that exist already. `fused_losses` never has more than a chunk of them:

    for a chunk of tokens       z, L, dL/dz  in buffers that all chunks share
                                dL/dx[chunk]  = dL/dz @ W
                                dL/dW        += dL/dz.T @ x[chunk]     in fp32

The gradient is computed in *forward*, when the chunk's logits are at hand (as Liger Kernel does, arXiv 2410.10989). That takes three
matrix products, as many as the plain loss; recomputing the logits in backward would take four. The gradient is that of the plain sum.
Backward multiplies it with the upstream gradient, which is right if all tokens share one. If they do not, the gradient is recomputed,
at twice the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.config.schema import Loss
from pretrain.conventions import IGNORED
from pretrain.models.compiled_loss import compiled_chunk_losses

CPU_CHUNK_BYTES, CHUNK_BYTES = 256 << 20, 1 << 30
"""Memory that the logits of a chunk may take, on CPU and elsewhere: enough tokens for matrix products at full speed."""

CPU_CHUNK_TOKENS = 1024
"""More are no faster, and leave the caches earlier."""


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

    def __post_init__(self) -> None:
        if self.z_loss < 0 or not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"z_loss={self.z_loss} must not be negative, label_smoothing={self.label_smoothing} is of [0, 1]")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be positive, or None for no cap")
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must be positive, or None for the default of the device")

    @classmethod
    def of(cls, loss: Loss | None, soft_cap: float = 0.0, logit_scale: float = 1.0) -> LossOptions:
        """What the configuration says, by default cross-entropy alone, of a model with this soft-cap (0: none) and scale."""
        if loss is None:
            return cls(soft_cap=soft_cap or None, logit_scale=logit_scale)
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
    """Summed over the target tokens of each sequence, [B], fp32 (fp64 from fp64)."""

    objective_B: Tensor
    """What is minimised."""

    cross_entropy_B: Tensor
    """The cross-entropy alone, unweighted. No gradient flows through it."""


def sequence_losses(logits_BTV: Tensor, targets_BT: Tensor, options: LossOptions = CROSS_ENTROPY) -> Tensor:
    """Sum of the token losses of each sequence, [B], fp32 (fp64 from fp64). Targets equal to IGNORED add nothing.

    The logits are final: scale and soft-cap are in them already. This is the plain form, for models that bring logits of
    their own, and the reference for `fused_losses`.
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


def fused_losses(
    x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, options: LossOptions = CROSS_ENTROPY, weights_B: Tensor | None = None
) -> Tensor:
    """The objective of `fused_losses_and_entropy`, [B]."""
    return fused_losses_and_entropy(x_BTD, weight_VD, targets_BT, options, weights_B).objective_B


@torch.compiler.disable
def fused_losses_and_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    options: LossOptions = CROSS_ENTROPY,
    weights_B: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Losses:
    """`sequence_losses_and_entropy` of the logits x @ weight.T, without ever having more than a chunk of them.

    The products are of the format of `x_BTD`, to which `weight_VD` is cast; the weight's gradient is of fp32. `weights_B` multiplies
    each sequence's objective; no gradient flows to it. Weighting here, and not the result, leaves the upstream gradient common to all
    tokens, which is the fast path. With a `shard` the losses are those of the whole vocabulary, equal on all ranks, and the gradient of x
    is what the rows at hand add to it.
    """
    if x_BTD.shape[:-1] != targets_BT.shape:  # would be flattened to something else otherwise
        raise ValueError(f"activations are {tuple(x_BTD.shape)}, targets {tuple(targets_BT.shape)}")
    weights_N = None
    if weights_B is not None:
        weights_N = weights_B.detach().to(loss_dtype(x_BTD))[:, None].expand(targets_BT.shape).flatten()
    arguments = x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), weights_N, options, shard, torch.is_grad_enabled()
    both = _FusedLosses.apply(*arguments)
    return Losses(*(losses_N.view(targets_BT.shape).sum(dim=1) for losses_N in both))


class _FusedLosses(torch.autograd.Function):
    """Weighted token losses and plain cross-entropies, both [N], of activations [N, D] and an output weight [V, D]."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, targets_N, weights_N, options, shard, recorded):
        needs_x, needs_weight = (recorded and needed for needed in ctx.needs_input_grad[:2])
        both, *ctx.unit = _losses_and_gradients(x_ND, weight_VD, targets_N, weights_N, options, shard, needs_x, needs_weight)
        ctx.save_for_backward(x_ND, weight_VD, targets_N, weights_N)
        ctx.options, ctx.shard = options, shard
        ctx.mark_non_differentiable(both[1])
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream_N, _):
        x_ND, weight_VD, targets_N, weights_N = ctx.saved_tensors
        unit, ctx.unit = ctx.unit, None  # scaled in place: a second backward computes it anew
        # An expanded tensor says that all its values are one without being looked at, for which a GPU would have to wait.
        if unit is not None and upstream_N.numel() > 0 and upstream_N.stride(0) == 0:
            grad_x, grad_weight = (_scale_in_place(gradient, upstream_N[:1, None]) for gradient in unit)
        else:
            del unit
            weights_N = upstream_N if weights_N is None else upstream_N * weights_N
            needs = ctx.needs_input_grad[:2]
            _, grad_x, grad_weight = _losses_and_gradients(
                x_ND, weight_VD, targets_N, weights_N, ctx.options, ctx.shard, *needs
            )
        if ctx.shard is not None and grad_weight is not None:
            grad_weight = ctx.shard.whole(grad_weight, weight_VD)
        return grad_x, grad_weight, None, None, None, None, None


def _scale_in_place(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Times a factor of fp32, which is not rounded to the gradient's format before."""
    if gradient is None or gradient.dtype == factor.dtype:
        return gradient if gradient is None else gradient.mul_(factor)
    return gradient.copy_(gradient * factor)


def _losses_and_gradients(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    options: LossOptions,
    shard: VocabularyShard | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor | None]:
    """Weighted losses and plain cross-entropies [N], and the gradients of the losses' sum with respect to x, in its format, and to the
    weight's rows at hand, in fp32.
    """
    dtype, weight_VD = loss_dtype(x_ND), (weight_VD if shard is None else shard.part(weight_VD)).to(x_ND.dtype)
    losses_N, entropies_N = (torch.empty(len(x_ND), dtype=dtype, device=x_ND.device) for _ in range(2))
    grad_x_ND = torch.empty_like(x_ND) if needs_x else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
    for rows, logits in _chunks(x_ND, weight_VD, options, shard, needs_x or needs_weight):
        x, targets = x_ND[rows], targets_N[rows]
        losses, entropies_N[rows] = logits.project(x).losses(targets)
        if needs_x or needs_weight:
            grad_logits = logits.gradient(targets)
            # Factors of a token go on the narrow side of the products.
            factor = options.logit_scale if weights_N is None else (weights_N[rows] * options.logit_scale)[:, None]
            plain = weights_N is None and options.logit_scale == 1.0
            if needs_x:
                torch.mm(grad_logits, weight_VD, out=grad_x_ND[rows])
                if not plain:
                    grad_x_ND[rows] = grad_x_ND[rows] * factor
            if needs_weight:
                _add_product(grad_weight_VD, grad_logits.t(), x if plain else (x * factor).to(x.dtype), logits.bytes)
        losses_N[rows] = losses if weights_N is None else losses * weights_N[rows]
    return (losses_N, entropies_N), grad_x_ND, grad_weight_VD


def _add_product(total: Tensor, left: Tensor, right: Tensor, limit: int) -> None:
    """total += left @ right, where the total may be of a wider format than the factors.

    Then the sum over chunks rounds no more than a single product would, and the product is formed in blocks of rows, for it
    is as large as the total.
    """
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
        return
    rows = max(1, limit // (4 * total.shape[1] * total.element_size()))
    for part, here in zip(total.split(rows), left.split(rows)):
        part.add_(torch.mm(here, right, out_dtype=total.dtype) if right.is_cuda else torch.mm(here, right))


def _chunks(
    x_ND: Tensor, weight_VD: Tensor, options: LossOptions, shard: VocabularyShard | None, wants_gradient: bool
) -> Iterator[tuple[slice, _ChunkLogits | _CompiledChunkLogits]]:
    """Slices of the tokens, of equal size but for the last, with buffers for their logits. With a `shard` they are the same on all ranks."""
    tokens, vocabulary = len(x_ND), len(weight_VD) if shard is None else shard.largest
    if not tokens:
        return
    on_cpu, compiled = x_ND.device.type == "cpu", options.compiled and shard is None
    size = chunk_size(tokens, vocabulary, x_ND.dtype, on_cpu, options, compiled)
    limit = _chunk_bytes(on_cpu, options)
    if compiled:
        buffers = _CompiledChunkLogits(size, weight_VD, options, limit, wants_gradient)
    else:
        buffers = _ChunkLogits(size, weight_VD, options, shard, limit)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens)), buffers


def chunk_size(
    tokens: int, vocabulary: int, dtype: torch.dtype, on_cpu: bool, options: LossOptions, compiled: bool = False
) -> int:
    """How many of `tokens` tokens, in this format, have their logits of so many rows of the vocabulary at one time."""
    bytes_per_logit = dtype.itemsize if compiled else _ChunkLogits.bytes_per_logit(dtype)
    most = max(1, _chunk_bytes(on_cpu, options) // (vocabulary * bytes_per_logit))
    if on_cpu:
        most = min(most, CPU_CHUNK_TOKENS)
    count = -(-tokens // most)
    return -(-tokens // count)


def _chunk_bytes(on_cpu: bool, options: LossOptions) -> int:
    return options.chunk_bytes or (CPU_CHUNK_BYTES if on_cpu else CHUNK_BYTES)


class _ChunkLogits:
    """The logits of one chunk of tokens after another, in buffers that are allocated once.

    Fresh memory for every chunk costs more than the arithmetic on it: the operating system clears each page.
    """

    @staticmethod
    def bytes_per_logit(dtype: torch.dtype) -> int:
        return 2 * dtype.itemsize if dtype.itemsize >= 4 else dtype.itemsize + 8

    def __init__(self, tokens: int, weight_VD: Tensor, options: LossOptions, shard: VocabularyShard | None, limit: int) -> None:
        self.weight_VD, self.options, self.shard, self.bytes = weight_VD, options, shard, limit
        self.vocabulary = len(weight_VD) if shard is None else shard.vocabulary
        dtype = loss_dtype(weight_VD)
        shape, device = (tokens, len(weight_VD)), weight_VD.device
        self._raw = torch.empty(shape, dtype=weight_VD.dtype, device=device)
        self._logits = self._raw if dtype == weight_VD.dtype else torch.empty(shape, dtype=dtype, device=device)
        self._probabilities = torch.empty(shape, dtype=dtype, device=device)

    def project(self, x: Tensor) -> _ChunkLogits:
        """Logits of the activations x [n, D]: rounded to their format, as where logits are asked for, then in fp32."""
        options = self.options
        self.raw, self.logits, self.probabilities = (b[: len(x)] for b in (self._raw, self._logits, self._probabilities))
        torch.mm(x, self.weight_VD.t(), out=self.raw)
        if self.raw.dtype != self.logits.dtype:
            self.logits.copy_(self.raw)
        if options.logit_scale != 1.0:
            self.logits.mul_(options.logit_scale)
        if options.soft_cap is not None:
            self.logits.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        torch.softmax(self.logits, dim=1, out=self.probabilities)
        # The largest probability is one over the sum of exponentials, and never so small that its logarithm is lost.
        self.log_partition = self.logits.amax(dim=1) - self.probabilities.amax(dim=1).log()
        if self.shard is not None:
            own, self.log_partition = self.log_partition, self.shard.gather(self.log_partition).logsumexp(dim=0)
            self.probabilities.mul_((own - self.log_partition).exp_()[:, None])
        return self

    def losses(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Token losses and cross-entropies [n], zero where ignored."""
        options, lse = self.options, self.log_partition
        counted = targets != IGNORED
        columns, here = self._columns(targets)
        target_logits = self.logits.gather(1, columns[:, None]).squeeze(1)
        if self.shard is not None:
            target_logits = self.shard.sum(target_logits.where(here, 0))
        entropies = (lse - target_logits).where(counted, 0)
        losses = lse - (1 - options.label_smoothing) * target_logits
        if options.label_smoothing:
            mean = self.logits.mean(dim=1) if self.shard is None else self.shard.sum(self.logits.sum(dim=1)) / self.vocabulary
            losses -= options.label_smoothing * mean
        if options.z_loss:
            losses += options.z_loss * lse.square()
        return losses.where(counted, 0), entropies

    def gradient(self, targets: Tensor) -> Tensor:
        """Gradient [n, V] of the sum of losses with respect to scaled logits before the cap, in the activations' format.

        It takes the place of the probabilities, and in half precision of the raw logits.
        """
        options, grad = self.options, self.probabilities
        # In the format of the gradient: a Boolean times a number would be of fp32, whatever the rest is.
        counted = (targets != IGNORED).to(grad.dtype)
        factor = counted * (1 + 2 * options.z_loss * self.log_partition) if options.z_loss else counted
        grad.mul_(factor[:, None])
        if options.label_smoothing:
            grad.sub_(options.label_smoothing / self.vocabulary * counted[:, None])
        rows = torch.arange(len(targets), device=targets.device)
        columns, here = self._columns(targets)
        grad[rows, columns] -= (1 - options.label_smoothing) * here.to(grad.dtype)
        if options.soft_cap is not None:
            grad.mul_(self.logits.div_(options.soft_cap).square_().neg_().add_(1))
        return grad if grad.dtype == self.raw.dtype else self.raw.copy_(grad)

    def _columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each target, 0 where it is ignored or not at hand; and whether it is at hand."""
        columns, here = targets, targets != IGNORED
        if self.shard is not None:
            columns = targets - self.shard.start
            here = here & (columns >= 0) & (columns < self.logits.shape[1])
        return columns.where(here, 0), here


class _CompiledChunkLogits:
    """`_ChunkLogits` with its arithmetic compiled. There is one buffer: the gradient takes the place of the products at once."""

    def __init__(self, tokens: int, weight_VD: Tensor, options: LossOptions, limit: int, wants_gradient: bool) -> None:
        self.weight_VD, self.options, self.bytes, self.wants_gradient = weight_VD, options, limit, wants_gradient
        self._raw = torch.empty((tokens, len(weight_VD)), dtype=weight_VD.dtype, device=weight_VD.device)

    def project(self, x: Tensor) -> _CompiledChunkLogits:
        self.raw = self._raw[: len(x)]
        torch.mm(x, self.weight_VD.t(), out=self.raw)
        return self

    def losses(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        switches = options.label_smoothing, options.z_loss, options.logit_scale, options.soft_cap
        return compiled_chunk_losses()(self.raw, targets, self.wants_gradient, *switches)

    def gradient(self, targets: Tensor) -> Tensor:
        return self.raw


class OutputHead(nn.Module):
    """Logits, or with targets the summed loss of each sequence, of final hidden states.

    Its weight `weight` [V, D] is cast to the activations' format where it is used; its gradient is of fp32. A tied head has none, and is given the embedding's in every call. Where no gradient is taken, as in validation, it leaves out z-loss and label
    smoothing: what it returns is the cross-entropy alone.
    """

    def __init__(self, dim: int, vocab_size: int, options: LossOptions = CROSS_ENTROPY, tied: bool = False) -> None:
        super().__init__()
        self.options = options
        self.shard: VocabularyShard | None = None
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
            part = weight if self.shard is None else self.shard.part(weight)
            logits_BTV = finish_logits(F.linear(x_BTD, part.to(x_BTD.dtype)), self.options)
            return logits_BTV if self.shard is None else self.shard.join(logits_BTV)
        options = self.options if torch.is_grad_enabled() else self.options.cross_entropy_only()
        losses = fused_losses_and_entropy(x_BTD, weight, targets_BT, options, sequence_weights_B, self.shard)
        return losses if with_cross_entropy else losses.objective_B
