"""OLMoE 1B-7B (arXiv 2409.02060): a mixture of experts in every layer, RMSNorm over all queries and all keys."""

from pretrain.config.model_schema import Model
from pretrain.models.families.declare.common import (
    TRAINING,
    WEIGHTS,
    attention_bias,
    eps,
    head_width,
    needs_experts,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import scalings, switches


def _refuse(model: Model) -> str | None:
    return needs_experts(model) or head_width(model)


OLMOE = Family(
    name="olmoe",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields=(
        *sizes(length=4096),
        eps(1e-5),
        tied(False),
        attention_bias(),
        Field("experts.count", "num_experts", 64),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.normalise", "norm_topk_prob", False),
    ),
    weights=WEIGHTS + stacked(),
    fixed={"norm.qk": "full", "experts.ffn_dim": lambda model: model.ffn_dim},
    defaults={"experts.normalise": False},
    constants={"hidden_act": "silu", "clip_qkv": None},
    inert=TRAINING,
    balance=0.01,
    refuse=_refuse,
    llama_cpp={
        **switches("experts.count", "experts.active"),
        "kv_heads": lambda heads, model: heads == model.heads,
        **scalings("linear", "yarn"),
    },
)
