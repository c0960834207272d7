"""Shapes of Phi-3 and Phi-4 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "grouped queries": Model(**SMALL, kv_heads=2, rope=Rope(theta=250_000.0)),
    "one key-value head": Model(**SMALL, kv_heads=1, norm_eps=1e-6),
    "window": Model(**SMALL, attention=Attention(window=7)),
    "partial rotation": Model(**SMALL | {"dim": 64}, kv_heads=2, rope=Rope(fraction=0.75)),
    "partial rotation of a width that is rounded down": Model(
        **SMALL | {"dim": 40}, tie_embeddings=True, rope=Rope(fraction=0.65)
    ),
}
