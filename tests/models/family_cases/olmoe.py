"""What the tests know of OLMoE."""

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 20, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, experts=ExpertsConfig(count=6, active=2)),
    "weights sum to one": Model(**SMALL, kv_heads=2, norm_eps=0.01, experts=ExpertsConfig(count=4, active=3, normalise=True)),
    "tied, biases": Model(
        **SMALL,
        kv_heads=1,
        tie_embeddings=True,
        attention=AttentionConfig(bias=["query", "key", "value", "output"]),
        experts=ExpertsConfig(count=3, active=1),
    ),
    "yarn scaling": Model(
        **SMALL, rope=Rope(theta=5e4, scaling="yarn", factor=4.0, original_length=16), experts=ExpertsConfig(count=8, active=8)
    ),
}

PUBLISHED = {
    "olmoe-1b-7b": hub(
        "OlmoeForCausalLM", 2048, 1024, 16, 16, 16, 50304,
        attention_bias=False, clip_qkv=None, hidden_act="silu", max_position_embeddings=4096, model_type="olmoe", norm_topk_prob=False,
        num_experts=64, num_experts_per_tok=8, output_router_logits=False, pad_token_id=1, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False,
    ),
}  # fmt: skip
COUNTS = {"olmoe-1b-7b": 6_919_161_856}  # allenai/OLMoE-1B-7B-0924 and -0125
READ = LLAMA | {"rms_norm_eps", "attention_bias", "num_experts", "num_experts_per_tok", "norm_topk_prob", "clip_qkv"}
