"""What the tests know of Qwen3.5's text model with experts."""

from typing import Any

from family_cases import LLAMA, hub
from family_cases.qwen3_5 import MROPE, SIZES, linear
from family_cases.qwen3_5 import READ as READ_DENSE
from pretrain.config.model_schema import ExpertsConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 20, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, experts=ExpertsConfig(count=6, active=2)),
    "two shared experts": Model(**SMALL, norm_eps=1e-3, linear_attention=SIZES, experts=ExpertsConfig(count=4, active=3, shared=2)),
    "all experts, tied": Model(
        **SMALL,
        tie_embeddings=True,
        kv_heads=1,
        linear_attention=linear(pattern=[False, True]),
        experts=ExpertsConfig(count=5, active=5),
    ),
}


def qwen3_5_moe(dim: int, layers: int, heads: int, *, values: int, experts: int, active: int, ffn: int) -> dict[str, Any]:
    config = hub(
        "Qwen3_5MoeForCausalLM", dim, ffn, layers, heads, 2, 248320,
        attention_bias=False, attn_output_gate=True, full_attention_interval=4, head_dim=256, hidden_act="silu",
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=values, linear_value_head_dim=128,
        mamba_ssm_dtype="float32", max_position_embeddings=262144, model_type="qwen3_5_moe_text", moe_intermediate_size=ffn,
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, num_experts=experts, num_experts_per_tok=active,
        output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06, router_aux_loss_coef=0.001,
        rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default", **MROPE},
        shared_expert_intermediate_size=ffn, tie_word_embeddings=False,
    )  # fmt: skip
    del config["intermediate_size"]
    return config


PUBLISHED = {"qwen3.5-35b-a3b": qwen3_5_moe(2048, 40, 16, values=32, experts=256, active=8, ffn=512)}
COUNTS = {"qwen3.5-35b-a3b": 34_660_610_688}  # as transformers counts its text model of this shape
READ = (
    READ_DENSE | LLAMA | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
) - {"intermediate_size"}
