"""Granite 3 (https://huggingface.co/ibm-granite, trained as in arXiv 2408.13359): Llama with four factors."""

from pretrain.models.families.declare.common import SIZES, WEIGHTS, attention_bias, eps, power, refuse_uneven_heads, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches, whole_heads

GRANITE = Family(
    name="granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *SIZES,
        eps(1e-6),
        tied(False),
        attention_bias(),
        Field("mlp.bias", "mlp_bias", False),
        Field("embedding_multiplier", "embedding_multiplier", 1.0),
        Field("residual_multiplier", "residual_multiplier", 1.0),
        power("logit_multiplier", "logits_scaling", 1.0, -1),  # logits are divided
        power("attention.query_scalar", "attention_multiplier", 1.0, -0.5),  # scores are multiplied
    ),
    weights=WEIGHTS,
    # As all of Granite 3: maximal update parametrisation from a width of 256, heads scaled by their width and not its root.
    defaults={
        "tie_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logit_multiplier": lambda model: 256 / model.dim,
        "attention.query_scalar": lambda model: float((model.head_dim or model.dim // model.heads) ** 2),
    },
    constants={"hidden_act": "silu"},
    refuse=refuse_uneven_heads,
    llama_cpp={
        **switches("tie_embeddings", "embedding_multiplier", "residual_multiplier", "logit_multiplier"),
        **switches("attention.query_scalar", "attention.bias"),
        "head_dim": whole_heads,
        **scalings("linear", "yarn"),
    },
)
