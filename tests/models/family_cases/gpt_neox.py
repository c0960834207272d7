"""Shapes of GPT-NeoX and Pythia that its tests go through."""

from pretrain.config.model_schema import Attention, Mlp, Model, Rope

SMALL = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "one after the other": Model(**SMALL, parallel_residual=False),
    "no attention biases": Model(**SMALL, attention=Attention(bias=[])),
    "tied": Model(**SMALL, tie_embeddings=True),
    "fully rotated": Model(**SMALL, rope=Rope(fraction=1.0)),
    "half rotated": Model(**SMALL, rope=Rope(fraction=0.5, theta=500.0)),
    "odd sizes": Model(dim=40, layers=3, heads=5, ffn_dim=37, vocab_size=101, norm_eps=0.01),
    "tanh gelu": Model(**SMALL, mlp=Mlp(activation="gelu_tanh")),
    "linear scaling": Model(**SMALL, rope=Rope(fraction=0.5, scaling="linear", factor=4.0)),
    "dynamic scaling": Model(**SMALL, rope=Rope(fraction=0.5, scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(fraction=1.0, scaling="yarn", factor=4.0, original_length=16)),
}
