"""The original Transformer (Vaswani et al., arXiv 1706.03762): an encoder and a decoder. It has no Hugging Face export."""

from pretrain.models.families.declare.family import Family

TRANSFORMER = Family(
    name="transformer",
    defaults={
        "encoder.layers": lambda model: model.layers,
        "tie_embeddings": True,
        "positions": "sinusoidal",
        "embedding_multiplier": lambda model: model.dim**0.5,
        "norm.kind": "layer",
        "norm.placement": "post",
        "attention.bias": ["query", "key", "value", "output"],
        "mlp.activation": "relu",
        "mlp.gated": False,
        "mlp.bias": True,
    },
    rope=None,
)
