"""Qwen3 30B-A3B and 235B-A22B (arXiv 2505.09388)."""

from typing import Any

from pretrain.errors import ConfigError
from pretrain.models.families.declare.common import (
    DENSE_LAYERS,
    TRAINING,
    WEIGHTS,
    attention_bias,
    eps,
    needs_experts,
    sizes,
    stacked,
    tied,
)
from pretrain.models.families.declare.family import Family, Field
from pretrain.models.families.declare.other_readers import one_of, scalings, switches


def _count(value: Any, config: dict[str, Any]) -> Any:
    """transformers 5 writes another name than the files of the hub have."""
    other = config.get("num_local_experts")
    if value is not None and other is not None and value != other:
        raise ConfigError(f"config.json: num_experts={value} contradicts num_local_experts={other}")
    return next(n for n in (value, other, 128) if n is not None)


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *sizes(kv_heads=4, length=32768),
        eps(1e-6),
        tied(False),
        attention_bias(),
        Field("experts.count", "num_experts", None, back=_count),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.ffn_dim", "moe_intermediate_size", 768),
        Field("experts.normalise", "norm_topk_prob", False),
        *DENSE_LAYERS,
    ),
    weights=WEIGHTS + stacked(),
    fixed={"norm.qk": "head"},
    constants={"hidden_act": "silu", "use_sliding_window": False},
    # A window's, which is not used, and what `num_experts` reads.
    inert=TRAINING | {"sliding_window", "max_window_layers", "num_local_experts"},
    refuse=needs_experts,
    balance=0.001,
    # It always makes the weights of a token's experts sum to one.
    llama_cpp=switches("tie_embeddings", "experts.count", "experts.active", "experts.ffn_dim")
    | {"experts.normalise": one_of(True)}
    | scalings("yarn"),
)
