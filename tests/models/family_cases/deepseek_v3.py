"""What the tests know of DeepSeek-V3."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import Latent, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
LATENT = Latent(kv_rank=12, query_rank=20, rope_dim=4, plain_dim=10, value_dim=6)
YARN = Rope(scaling="yarn", factor=4.0, original_length=16, mscale=1.0, mscale_all_dim=0.7)

CASES = {
    "plain": Model(
        **SMALL,
        latent=LATENT,
        experts=ExpertsConfig(count=8, active=3, ffn_dim=20, dense_layers=[0], groups=4, active_groups=2, scale=2.5),
    ),
    "whole queries, values wider than keys": Model(
        **SMALL,
        latent=Latent(kv_rank=16, rope_dim=8, plain_dim=4, value_dim=24),
        experts=ExpertsConfig(count=4, active=2, ffn_dim=16, shared=2, scale=1.5),
    ),
    "yarn that scales the scores, not normalised": Model(
        **SMALL | {"dim": 28, "heads": 3},  # a width that its heads do not divide into whole heads of their own
        latent=LATENT,
        rope=YARN,
        norm_eps=1e-5,
        experts=ExpertsConfig(count=6, active=2, ffn_dim=20, dense_layers=[0, 1], groups=2, active_groups=1, normalise=False),
    ),
    "rotated by halves, tied": Model(
        **SMALL,
        tie_embeddings=True,
        latent=LATENT,
        rope=Rope(layout="half", theta=5e4),
        experts=ExpertsConfig(count=5, active=5, ffn_dim=20),
    ),
    "yarn without mscale, dense only but for the last": Model(
        **SMALL,
        latent=LATENT,
        rope=Rope(scaling="yarn", factor=8.0, original_length=8),
        experts=ExpertsConfig(count=4, active=1, ffn_dim=20, dense_layers=[0, 1], normalise=False),
    ),
}

PUBLISHED = {"deepseek-v3": {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.006,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}}  # fmt: skip


def like_deepseek(dim: int, ffn: int, layers: int, heads: int, *, experts: int, active: int, width: int, shared: int, query_rank: int | None, **rest: Any) -> dict[str, Any]:
    """The config.json of other models of this architecture: one group of experts, and one dense layer first."""
    return hub(
        "DeepseekV3ForCausalLM", dim, ffn, layers, heads, heads, 163840,
        attention_bias=False, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=width,
        moe_layer_freq=1, n_group=1, n_routed_experts=experts, n_shared_experts=shared, norm_topk_prob=True, num_experts_per_tok=active,
        num_nextn_predict_layers=0, pretraining_tp=1, q_lora_rank=query_rank, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=50000.0,
        scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=128, **rest,
    )  # fmt: skip


YARN = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED |= {
    "moonlight-16b-a3b": like_deepseek(
        2048, 11264, 27, 16, experts=64, active=6, width=1408, shared=2, query_rank=None, model_type="deepseek_v3", max_position_embeddings=8192,
        rms_norm_eps=1e-05, rope_scaling=None, routed_scaling_factor=2.446,
    ),
    # The hub's has another name of the architecture, kimi_k2 (test_moe_presets.py).
    "kimi-k2": like_deepseek(
        7168, 18432, 61, 64, experts=384, active=8, width=2048, shared=1, query_rank=1536, model_type="deepseek_v3", max_position_embeddings=131072,
        rms_norm_eps=1e-06, rope_scaling=YARN, routed_scaling_factor=2.827,
    ),
}  # fmt: skip
COUNTS = {
    # Tensors of the published files without layer 61 and the 58 x 256 balancing biases.
    "deepseek-v3": 671_026_404_352,
    # As transformers counts.
    "moonlight-16b-a3b": 15_960_108_544,
    "kimi-k2": 1_026_408_209_408,
}
READ = LLAMA | {
    "rms_norm_eps",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
}
