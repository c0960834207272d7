"""What the tests know of OLMo 2."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "grouped queries": Model(**SMALL, kv_heads=2, norm_eps=1e-5),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "tied": Model(**SMALL, tie_embeddings=True),
    "biases": Model(**SMALL, kv_heads=2, attention=AttentionConfig(bias=["query", "key", "value", "output"])),
    "other theta": Model(**SMALL, rope=Rope(theta=10_000.0)),
    "linear scaling": Model(**SMALL, rope=Rope(scaling="linear", factor=4.0)),
    "odd sizes": Model(dim=30, layers=3, heads=5, ffn_dim=37, vocab_size=101),
}


def olmo2(*shape: int) -> dict[str, Any]:
    return hub(
        "Olmo2ForCausalLM",
        *shape,
        attention_bias=False,
        hidden_act="silu",
        max_position_embeddings=4096,
        model_type="olmo2",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
    )


PUBLISHED = {
    "olmo2-1b": olmo2(2048, 8192, 16, 16, 16, 100352),
    "olmo2-7b": olmo2(4096, 11008, 32, 32, 32, 100352),
    "olmo2-13b": olmo2(5120, 13824, 40, 40, 40, 100352),
    "olmo2-32b": olmo2(5120, 27648, 64, 40, 8, 100352),
}
COUNTS = {
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
}
READ = LLAMA | {"rms_norm_eps", "attention_bias"}
