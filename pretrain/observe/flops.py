"""Peaks of devices, for the MFU by the convention most published numbers use (PaLM, arXiv 2204.02311, appendix B).

Per token (`flops_per_token` of a network), forward and backward: 6 x (parameters in matrix products) + 12 x layers x attention width x min(sequence length,
window); a layer of linear attention has 18 x value heads x key width x value width in place of attention. The output head counts, the embedding look-up does not. There is no causal discount, and recomputation does not count.
"""

from __future__ import annotations

import torch

# Dense peak, FLOP/s, as printed in the vendors' data sheets. Names are exactly those that torch reports: a longer name (4090 D,
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


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Peak of a device in FLOP/s; None if it is unknown, so that MFU is unknown too and not guessed."""
    if device.type != "cuda" or compute != "bf16":
        return None
    return PEAKS_BF16.get(torch.cuda.get_device_name(device))
