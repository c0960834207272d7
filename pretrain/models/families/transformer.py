"""The original Transformer (Vaswani et al., arXiv 1706.03762): an encoder and a decoder. It has no Hugging Face export."""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.family import Family


def _refuse(model: Model) -> str:
    return "model.family=transformer (encoder-decoder) has no counterpart in transformers that this program writes"


TRANSFORMER = Family(
    name="transformer",
    model_type="",
    architecture="",
    fields=(),
    weights=(),
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
    refuse=_refuse,
)
