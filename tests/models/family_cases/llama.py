"""What the tests know of Llama 2, 3 and 3.x."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}
BIASED = AttentionConfig(bias=["query", "key", "value", "output"])
LLAMA3 = Rope(theta=500_000.0, scaling="llama3", factor=8.0, original_length=16, low_frequency=1.0, high_frequency=4.0)

CASES = {
    "plain": Model(**SMALL),
    "tied": Model(**SMALL, tie_embeddings=True),
    "one key-value head": Model(**SMALL, kv_heads=1),
    "grouped queries": Model(**SMALL, kv_heads=2),
    "narrow heads": Model(**SMALL, head_dim=2, kv_heads=2),
    "wide heads": Model(**SMALL | {"heads": 2}, head_dim=24, kv_heads=1),
    "other theta": Model(**SMALL, rope=Rope(theta=500_000.0)),
    "large eps": Model(**SMALL, norm_eps=0.1),
    "odd sizes": Model(dim=30, layers=3, heads=5, ffn_dim=37, vocab_size=101, tie_embeddings=True, norm_eps=1e-6),
    "derived ffn": Model(dim=16, layers=1, heads=2, vocab_size=7),
    "biases": Model(**SMALL, kv_heads=2, attention=BIASED, mlp=MlpConfig(bias=True)),
    "llama3 scaling": Model(**SMALL, rope=LLAMA3),
    "linear scaling": Model(**SMALL, rope=Rope(scaling="linear", factor=4.0)),
    "dynamic scaling": Model(**SMALL, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}


def llama(*shape: int, **rest: Any) -> dict[str, Any]:
    common = {"hidden_act": "silu", "model_type": "llama", "rms_norm_eps": 1e-05, "attention_bias": False, "pretraining_tp": 1}
    return hub("LlamaForCausalLM", *shape, **{"rope_scaling": None, "tie_word_embeddings": False, **common, **rest})


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


PUBLISHED = {
    "llama2-7b": llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "llama3.1-8b": llama(4096, 14336, 32, 32, 8, 128256, **llama3(8.0)),
    "llama3.1-70b": llama(8192, 28672, 80, 64, 8, 128256, **llama3(8.0)),
    "llama3.2-1b": llama(2048, 8192, 16, 32, 8, 128256, **llama3(32.0), head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": llama(3072, 8192, 28, 24, 8, 128256, **llama3(32.0), head_dim=128, tie_word_embeddings=True),
    "tinyllama-1.1b": llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048, rope_theta=10000.0),
    "smollm2-135m": smollm2(576, 1536, 30, 9, 3, 49152, rope_theta=100000, initializer_range=0.041666666666666664),
    "smollm2-360m": smollm2(960, 2560, 32, 15, 5, 49152, rope_theta=100000),
    "smollm2-1.7b": smollm2(2048, 8192, 24, 32, 32, 49152, rope_theta=130000),
}
COUNTS = {
    # Our own: vocabulary x dim + layers x (dim x (2 x dim + 2 x key-value width + 3 x ffn) + 2 x dim) + dim
    "llama-10m": 32000 * 192 + 10 * (192 * (2 * 192 + 2 * 64 + 3 * 512) + 2 * 192) + 192,
    "llama-25m": 32000 * 320 + 13 * (320 * (2 * 320 + 2 * 160 + 3 * 896) + 2 * 320) + 320,
    "llama-60m": 32000 * 512 + 15 * (512 * (2 * 512 + 2 * 256 + 3 * 1408) + 2 * 512) + 512,
    "llama-125m": 32000 * 768 + 16 * (768 * (2 * 768 + 2 * 256 + 3 * 2048) + 2 * 768) + 768,
    # meta-llama, TinyLlama and HuggingFaceTB on the hub
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
READ = LLAMA | {"rms_norm_eps", "attention_bias", "mlp_bias"}
