"""Shapes of Qwen3 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True, kv_heads=2),
    "wide heads": Model(**SMALL, head_dim=16, kv_heads=2),
    "width that heads do not divide": Model(**SMALL | {"heads": 3}, head_dim=8, kv_heads=1),
    "biases": Model(**SMALL, kv_heads=1, attention=Attention(bias=["query", "key", "value", "output"])),
    "large eps": Model(**SMALL, norm_eps=1e-2),
    "windows in the last layers": Model(
        **SMALL, head_dim=12, attention=Attention(window=8, window_pattern=[False, True, True])
    ),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}
