"""What the tests know of Qwen3-MoE."""

from family_cases import LLAMA
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
BIASED = AttentionConfig(bias=["query", "key", "value", "output"])

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=6, active=2, ffn_dim=20)),
    "weights do not sum to one": Model(
        **SMALL, kv_heads=1, tie_embeddings=True, experts=ExpertsConfig(count=4, active=3, ffn_dim=24, normalise=False)
    ),
    "dense layers": Model(
        **SMALL | {"layers": 4}, head_dim=16, experts=ExpertsConfig(count=4, active=2, ffn_dim=16, dense_layers=[0, 2])
    ),
    "biases, yarn": Model(
        **SMALL,
        attention=BIASED,
        norm_eps=1e-5,
        rope=Rope(theta=1e6, scaling="yarn", factor=4.0, original_length=16),
        experts=ExpertsConfig(count=8, active=8, ffn_dim=12),
    ),
}

PUBLISHED = {"qwen3-30b-a3b": {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}}  # fmt: skip
COUNTS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "moe-40m-a10m": 41_473_280,  # our own
}
READ = LLAMA | {
    "rms_norm_eps",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}
