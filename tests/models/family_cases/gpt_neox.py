"""What the tests know of GPT-NeoX and Pythia."""

from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "one after the other": Model(**SMALL, parallel_residual=False),
    "no attention biases": Model(**SMALL, attention=AttentionConfig(bias=[])),
    "tied": Model(**SMALL, tie_embeddings=True),
    "fully rotated": Model(**SMALL, rope=Rope(fraction=1.0)),
    "half rotated": Model(**SMALL, rope=Rope(fraction=0.5, theta=500.0)),
    "odd sizes": Model(dim=40, layers=3, heads=5, ffn_dim=37, vocab_size=101, norm_eps=0.01),
    "tanh gelu": Model(**SMALL, mlp=MlpConfig(activation="gelu_tanh")),
    "linear scaling": Model(**SMALL, rope=Rope(fraction=0.5, scaling="linear", factor=4.0)),
    "dynamic scaling": Model(**SMALL, rope=Rope(fraction=0.5, scaling="dynamic", factor=2.0), max_sequence_length=16),
    "yarn scaling": Model(**SMALL, rope=Rope(fraction=1.0, scaling="yarn", factor=4.0, original_length=16)),
}

PUBLISHED = {"pythia-160m": {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
    "use_parallel_residual": True, "vocab_size": 50304,
}}  # fmt: skip
COUNTS = {
    # The table in the README of EleutherAI/pythia.
    "pythia-14m": 14_067_712,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}
READ = {"hidden_size", "rotary_pct", "rotary_emb_base", "use_parallel_residual", "layer_norm_eps", "attention_bias"}
