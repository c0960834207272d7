"""What the tests know of Qwen3-Next."""

from typing import Any

from family_cases import hub
from family_cases.qwen3_5 import SIZES, linear
from family_cases.qwen3_5_moe import READ as READ_EXPERTS
from pretrain.config.attention_schema import Rope
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=6, active=2, ffn_dim=20)),
    "two shared experts, weights do not sum to one": Model(
        **SMALL, norm_eps=1e-3, linear_attention=SIZES, experts=ExpertsConfig(count=4, active=3, ffn_dim=20, shared=2, normalise=False)
    ),
    "dense layers, tied": Model(
        **SMALL | {"layers": 4},
        tie_embeddings=True,
        kv_heads=1,
        linear_attention=linear(pattern=[False, True]),
        experts=ExpertsConfig(count=5, active=5, ffn_dim=12, dense_layers=[0, 3]),
    ),
    "four value heads for one key head, yarn": Model(
        **SMALL,
        head_dim=16,
        rope=Rope(theta=500.0, scaling="yarn", factor=4.0, original_length=16),
        linear_attention=linear(key_heads=1),
        experts=ExpertsConfig(count=4, active=2, ffn_dim=8),
    ),
}


def qwen3_next(dim: int, ffn: int, layers: int, heads: int, *, experts: int, active: int, width: int) -> dict[str, Any]:
    return hub(
        "Qwen3NextForCausalLM", dim, ffn, layers, heads, 2, 151936,
        attention_bias=False, decoder_sparse_step=1, full_attention_interval=4, head_dim=256, hidden_act="silu", linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
        mlp_only_layers=[], model_type="qwen3_next", moe_intermediate_size=width, norm_topk_prob=True, num_experts=experts,
        num_experts_per_tok=active, output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=width, tie_word_embeddings=False,
        use_sliding_window=False,
    )  # fmt: skip


PUBLISHED = {"qwen3-next-80b-a3b": qwen3_next(2048, 5120, 48, 16, experts=512, active=10, width=512)}
COUNTS = {"qwen3-next-80b-a3b": 79_674_391_296}  # as transformers counts; the hub's files also hold layers that predict further ahead
READ = (READ_EXPERTS | {"intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}) - {"attn_output_gate"}
