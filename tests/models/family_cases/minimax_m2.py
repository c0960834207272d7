"""What the tests know of MiniMax-M2."""

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 20, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, head_dim=16, experts=ExpertsConfig(count=8, active=3)),
    "fully rotated, tied": Model(
        **SMALL, kv_heads=1, tie_embeddings=True, rope=Rope(fraction=1.0, theta=1e4), experts=ExpertsConfig(count=4, active=2)
    ),
    "a share that is no whole number of components": Model(
        **SMALL | {"dim": 36}, head_dim=16, norm_eps=0.01, rope=Rope(fraction=0.3), experts=ExpertsConfig(count=5, active=5)
    ),
    "yarn scaling": Model(
        **SMALL,
        head_dim=12,
        rope=Rope(scaling="yarn", factor=4.0, original_length=16),
        experts=ExpertsConfig(count=4, active=2),
    ),
}

# The files of the hub have fp8 weights, and say so in quantization_config, which is refused; this is what is left without it.
PUBLISHED = {
    "minimax-m2": hub(
        "MiniMaxM2ForCausalLM", 3072, 1536, 62, 48, 8, 200064,
        attn_type_list=[1] * 62, head_dim=128, hidden_act="silu", max_position_embeddings=196608, model_type="minimax_m2",
        mtp_transformer_layers=1, num_experts_per_tok=8, num_local_experts=256, num_mtp_modules=3, qk_norm_type="per_layer",
        rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=64, scoring_func="sigmoid", shared_intermediate_size=0,
        tie_word_embeddings=False, use_mtp=True, use_qk_norm=True, use_routing_bias=True,
    ),
}  # fmt: skip
COUNTS = {"minimax-m2": 228_689_764_864 - 62 * 256}  # the hub's total without the balancing biases
READ = LLAMA | {
    "rms_norm_eps", "num_local_experts", "num_experts_per_tok", "rotary_dim", "scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type",
}  # fmt: skip
