"""What the tests know of Mistral."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "window": Model(**SMALL, kv_heads=2, attention=AttentionConfig(window=8)),
    "window of two": Model(**SMALL, kv_heads=2, attention=AttentionConfig(window=2)),
    "window as long as the sequence": Model(**SMALL, kv_heads=1, attention=AttentionConfig(window=40)),
    "window longer than the sequence": Model(**SMALL, attention=AttentionConfig(window=50)),
    "tied": Model(**SMALL, tie_embeddings=True, norm_eps=1e-6),
    "wide heads": Model(**SMALL | {"heads": 2}, head_dim=24, kv_heads=1, attention=AttentionConfig(window=8)),
    "width that heads do not divide": Model(**SMALL | {"heads": 3}, head_dim=8),
    "other theta": Model(**SMALL, kv_heads=2, rope=Rope(theta=1_000_000.0)),
    "yarn scaling": Model(
        **SMALL, attention=AttentionConfig(window=8), rope=Rope(scaling="yarn", factor=4.0, original_length=16, beta_fast=4.0)
    ),
}


def mistral(vocab: int, **rest: Any) -> dict[str, Any]:
    common = {"hidden_act": "silu", "model_type": "mistral", "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
    return hub("MistralForCausalLM", 4096, 14336, 32, 32, 8, vocab, max_position_embeddings=32768, **common, **rest)


PUBLISHED = {
    "mistral-7b": mistral(32768, rope_theta=1000000.0, sliding_window=None),
    "mistral-7b-v0.1": mistral(32000, rope_theta=10000.0, sliding_window=4096),
}
COUNTS = {
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
}
READ = LLAMA | {"rms_norm_eps", "sliding_window"}
