"""What the tests know of Mixtral."""

from family_cases import LLAMA
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=4, active=2)),
    "two experts of three, tied": Model(**SMALL, tie_embeddings=True, experts=ExpertsConfig(count=3, active=2)),
    "every expert": Model(**SMALL, kv_heads=1, rope=Rope(theta=1e6), experts=ExpertsConfig(count=4, active=4)),
    "window": Model(**SMALL, attention=AttentionConfig(window=9), norm_eps=1e-4, experts=ExpertsConfig(count=5, active=3)),
    "wide heads": Model(**SMALL, head_dim=12, kv_heads=2, experts=ExpertsConfig(count=8, active=2)),
}

PUBLISHED = {"mixtral-8x7b": {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}}  # fmt: skip
COUNTS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}
READ = LLAMA | {"rms_norm_eps", "num_local_experts", "num_experts_per_tok", "sliding_window"}
