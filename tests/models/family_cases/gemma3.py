"""Shapes of Gemma 3's text model that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 4, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
EVERY_THIRD = Attention(window=8, window_pattern=[True, True, False])

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL | {"layers": 7}, kv_heads=2, attention=Attention(window=8)),
    "another pattern": Model(**SMALL, attention=EVERY_THIRD),
    "a pattern that no number gives": Model(**SMALL, attention=Attention(window=8, window_pattern=[False, True])),
    "no window": Model(**SMALL, attention=Attention(window=0)),
    "other bases": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(theta=10_000.0, local_theta=100.0)),
    "linear scaling in layers without a window": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(scaling="linear", factor=8.0)),
    "dynamic scaling": Model(**SMALL, attention=EVERY_THIRD, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "soft-cap of logits": Model(**SMALL, kv_heads=1, attention=EVERY_THIRD, logit_soft_cap=1.5),
    "wide heads and another scale": Model(
        **SMALL, head_dim=24, kv_heads=2, attention=Attention(window=8, window_pattern=[True, False], query_scalar=168.0)
    ),
    "a head of its own": Model(**SMALL, tie_embeddings=False, norm_eps=1e-5),
}
