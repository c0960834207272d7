"""Shapes of Qwen2 and Qwen2.5 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True, kv_heads=2),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "other eps and theta": Model(**SMALL, norm_eps=1e-2, rope=Rope(theta=10_000.0)),
    "windows in the last layers": Model(**SMALL, kv_heads=2, attention=Attention(window=8, window_pattern=[False, True, True])),
    "windows in every layer": Model(**SMALL, attention=Attention(window=8)),
    "windows in one layer that is not the last": Model(
        **SMALL, attention=Attention(window=5, window_pattern=[False, True, False])
    ),
    "a window that no layer has": Model(**SMALL, attention=Attention(window=8, window_pattern=[False])),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}
