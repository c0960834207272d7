"""Shapes of Gemma 2 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL, kv_heads=2, attention=Attention(window=8)),
    "one layer": Model(**SMALL | {"layers": 1}, attention=Attention(window=8)),
    "another pattern": Model(**SMALL, attention=Attention(window=8, window_pattern=[False, True, True])),
    "no window": Model(**SMALL, attention=Attention(window=0)),
    "strong soft-caps": Model(**SMALL, kv_heads=1, attention=Attention(window=8, soft_cap=0.5), logit_soft_cap=1.5),
    "no soft-caps": Model(**SMALL, attention=Attention(window=8, soft_cap=0.0), logit_soft_cap=0.0),
    "wide heads and another scale": Model(**SMALL, head_dim=24, kv_heads=2, attention=Attention(window=8, query_scalar=8.0)),
    "a head of its own": Model(**SMALL, tie_embeddings=False, norm_eps=1e-5, rope=Rope(theta=500.0)),
    "biases": Model(**SMALL, attention=Attention(window=8, bias=["query", "key", "value", "output"])),
}
