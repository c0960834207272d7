"""Model FLOPs and MFU, by the convention most published numbers use (PaLM, arXiv 2204.02311, appendix B).

Per token, forward and backward: 6 x (parameters in matrix multiplications; the embedding look-up is none, the output head is one)
+ 12 x layers x attention width x sequence length. No causal discount, no recomputation.
"""

from __future__ import annotations

import torch

from pretrain.config.schema import Model

# Dense peak, FLOP/s, as printed in the vendors' data sheets. Names exactly as torch reports them: what begins alike (4090 D,
# 3090 Ti, a MIG slice) is another device.
PEAKS_BF16 = {
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-PCIE-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}


def matmul_parameters(model: Model) -> int:
    """Parameters that a token is multiplied with."""
    attention = model.dim * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    mlp = 3 * model.dim * model.ffn_dim
    return model.layers * (attention + mlp) + model.vocab_size * model.dim


def flops_per_token(model: Model, sequence_length: int) -> int:
    """FLOPs of forward and backward per token."""
    return 6 * matmul_parameters(model) + 12 * model.layers * model.heads * model.head_dim * sequence_length


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Peak of a device in FLOP/s; None where it is not known, which makes MFU unknown rather than guessed."""
    if device.type != "cuda" or compute != "bf16":
        return None
    return PEAKS_BF16.get(torch.cuda.get_device_name(device))
