"""Shapes of Llama 2, 3 and 3.x that its tests go through."""

from pretrain.config.model_schema import Attention, Mlp, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
BIASED = Attention(bias=["query", "key", "value", "output"])
LLAMA3 = Rope(theta=500_000.0, scaling="llama3", factor=8.0, original_length=16, low_frequency=1.0, high_frequency=4.0)

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "grouped queries": Model(**SMALL, kv_heads=2),
    "narrow heads": Model(**SMALL, head_dim=2, kv_heads=2),
    "wide heads": Model(**SMALL | {"heads": 2}, head_dim=24, kv_heads=1),
    "other theta": Model(**SMALL, rope=Rope(theta=500_000.0)),
    "large eps": Model(**SMALL, norm_eps=0.1),
    "odd sizes": Model(dim=30, layers=3, heads=5, ffn_dim=37, vocab_size=101, tie_embeddings=True, norm_eps=1e-6),
    "derived ffn": Model(dim=16, layers=1, heads=2, vocab_size=7),
    "biases": Model(**SMALL, kv_heads=2, attention=BIASED, mlp=Mlp(bias=True)),
    "llama3 scaling": Model(**SMALL, rope=LLAMA3),
    "linear scaling": Model(**SMALL, rope=Rope(scaling="linear", factor=4.0)),
    "dynamic scaling": Model(**SMALL, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}
