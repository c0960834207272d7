"""What the tests know of GLM-4."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2),
    "no biases, tied": Model(**SMALL, kv_heads=1, tie_embeddings=True, attention=AttentionConfig(bias=[])),
    "fully rotated": Model(**SMALL, head_dim=16, norm_eps=0.01, rope=Rope(fraction=1.0)),
    "a quarter rotated": Model(**SMALL | {"dim": 40, "heads": 3}, head_dim=16, rope=Rope(fraction=0.25, theta=500.0)),
    "linear scaling": Model(**SMALL, kv_heads=2, rope=Rope(scaling="linear", factor=4.0)),
    "yarn scaling": Model(**SMALL, kv_heads=2, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}


def glm4(*shape: int, bias: bool) -> dict[str, Any]:
    return hub(
        "Glm4ForCausalLM",
        *shape,
        attention_bias=bias,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=32768,
        model_type="glm4",
        pad_token_id=151329,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )


PUBLISHED = {
    "glm4-9b": glm4(4096, 13696, 40, 32, 2, 151552, bias=True),
    "glm4-32b": glm4(6144, 23040, 61, 48, 2, 151552, bias=False),
}
COUNTS = {
    # zai-org/GLM-4-9B-0414 and GLM-4-32B-0414
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
}
READ = LLAMA | {"rms_norm_eps", "attention_bias", "partial_rotary_factor"}
