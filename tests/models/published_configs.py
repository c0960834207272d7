"""config.json files as they stand on the hub, of transformers 4.31 to 5.0: what an import has to understand.

Written from memory of the files, without the fields that say nothing of the network (`_name_or_path`, ids of special tokens, ...)
except for some of each kind.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def config(architecture: str, dim: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **rest: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": vocab,
        **rest,
    }


def llama(*shape: int, **rest: Any) -> dict[str, Any]:
    common = {"hidden_act": "silu", "model_type": "llama", "rms_norm_eps": 1e-05, "attention_bias": False, "pretraining_tp": 1}
    return config("LlamaForCausalLM", *shape, **{"rope_scaling": None, "tie_word_embeddings": False, **common, **rest})


def llama3(factor: float) -> dict[str, Any]:
    return {
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }


def smollm2(*shape: int, **rest: Any) -> dict[str, Any]:
    return llama(
        *shape,
        is_llama_config=True,
        max_position_embeddings=8192,
        mlp_bias=False,
        rope_interleaved=False,
        tie_word_embeddings=True,
        **rest,
    )


def mistral(vocab: int, **rest: Any) -> dict[str, Any]:
    common = {"hidden_act": "silu", "model_type": "mistral", "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
    return config("MistralForCausalLM", 4096, 14336, 32, 32, 8, vocab, max_position_embeddings=32768, **common, **rest)


def qwen2(*shape: int, tied: bool, length: int, eps: float = 1e-06, **rest: Any) -> dict[str, Any]:
    return config(
        "Qwen2ForCausalLM",
        *shape,
        hidden_act="silu",
        max_position_embeddings=length,
        max_window_layers=shape[2],
        model_type="qwen2",
        rms_norm_eps=eps,
        rope_theta=1000000.0,
        sliding_window=length,
        tie_word_embeddings=tied,
        use_mrope=False,
        use_sliding_window=False,
        **rest,
    )


def qwen3(*shape: int, tied: bool) -> dict[str, Any]:
    return config(
        "Qwen3ForCausalLM",
        *shape,
        attention_bias=False,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        max_window_layers=shape[2],
        model_type="qwen3",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=tied,
        use_sliding_window=False,
    )


def gemma2(*shape: int, head_dim: int, scalar: int) -> dict[str, Any]:
    return config(
        "Gemma2ForCausalLM",
        *shape,
        attention_bias=False,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=head_dim,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        model_type="gemma2",
        query_pre_attn_scalar=scalar,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
    )


def gemma3(
    *shape: int, window: int, length: int, scaling: Any = None, head_dim: int = 256, scalar: int = 256
) -> dict[str, Any]:
    return config(
        "Gemma3ForCausalLM",
        *shape,
        attention_bias=False,
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=head_dim,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=length,
        model_type="gemma3_text",
        query_pre_attn_scalar=scalar,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=scaling,
        rope_theta=1000000,
        sliding_window=window,
        sliding_window_pattern=6,
    )


def olmo2(*shape: int) -> dict[str, Any]:
    return config(
        "Olmo2ForCausalLM",
        *shape,
        attention_bias=False,
        hidden_act="silu",
        max_position_embeddings=4096,
        model_type="olmo2",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
    )


def olmo3(*shape: int) -> dict[str, Any]:
    return {
        **olmo2(*shape),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(shape[2])],
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
    }


def phi3(*shape: int, length: int = 4096, **rest: Any) -> dict[str, Any]:
    values = {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "model_type": "phi3",
        "original_max_position_embeddings": length,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
    }
    return config("Phi3ForCausalLM", *shape, **{**values, **rest})


EIGHTFOLD = {"factor": 8.0, "rope_type": "linear"}

# By preset, the file that it is the shape of.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2-7b": llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "llama3.1-8b": llama(4096, 14336, 32, 32, 8, 128256, **llama3(8.0)),
    "llama3.1-70b": llama(8192, 28672, 80, 64, 8, 128256, **llama3(8.0)),
    "llama3.2-1b": llama(2048, 8192, 16, 32, 8, 128256, **llama3(32.0), head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": llama(3072, 8192, 28, 24, 8, 128256, **llama3(32.0), head_dim=128, tie_word_embeddings=True),
    "tinyllama-1.1b": llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048, rope_theta=10000.0),
    "smollm2-135m": smollm2(576, 1536, 30, 9, 3, 49152, rope_theta=100000, initializer_range=0.041666666666666664),
    "smollm2-360m": smollm2(960, 2560, 32, 15, 5, 49152, rope_theta=100000),
    "smollm2-1.7b": smollm2(2048, 8192, 24, 32, 32, 49152, rope_theta=130000),
    "smollm3-3b": config(
        "SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256,
        attention_bias=False, hidden_act="silu", layer_types=[FULL] * 36, max_position_embeddings=65536, max_window_layers=28,
        mlp_bias=False, model_type="smollm3", no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
    ),
    "mistral-7b": mistral(32768, rope_theta=1000000.0, sliding_window=None),
    "mistral-7b-v0.1": mistral(32000, rope_theta=10000.0, sliding_window=4096),
    "qwen2.5-0.5b": qwen2(896, 4864, 24, 14, 2, 151936, tied=True, length=32768),
    "qwen2.5-1.5b": qwen2(1536, 8960, 28, 12, 2, 151936, tied=True, length=131072),
    "qwen2.5-7b": qwen2(3584, 18944, 28, 28, 4, 152064, tied=False, length=131072),
    "qwen2.5-72b": qwen2(8192, 29568, 80, 64, 8, 152064, tied=False, length=131072, eps=1e-05),
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, 8, 151936, tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, 8, 151936, tied=True),
    "qwen3-4b": qwen3(2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, 8, 151936, tied=False),
    "qwen3-14b": qwen3(5120, 17408, 40, 40, 8, 151936, tied=False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, 8, 151936, tied=False),
    "gemma2-2b": gemma2(2304, 9216, 26, 8, 4, 256000, head_dim=256, scalar=256),
    "gemma2-9b": gemma2(3584, 14336, 42, 16, 8, 256000, head_dim=256, scalar=256),
    "gemma2-27b": gemma2(4608, 36864, 46, 32, 16, 256000, head_dim=128, scalar=144),
    "gemma3-270m": gemma3(640, 2048, 18, 4, 1, 262144, window=512, length=32768),
    "gemma3-1b": gemma3(1152, 6912, 26, 4, 1, 262144, window=512, length=32768),
    "gemma3-4b": gemma3(2560, 10240, 34, 8, 4, 262208, window=1024, length=131072, scaling=EIGHTFOLD),
    "gemma3-12b": gemma3(3840, 15360, 48, 16, 8, 262208, window=1024, length=131072, scaling=EIGHTFOLD),
    "gemma3-27b": gemma3(
        5376, 21504, 62, 32, 16, 262208, window=1024, length=131072, scaling=EIGHTFOLD, head_dim=128, scalar=168
    ),
    "olmo2-1b": olmo2(2048, 8192, 16, 16, 16, 100352),
    "olmo2-7b": olmo2(4096, 11008, 32, 32, 32, 100352),
    "olmo2-13b": olmo2(5120, 13824, 40, 40, 40, 100352),
    "olmo2-32b": olmo2(5120, 27648, 64, 40, 8, 100352),
    "olmo3-7b": olmo3(4096, 11008, 32, 32, 32, 100278),
    "olmo3-32b": olmo3(5120, 27648, 64, 40, 8, 100278),
    "phi3-mini": phi3(3072, 8192, 32, 32, 32, 32064),
    "phi3-medium": phi3(5120, 17920, 40, 40, 10, 32064),
    "phi4": phi3(5120, 17920, 40, 40, 10, 100352, length=16384, rope_theta=250000, sliding_window=None),
}  # fmt: skip
