"""The logits of one chunk of tokens after another, with their losses and gradients: output_head.py never has more of them.

There are two forms of the same arithmetic (loss.py has the formulas). `ChunkLogits` does one operation after another, also where ranks share the
vocabulary. `CompiledChunkLogits` is for torch's compiler: two passes over the logits in place of ten, for a whole vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from pretrain.conventions import IGNORED
from pretrain.models.compiling import compile_strictly
from pretrain.models.loss import LossOptions, VocabularyShard, loss_dtype

T = TypeVar("T")

CPU_CHUNK_BYTES, CHUNK_BYTES = 256 << 20, 1 << 30
"""Memory that the logits of a chunk may take, on CPU and elsewhere: enough tokens for matrix products at full speed."""

CPU_CHUNK_TOKENS = 1024
"""More are no faster, and leave the caches earlier."""


def logit_chunks(
    x_ND: Tensor, weight_VD: Tensor, options: LossOptions, shard: VocabularyShard | None
) -> Iterator[tuple[slice, ChunkLogits | CompiledChunkLogits]]:
    """Slices of the tokens, of equal size but for the last, with buffers for their logits. With a `shard` they are the same on all ranks."""
    tokens, vocabulary = len(x_ND), len(weight_VD) if shard is None else shard.largest
    if not tokens:
        return
    on_cpu, compiled = x_ND.device.type == "cpu", options.compiled and shard is None
    size = chunk_size(tokens, vocabulary, x_ND.dtype, on_cpu, options, compiled)
    limit = _chunk_bytes(on_cpu, options)
    if compiled:
        buffers = CompiledChunkLogits(size, weight_VD, options, limit)
    else:
        buffers = ChunkLogits(size, weight_VD, options, shard, limit)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens)), buffers


def chunk_size(
    tokens: int, vocabulary: int, dtype: torch.dtype, on_cpu: bool, options: LossOptions, compiled: bool = False
) -> int:
    """How many of `tokens` tokens, in this format, have their logits of so many rows of the vocabulary at one time."""
    bytes_per_logit = dtype.itemsize if compiled else ChunkLogits.bytes_per_logit(dtype)
    most = max(1, _chunk_bytes(on_cpu, options) // (vocabulary * bytes_per_logit))
    if on_cpu:
        most = min(most, CPU_CHUNK_TOKENS)
    count = -(-tokens // most)
    return -(-tokens // count)


def _chunk_bytes(on_cpu: bool, options: LossOptions) -> int:
    return options.chunk_bytes or (CPU_CHUNK_BYTES if on_cpu else CHUNK_BYTES)


def rows_aligned(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty matrix, on a GPU with rows that begin at multiples of 128 bytes. Where rows do not begin at multiples of 16, an H200 takes a kernel for products
    that has a fifth of the usual speed.
    """
    rows, columns = shape
    unit = 1 if device.type == "cpu" else 128 // dtype.itemsize
    return torch.empty((rows, -(-columns // unit) * unit), dtype=dtype, device=device)[:, :columns]


class ChunkLogits:
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
        if dtype == weight_VD.dtype:
            self._raw = self._logits = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._raw = rows_aligned(shape, weight_VD.dtype, device)
            self._logits = torch.empty(shape, dtype=dtype, device=device)
        self._probabilities = torch.empty(shape, dtype=dtype, device=device)

    def project(self, x: Tensor) -> ChunkLogits:
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


class CompiledChunkLogits:
    """`ChunkLogits` with its arithmetic compiled. There is one buffer: the gradient takes the place of the products, in a function of its own.
    In one that reads and overwrites them, torch 2.11's compiler for CPUs took the gradient for the products, and made other losses of it.
    """

    def __init__(self, tokens: int, weight_VD: Tensor, options: LossOptions, limit: int) -> None:
        self.weight_VD, self.options, self.bytes = weight_VD, options, limit
        self._raw = rows_aligned((tokens, len(weight_VD)), weight_VD.dtype, weight_VD.device)

    def project(self, x: Tensor) -> CompiledChunkLogits:
        self.raw = self._raw[: len(x)]
        torch.mm(x, self.weight_VD.t(), out=self.raw)
        return self

    def losses(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, entropies, self.log_partition = compiled(chunk_losses)(self.raw, targets, *self._switches())
        return losses, entropies

    def gradient(self, targets: Tensor) -> Tensor:
        compiled(overwrite_with_gradient)(self.raw, targets, self.log_partition, *self._switches())
        return self.raw

    def _switches(self) -> tuple[float, float, float, float | None]:
        options = self.options
        return options.label_smoothing, options.z_loss, options.logit_scale, options.soft_cap


@functools.cache
def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """`chunk_losses` or `overwrite_with_gradient`, compiled once in a process for each set of options."""
    return compile_strictly(function)


def chunk_losses(
    raw_NV: Tensor, targets_N: Tensor, label_smoothing: float, z_loss: float, logit_scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token losses, cross-entropies and logsumexp of logits [N] of products with the output weight. fp32 (fp64 from fp64); options as in `LossOptions`."""
    logits, counted, columns = _scaled(raw_NV, logit_scale, soft_cap), targets_N != IGNORED, _columns_of(targets_N)
    log_partition = torch.logsumexp(logits, dim=1)
    target_logits = logits.gather(1, columns[:, None]).squeeze(1)
    losses = log_partition - (1 - label_smoothing) * target_logits
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(dim=1)
    if z_loss:
        losses = losses + z_loss * log_partition.square()
    return losses.where(counted, 0), (log_partition - target_logits).where(counted, 0), log_partition


def overwrite_with_gradient(
    raw_NV: Tensor,
    targets_N: Tensor,
    log_partition_N: Tensor,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    soft_cap: float | None,
) -> None:
    """Put the gradient of the losses' sum with respect to scaled logits before the cap in the place of the products."""
    logits, counted, columns = _scaled(raw_NV, logit_scale, soft_cap), targets_N != IGNORED, _columns_of(targets_N)
    factor = 1 + 2 * z_loss * log_partition_N if z_loss else torch.ones_like(log_partition_N)
    gradient = (logits - log_partition_N[:, None]).exp() * factor[:, None]
    if label_smoothing:
        gradient = gradient - label_smoothing / logits.shape[1]
    # In the format of the gradient: a Boolean times a number would be of fp32, whatever the rest is.
    here = (torch.arange(logits.shape[1], device=logits.device) == columns[:, None]).to(gradient.dtype)
    gradient = (gradient - (1 - label_smoothing) * here) * counted[:, None]
    if soft_cap is not None:
        gradient = gradient * (1 - (logits / soft_cap).square())
    raw_NV.copy_(gradient)


def _scaled(raw_NV: Tensor, logit_scale: float, soft_cap: float | None) -> Tensor:
    logits = (raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float()) * logit_scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def _columns_of(targets_N: Tensor) -> Tensor:
    return targets_N.where(targets_N != IGNORED, 0)
