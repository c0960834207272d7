"""Shapes of OLMo 2 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "grouped queries": Model(**SMALL, kv_heads=2, norm_eps=1e-5),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "tied": Model(**SMALL, tie_embeddings=True),
    "biases": Model(**SMALL, kv_heads=2, attention=Attention(bias=["query", "key", "value", "output"])),
    "other theta": Model(**SMALL, rope=Rope(theta=10_000.0)),
    "linear scaling": Model(**SMALL, rope=Rope(scaling="linear", factor=4.0)),
    "odd sizes": Model(dim=30, layers=3, heads=5, ffn_dim=37, vocab_size=101),
}
