"""What the tests know of Granite 4."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, LinearAttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

# As in granite.py.
SMALL = {"logit_multiplier": 0.125, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}


def mamba(**others: Any) -> LinearAttentionConfig:
    return LinearAttentionConfig(**{"key_dim": 6, "value_dim": 8, **others})


CASES = {
    "mamba first": Model(**SMALL, linear_attention=mamba()),
    "attention first, two groups": Model(
        **SMALL, kv_heads=2, norm_eps=1e-3, linear_attention=mamba(pattern=[False, True], key_heads=2, value_heads=8, value_dim=4)
    ),
    "untied, biases, another kernel": Model(
        **SMALL | {"logit_multiplier": 0.3},
        tie_embeddings=False,
        attention=AttentionConfig(bias=["query", "key", "value", "output"], query_scalar=9.0),
        linear_attention=mamba(kernel=3),
    ),
    "experts": Model(**SMALL, experts=ExpertsConfig(count=4, active=2), linear_attention=mamba()),
    "experts, one shared": Model(
        **SMALL | {"layers": 3},
        residual_multiplier=1.0,
        experts=ExpertsConfig(count=5, active=3, shared=1),
        linear_attention=mamba(pattern=[True, False, True], key_heads=2),
    ),
    "attention alone, rotated": Model(
        **SMALL, kv_heads=2, positions="rope", rope=Rope(theta=500.0), linear_attention=LinearAttentionConfig(pattern=[False])
    ),
    "experts, attention alone": Model(
        **SMALL, experts=ExpertsConfig(count=3, active=2, shared=3), linear_attention=LinearAttentionConfig(pattern=[False])
    ),
    "rotated, yarn scaling": Model(
        **SMALL,
        positions="rope",
        rope=Rope(theta=500.0, scaling="yarn", factor=4.0, original_length=16),
        linear_attention=mamba(value_dim=16, key_heads=4),
    ),
}


def granite(*shape: int, logits: float, scores: float, heads: int = 0, **others: Any) -> dict[str, Any]:
    layers = shape[2]
    mamba = {
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": heads, "mamba_proj_bias": False,
    } if heads else {}  # fmt: skip
    return hub(
        "GraniteMoeHybridForCausalLM", *shape, 100352, attention_bias=False, attention_multiplier=scores, embedding_multiplier=12,
        hidden_act="silu", layer_types=["mamba" if heads and i % 10 != 5 else "attention" for i in range(layers)], logits_scaling=logits,
        max_position_embeddings=131072, model_type="granitemoehybrid", normalization_function="rmsnorm", position_embedding_type="nope" if heads else "rope",
        rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=True,
        **mamba, **{"rope_theta": 10000, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": shape[1], "residual_multiplier": 0.22, **others},
    )  # fmt: skip


PUBLISHED = {
    "granite4.0-h-tiny": granite(
        1536, 512, 40, 12, 4, logits=6, scores=0.0078125, heads=48,
        num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024,
    ),
    # As the text model of granite-4.0-3b-vision says it, sizes of Mamba 2 that no layer has included.
    "granite4.0-micro": granite(
        2560, 8192, 40, 40, 8, logits=10, scores=0.015625, rope_theta=10000000, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4,
        mamba_d_head=40, mamba_d_state=256, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128, mamba_proj_bias=False,
    ),
    "granite4.0-h-1b": granite(1536, 4096, 40, 12, 4, logits=6, scores=0.0078125, heads=48),
    "granite4.0-h-micro": granite(2048, 8192, 40, 32, 8, logits=8, scores=0.015625, heads=64),
    "granite4.0-h-small": granite(
        4096, 768, 40, 32, 8, logits=16, scores=0.0078125, heads=128,
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536,
    ),
}  # fmt: skip
# As transformers counts.
COUNTS = {
    "granite4.0-micro": 3_402_836_480,
    "granite4.0-h-1b": 1_461_538_368,
    "granite4.0-h-micro": 3_191_396_096,
    "granite4.0-h-tiny": 6_939_037_248,
    "granite4.0-h-small": 32_207_337_984,
}
READ = (LLAMA - {"head_dim"}) | {
    "rms_norm_eps", "layer_types", "position_embedding_type", "attention_multiplier", "embedding_multiplier", "logits_scaling",
    "residual_multiplier", "num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "mamba_expand", "mamba_n_groups",
    "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias",
}  # fmt: skip
