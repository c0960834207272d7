"""What the tests know of gpt-oss."""

from family_cases import LLAMA
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 24, "vocab_size": 61}
YARN = Rope(scaling="yarn", factor=32.0, original_length=16, truncate=False)

CASES = {
    "plain": Model(
        **SMALL, kv_heads=2, rope=YARN, attention=AttentionConfig(window=9), experts=ExpertsConfig(count=4, active=2)
    ),
    "wide heads, no biases in attention": Model(
        **SMALL, head_dim=24, kv_heads=1, attention=AttentionConfig(window=5, bias=[]), experts=ExpertsConfig(count=6, active=3)
    ),
    "window in all layers but the first, tied": Model(
        **SMALL | {"layers": 4},
        tie_embeddings=True,
        rope=YARN,
        attention=AttentionConfig(window=7, window_pattern=[False, True, True, True]),
        experts=ExpertsConfig(count=3, active=3),
    ),
    "no window": Model(
        **SMALL,
        attention=AttentionConfig(window=128, window_pattern=[False]),
        rope=Rope(theta=5e4, scaling="yarn", factor=4.0, original_length=16),
        experts=ExpertsConfig(count=5, active=2),
    ),
}

PUBLISHED = {"gpt-oss-20b": {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}}  # fmt: skip
COUNTS = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
READ = LLAMA | {"rms_norm_eps", "num_local_experts", "num_experts_per_tok", "sliding_window", "layer_types", "swiglu_limit"}
