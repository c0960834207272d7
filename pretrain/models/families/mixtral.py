"""Mixtral 8x7B and 8x22B (arXiv 2401.04088)."""

from pretrain.models.families.declare.common import (
    ATTENTION,
    ENDS,
    PRE_NORMS,
    TRAINING,
    eps,
    needs_experts,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import AS_LLAMA, switches
from pretrain.models.families.declare.windows import width_of

MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *sizes(kv_heads=8, length=131072),
        eps(1e-5),
        tied(False),
        Field("attention.window", "sliding_window", None, lambda n, model: n or None, width_of),
        Field("experts.count", "num_local_experts", 8),
        Field("experts.active", "num_experts_per_tok", 2),
    ),
    weights=ENDS + ATTENTION + PRE_NORMS + stacked("block_sparse_moe", "w1", "w3", "w2"),
    fixed={"experts.ffn_dim": lambda model: model.ffn_dim},
    constants={"hidden_act": "silu", "router_jitter_noise": 0.0},
    inert=TRAINING,
    refuse=needs_experts,
    balance=0.001,
    theta=1_000_000.0,
    llama_cpp=AS_LLAMA | switches("experts.count", "experts.active", "experts.ffn_dim"),
)
