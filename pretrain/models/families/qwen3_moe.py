"""Qwen3 30B-A3B and 235B-A22B (arXiv 2505.09388)."""

from typing import Any

from pretrain.models.families.common import SIZES, WEIGHTS, eps, projections, tied
from pretrain.models.families.experts import TRAINING, needs_experts, stacked
from pretrain.models.families.family import Family, Field


def _dense_layers(value: Any, config: dict[str, Any]) -> list[int]:
    """Two fields say together which layers have an MLP."""
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return [i for i in range(config["num_hidden_layers"]) if i in listed or (i + 1) % step]


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *SIZES,
        eps(1e-6),
        tied(False),
        Field("attention.bias", "attention_bias", False, *projections("query", "key", "value", "output")),
        Field("experts.count", "num_experts", 128),
        Field("experts.active", "num_experts_per_tok", 8),
        Field("experts.ffn_dim", "moe_intermediate_size", 768),
        Field("experts.normalise", "norm_topk_prob", False),
        Field("experts.dense_layers", "mlp_only_layers", None, back=_dense_layers),
        Field("experts.dense_layers", "decoder_sparse_step", 1, lambda layers, model: 1, _dense_layers),
    ),
    weights=WEIGHTS + stacked(),
    fixed={"norm.qk": "head"},
    constants={"hidden_act": "silu", "use_sliding_window": False},
    inert=TRAINING | {"sliding_window", "max_window_layers"},  # of the window that is not used
    refuse=needs_experts,
)
