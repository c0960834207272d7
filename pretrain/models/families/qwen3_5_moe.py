"""Qwen3.5 with experts, the text model: Qwen3.5's layers, with experts in each, and a shared expert behind a gate."""

from pretrain.models.families.declare.common import TRAINING, stacked
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.hybrid import (
    OF_QWEN3_5,
    PROJECTIONS,
    SHARED_WEIGHTS,
    SHARED_WIDTH,
    WEIGHTS_HYBRID,
    fields,
    refuse_no_experts,
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=(
        *(field for field in fields(kv_heads=2) if field.ours != "ffn_dim"),
        Field("ffn_dim", "moe_intermediate_size", 512),
        Field("experts.count", "num_experts", 256),
        Field("experts.active", "num_experts_per_tok", 8),
        SHARED_WIDTH,
    ),
    weights=WEIGHTS_HYBRID + PROJECTIONS + stacked() + SHARED_WEIGHTS,
    refuse=refuse_no_experts,
    balance=0.001,
    **OF_QWEN3_5
    | {
        "fixed": OF_QWEN3_5["fixed"] | {"experts.ffn_dim": lambda model: model.ffn_dim, "experts.shared_gate": True},
        "defaults": OF_QWEN3_5["defaults"] | {"experts.shared": 1},
        "accepted": OF_QWEN3_5["accepted"] | {"norm_topk_prob": True},
        # Every layer has experts, so the width of an MLP without them means nothing.
        "inert": OF_QWEN3_5["inert"] | TRAINING | {"intermediate_size"},
    },
)
