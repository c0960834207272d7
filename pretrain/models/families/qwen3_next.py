"""Qwen3-Next: Gated DeltaNet (arXiv 2412.06464) in three layers of four, attention with an output gate in the fourth, and experts."""

from pretrain.models.families.declare.common import DENSE_LAYERS, MLP, TRAINING, stacked
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.hybrid import (
    HYBRID,
    LINEAR,
    SHARED_WEIGHTS,
    SHARED_WIDTH,
    THEIR_LINEAR,
    WEIGHTS_HYBRID,
    fields,
    refuse_no_experts,
)
from pretrain.models.families.declare.weights import FusedPerGroup, entry

_PER_KEY_HEAD = FusedPerGroup(lambda model: model.linear_attention.key_heads)

QWEN3_NEXT = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=(
        *fields(kv_heads=2),
        Field("experts.count", "num_experts", 512),
        Field("experts.active", "num_experts_per_tok", 10),
        Field("experts.ffn_dim", "moe_intermediate_size", 512),
        Field("experts.normalise", "norm_topk_prob", True),
        SHARED_WIDTH,
        *DENSE_LAYERS,
    ),
    weights=(
        *WEIGHTS_HYBRID,
        entry(
            [f"{LINEAR}.{name}.weight" for name in ("query", "key", "value", "gate")],
            f"{THEIR_LINEAR}.in_proj_qkvz.weight",
            _PER_KEY_HEAD,
        ),
        entry([f"{LINEAR}.{name}.weight" for name in ("rate", "decay")], f"{THEIR_LINEAR}.in_proj_ba.weight", _PER_KEY_HEAD),
        *MLP,
        *stacked(),
        *SHARED_WEIGHTS,
    ),
    refuse=refuse_no_experts,
    dropped=lambda name, model: name.startswith("mtp."),  # layers that predict further ahead
    balance=0.001,
    inert=TRAINING,
    accepted={"use_sliding_window": False},
    **HYBRID
    | {
        "fixed": HYBRID["fixed"] | {"experts.shared_gate": True},
        "defaults": HYBRID["defaults"] | {"experts.shared": 1},
    },
)
