"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): ordinary attention, half of a head rotated, and DeepSeek-V3's experts."""

from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.common import (
    CORRECTED,
    CORRECTION,
    ROUTING,
    SHARED,
    TRAINING,
    WEIGHTS,
    attention_bias,
    beyond_the_last_layer,
    corrected,
    eps,
    refuse_uncorrected,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches


def _has_norms(qk: str, model: Model) -> bool:
    if qk == "full":
        raise ConfigError("model.norm.qk=full: transformers' glm4_moe has norms of heads, or none; set head or none")
    return qk == "head"


def _norms(flag: Any, config: dict[str, Any]) -> str:
    if not isinstance(flag, bool):
        raise ConfigError(f"config.json: use_qk_norm={shown(flag)} is not supported: expected true or false")
    return "head" if flag else "none"


GLM4_MOE = Family(
    name="glm4_moe",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=(
        *sizes(kv_heads=8, length=131072),
        eps(1e-5),
        tied(False),
        attention_bias(False, ("query", "key", "value")),
        Field("norm.qk", "use_qk_norm", False, _has_norms, _norms),
        *corrected(count=128, ffn_dim=1408, dense=1, scale=1.0, groups=1, active_groups=1),
    ),
    weights=(*WEIGHTS, *stacked(), CORRECTION, *SHARED),
    fixed=CORRECTED,
    defaults={
        "rope.theta": 1_000_000.0,
        "rope.fraction": 0.5,
        "attention.bias": ["query", "key", "value"],
        "experts.shared": 1,
        "experts.correction_rate": 0.001,
    },
    constants={"hidden_act": "silu"},
    derived={"num_nextn_predict_layers": lambda model: 0},
    # Layers that predict further ahead change no logit of the next token: they are left out, whatever their number.
    inert=TRAINING | {"num_nextn_predict_layers", "num_mtp_layers"},
    dropped=beyond_the_last_layer,
    partial=True,
    refuse=refuse_uncorrected,
    llama_cpp={
        **switches("tie_embeddings", "attention.bias", "norm.qk", "rope.fraction"),
        **switches(*(f"experts.{name}" for name in ROUTING)),
        **scalings("linear", "yarn"),
    },
)
