"""What the tests know of SmolLM3."""

from family_cases import LLAMA, hub
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 5, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL, kv_heads=2),
    "fewer layers than the pattern": Model(**SMALL | {"layers": 2}),
    "another pattern": Model(**SMALL, rope=Rope(pattern=[False, True, True])),
    "rotation everywhere": Model(**SMALL, rope=Rope(pattern=[True])),
    "rotation nowhere": Model(**SMALL | {"layers": 2}, rope=Rope(pattern=[False])),
    "window in layers without rotation": Model(
        **SMALL, kv_heads=1, attention=AttentionConfig(window=8, window_pattern=[False, False, False, True])
    ),
    "window in other layers": Model(**SMALL, attention=AttentionConfig(window=8, window_pattern=[True, False])),
    "a head of its own and biases": Model(
        **SMALL,
        tie_embeddings=False,
        rope=Rope(pattern=[True]),  # where nothing rotates, a bias of the keys changes nothing
        attention=AttentionConfig(bias=["query", "key", "value", "output"]),
        mlp=MlpConfig(bias=True),
        norm_eps=1e-5,
    ),
    "dynamic scaling": Model(**SMALL, rope=Rope(scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(theta=2_000_000.0, scaling="yarn", factor=4.0, original_length=16)),
}

PUBLISHED = {
    "smollm3-3b": hub(
        "SmolLM3ForCausalLM",
        2048,
        11008,
        36,
        16,
        4,
        128256,
        attention_bias=False,
        hidden_act="silu",
        layer_types=["full_attention"] * 36,
        max_position_embeddings=65536,
        max_window_layers=28,
        mlp_bias=False,
        model_type="smollm3",
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pretraining_tp=2,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    ),
}
COUNTS = {
    "smollm3-3b": 3_075_098_624,
}
READ = LLAMA | {
    "rms_norm_eps",
    "sliding_window",
    "layer_types",
    "no_rope_layers",
    "use_sliding_window",
    "attention_bias",
    "mlp_bias",
}
