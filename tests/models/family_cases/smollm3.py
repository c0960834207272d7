"""Shapes of SmolLM3 that its tests go through."""

from pretrain.config.model_schema import Attention, Mlp, Model, Rope

SMALL = {"dim": 32, "layers": 5, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2),
    "fewer layers than the pattern": Model(**SMALL | {"layers": 2}),
    "another pattern": Model(**SMALL, rope=Rope(pattern=[False, True, True])),
    "rotation everywhere": Model(**SMALL, rope=Rope(pattern=[True])),
    "rotation nowhere": Model(**SMALL | {"layers": 2}, rope=Rope(pattern=[False])),
    "window in layers without rotation": Model(
        **SMALL, kv_heads=1, attention=Attention(window=8, window_pattern=[False, False, False, True])
    ),
    "window in other layers": Model(**SMALL, attention=Attention(window=8, window_pattern=[True, False])),
    "a head of its own and biases": Model(
        **SMALL,
        tie_embeddings=False,
        rope=Rope(pattern=[True]),  # where nothing rotates, a bias of the keys changes nothing
        attention=Attention(bias=["query", "key", "value", "output"]),
        mlp=Mlp(bias=True),
        norm_eps=1e-5,
    ),
    "dynamic scaling": Model(**SMALL, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(theta=2_000_000.0, scaling="yarn", factor=4.0, original_length=16)),
}
