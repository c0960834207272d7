"""What the tests know of Gemma 2."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL, kv_heads=2, attention=AttentionConfig(window=8)),
    "one layer": Model(**SMALL | {"layers": 1}, attention=AttentionConfig(window=8)),
    "another pattern": Model(**SMALL, attention=AttentionConfig(window=8, window_pattern=[False, True, True])),
    "no window": Model(**SMALL, attention=AttentionConfig(window=0)),
    "strong soft-caps": Model(**SMALL, kv_heads=1, attention=AttentionConfig(window=8, soft_cap=0.5), logit_soft_cap=1.5),
    "no soft-caps": Model(**SMALL, attention=AttentionConfig(window=8, soft_cap=0.0), logit_soft_cap=0.0),
    "wide heads and another scale": Model(
        **SMALL, head_dim=24, kv_heads=2, attention=AttentionConfig(window=8, query_scalar=8.0)
    ),
    "a head of its own": Model(**SMALL, tie_embeddings=False, norm_eps=1e-5, rope=Rope(theta=500.0)),
    "biases": Model(**SMALL, attention=AttentionConfig(window=8, bias=["query", "key", "value", "output"])),
}


def gemma2(*shape: int, head_dim: int, scalar: int) -> dict[str, Any]:
    return hub(
        "Gemma2ForCausalLM",
        *shape,
        attention_bias=False,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=head_dim,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        model_type="gemma2",
        query_pre_attn_scalar=scalar,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
    )


PUBLISHED = {
    "gemma2-2b": gemma2(2304, 9216, 26, 8, 4, 256000, head_dim=256, scalar=256),
    "gemma2-9b": gemma2(3584, 14336, 42, 16, 8, 256000, head_dim=256, scalar=256),
    "gemma2-27b": gemma2(4608, 36864, 46, 32, 16, 256000, head_dim=128, scalar=144),
}
COUNTS = {
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
}
READ = LLAMA | {
    "rms_norm_eps",
    "sliding_window",
    "layer_types",
    "attention_bias",
    "query_pre_attn_scalar",
    "hidden_activation",
    "final_logit_softcapping",
    "attn_logit_softcapping",
}
