"""GLM-4-0414 and GLM-Z1 (arXiv 2406.12793): norms around both sublayers, half of a head rotated, gate and up in one matrix."""

from pretrain.models.families.declare.common import ATTENTION, ENDS, LAYER, MLP, THEIRS, eps, norms, projections, sizes, tied
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches
from pretrain.models.families.declare.weights import CONCATENATED, entry

GLM4 = Family(
    name="glm4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *sizes(kv_heads=2, head_dim=128, length=131072),
        eps(1.5625e-07),
        tied(False),
        Field("attention.bias", "attention_bias", True, *projections("query", "key", "value")),
    ),
    weights=(
        *ENDS,
        *ATTENTION,
        entry((f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.up.weight"), f"{THEIRS}.mlp.gate_up_proj.weight", CONCATENATED),
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
