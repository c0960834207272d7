"""Shapes of gpt-oss that its tests go through."""

from pretrain.config.model_schema import Attention, Experts, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 24, "vocab_size": 61}
YARN = Rope(scaling="yarn", factor=32.0, original_length=16, truncate=False)

CASES = {
    "plain": Model(**SMALL, kv_heads=2, rope=YARN, attention=Attention(window=9), experts=Experts(count=4, active=2)),
    "wide heads, no biases in attention": Model(
        **SMALL, head_dim=24, kv_heads=1, attention=Attention(window=5, bias=[]), experts=Experts(count=6, active=3)
    ),
    "window in all layers but the first, tied": Model(
        **SMALL | {"layers": 4},
        tie_embeddings=True,
        rope=YARN,
        attention=Attention(window=7, window_pattern=[False, True, True, True]),
        experts=Experts(count=3, active=3),
    ),
    "no window": Model(
        **SMALL,
        attention=Attention(window=128, window_pattern=[False]),
        rope=Rope(theta=5e4, scaling="yarn", factor=4.0, original_length=16),
        experts=Experts(count=5, active=2),
    ),
}
