"""What the tests know of Qwen2 and Qwen2.5."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True, kv_heads=2),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "other eps and theta": Model(**SMALL, norm_eps=1e-2, rope=Rope(theta=10_000.0)),
    "windows in the last layers": Model(
        **SMALL, kv_heads=2, attention=AttentionConfig(window=8, window_pattern=[False, True, True])
    ),
    "windows in every layer": Model(**SMALL, attention=AttentionConfig(window=8)),
    "windows in one layer that is not the last": Model(
        **SMALL, attention=AttentionConfig(window=5, window_pattern=[False, True, False])
    ),
    "a window that no layer has": Model(**SMALL, attention=AttentionConfig(window=8, window_pattern=[False])),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}


def qwen2(*shape: int, tied: bool, length: int, eps: float = 1e-06, **rest: Any) -> dict[str, Any]:
    return hub(
        "Qwen2ForCausalLM",
        *shape,
        hidden_act="silu",
        max_position_embeddings=length,
        max_window_layers=shape[2],
        model_type="qwen2",
        rms_norm_eps=eps,
        rope_theta=1000000.0,
        sliding_window=length,
        tie_word_embeddings=tied,
        use_mrope=False,
        use_sliding_window=False,
        **rest,
    )


PUBLISHED = {
    "qwen2.5-0.5b": qwen2(896, 4864, 24, 14, 2, 151936, tied=True, length=32768),
    "qwen2.5-1.5b": qwen2(1536, 8960, 28, 12, 2, 151936, tied=True, length=131072),
    "qwen2.5-7b": qwen2(3584, 18944, 28, 28, 4, 152064, tied=False, length=131072),
    "qwen2.5-72b": qwen2(8192, 29568, 80, 64, 8, 152064, tied=False, length=131072, eps=1e-05),
}
COUNTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
}
READ = LLAMA | {"rms_norm_eps", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers"}
