"""Model FLOPs and MFU, by the convention most published numbers use (PaLM, arXiv 2204.02311, appendix B).

Per token, forward and backward: 6 x (parameters in matrix multiplications; the embedding look-up is none, the output head is one)
+ 12 x layers x attention width x min(sequence length, window). No causal discount, no recomputation.
"""

from __future__ import annotations

import torch

from pretrain.config.model_schema import Model
from pretrain.models.layers import Embedding
from pretrain.models.network import build_network
from pretrain.models.shape import has_window

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
    """Parameters that a token is multiplied with; of routed experts those of the active ones."""
    with torch.device("meta"):
        network = build_network(model)
    if model.family == "hf":
        return network.matmul_parameters()
    tables = {id(module.weight) for module in network.modules() if isinstance(module, Embedding)}
    matrices = [
        (name, p.numel())
        for name, p in network.named_parameters()
        if p.dim() > 1 and id(p) not in tables and not name.endswith("bias")
    ]
    routed = sum(count for name, count in matrices if ".experts." in name)
    rest = sum(count for name, count in matrices if ".experts." not in name)
    # Every token predicted ahead goes through the one head again; a tied one is a table.
    heads = model.predict_ahead + model.tie_embeddings
    return rest + heads * model.vocab_size * model.dim + (routed * model.experts.active // model.experts.count if routed else 0)


def active_parameters(model: Model) -> int:
    """Parameters that a token meets: all but those of the routed experts it is not sent to. Both embeddings are counted."""
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in build_network(model).named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - routed + (routed * model.experts.active // model.experts.count if routed else 0)


def attention_flops(model: Model, sequence_length: int) -> int:
    """FLOPs per token of scores and of the sums over values, forward and backward, over all layers."""
    if model.family == "hf":  # windows, where it has any, are not known here
        return 12 * model.layers * model.heads * model.head_dim * sequence_length
    latent = model.latent
    widths = latent.plain_dim + latent.rope_dim + latent.value_dim if latent.kv_rank else 2 * model.head_dim
    layers = [*range(model.layers), *[model.layers - 1] * model.predict_ahead]
    seen = [min(sequence_length, model.attention.window) if has_window(model, i) else sequence_length for i in layers]
    return 6 * model.heads * widths * sum(seen)


def flops_per_token(model: Model, sequence_length: int) -> int:
    """FLOPs of forward and backward per token, of a complete model."""
    return 6 * matmul_parameters(model) + attention_flops(model, sequence_length)


def flops_per_target_token(model: Model, source: float, target: float) -> int:
    """FLOPs of forward and backward of an encoder-decoder per target token, on sources and targets of on average so many tokens."""
    with torch.device("meta"):
        network = build_network(model)
    tables = {id(module.weight) for module in network.modules() if isinstance(module, Embedding)}
    ratio, total = source / target, float(model.vocab_size * model.dim if model.tie_embeddings else 0)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in tables:
            of_sources = name.startswith("encoder.") or name.endswith(("cross.key.weight", "cross.value.weight"))
            total += parameter.numel() * (ratio if of_sources else 1)
    seen = model.encoder_layers * ratio * source + model.layers * (target + source)
    return round(6 * total + 12 * model.heads * model.head_dim * seen)


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Peak of a device in FLOP/s; None where it is not known, which makes MFU unknown rather than guessed."""
    if device.type != "cuda" or compute != "bf16":
        return None
    return PEAKS_BF16.get(torch.cuda.get_device_name(device))
