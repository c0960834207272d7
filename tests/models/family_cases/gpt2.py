"""Shapes of GPT-2 that its tests go through."""

from pretrain.config.model_schema import Mlp, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "inner width": Model(**SMALL, ffn_dim=72),
    "an output head of its own": Model(**SMALL, tie_embeddings=False),
    "one head": Model(**SMALL | {"heads": 1}),
    "odd sizes": Model(dim=35, layers=3, heads=5, vocab_size=101, max_sequence_length=41),
    "large eps": Model(**SMALL, norm_eps=0.1),
    "exact gelu": Model(**SMALL, mlp=Mlp(activation="gelu")),
    "relu": Model(**SMALL, mlp=Mlp(activation="relu")),
}
