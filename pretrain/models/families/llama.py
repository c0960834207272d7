"""Llama 2, 3 and 3.x (arXiv 2307.09288, 2407.21783)."""

from pretrain.models.families.declare.common import SIZES, WEIGHTS, attention_bias, buffers, eps, refuse_uneven_heads, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import AS_LLAMA

LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *SIZES,
        eps(1e-6),
        tied(False),
        attention_bias(),
        Field("mlp.bias", "mlp_bias", False),
    ),
    weights=WEIGHTS,
    constants={"hidden_act": "silu"},
    accepted={"rope_interleaved": False},
    inert=frozenset({"is_llama_config"}),
    refuse=refuse_uneven_heads,
    dropped=buffers(".rotary_emb.inv_freq"),
    llama_cpp=AS_LLAMA,
)
