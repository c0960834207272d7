"""Qwen3.5 with experts, the text model: Qwen3.5's layers, with experts in each, and a shared expert behind a gate."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import LAYER, THEIRS, TRAINING, needs_experts, stacked
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.hybrid import HYBRID, WEIGHTS_HYBRID, fields, refuse_no_linear_attention
from pretrain.models.families.declare.weights import entry


def _shared(width: Any, config: dict[str, Any]) -> Any:
    """Shared experts are together one MLP, whose width is a multiple of an expert's."""
    own = config.get("moe_intermediate_size", 512)
    if not isinstance(width, int) or not isinstance(own, int) or own < 1 or width < 1 or width % own:
        raise ConfigError(
            f"config.json: shared_expert_intermediate_size={shown(width)} is no multiple of moe_intermediate_size={shown(own)}"
        )
    return width // own


def _refuse(model: Model) -> str | None:
    missing = None if model.experts.shared else "model.experts.shared=0 has no shared expert"
    return needs_experts(model) or missing or refuse_no_linear_attention(model)


QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=(
        *(field for field in fields(kv_heads=2) if field.ours != "ffn_dim"),
        Field("ffn_dim", "moe_intermediate_size", 512),
        Field("experts.count", "num_experts", 256),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.shared", "shared_expert_intermediate_size", 512, lambda n, model: n * model.experts.ffn_dim, _shared),
    ),
    weights=(
        *WEIGHTS_HYBRID,
        *stacked(),
        *(
            entry(f"{LAYER}.mlp.shared.{name}.weight", f"{THEIRS}.mlp.shared_expert.{name}_proj.weight")
            for name in ("gate", "up", "down")
        ),
        entry(f"{LAYER}.mlp.shared_gate.weight", f"{THEIRS}.mlp.shared_expert_gate.weight"),
    ),
    refuse=_refuse,
    balance=0.001,
    **HYBRID
    | {
        "fixed": HYBRID["fixed"] | {"experts.ffn_dim": lambda model: model.ffn_dim, "experts.shared_gate": True},
        "defaults": HYBRID["defaults"] | {"experts.shared": 1},
        "accepted": HYBRID["accepted"] | {"norm_topk_prob": True},
        # Every layer has experts, so the width of an MLP without them means nothing.
        "inert": HYBRID["inert"] | TRAINING | {"intermediate_size"},
    },
)
