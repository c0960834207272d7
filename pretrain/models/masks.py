"""Document masks: a position attends to no other document than its own, and counts from where that begins.

A sequence of T positions is packed from documents. `documents_BT` labels them: neighbours with equal labels belong together,
and wherever the label changes another document begins, so padding is simply one more label. Everything here stays on the
labels' device and never waits for it.

    labels     7 7 7 9 9 4 4 4        attends   1 . . . . . . .
    numbers    0 0 0 1 1 2 2 2                  1 1 . . . . . .
    positions  0 1 2 0 1 0 1 2                  1 1 1 . . . . .
                                                . . . 1 . . . .
                                                . . . 1 1 . . .   every row holds at least itself: no softmax over nothing
                                                . . . . . 1 . .

Two back ends compute the same attention. `sdpa` takes a dense mask: O(T^2) memory, any device. `flex` (FlexAttention,
arXiv 2412.05496) skips the blocks of the attention matrix that hold no pair of one document: O(T) memory, compiled for CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pretrain.config.schema import Model
from pretrain.errors import ConfigError

Mask = Tensor | BlockMask
FLEX_BLOCK = 128  # rows and columns of a block of FlexAttention, its default
FLEX_NARROWEST_HEAD = 16  # below, its kernels do not compile


def document_numbers(documents_BT: Tensor) -> Tensor:
    """Documents numbered 0, 1, ... along each sequence, int64 [B, T], from labels [B, T] of which only changes matter."""
    return F.pad((documents_BT[:, 1:] != documents_BT[:, :-1]).cumsum(dim=1), (1, 0))


def document_positions(numbers_BT: Tensor) -> Tensor:
    """Positions counted from 0 in each document, int64 [B, T]."""
    # A row is sorted, so the leftmost place of a number is where its document begins.
    begin_BT = torch.searchsorted(numbers_BT, numbers_BT)
    return torch.arange(numbers_BT.shape[1], device=numbers_BT.device) - begin_BT


def attention_backend(model: Model, device: torch.device, training: bool) -> Literal["sdpa", "flex"]:
    """What applies document masks: `model.attention` with `auto` resolved. Raises ConfigError where it cannot run."""
    if model.attention == "auto":
        return "flex" if device.type == "cuda" and model.head_dim >= FLEX_NARROWEST_HEAD else "sdpa"
    if model.attention == "flex" and training and device.type != "cuda":
        raise ConfigError(
            f"model.attention=flex cannot train on run.device={device.type}: FlexAttention has a backward pass on CUDA only; "
            "use sdpa or auto"
        )
    if model.attention == "flex" and device.type == "cuda" and model.head_dim < FLEX_NARROWEST_HEAD:
        raise ConfigError(
            f"model.attention=flex needs model.head_dim of at least {FLEX_NARROWEST_HEAD}, and it is {model.head_dim}; "
            "raise it, or use sdpa or auto"
        )
    return model.attention


def document_mask(numbers_BT: Tensor, backend: Literal["sdpa", "flex"]) -> Mask:
    """Who attends to whom: earlier positions of the same document, and itself. Built once per forward, for all layers."""
    return _block_mask(numbers_BT) if backend == "flex" else _dense_mask(numbers_BT)


def _dense_mask(numbers_BT: Tensor) -> Tensor:
    """Boolean [B, 1, T, T], true where a row attends."""
    return (numbers_BT[:, :, None] == numbers_BT[:, None, :]).tril()[:, None]


def _block_mask(numbers_BT: Tensor) -> BlockMask:
    """What `create_block_mask` makes of the same rule, without going through all T^2 pairs.

    Numbers do not fall along a sequence, so the first and the last one of each block of positions decide: a block of keys
    matters to a later block of queries if it ends in the document in which that begins, and needs no mask inside if both lie in
    one document altogether.
    """
    length = numbers_BT.shape[1]
    # What is missing in the last block counts as a document of its own: such a block is never taken for a whole one.
    padded_BT = F.pad(numbers_BT, (0, -length % FLEX_BLOCK), value=length)
    first_BN, last_BN = padded_BT[:, ::FLEX_BLOCK], padded_BT[:, FLEX_BLOCK - 1 :: FLEX_BLOCK]
    needed_BNN = (last_BN[:, None, :] >= first_BN[:, :, None]).tril()
    whole_BNN = (first_BN[:, None, :] == last_BN[:, :, None]).tril(-1)
    partial, whole = _listed(needed_BNN & ~whole_BNN), _listed(whole_BNN)
    rule = _same_document(numbers_BT.int())
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=FLEX_BLOCK, mask_mod=rule, seq_lengths=(length, length))


def _listed(blocks_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks how many there are, [B, 1, N], and which, [B, 1, N, N], those that are there first; int32."""
    order_BNN = blocks_BNN.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_BNN.sum(dim=-1).int()[:, None], order_BNN.int()[:, None]


def _same_document(numbers_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers_BT[batch, query] == numbers_BT[batch, key])

    return attends


def masked_attention(q_BHTG: Tensor, k_BKTG: Tensor, v_BKTG: Tensor, mask: Mask) -> Tensor:
    """Attention [B, H, T, G] under a document mask, with the back end that the mask was built for."""
    grouped = q_BHTG.shape[1] != k_BKTG.shape[1]
    if isinstance(mask, Tensor):
        if grouped and q_BHTG.is_cuda:
            # On CUDA the one fused kernel that takes a mask knows no groups: with them torch would fall back to plain
            # matrix products and keep all H x T x T scores (notes of torch's scaled_dot_product_attention).
            repeats = q_BHTG.shape[1] // k_BKTG.shape[1]
            k_BKTG, v_BKTG = (x.repeat_interleave(repeats, dim=1) for x in (k_BKTG, v_BKTG))
            grouped = False
        return F.scaled_dot_product_attention(q_BHTG, k_BKTG, v_BKTG, attn_mask=mask, enable_gqa=grouped)
    # A compiled block takes it in as it is; on CPU it is the reference only, and compiling costs more than it saves.
    compiled = q_BHTG.is_cuda and not torch.compiler.is_compiling()
    attend = _compiled_flex() if compiled else flex_attention
    return attend(q_BHTG, k_BKTG, v_BKTG, block_mask=mask, enable_gqa=grouped)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)
