"""What the tests know of Phi-3 and Phi-4."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "grouped queries": Model(**SMALL, kv_heads=2, rope=Rope(theta=250_000.0)),
    "one key-value head": Model(**SMALL, kv_heads=1, norm_eps=1e-6),
    "window": Model(**SMALL, attention=AttentionConfig(window=7)),
    "partial rotation": Model(**SMALL | {"dim": 64}, kv_heads=2, rope=Rope(fraction=0.75)),
    "partial rotation of a width that is rounded down": Model(
        **SMALL | {"dim": 40}, tie_embeddings=True, rope=Rope(fraction=0.65)
    ),
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
    return hub("Phi3ForCausalLM", *shape, **{**values, **rest})


PUBLISHED = {
    "phi3-mini": phi3(3072, 8192, 32, 32, 32, 32064),
    "phi3-medium": phi3(5120, 17920, 40, 40, 10, 32064),
    "phi4": phi3(5120, 17920, 40, 40, 10, 100352, length=16384, rope_theta=250000, sliding_window=None),
}
COUNTS = {
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
}
READ = LLAMA | {"rms_norm_eps", "sliding_window", "original_max_position_embeddings"}
