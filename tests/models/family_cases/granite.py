"""What the tests know of Granite."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

# The published files divide logits by 8 or 16. Undivided ones are of 15 here, where the last bit alone is 1e-6.
SMALL = {"logit_multiplier": 0.125, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
ALL = ["query", "key", "value", "output"]

CASES = {
    "plain": Model(**SMALL),
    "other factors": Model(
        **SMALL | {"logit_multiplier": 0.3},
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention=AttentionConfig(query_scalar=10.0),
    ),
    "untied, grouped queries": Model(
        **SMALL | {"logit_multiplier": 0.5}, kv_heads=2, tie_embeddings=False, embedding_multiplier=1.0
    ),
    "biases, wide heads": Model(
        **SMALL | {"logit_multiplier": 1.0},
        head_dim=16,
        attention=AttentionConfig(bias=ALL),
        mlp=MlpConfig(bias=True),
        residual_multiplier=1.0,
    ),
    "yarn scaling": Model(**SMALL, norm_eps=1e-3, rope=Rope(theta=5e4, scaling="yarn", factor=4.0, original_length=16)),
}


def granite(*shape: int, logits: float, scores: float) -> dict[str, Any]:
    return hub(
        "GraniteForCausalLM",
        *shape,
        attention_bias=False,
        attention_multiplier=scores,
        embedding_multiplier=12.0,
        hidden_act="silu",
        logits_scaling=logits,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="granite",
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=10000000.0,
        tie_word_embeddings=True,
    )


PUBLISHED = {
    "granite3.3-2b": granite(2048, 8192, 40, 32, 8, 49159, logits=8.0, scores=0.015625),
    "granite3.3-8b": granite(4096, 12800, 40, 32, 8, 49159, logits=16.0, scores=0.0078125),
}
COUNTS = {
    # ibm-granite/granite-3.3-2b-instruct and -8b-instruct
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
}
READ = LLAMA | {
    "rms_norm_eps", "attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
}  # fmt: skip
