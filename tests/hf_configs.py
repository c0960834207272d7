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


def write_config(folder: Path, kind: str, **changes: object) -> Path:
    """The directory of a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS.get(kind, {}), **changes}))
    return folder
