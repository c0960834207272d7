"""What the tests know of OLMo Hybrid."""

import torch

from family_cases import LLAMA, hub
from family_cases.qwen3_5 import linear
from pretrain.config.attention_schema import AttentionConfig, LinearAttentionConfig, Rope
from pretrain.config.model_schema import Model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 61}

BIASED = AttentionConfig(bias=["query", "key", "value", "output"])
FIRST = LinearAttentionConfig(pattern=[False, True])

# Norms of attention's results, and of heads whose query and key are nearly orthogonal, enlarge roundings of fp32: without biases, models whose
# first layer has linear attention differ from transformers' by 1e-5 to 3e-5. test_conversion_checks.py compares one of them in fp64.
CASES = {
    "attention first": Model(**SMALL, linear_attention=FIRST),
    "attention last, biases": Model(**SMALL, norm_eps=0.01, attention=BIASED),
    "grouped values": Model(**SMALL, kv_heads=1, norm_eps=1e-3, linear_attention=linear(pattern=[False, True])),
    "three layers, no negative eigenvalues": Model(
        **SMALL | {"layers": 3}, linear_attention=linear(pattern=[False, True], negative_eigenvalues=False)
    ),
    "rotated, tied": Model(
        **SMALL,
        kv_heads=2,
        positions="rope",
        tie_embeddings=True,
        attention=BIASED,
        linear_attention=LinearAttentionConfig(kernel=2, key_heads=2),
    ),
    "yarn scaling": Model(
        **SMALL,
        attention=BIASED,
        positions="rope",
        rope=Rope(theta=500.0, scaling="yarn", factor=4.0, original_length=16),
        linear_attention=LinearAttentionConfig(key_heads=2),
    ),
}

PUBLISHED = {
    "olmo-hybrid-7b": hub(
        "OlmoHybridForCausalLM", 3840, 11008, 32, 30, 30, 100352,
        attention_bias=False, hidden_act="silu", layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(32)],
        linear_a_log_max=16.0, linear_a_log_min=0.0, linear_allow_neg_eigval=True, linear_conv_kernel_dim=4, linear_dt_init_floor=0.0001,
        linear_dt_max=0.1, linear_dt_min=0.001, linear_key_head_dim=96, linear_num_key_heads=30, linear_num_value_heads=30,
        linear_value_head_dim=192, max_position_embeddings=65536, model_type="olmo_hybrid", rms_norm_eps=1e-06,
        rope_parameters={"rope_theta": None, "rope_type": "default"}, tie_word_embeddings=False,
    )
}  # fmt: skip
COUNTS = {"olmo-hybrid-7b": 7_430_870_688}  # as transformers counts
READ = (LLAMA - {"head_dim"}) | {
    "rms_norm_eps",
    "layer_types",
    "linear_allow_neg_eigval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
}


def as_published(tensors: dict[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """Tensors that transformers has written. It joins three filters in memory, and cuts them into equal parts where they are not equal."""
    sizes = model.linear_attention
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    right = {}
    for query in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [query.replace(".q_", f".{letter}_") for letter in "qkv"]
        right |= dict(zip(names, torch.cat([tensors[name] for name in names]).split([keys, keys, values])))
    return tensors | right
