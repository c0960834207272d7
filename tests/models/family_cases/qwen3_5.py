"""What the tests know of Qwen3.5's text model."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import LinearAttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
SIZES = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=10)


def linear(**others: Any) -> LinearAttentionConfig:
    return LinearAttentionConfig(**vars(SIZES) | others)


CASES = {
    "plain": Model(**SMALL, kv_heads=2),
    "grouped values": Model(**SMALL, kv_heads=1, norm_eps=1e-3, linear_attention=SIZES),
    "attention first": Model(**SMALL | {"layers": 3}, linear_attention=linear(pattern=[False, True])),
    "another kernel": Model(**SMALL, linear_attention=linear(kernel=2)),
    "a kernel of one": Model(**SMALL, linear_attention=linear(kernel=1)),
    "one value head for each key head": Model(**SMALL, linear_attention=linear(value_heads=2)),
    "four value heads for one key head": Model(**SMALL, linear_attention=linear(key_heads=1)),
    "wide heads, tied": Model(**SMALL | {"heads": 3}, head_dim=24, kv_heads=1, tie_embeddings=True, norm_eps=0.01),
    "fully rotated": Model(**SMALL, rope=Rope(fraction=1.0, theta=500.0)),
    "yarn scaling": Model(**SMALL, kv_heads=2, head_dim=16, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}

MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


def qwen3_5(*shape: int, values: int, tied: bool) -> dict[str, Any]:
    layers = shape[2]
    return hub(
        "Qwen3_5ForCausalLM",
        *shape,
        attention_bias=False,
        attn_output_gate=True,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_value_head_dim=128,
        mamba_ssm_dtype="float32",
        max_position_embeddings=262144,
        model_type="qwen3_5_text",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-06,
        rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default", **MROPE},
        tie_word_embeddings=tied,
    )


PUBLISHED = {
    "qwen3.5-9b": qwen3_5(4096, 12288, 32, 16, 4, 248320, values=32, tied=False),
    "qwen3.5-27b": qwen3_5(5120, 17408, 64, 24, 4, 248320, values=48, tied=False),
}
COUNTS = {
    # As transformers counts its text models of these shapes. llama.cpp prints 8.95 B and 26.90 B; the hub's files hold a vision tower besides.
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
}
READ = LLAMA | {
    "rms_norm_eps",
    "layer_types",
    "full_attention_interval",
    "attn_output_gate",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "partial_rotary_factor",
}
