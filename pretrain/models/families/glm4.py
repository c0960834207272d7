"""GLM-4-0414 and GLM-Z1 (arXiv 2406.12793): norms around both sublayers, half of a head rotated, gate and up in one matrix."""

from pretrain.models.families.declare.common import ATTENTION, ENDS, FUSED, LAYER, MLP, attention_bias, eps, norms, sizes, tied
from pretrain.models.families.declare.family import Family
from pretrain.models.families.declare.other_readers import scalings, switches

GLM4 = Family(
    name="glm4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *sizes(kv_heads=2, head_dim=128, length=131072),
        eps(1.5625e-07),
        tied(False),
        attention_bias(True, ("query", "key", "value")),
    ),
    weights=(
        *ENDS,
        *ATTENTION,
        FUSED[1],
        *(line for line in MLP if line.ours == (f"{LAYER}.mlp.down.weight",)),
        *norms(
            attention_norm="input_layernorm",
            attention_output_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            mlp_output_norm="post_mlp_layernorm",
        ),
    ),
    fixed={"norm.placement": "sandwich", "rope.layout": "interleaved"},
    defaults={"rope.fraction": 0.5, "attention.bias": ["query", "key", "value"]},
    constants={"hidden_act": "silu"},
    partial=True,
    llama_cpp=switches("tie_embeddings", "attention.bias", "rope.fraction") | scalings("linear", "yarn"),
)
