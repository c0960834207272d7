"""What the tests know of Qwen3."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True, kv_heads=2),
    "wide heads": Model(**SMALL, head_dim=16, kv_heads=2),
    "width that heads do not divide": Model(**SMALL | {"heads": 3}, head_dim=8, kv_heads=1),
    "biases": Model(**SMALL, kv_heads=1, attention=AttentionConfig(bias=["query", "key", "value", "output"])),
    "large eps": Model(**SMALL, norm_eps=1e-2),
    "windows in the last layers": Model(
        **SMALL, head_dim=12, attention=AttentionConfig(window=8, window_pattern=[False, True, True])
    ),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}


def qwen3(*shape: int, tied: bool) -> dict[str, Any]:
    return hub(
        "Qwen3ForCausalLM",
        *shape,
        attention_bias=False,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        max_window_layers=shape[2],
        model_type="qwen3",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=tied,
        use_sliding_window=False,
    )


PUBLISHED = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, 8, 151936, tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, 8, 151936, tied=True),
    "qwen3-4b": qwen3(2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, 8, 151936, tied=False),
    "qwen3-14b": qwen3(5120, 17408, 40, 40, 8, 151936, tied=False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, 8, 151936, tied=False),
}
COUNTS = {
    "qwen3-0.6b": 596_049_920,  # the hub shows 751,632,384: its file has the tied head twice
    "qwen3-1.7b": 1_720_574_976,  # 2,031,739,904, likewise
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
READ = LLAMA | {"rms_norm_eps", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "attention_bias"}
