"""Which code computes attention where FlexAttention does not: ours of matrix products, or one of torch's fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from pretrain.models.causal_blocks_fp32 import is_faster

SHORT = 128
"""Positions up to which plain matrix products are the fastest in bf16 on a CPU. torch's fused kernel takes 7 times as long at 16 positions."""

_asked = "auto"


def ask_for_kernel(name: str) -> None:
    """The kernel that `run.attention_kernel` names. On a CPU `flash` is torch's fused one, even for training, where matrix products or our blocks are faster."""
    global _asked
    _asked = name


@contextmanager
def changing_shapes() -> Iterator[None]:
    """Where nearly every call of attention has another shape. torch prefers cuDNN's kernel on an H100, which takes about a second to plan each new one."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled and _asked != "auto")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def way_of(
    q_BHTG: Tensor, k_BKSG: Tensor, has_mask: bool, is_special: bool
) -> Literal["products", "blocks", "blocks_fp32", "fused"]:
    """What computes attention where FlexAttention does not: matrix products, those over blocks of queries, or torch's fused kernels.

    `is_special`: it has what no fused kernel computes: a soft-cap, sinks, dropped weights.
    """
    trains_on_cpu = _asked != "flash" and q_BHTG.device.type == "cpu" and torch.is_grad_enabled()
    in_bf16, length = trains_on_cpu and q_BHTG.dtype == torch.bfloat16, q_BHTG.shape[2]
    if is_special or (in_bf16 and length * k_BKSG.shape[2] <= SHORT**2):
        return "products"
    if in_bf16 and not has_mask and length == k_BKSG.shape[2]:
        return "blocks"
    if trains_on_cpu and not has_mask and q_BHTG.dtype == torch.float32 and is_faster(q_BHTG, k_BKSG):
        return "blocks_fp32"
    return "fused"


def repeats_groups(q_BHTG: Tensor, k_BKSG: Tensor, has_mask: bool) -> bool:
    """Whether torch's kernels get keys and values once per head, because the kernel that is to compute knows no groups.

    On CUDA that is the memory-efficient kernel. It is the only one for fp32, and for masks where cuDNN's is not used. Given groups, torch would fall
    back to plain matrix products there and keep all H x T x T scores (sdp_utils.cpp, notes of scaled_dot_product_attention).
    """
    grouped = q_BHTG.shape[1] != k_BKSG.shape[1]
    return grouped and q_BHTG.is_cuda and (has_mask or q_BHTG.dtype == torch.float32 or _asked == "efficient")
