"""What a model section leaves open is derived here, and what cannot go together is refused."""

from __future__ import annotations

import dataclasses

from pretrain.config.schema import Model
from pretrain.errors import ConfigError, nearest_multiples


def complete(model: Model, sequence_length: int | None = None) -> Model:
    """The section with every derivable key filled in (`vocab_size` stays as it is). Raises ConfigError naming both keys."""
    if model.head_dim is None and model.dim % model.heads:
        raise ConfigError(
            f"model.dim={model.dim} is not divisible by model.heads={model.heads}; "
            f"nearest legal model.dim: {nearest_multiples(model.dim, model.heads)}, or set model.head_dim"
        )
    head_dim = model.head_dim or model.dim // model.heads
    if head_dim % 2:
        raise ConfigError(
            f"model.head_dim={head_dim} must be even: rotary positions turn pairs; nearest: {head_dim - 1}, {head_dim + 1}"
        )
    kv_heads = model.kv_heads or model.heads
    if model.heads % kv_heads:
        legal = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise ConfigError(f"model.heads={model.heads} is not divisible by model.kv_heads={kv_heads}; legal: {legal}")
    longest = model.max_sequence_length or sequence_length
    if sequence_length and longest < sequence_length:
        raise ConfigError(
            f"model.max_sequence_length={longest} is below data.sequence_length={sequence_length}; raise it or remove it"
        )
    ffn_dim = model.ffn_dim or -(-8 * model.dim // (3 * 64)) * 64
    return dataclasses.replace(model, head_dim=head_dim, kv_heads=kv_heads, ffn_dim=ffn_dim, max_sequence_length=longest)
