"""What the tests know of GPT-2."""

from pretrain.config.model_schema import MlpConfig, Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 61}

CASES = {
    "plain": Model(**SMALL),
    "inner width": Model(**SMALL, ffn_dim=72),
    "an output head of its own": Model(**SMALL, tie_embeddings=False),
    "one head": Model(**SMALL | {"heads": 1}),
    "odd sizes": Model(dim=35, layers=3, heads=5, vocab_size=101, max_sequence_length=41),
    "large eps": Model(**SMALL, norm_eps=0.1),
    "exact gelu": Model(**SMALL, mlp=MlpConfig(activation="gelu")),
    "relu": Model(**SMALL, mlp=MlpConfig(activation="relu")),
}

PUBLISHED = {"gpt2-124m": {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
    "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}}  # fmt: skip
COUNTS = {
    # Tensors of the published files of openai-community.
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
}
READ = {
    "n_embd",
    "n_head",
    "n_layer",
    "n_positions",
    "n_inner",
    "layer_norm_epsilon",
    "activation_function",
    "scale_attn_weights",
}
