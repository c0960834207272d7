"""What the tests know of ERNIE 4.5 with experts."""

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=8, active=3, ffn_dim=20, dense_layers=[0])),
    "no shared expert, untied": Model(
        **SMALL, tie_embeddings=False, norm_eps=0.01, experts=ExpertsConfig(count=4, active=2, ffn_dim=12, shared=0)
    ),
    "every other layer, wide heads": Model(
        **SMALL | {"layers": 5, "heads": 3},
        head_dim=16,
        rope=Rope(theta=1e4),
        experts=ExpertsConfig(count=4, active=2, ffn_dim=16, shared=1, dense_layers=[0, 2, 4]),
    ),
    "a stretch in the middle, yarn": Model(
        **SMALL | {"layers": 4},
        kv_heads=1,
        rope=Rope(scaling="yarn", factor=4.0, original_length=16),
        experts=ExpertsConfig(count=5, active=5, ffn_dim=16, dense_layers=[0, 3]),
    ),
}

PUBLISHED = {
    "ernie4.5-21b-a3b": hub(
        "Ernie4_5_MoeForCausalLM", 2560, 12288, 28, 20, 4, 103424,
        hidden_act="silu", max_position_embeddings=131072, model_type="ernie4_5_moe", moe_capacity=[64, 64, 64], moe_gate="topk",
        moe_intermediate_size=1536, moe_k=6, moe_layer_end_index=27, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=64,
        moe_num_shared_experts=2, moe_use_aux_free=True, num_nextn_predict_layers=1, pad_token_id=0, rms_norm_eps=1e-05,
        rope_theta=500000, tie_word_embeddings=True, use_bias=False, use_rmsnorm=True,
    ),
}  # fmt: skip
COUNTS = {
    "ernie4.5-21b-a3b": 21_825_436_160
}  # baidu/ERNIE-4.5-21B-A3B-PT, 21.8B, without the layer that predicts further ahead
READ = LLAMA | {
    "rms_norm_eps", "use_bias", "moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts", "moe_layer_start_index",
    "moe_layer_end_index", "moe_layer_interval", "moe_use_aux_free",
}  # fmt: skip
