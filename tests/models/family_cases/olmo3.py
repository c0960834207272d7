"""Shapes of OLMo 3 that its tests go through."""

from pretrain.config.model_schema import Attention, Model, Rope

SMALL = {"dim": 32, "layers": 5, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
YARN = {"scaling": "yarn", "factor": 8.0, "original_length": 16, "attention_factor": 1.2}

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL, attention=Attention(window=8)),
    "fewer layers than the pattern": Model(**SMALL | {"layers": 2}, attention=Attention(window=8)),
    "another pattern": Model(**SMALL, kv_heads=2, attention=Attention(window=8, window_pattern=[False, True])),
    "no window": Model(**SMALL | {"layers": 2}, kv_heads=1, attention=Attention(window=0)),
    "tied with biases": Model(
        **SMALL, tie_embeddings=True, attention=Attention(window=3, bias=["query", "key", "value", "output"])
    ),
    "yarn scaling in layers without a window": Model(**SMALL, attention=Attention(window=8), rope=Rope(**YARN)),
    "yarn scaling everywhere": Model(**SMALL, attention=Attention(window=8), rope=Rope(**YARN, scale_local=True)),
    "llama3 scaling": Model(
        **SMALL,
        attention=Attention(window=8),
        rope=Rope(scaling="llama3", factor=8.0, original_length=16, low_frequency=1.0, high_frequency=4.0),
    ),
    "bases that differ": Model(**SMALL, attention=Attention(window=8), rope=Rope(theta=10_000.0, local_theta=100.0)),
}
