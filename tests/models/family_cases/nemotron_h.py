"""What the tests know of Nemotron-H, Nano 2 and Nemotron 3 Nano."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import LinearAttentionConfig
from pretrain.config.model_schema import ExpertsConfig, MlpConfig, Model

SMALL = {"dim": 32, "layers": 4, "heads": 4, "head_dim": 6, "ffn_dim": 48, "vocab_size": 61}


def mamba(*pattern: bool, **others: Any) -> LinearAttentionConfig:
    return LinearAttentionConfig(**{"key_dim": 6, "value_dim": 8, "value_heads": 8, "pattern": list(pattern), **others})


CASES = {
    "the usual layers": Model(**SMALL, kv_heads=2, linear_attention=mamba(True, False, False, False)),
    "two groups, another kernel": Model(
        **SMALL | {"layers": 5},
        norm_eps=1e-3,
        sublayers=["mixer", "mixer", "mlp", "mlp", "mixer"],
        linear_attention=mamba(True, False, False, False, True, key_heads=2, kernel=3),
    ),
    "experts": Model(
        **SMALL, linear_attention=mamba(True, False, False, False, key_heads=4), experts=ExpertsConfig(count=4, active=2, ffn_dim=24)
    ),
    "experts and an MLP, groups, two shared": Model(
        **SMALL | {"layers": 6},
        sublayers=["mlp", "mixer", "mlp", "mixer", "mixer", "mlp"],
        linear_attention=mamba(False, True, False, False, True, False),
        mlp=MlpConfig(activation="silu"),
        experts=ExpertsConfig(
            count=6, active=3, ffn_dim=20, shared=2, dense_layers=[2], scale=2.5, groups=3, active_groups=2, normalise=False
        ),
    ),
    "attention alone": Model(**SMALL, linear_attention=LinearAttentionConfig(pattern=[False])),
}


def nemotron(*shape: int, pattern: str, heads: int, width: int, **others: Any) -> dict[str, Any]:
    """Shapes as in `hub`; letters of the layers; heads of Mamba 2 and their width."""
    return hub(
        "NemotronHForCausalLM", *shape, 131072, attention_bias=False, chunk_size=128, conv_kernel=4, expand=2, head_dim=128, hidden_dropout=0.0,
        hybrid_override_pattern=pattern, layer_norm_epsilon=1e-05, mamba_head_dim=width, mamba_hidden_act="silu", mamba_num_heads=heads,
        mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2", model_type="nemotron_h", n_groups=8, num_logits_to_keep=1,
        rescale_prenorm_residual=True, residual_in_fp32=False, ssm_state_size=128, tie_word_embeddings=False, time_step_floor=0.0001,
        time_step_max=0.1, time_step_min=0.001, use_bias=False, use_conv_bias=True, use_mamba_kernels=True, **others,
    )  # fmt: skip


PUBLISHED = {
    "nemotron-h-8b": nemotron(
        4096, 21504, 52, 32, 8, pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", heads=128, width=64,
        max_position_embeddings=8192,
    ),
    "nemotron-nano-9b-v2": nemotron(
        4480, 15680, 56, 40, 8, pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", heads=128, width=80,
        max_position_embeddings=131072,
    ),
    "nemotron3-nano-30b-a3b": nemotron(
        2688, 1856, 52, 32, 2, pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", heads=64, width=64,
        max_position_embeddings=262144, mamba_ssm_cache_dtype="float32", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        n_group=1, n_routed_experts=128, n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True, num_experts_per_tok=6,
        partial_rotary_factor=1.0, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None, topk_group=1,
    ),
}  # fmt: skip
# As transformers counts.
COUNTS = {
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron3-nano-30b-a3b": 31_577_937_344,
}
READ = (LLAMA - {"rope_theta", "rope_parameters", "hidden_act"}) | {
    "attention_bias", "conv_kernel", "expand", "hybrid_override_pattern", "layer_norm_epsilon", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads",
    "mamba_proj_bias", "mlp_bias", "mlp_hidden_act", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group", "n_groups",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "ssm_state_size", "topk_group",
    "use_bias", "use_conv_bias",
}  # fmt: skip
