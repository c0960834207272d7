"""The output head: logits of final hidden states, or their loss, fused with the output projection.

`fused_losses_and_entropy` never has more than a chunk of logits:

    for a chunk of tokens       z, L, dL/dz  in buffers that all chunks share (loss_chunks.py)
                                dL/dx[chunk]  = dL/dz @ W
                                dL/dW        += dL/dz.T @ x[chunk]     in fp32

The gradient is computed in *forward*, when the chunk's logits are at hand (as Liger Kernel does, arXiv 2410.10989). That takes three
matrix products, as many as the plain loss; recomputing the logits in backward would take four. The gradient is that of the plain sum.
Backward multiplies it with the upstream gradient, which is right if all tokens share one. If they do not, the gradient is recomputed,
at twice the work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pretrain.models.compiling import never_compiled
from pretrain.models.layers import copy_at_hand
from pretrain.models.loss import CROSS_ENTROPY, Losses, LossOptions, VocabularyShard, finish_logits, loss_dtype
from pretrain.models.loss_chunks import compiled_once, logit_chunks, scale_in_place, times_in


@never_compiled
def fused_losses_and_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    options: LossOptions = CROSS_ENTROPY,
    weights_B: Tensor | None = None,
    shard: VocabularyShard | None = None,
    copy_VD: Tensor | None = None,
) -> Losses:
    """`sequence_losses_and_entropy` of the logits x @ weight.T, without ever having more than a chunk of them.

    Products are made in the format of `x_BTD`. `weight_VD` is cast to it, unless `copy_VD`, a copy in that format, is given. The weight's gradient
    is in fp32. `weights_B` multiplies each sequence's objective; no gradient flows to it. Weighting here, and not the result, leaves the upstream
    gradient common to all tokens, which is the fast path. With a `shard` the losses are those of the whole vocabulary, equal on all ranks, and
    the gradient of x is what the rows at hand add to it.
    """
    if x_BTD.shape[:-1] != targets_BT.shape:  # would be flattened to something else otherwise
        raise ValueError(f"activations are {tuple(x_BTD.shape)}, targets {tuple(targets_BT.shape)}")
    weights_N = None
    if weights_B is not None:
        weights_N = weights_B.detach().to(loss_dtype(x_BTD))[:, None].expand(targets_BT.shape).flatten()
    arguments = x_BTD.flatten(0, 1), weight_VD, copy_VD, targets_BT.flatten(), weights_N, options, shard
    both = _FusedLosses.apply(*arguments, torch.is_grad_enabled())
    return Losses(*(losses_N.view(targets_BT.shape).sum(dim=1) for losses_N in both))


class _FusedLosses(torch.autograd.Function):
    """Weighted token losses and plain cross-entropies, both [N], of activations [N, D] and an output weight [V, D] with perhaps a copy."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, copy_VD, targets_N, weights_N, options, shard, recorded):
        needs_x, needs_weight = (recorded and needed for needed in ctx.needs_input_grad[:2])
        table_VD = weight_VD if copy_VD is None else copy_VD
        both, *ctx.unit = _losses_and_gradients(x_ND, table_VD, targets_N, weights_N, options, shard, needs_x, needs_weight)
        ctx.save_for_backward(x_ND, weight_VD, table_VD, targets_N, weights_N)
        ctx.options, ctx.shard = options, shard
        ctx.weight_gradient_dtype = weight_VD.grad_dtype if weight_VD.is_leaf and shard is None else None
        ctx.mark_non_differentiable(both[1])
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream_N, _):
        x_ND, weight_VD, table_VD, targets_N, weights_N = ctx.saved_tensors
        unit, ctx.unit = ctx.unit, None  # they may be scaled in place: a second backward computes them anew
        # An expanded tensor has one value throughout. That is known without a look at the values, for which the host would wait for a GPU.
        if unit is not None and upstream_N.numel() > 0 and upstream_N.stride(0) == 0:
            is_compiled = ctx.options.compiled and ctx.shard is None
            grad_x = _times(unit[0], upstream_N[:1], is_compiled)
            grad_weight = _times(unit[1], upstream_N[:1], is_compiled, ctx.weight_gradient_dtype)
        else:
            del unit
            weights_N = upstream_N if weights_N is None else upstream_N * weights_N
            needs = ctx.needs_input_grad[:2]
            _, grad_x, grad_weight = _losses_and_gradients(x_ND, table_VD, targets_N, weights_N, ctx.options, ctx.shard, *needs)
        if ctx.shard is not None and grad_weight is not None:
            grad_weight = ctx.shard.whole(grad_weight, weight_VD)
        return grad_x, grad_weight, *[None] * 6


def _times(gradient: Tensor | None, factor: Tensor, is_compiled: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    """A gradient times a factor [1] of fp32, which is not rounded to the gradient's format before. In place, or, compiled, in a narrower format if
    that is given: autograd would convert to it in a further pass.
    """
    if gradient is None:
        return None
    if is_compiled and dtype is not None and dtype.itemsize < gradient.dtype.itemsize:
        return compiled_once(times_in)(gradient, factor, dtype)
    if is_compiled:
        compiled_once(scale_in_place)(gradient, factor)
    elif gradient.dtype == factor.dtype:
        torch._foreach_mul_([gradient], factor[0])  # on a GPU 1.5 times as fast as gradient.mul_(factor)
    else:
        gradient.copy_(gradient * factor)
    return gradient


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
    """Weighted losses and plain cross-entropies [N]; and two gradients of the losses' sum: that of x, in its format, and that of the weight's rows at
    hand, in fp32.
    """
    dtype, weight_VD = loss_dtype(x_ND), (weight_VD if shard is None else shard.part(weight_VD)).to(x_ND.dtype)
    losses_N, entropies_N = (torch.empty(len(x_ND), dtype=dtype, device=x_ND.device) for _ in range(2))
    grad_x_ND = torch.empty_like(x_ND) if needs_x else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight and not len(x_ND) else None
    for rows, logits in logit_chunks(x_ND, weight_VD, options, shard):
        x = x_ND[rows]
        losses, entropies_N[rows], grad_logits = logits.compute(x, targets_N[rows], needs_x or needs_weight)
        if grad_logits is not None:
            # Factors of a token go on the narrow side of the products.
            factor = options.logit_scale if weights_N is None else (weights_N[rows] * options.logit_scale)[:, None]
            plain = weights_N is None and options.logit_scale == 1.0
            if needs_x:
                torch.mm(grad_logits, weight_VD, out=grad_x_ND[rows])
                if not plain:
                    grad_x_ND[rows] = grad_x_ND[rows] * factor
            if needs_weight:
                right = x if plain else (x * factor).to(x.dtype)
                grad_weight_VD = _add_product(grad_weight_VD, grad_logits.t(), right, dtype, logits.bytes)
        losses_N[rows] = losses if weights_N is None else losses * weights_N[rows]
    return (losses_N, entropies_N), grad_x_ND, grad_weight_VD


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype, limit: int) -> Tensor:
    """total + left @ right, in a format that may be wider than that of the factors. It is in the memory of `total`; None: the product alone.

    Then the sum over chunks rounds no more than a single product would. A GPU adds in the product; on a CPU that is formed in blocks of
    rows, for it is as large as the total.
    """
    if left.dtype == dtype:
        return torch.mm(left, right) if total is None else torch.addmm(total, left, right, out=total)
    if right.is_cuda:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    is_first = total is None
    if is_first:
        total = torch.empty((len(left), right.shape[1]), dtype=dtype, device=right.device)
    rows = max(1, limit // (4 * total.shape[1] * total.element_size()))
    for part, here in zip(total.split(rows), left.split(rows)):
        product = torch.mm(here, right)
        if is_first:
            part.copy_(product)
        else:
            part.add_(product)
    return total


class OutputHead(nn.Module):
    """Logits, or with targets the summed loss of each sequence, of final hidden states.

    Its weight `weight` [V, D] is cast to the activations' format where it is used; its gradient is of fp32. A tied head has none, and is
    given the embedding's in every call. Where no gradient is taken, as in validation, it leaves out z-loss and label smoothing: what it
    returns is the cross-entropy alone.
    """

    casts = ("weight",)

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
        gradients keep the fast path. `with_cross_entropy`: return that beside them.
        """
        if (weight is None) == (self.weight is None):
            raise ValueError("a tied head is called with the embedding's weight, and no other head is")
        weight = self.weight if weight is None else weight
        if targets_BT is None:
            part = weight if self.shard is None else self.shard.part(weight)
            logits_BTV = finish_logits(F.linear(x_BTD, part.to(x_BTD.dtype)), self.options)
            return logits_BTV if self.shard is None else self.shard.join(logits_BTV)
        options = self.options if torch.is_grad_enabled() else self.options.cross_entropy_only()
        copy_VD = copy_at_hand(self)  # the loss makes the gradient of the weight itself
        losses = fused_losses_and_entropy(x_BTD, weight, targets_BT, options, sequence_weights_B, self.shard, copy_VD)
        return losses if with_cross_entropy else losses.objective_B
