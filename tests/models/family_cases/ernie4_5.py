"""What the tests know of ERNIE 4.5."""

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2),
    "biases, untied": Model(
        **SMALL,
        tie_embeddings=False,
        attention=AttentionConfig(bias=["query", "key", "value", "output"]),
        mlp=MlpConfig(bias=True),
    ),
    "wide heads": Model(**SMALL | {"dim": 40, "heads": 3}, kv_heads=1, head_dim=16, norm_eps=0.01, rope=Rope(theta=1e4)),
    "yarn scaling": Model(**SMALL, rope=Rope(scaling="yarn", factor=4.0, original_length=16)),
}

PUBLISHED = {
    "ernie4.5-0.3b": hub(
        "Ernie4_5ForCausalLM", 1024, 3072, 18, 16, 2, 103424,
        head_dim=128, hidden_act="silu", max_position_embeddings=131072, model_type="ernie4_5", pad_token_id=0, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=True, use_bias=False,
    ),
}  # fmt: skip
COUNTS = {"ernie4.5-0.3b": 360_748_032}  # baidu/ERNIE-4.5-0.3B-PT
READ = LLAMA | {"rms_norm_eps", "use_bias"}
