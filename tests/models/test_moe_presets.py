"""Presets with experts: active parameters, and fields of their files that are refused."""

from __future__ import annotations

import pytest
import torch
from presets import PUBLISHED, preset

from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import family_of_hf

# Active parameters that the reports print, in billions; those of gpt-oss leave the input embedding out, and so are less by it.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.2,
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.2,
    "deepseek-v3": 37.6,
    "olmoe-1b-7b": 1.3,
    "gpt-oss-20b": 3.61 + 0.58,
    "gpt-oss-120b": 5.13 + 0.58,
    "moe-40m-a10m": 0.010,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_was_published(name):
    """All parameters but those of the routed experts that a token is not sent to; both embeddings count."""
    active, model = ACTIVE[name], preset(name)
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in build_network(model).named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    used = sum(sizes.values()) - routed + routed * model.experts.active // model.experts.count
    assert used / 1e9 == pytest.approx(active, abs=0.05 if active > 1 else 0.001)


def test_another_name_of_the_same_architecture_is_no_contradiction():
    """M-D3: Kimi-K2 calls itself kimi_k2 and is a DeepSeek-V3."""
    file = PUBLISHED["deepseek-v3"]
    assert family_of_hf(file | {"model_type": "kimi_k2"}).from_hf(file | {"model_type": "kimi_k2"}) == family_of_hf(
        file
    ).from_hf(file)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("deepseek-v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "head_dim", 128),
        ("deepseek-v3", "first_k_dense_replace", "three"),
        ("deepseek-v3", "num_key_value_heads", 8),
        ("gpt-oss-20b", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt-oss-20b", "swiglu_limit", 5.0),
        ("qwen3-30b-a3b", "use_sliding_window", True),
        ("qwen3-30b-a3b", "num_local_experts", 64),
        ("qwen3-30b-a3b", "decoder_sparse_step", 0),
        ("qwen3-30b-a3b", "decoder_sparse_step", True),
        ("qwen3-30b-a3b", "mlp_only_layers", "first"),
        ("qwen3-30b-a3b", "mlp_only_layers", ["0"]),
        ("qwen3-30b-a3b", "mlp_only_layers", 0),
        ("mixtral-8x7b", "router_jitter_noise", 0.1),
        ("mixtral-8x7b", "num_experts_per_tok", 9),
    ],
)
def test_what_is_not_computed_is_named_and_refused(name, field, value):
    file = PUBLISHED[name] | {field: value}
    ours = {"num_key_value_heads": "model.kv_heads=8", "num_experts_per_tok": "model.experts.active=9"}
    expected = ours.get(field, "num_experts" if field == "num_local_experts" else f"config.json: .*({field}|head's width)")
    with pytest.raises(ConfigError, match=expected) as caught:
        family_of_hf(file).from_hf(file)
    assert "\n" not in str(caught.value)
