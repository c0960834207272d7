"""Masks: which earlier positions a position attends to, by document and by sliding window.

A sequence of T positions is packed from documents. `documents_BT` labels them: neighbours with equal labels belong together,
and wherever the label changes another document begins, so padding is simply one more label. Everything here stays on the
labels' device and never waits for it.

    labels     7 7 7 9 9 4 4 4        attends   1 . . . . . . .
    numbers    0 0 0 1 1 2 2 2                  1 1 . . . . . .
    positions  0 1 2 0 1 0 1 2                  1 1 1 . . . . .
                                                . . . 1 . . . .
                                                . . . 1 1 . . .   every row holds at least itself: no softmax over nothing
                                                . . . . . 1 . .

A window of W lets a query see itself and the W - 1 positions before it. Three back ends compute the same attention. `sdpa` takes a
dense mask: O(T^2) memory, any device. `flex` (FlexAttention, arXiv 2412.05496) skips the blocks of the attention matrix that hold
no pair that attends: O(T) memory, compiled for CUDA. `varlen` (torch's flash kernel for sequences of any length) takes documents as
sequences of their own: O(T) memory, CUDA and bf16. It needs to know how many documents a row has, without waiting for the device. So `starts_BN`,
made with the batch, lists where the documents of each row begin, and as many rows' ends as fill it up.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from pretrain.config.model_schema import Model
from pretrain.conventions import document_starts
from pretrain.errors import ConfigError
from pretrain.models.shape import head_widths


class PackedDocuments(NamedTuple):
    """Documents of all rows, one after the other, for `varlen`."""

    ends_N: Tensor
    """Where each ends in B x T positions, int32, after a 0; empty ones are between them."""
    length: int
    """T, the length of the longest one at most."""
    window: int
    """0: no window."""
    knows_groups: bool
    """Whether the kernel takes groups of queries."""


Mask = Tensor | BlockMask | PackedDocuments
"""True where a row attends, or what is added to the scores, [B or 1, H or 1, T, S]; or blocks of FlexAttention; or documents by their ends."""
Backend = Literal["sdpa", "flex", "varlen"]
FLEX_BLOCK = 128  # rows and columns of a block of FlexAttention, its default
FLEX_NARROWEST_HEAD = 16  # below, its kernels do not compile


def document_numbers(documents_BT: Tensor) -> Tensor:
    """Documents numbered 0, 1, ... along each sequence, int64 [B, T], from labels [B, T] of which only changes matter."""
    return document_begins(documents_BT).cumsum(dim=1)


def document_begins(numbers_BT: Tensor) -> Tensor:
    """True where a position is of another document than the one before; never at the first one. Boolean [B, T], from labels or numbers."""
    return F.pad(numbers_BT[:, 1:] != numbers_BT[:, :-1], (1, 0))


def document_positions(numbers_BT: Tensor) -> Tensor:
    """Positions counted from 0 in each document, int64 [B, T]."""
    # A row is sorted, so the leftmost place of a number is where its document begins.
    begin_BT = torch.searchsorted(numbers_BT, numbers_BT)
    return torch.arange(numbers_BT.shape[1], device=numbers_BT.device) - begin_BT


def starts_of(numbers_BT: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """`document_starts` of a batch on its device, which the host waits for; of whole rows without numbers."""
    if numbers_BT is None:
        return tokens_BT.new_zeros(len(tokens_BT), 1, dtype=torch.int32)
    return torch.from_numpy(document_starts(numbers_BT.cpu().numpy())).to(tokens_BT.device)


@functools.cache
def _varlen_knows_groups() -> bool:
    """Not in every version of torch."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attention_backend(model: Model, device: torch.device, training: bool, dtype: torch.dtype = torch.bfloat16) -> Backend:
    """What applies document masks: `model.attention_backend` with `auto` resolved. Raises ConfigError where it cannot run. `varlen` trains where
    it can; evaluations on other devices or in another `dtype` take `sdpa`.
    """
    narrowest = min(head_widths(model))
    if model.attention_backend == "auto":
        drops = training and model.attention_dropout
        flex = device.type == "cuda" and narrowest >= FLEX_NARROWEST_HEAD and not drops
        return "flex" if flex else "sdpa"
    if training:
        check_flex_with_dropout(model)
    if model.attention_backend != "sdpa" and training and device.type not in ("cuda", "meta"):
        what = {"flex": "FlexAttention has a backward pass", "varlen": "torch's kernel exists"}[model.attention_backend]
        raise ConfigError(
            f"model.attention_backend={model.attention_backend} cannot train on run.device={device.type}: {what} on CUDA only; use sdpa or auto"
        )
    if model.attention_backend == "varlen" and (device.type == "cpu" or dtype != torch.bfloat16):
        return "sdpa"
    if model.attention_backend == "flex" and device.type == "cuda" and narrowest < FLEX_NARROWEST_HEAD:
        raise ConfigError(
            f"model.attention_backend=flex needs model.head_dim of at least {FLEX_NARROWEST_HEAD}, and it is {narrowest}; "
            "raise it, or use sdpa or auto"
        )
    return model.attention_backend


def check_flex_with_dropout(model: Model) -> None:
    """Raise ConfigError for FlexAttention where weights of attention are dropped in training."""
    if model.attention_backend == "flex" and model.attention_dropout:
        raise ConfigError(
            f"model.attention_backend=flex drops no weights, as model.attention_dropout={model.attention_dropout:g} asks; use sdpa or auto"
        )


def attention_mask(
    length: int,
    device: torch.device,
    backend: Backend | None,
    numbers_BT: Tensor | None = None,
    window: int = 0,
    starts_BN: Tensor | None = None,
) -> Mask | None:
    """Who attends to whom: earlier positions of the same document and inside the window, and itself.

    `numbers_BT`: see `document_numbers`; `window` 0: no window; `starts_BN`: for `varlen`, see `document_starts`. Built once per forward, for
    all layers of a kind. Without a back end there is no mask: torch's causal kernel does by itself what is left.
    """
    if backend is None:
        return None
    window = window if window < length else 0
    if backend == "varlen":
        rows_B1 = torch.arange(len(starts_BN), device=device, dtype=torch.int32)[:, None] * length
        ends_N = F.pad((starts_BN + rows_B1).flatten(), (0, 1), value=len(starts_BN) * length)
        return PackedDocuments(ends_N, length, window, _varlen_knows_groups())
    if backend == "sdpa":
        return _dense_mask(length, device, numbers_BT, window)
    numbers_BT = torch.zeros(1, length, dtype=torch.int64, device=device) if numbers_BT is None else numbers_BT
    return _block_mask(numbers_BT, window)


def cached_mask(start: int, stop: int, device: torch.device, window: int = 0, numbers_BS: Tensor | None = None) -> Tensor:
    """Mask [B or 1, 1, stop - start, stop] of new positions, which attend to a cache and to each other. With the document numbers of all
    positions they attend to their own document only.
    """
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    attends = distance >= 0
    attends = (attends & (distance < window) if window else attends)[None]
    if numbers_BS is not None:
        attends = attends & (numbers_BS[:, start:, None] == numbers_BS[:, None, :])
    return attends[:, None]


def _dense_mask(length: int, device: torch.device, numbers_BT: Tensor | None, window: int) -> Tensor:
    """Boolean [B or 1, 1, T, T], true where a row attends."""
    if numbers_BT is None:
        attends = torch.ones(1, length, length, dtype=torch.bool, device=device)
    else:
        attends = numbers_BT[:, :, None] == numbers_BT[:, None, :]
    return (attends.tril().triu(1 - window) if window else attends.tril())[:, None]


def _block_mask(numbers_BT: Tensor, window: int) -> BlockMask:
    """What `create_block_mask` makes of the same rule, without going through all T^2 pairs.

    Numbers do not fall along a sequence, so the first and the last one of each block of positions decide. A block of keys matters to a later
    block of queries on two conditions: it ends in the document in which the queries begin, and it reaches into the window of the first query.
    No mask is needed inside if both blocks lie in one document altogether, and the keys lie in the window of the last query.
    """
    length = numbers_BT.shape[1]
    # What is missing in the last block counts as a document of its own: such a block is never taken for a whole one.
    padded_BT = F.pad(numbers_BT, (0, -length % FLEX_BLOCK), value=length)
    first_BN, last_BN = padded_BT[:, ::FLEX_BLOCK], padded_BT[:, FLEX_BLOCK - 1 :: FLEX_BLOCK]
    needed_BNN = (last_BN[:, None, :] >= first_BN[:, :, None]).tril()
    whole_BNN = (first_BN[:, None, :] == last_BN[:, :, None]).tril(-1)
    if window:
        begin_N = torch.arange(first_BN.shape[1], device=numbers_BT.device) * FLEX_BLOCK
        nearest_NN = begin_N[:, None] - (begin_N + FLEX_BLOCK - 1)  # from the first query of a block to the last key of another
        needed_BNN = needed_BNN & (nearest_NN < window)
        whole_BNN = whole_BNN & (nearest_NN + 2 * (FLEX_BLOCK - 1) < window)
    partial, whole = _listed(needed_BNN & ~whole_BNN), _listed(whole_BNN)
    rule = _attends(numbers_BT.int(), window)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=FLEX_BLOCK, mask_mod=rule, seq_lengths=(length, length))


def _listed(blocks_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks how many there are, [B, 1, N], and which, [B, 1, N, N], those that are there first; int32."""
    order_BNN = blocks_BNN.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_BNN.sum(dim=-1).int()[:, None], order_BNN.int()[:, None]


def _attends(numbers_BT: Tensor, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # One row of numbers may stand for all sequences.
        row = batch if numbers_BT.shape[0] > 1 else batch * 0
        attends = (query >= key) & (numbers_BT[row, query] == numbers_BT[row, key])
        return attends & (query - key < window) if window else attends

    return rule
