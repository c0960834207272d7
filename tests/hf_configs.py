"""Tiny configurations of architectures that have no family of their own here, as their config.json would have them."""

import json
from pathlib import Path

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
LLAMA_LIKE = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64,
                      "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
GPT_LIKE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 64}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257},
    "opt": SIZES | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "falcon": SIZES | ENDS | {"num_kv_heads": 2, "new_decoder_architecture": True},
    "stablelm": LLAMA_LIKE,
    "granite": LLAMA_LIKE | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere": LLAMA_LIKE | {"use_qk_norm": True},
    "phi": LLAMA_LIKE,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 257, "max_seq_len": 64, "expansion_ratio": 2},
    "qwen2_moe": LLAMA_LIKE
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gptj": GPT_LIKE | ENDS | {"rotary_dim": 4},
    "gpt_bigcode": GPT_LIKE | ENDS,
    "starcoder2": LLAMA_LIKE,
    "bert": LLAMA_LIKE | {"is_decoder": True},
}
CONFIGS["bert"].pop("num_key_value_heads")


MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GROUPED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 257, "state_size": 8, **ENDS}
HALF = {"layer_types": ["linear_attention", "full_attention"]}

ARCHITECTURES = {
    # Attention in every layer.
    "ernie4_5": LLAMA_LIKE | {"head_dim": 8},
    "ernie4_5_moe": LLAMA_LIKE
    | {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "llama4_text": LLAMA_LIKE
    | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    "olmoe": LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": CONFIGS["qwen2_moe"],
    "cohere2": LLAMA_LIKE | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": LLAMA_LIKE | {"head_dim": 8},
    "granite": CONFIGS["granite"],
    "starcoder2": CONFIGS["starcoder2"],
    "arcee": LLAMA_LIKE | {"head_dim": 8},
    "nanochat": LLAMA_LIKE,
    "hunyuan_v1_dense": LLAMA_LIKE | {"head_dim": 8},
    "hunyuan_v1_moe": LLAMA_LIKE | {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "seed_oss": LLAMA_LIKE | {"head_dim": 8},
    "exaone4": LLAMA_LIKE | {"sliding_window": 8, "sliding_window_pattern": 2},
    "nemotron": LLAMA_LIKE | {"head_dim": 8},
    "phimoe": LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LLAMA_LIKE | LATENT | GROUPED | {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": None, "topk_group": None},
    "flex_olmo": LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2},
    "bitnet": LLAMA_LIKE,
    "apertus": LLAMA_LIKE,  # parameters whose first values are their constructor's
    "ministral3": LLAMA_LIKE | {"head_dim": 8},  # queries scaled by position, a parameter of its rotation
    # Tensors that are saved and are no weights.
    "minimax_m2": LLAMA_LIKE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "glm4_moe": LLAMA_LIKE | GROUPED | {"head_dim": 8, "first_k_dense_replace": 1},
    "dots1": LLAMA_LIKE | GROUPED | {"first_k_dense_replace": 1},
    "hy_v3": LLAMA_LIKE | MOE | {"head_dim": 8},
    "gemma4_text": LLAMA_LIKE
    | {"head_dim": 8, "vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8, "sliding_window": 8,
       "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"01": {"head_dim": 16}}},
    "deepseek_v4": LLAMA_LIKE
    | {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 4,
       "partial_rotary_factor": 0.25, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "mlp_layer_types": ["hash_moe", "moe"], "layer_types": ["heavily_compressed_attention"] * 2,
       "compress_rates": {"heavily_compressed_attention": 8}, "sliding_window": 8},
    # Linear attention, state spaces and convolutions, with attention or without.
    "lfm2": LLAMA_LIKE | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": LLAMA_LIKE | MOE | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "qwen3_next": LLAMA_LIKE | MOE | DELTA | HALF | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LLAMA_LIKE | DELTA | HALF | {"head_dim": 8},
    "qwen3_5_moe_text": LLAMA_LIKE | MOE | DELTA | HALF | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "kimi_linear": LLAMA_LIKE
    | LATENT
    | HALF
    | {"q_lora_rank": None, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "linear_head_dim": 8,
       "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "olmo_hybrid": LLAMA_LIKE | DELTA | HALF | {"linear_num_value_heads": 2},
    "minimax": LLAMA_LIKE | HALF | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "falcon_h1": LLAMA_LIKE | MAMBA | {"head_dim": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": LLAMA_LIKE
    | MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "nemotron_h": LLAMA_LIKE
    | GROUPED
    | {"num_hidden_layers": 4, "head_dim": 8, "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
       "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "moe_shared_expert_intermediate_size": 16},
    "bamba": LLAMA_LIKE | MAMBA | {"attn_layer_indices": [1]},
    "jamba": LLAMA_LIKE
    | {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2,
       "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    # One transformer block, used by several layers.
    "zamba2": LLAMA_LIKE
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8,
       "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8, "attention_hidden_size": 64},
    "mamba": STATES,
    "mamba2": STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": STATES,
    "recurrent_gemma": {name: value for name, value in LLAMA_LIKE.items() if name != "max_position_embeddings"}
    | {"num_hidden_layers": 3, "attention_window_size": 8, "lru_width": 32},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 257, "attention_hidden_size": 32, "context_length": 64,
             "bos_token_id": None, "eos_token_id": None},
    "xlstm": {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "num_blocks": 2, "vocab_size": 257, **ENDS},
}  # fmt: skip
"""Architectures of 2025 and 2026, and those that are not attention alone, as `CONFIGS`."""


def write_config(folder: Path, kind: str, **changes: object) -> Path:
    """The directory of a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **(CONFIGS | ARCHITECTURES).get(kind, {}), **changes}))
    return folder
