"""What the tests know of Gemma 3's text model."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 4, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
EVERY_THIRD = AttentionConfig(window=8, window_pattern=[True, True, False])

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL | {"layers": 7}, kv_heads=2, attention=AttentionConfig(window=8)),
    "another pattern": Model(**SMALL, attention=EVERY_THIRD),
    "a pattern that no number gives": Model(**SMALL, attention=AttentionConfig(window=8, window_pattern=[False, True])),
    "no window": Model(**SMALL, attention=AttentionConfig(window=0)),
    "other bases": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(theta=10_000.0, local_theta=100.0)),
    "linear scaling in layers without a window": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(scaling="linear", factor=8.0)),
    "dynamic scaling": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "soft-cap of logits": Model(**SMALL, kv_heads=1, attention=EVERY_THIRD, logit_soft_cap=1.5),
    "wide heads and another scale": Model(
        **SMALL, head_dim=24, kv_heads=2, attention=AttentionConfig(window=8, window_pattern=[True, False], query_scalar=168.0)
    ),
    "a head of its own": Model(**SMALL, tie_embeddings=False, norm_eps=1e-5),
}


def gemma3(
    *shape: int, window: int, length: int, scaling: Any = None, head_dim: int = 256, scalar: int = 256
) -> dict[str, Any]:
    return hub(
        "Gemma3ForCausalLM",
        *shape,
        attention_bias=False,
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=head_dim,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=length,
        model_type="gemma3_text",
        query_pre_attn_scalar=scalar,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=scaling,
        rope_theta=1000000,
        sliding_window=window,
        sliding_window_pattern=6,
    )


EIGHTFOLD = {"factor": 8.0, "rope_type": "linear"}


PUBLISHED = {
    "gemma3-270m": gemma3(640, 2048, 18, 4, 1, 262144, window=512, length=32768),
    "gemma3-1b": gemma3(1152, 6912, 26, 4, 1, 262144, window=512, length=32768),
    "gemma3-4b": gemma3(2560, 10240, 34, 8, 4, 262208, window=1024, length=131072, scaling=EIGHTFOLD),
    "gemma3-12b": gemma3(3840, 15360, 48, 16, 8, 262208, window=1024, length=131072, scaling=EIGHTFOLD),
    "gemma3-27b": gemma3(
        5376, 21504, 62, 32, 16, 262208, window=1024, length=131072, scaling=EIGHTFOLD, head_dim=128, scalar=168
    ),
}
COUNTS = {
    # The hub's totals without the vision tower (SigLIP, 416,866,032) and its projection (1,152 x dim + 1,152).
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
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
    "rope_local_base_freq",
    "sliding_window_pattern",
}
