"""What the tests know of GLM-4.5."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model, Norm

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=8, active=3, ffn_dim=20, dense_layers=[0])),
    "norms of heads, groups": Model(
        **SMALL | {"heads": 3},
        head_dim=16,
        norm=Norm(qk="head"),
        experts=ExpertsConfig(count=8, active=2, ffn_dim=12, dense_layers=[0, 1], groups=4, active_groups=2, scale=2.5),
    ),
    "no biases, tied, not normalised": Model(
        **SMALL,
        kv_heads=1,
        tie_embeddings=True,
        norm_eps=0.01,
        attention=AttentionConfig(bias=[]),
        experts=ExpertsConfig(count=5, active=5, ffn_dim=20, shared=2, normalise=False),
    ),
    "fully rotated, yarn": Model(
        **SMALL,
        head_dim=12,
        rope=Rope(theta=1e4, fraction=1.0, scaling="yarn", factor=4.0, original_length=16),
        experts=ExpertsConfig(count=4, active=1, ffn_dim=20, dense_layers=[0], normalise=False),
    ),
}


def glm4_moe(*shape: int, experts: int, width: int, dense: int, scale: float, norms: bool) -> dict[str, Any]:
    return hub(
        "Glm4MoeForCausalLM",
        *shape,
        attention_bias=True,
        first_k_dense_replace=dense,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=131072,
        model_type="glm4_moe",
        moe_intermediate_size=width,
        n_group=1,
        n_routed_experts=experts,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=scale,
        tie_word_embeddings=False,
        topk_group=1,
        use_qk_norm=norms,
    )


PUBLISHED = {
    "glm4.5-air": glm4_moe(4096, 10944, 46, 96, 8, 151552, experts=128, width=1408, dense=1, scale=1.0, norms=False),
    "glm4.5": glm4_moe(5120, 12288, 92, 96, 8, 151552, experts=160, width=1536, dense=3, scale=2.5, norms=True),
}


def ahead(dim: int, experts: int, width: int, norms: bool) -> int:
    """Parameters of the layer that predicts further ahead: a block, two norms and a projection before it, a head and an embedding."""
    attention = 2 * dim * 96 * 128 + 96 * 128 + 2 * (dim + 1) * 8 * 128 + norms * 2 * 128
    block = attention + 2 * dim + experts * dim + (experts + 1) * 3 * dim * width
    return block + 2 * dim + 2 * dim * dim + dim + 2 * 151552 * dim


COUNTS = {
    # zai-org: the hub's totals without that layer and the balancing biases, its own among them.
    "glm4.5-air": 110_468_824_832 - ahead(4096, 128, 1408, norms=False) - 46 * 128,
    "glm4.5": 358_337_791_296 - ahead(5120, 160, 1536, norms=True) - 90 * 160,
}
READ = LLAMA | {
    "rms_norm_eps", "attention_bias", "partial_rotary_factor", "use_qk_norm", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
}  # fmt: skip
