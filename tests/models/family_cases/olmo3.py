"""What the tests know of OLMo 3."""

from typing import Any

from family_cases import LLAMA
from family_cases.olmo2 import olmo2
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 5, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
YARN = {"scaling": "yarn", "factor": 8.0, "original_length": 16, "attention_factor": 1.2}

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL, attention=AttentionConfig(window=8)),
    "fewer layers than the pattern": Model(**SMALL | {"layers": 2}, attention=AttentionConfig(window=8)),
    "another pattern": Model(**SMALL, kv_heads=2, attention=AttentionConfig(window=8, window_pattern=[False, True])),
    "no window": Model(**SMALL | {"layers": 2}, kv_heads=1, attention=AttentionConfig(window=0)),
    "tied with biases": Model(
        **SMALL, tie_embeddings=True, attention=AttentionConfig(window=3, bias=["query", "key", "value", "output"])
    ),
    "yarn scaling in layers without a window": Model(**SMALL, attention=AttentionConfig(window=8), rope=Rope(**YARN)),
    "yarn scaling everywhere": Model(**SMALL, attention=AttentionConfig(window=8), rope=Rope(**YARN, scale_local=True)),
    "llama3 scaling": Model(
        **SMALL,
        attention=AttentionConfig(window=8),
        rope=Rope(scaling="llama3", factor=8.0, original_length=16, low_frequency=1.0, high_frequency=4.0),
    ),
    "bases that differ": Model(**SMALL, attention=AttentionConfig(window=8), rope=Rope(theta=10_000.0, local_theta=100.0)),
}


def olmo3(*shape: int) -> dict[str, Any]:
    return {
        **olmo2(*shape),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": ["full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(shape[2])],
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
    }


PUBLISHED = {
    "olmo3-7b": olmo3(4096, 11008, 32, 32, 32, 100278),
    "olmo3-32b": olmo3(5120, 27648, 64, 40, 8, 100278),
}
COUNTS = {
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
}
READ = LLAMA | {"rms_norm_eps", "sliding_window", "layer_types", "attention_bias"}
