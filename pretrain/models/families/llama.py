"""Llama 2, 3 and 3.x (arXiv 2307.09288, 2407.21783)."""

from pretrain.config.model_schema import Model
from pretrain.models.families.common import SIZES, WEIGHTS, eps, projections, tied
from pretrain.models.families.family import Family, Field


def _refuse(model: Model) -> str | None:
    if model.dim % model.heads:  # which the head's own width makes possible here
        return f"model.dim={model.dim} is not divisible by model.heads={model.heads}: transformers refuses such a llama"
    return None


LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *SIZES,
        eps(1e-6),
        tied(False),
        Field("attention.bias", "attention_bias", False, *projections("query", "key", "value", "output")),
        Field("mlp.bias", "mlp_bias", False),
    ),
    weights=WEIGHTS,
    constants={"hidden_act": "silu"},
    refuse=_refuse,
)
