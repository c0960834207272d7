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

CPU_CACHE_BYTES = 4 << 20
"""Logits in fp32 and their probabilities that exist at one time, for each thread. Ten passes go over them, and more would leave the caches in between."""


def logit_chunks(
    x_ND: Tensor, weight_VD: Tensor, options: LossOptions, shard: VocabularyShard | None
) -> Iterator[tuple[slice, ChunkLogits | CompiledChunkLogits]]:
    """Slices of the tokens, of equal size but for the last, with buffers for their logits. With a `shard` they are the same on all ranks."""
    tokens, vocabulary = len(x_ND), len(weight_VD) if shard is None else shard.largest
    if not tokens:
        return
    on_cpu, is_compiled = x_ND.device.type == "cpu", options.compiled and shard is None
    in_parts = on_cpu and shard is None
    limit = _chunk_bytes(on_cpu, options)
    if is_compiled:
        size = _chunk_size(tokens, limit // (vocabulary * x_ND.dtype.itemsize), on_cpu)
        buffers = CompiledChunkLogits(size, weight_VD, options, limit)
    elif in_parts:
        size = _chunk_size(tokens, limit // 2 // (vocabulary * x_ND.dtype.itemsize), on_cpu)
        cache = min(limit // 2, torch.get_num_threads() * CPU_CACHE_BYTES)
        at_once = max(1, cache // (vocabulary * 2 * loss_dtype(x_ND).itemsize))
        buffers = ChunkLogits(size, at_once, weight_VD, options, shard, limit)
    else:
        size = whole_chunk_size(tokens, vocabulary, x_ND.dtype, on_cpu, options)
        buffers = ChunkLogits(size, size, weight_VD, options, shard, limit)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens)), buffers


def whole_chunk_size(tokens: int, vocabulary: int, dtype: torch.dtype, on_cpu: bool, options: LossOptions) -> int:
    """How many of `tokens` tokens are in a chunk that is computed at once. Their activations are in this format, and a rank has logits for `vocabulary`
    tokens.
    """
    bytes_per_logit = 2 * dtype.itemsize if dtype.itemsize >= 4 else dtype.itemsize + 8
    return _chunk_size(tokens, _chunk_bytes(on_cpu, options) // (vocabulary * bytes_per_logit), on_cpu)


def _chunk_size(tokens: int, most: int, on_cpu: bool) -> int:
    """How many tokens are in a chunk, if there is memory for `most`. All chunks but the last have as many."""
    most = max(1, min(most, CPU_CHUNK_TOKENS) if on_cpu else most)
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

    Fresh memory for every chunk costs more than the arithmetic on it: the operating system clears each page. Products of all tokens of a chunk
    are there, in the format of the weight, and logits in fp32 of only `at_once` of them.
    """

    def __init__(
        self, tokens: int, at_once: int, weight_VD: Tensor, options: LossOptions, shard: VocabularyShard | None, limit: int
    ) -> None:
        self.weight_VD, self.options, self.shard, self.bytes = weight_VD, options, shard, limit
        self.vocabulary = len(weight_VD) if shard is None else shard.vocabulary
        self.at_once, self.dtype = min(at_once, tokens), loss_dtype(weight_VD)
        self._raw = rows_aligned((tokens, len(weight_VD)), weight_VD.dtype, weight_VD.device)
        self._probabilities = torch.empty((self.at_once, len(weight_VD)), dtype=self.dtype, device=weight_VD.device)
        self._logits = None if self.dtype == weight_VD.dtype else torch.empty_like(self._probabilities)

    def compute(self, x: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses [n] and cross-entropies [n] of tokens with these activations [n, D], zero where ignored; and a gradient [n, V].

        The gradient is that of the sum of losses with respect to the scaled logits before the cap, in the format of the activations. It takes
        the place of the products.
        """
        raw = self._raw[: len(x)]
        torch.mm(x, self.weight_VD.t(), out=raw)
        both = torch.empty((2, len(x)), dtype=self.dtype, device=x.device)
        for start in range(0, len(x), self.at_once):
            rows = slice(start, start + self.at_once)
            self._finish(raw[rows])
            both[:, rows] = torch.stack(self._losses(targets[rows]))
            if with_gradient:
                raw[rows] = self._gradient(targets[rows])
        return both[0], both[1], raw if with_gradient else None

    def _finish(self, raw: Tensor) -> None:
        """Make logits of products: these were rounded to their format, as where logits are asked for, and the rest is in fp32."""
        options = self.options
        self.logits = raw if self._logits is None else self._logits[: len(raw)].copy_(raw)
        self.probabilities = self._probabilities[: len(raw)]
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

    def _losses(self, targets: Tensor) -> tuple[Tensor, Tensor]:
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

    def _gradient(self, targets: Tensor) -> Tensor:
        """In fp32. It takes the place of the probabilities."""
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
        return grad

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

    def compute(self, x: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """`ChunkLogits.compute`."""
        raw, options = self._raw[: len(x)], self.options
        switches = options.label_smoothing, options.z_loss, options.logit_scale, options.soft_cap
        torch.mm(x, self.weight_VD.t(), out=raw)
        losses, entropies, log_partition = compiled_once(chunk_losses)(raw, targets, *switches)
        if with_gradient:
            compiled_once(overwrite_with_gradient)(raw, targets, log_partition, *switches)
        return losses, entropies, raw if with_gradient else None


@functools.cache
def compiled_once(function: Callable[..., T]) -> Callable[..., T]:
    """One of the functions below, compiled once in a process for each set of options."""
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


def times_in(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in a format."""
    return (gradient * factor).to(dtype)


def scale_in_place(gradient: Tensor, factor: Tensor) -> None:
    """Multiply; the product is formed in the wider of the two formats."""
    gradient.copy_(gradient * factor)


def _scaled(raw_NV: Tensor, logit_scale: float, soft_cap: float | None) -> Tensor:
    logits = (raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float()) * logit_scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def _columns_of(targets_N: Tensor) -> Tensor:
    return targets_N.where(targets_N != IGNORED, 0)
