"""Llama 2 / 3 (arXiv 2307.09288, 2407.21783), without scaled rotary positions."""

from __future__ import annotations

from typing import Any

from pretrain.config.schema import Model, Rope
from pretrain.errors import ConfigError
from pretrain.models.families import Family

WEIGHTS = (
    ("embedding.weight", "model.embed_tokens.weight"),
    ("layers.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    ("layers.{layer}.attention.query.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    ("layers.{layer}.attention.key.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
    ("layers.{layer}.attention.value.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
    ("layers.{layer}.attention.output.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
    ("layers.{layer}.mlp_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    ("layers.{layer}.mlp.gate.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
    ("layers.{layer}.mlp.up.weight", "model.layers.{layer}.mlp.up_proj.weight"),
    ("layers.{layer}.mlp.down.weight", "model.layers.{layer}.mlp.down_proj.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
)

# Fields of config.json that change what the network computes: the value it must have for us to compute the same.
REQUIRED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0}

# Fields that are about files, generation or training, and change no logit.
INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id",
    "pad_token_id", "use_cache", "pretraining_tp", "initializer_range", "_name_or_path", "output_attentions",
    "output_hidden_states", "return_dict", "id2label", "label2id", "is_encoder_decoder", "problem_type", "chunk_size_feed_forward",
}  # fmt: skip


# Fields without a default that two libraries agree on.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def to_hf(model: Model) -> dict[str, Any]:
    if model.dim % model.heads:  # which the head's own width makes possible here
        raise ConfigError(
            f"model.dim={model.dim} is not divisible by model.heads={model.heads}: transformers refuses such a llama, "
            "so it cannot be exported"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_dim,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        # Both spellings: transformers 5 reads rope_parameters, what came before it (and llama.cpp, vLLM) rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
        "rope_theta": model.rope.theta,
        "initializer_range": model.init_std,
        **REQUIRED,
    }


def from_hf(config: dict[str, Any]) -> Model:
    rest = dict(config)
    for name in SIZES:
        if not isinstance(rest.get(name), int):
            raise ConfigError(f"config.json: {name} is missing or no whole number")
    for name, value in REQUIRED.items():
        if rest.pop(name, value) != value:
            raise ConfigError(f"config.json: {name}={config[name]!r} is not supported for llama; only {value!r} is")
    rope = rest.pop("rope_parameters", None) or {}
    scaling = rest.pop("rope_scaling", None) or {}
    kinds = {r.get("rope_type", r.get("type", "default")) for r in (rope, scaling)}
    if kinds != {"default"} or set(rope) - {"rope_type", "rope_theta"}:
        raise ConfigError(
            f"config.json: rope_scaling or rope_parameters={scaling or rope} is not supported for llama; only default is"
        )
    theta = rope.get("rope_theta", rest.get("rope_theta", 10000.0))
    rest.pop("rope_theta", None)
    heads = rest.pop("num_attention_heads")
    model = Model(
        family="llama",
        vocab_size=rest.pop("vocab_size"),
        dim=(dim := rest.pop("hidden_size")),
        layers=rest.pop("num_hidden_layers"),
        heads=heads,
        kv_heads=rest.pop("num_key_value_heads", None) or heads,
        head_dim=rest.pop("head_dim", None) or dim // heads,
        ffn_dim=rest.pop("intermediate_size"),
        max_sequence_length=rest.pop("max_position_embeddings", 2048),
        norm_eps=rest.pop("rms_norm_eps", 1e-6),
        tie_embeddings=rest.pop("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        rope=Rope(theta=float(theta)),
    )
    unknown = sorted(set(rest) - INERT)
    if unknown:
        raise ConfigError(
            f"config.json: {unknown[0]}={rest[unknown[0]]!r} is not known for llama; it may change what is computed"
        )
    return model


LLAMA = Family("llama", "LlamaForCausalLM", WEIGHTS, to_hf, from_hf)
