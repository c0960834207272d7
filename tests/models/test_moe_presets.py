"""Presets with experts: active parameters, and the files of the hub."""

from __future__ import annotations

import pytest
from presets import preset

from pretrain.errors import ConfigError
from pretrain.models.families import family_of_hf
from pretrain.models.shape import with_values
from pretrain.observe.flops import active_parameters

# Active parameters that the reports print, in billions; those of gpt-oss leave the input embedding out, and so are less by it.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.2,
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.2,
    "deepseek-v3": 37.6,
    "gpt-oss-20b": 3.61 + 0.58,
    "gpt-oss-120b": 5.13 + 0.58,
    "moe-40m-a10m": 0.010,
}
GPT_OSS_FILE = {
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
}  # fmt: skip
DEEPSEEK_FILE = {
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
}  # fmt: skip
QWEN_FILE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_FILE = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
FILES = {
    "mixtral-8x7b": MIXTRAL_FILE,
    "qwen3-30b-a3b": QWEN_FILE,
    "deepseek-v3": DEEPSEEK_FILE,
    "gpt-oss-20b": GPT_OSS_FILE,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_was_published(name):
    active = ACTIVE[name]
    assert active_parameters(preset(name)[0]) / 1e9 == pytest.approx(active, abs=0.05 if active > 1 else 0.001)


@pytest.mark.parametrize("name", FILES)
def test_the_config_json_of_the_hub_is_the_preset(name):
    file, trained = FILES[name], {"experts.balance_loss": 0.0}
    assert family_of_hf(file).from_hf(file) == with_values(preset(name)[0], trained)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("deepseek-v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "head_dim", 128),
        ("deepseek-v3", "first_k_dense_replace", "three"),
        ("deepseek-v3", "num_key_value_heads", 8),
        ("gpt-oss-20b", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt-oss-20b", "swiglu_limit", 5.0),
        ("qwen3-30b-a3b", "use_sliding_window", True),
        ("qwen3-30b-a3b", "num_local_experts", 64),
        ("qwen3-30b-a3b", "decoder_sparse_step", 0),
        ("qwen3-30b-a3b", "mlp_only_layers", "first"),
        ("mixtral-8x7b", "router_jitter_noise", 0.1),
        ("mixtral-8x7b", "num_experts_per_tok", 9),
    ],
)
def test_what_is_not_computed_is_named_and_refused(name, field, value):
    file = FILES[name] | {field: value}
    ours = {"num_key_value_heads": "model.kv_heads=8", "num_experts_per_tok": "model.experts.active=9"}
    expected = ours.get(field, "num_experts" if field == "num_local_experts" else f"config.json: .*({field}|head's width)")
    with pytest.raises(ConfigError, match=expected) as caught:
        family_of_hf(file).from_hf(file)
    assert "\n" not in str(caught.value)
