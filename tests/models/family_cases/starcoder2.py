"""What the tests know of StarCoder2."""

from typing import Any

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2, attention=AttentionConfig(window=0)),
    "a window": Model(**SMALL, kv_heads=1, attention=AttentionConfig(window=7)),
    "no biases": Model(**SMALL, attention=AttentionConfig(bias=[], window=3), mlp=MlpConfig(bias=False)),
    "untied, exact gelu": Model(**SMALL, kv_heads=2, tie_embeddings=False, norm_eps=0.01, mlp=MlpConfig(activation="gelu")),
    "linear scaling": Model(**SMALL, rope=Rope(theta=1e4, scaling="linear", factor=4.0)),
}


def starcoder2(*shape: int, theta: float, std: float = 0.018042, **rest: Any) -> dict[str, Any]:
    return hub(
        "Starcoder2ForCausalLM",
        *shape,
        embedding_dropout=0.1,
        hidden_act="gelu_pytorch_tanh",
        initializer_range=std,
        max_position_embeddings=16384,
        mlp_type="default",
        model_type="starcoder2",
        norm_epsilon=1e-05,
        norm_type="layer_norm",
        residual_dropout=0.1,
        rope_theta=theta,
        sliding_window=4096,
        use_bias=True,
        **rest,
    )


PUBLISHED = {
    "starcoder2-3b": starcoder2(3072, 12288, 30, 24, 2, 49152, theta=999999.4420358813),
    "starcoder2-7b": starcoder2(4608, 18432, 32, 36, 4, 49152, theta=1000000),
    "starcoder2-15b": starcoder2(
        6144, 24576, 40, 48, 4, 49152, theta=100000, std=0.01275, rms_norm_eps=1e-05, tie_word_embeddings=False
    ),
}
COUNTS = {
    # bigcode
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
}
READ = LLAMA | {"norm_epsilon", "use_bias", "sliding_window"}
