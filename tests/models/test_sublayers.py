"""Layers with one sublayer alone: attention or linear attention without an MLP, or an MLP or experts without attention."""

from __future__ import annotations

import math

import pytest
import torch

from pretrain.config.attention_schema import AttentionConfig, LinearAttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model, Norm
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.caches import Cache
from pretrain.models.families import family_of
from pretrain.models.layer_specs import layer_specs

SIZES = {"family": "custom", "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 61, "max_sequence_length": 64}
LINEAR = {"kind": "mamba2", "key_dim": 6, "value_dim": 8, "value_heads": 4}


def model(**others):
    config = Model(**{**SIZES, **others})
    return family_of(config.family).complete(config, 64)


def filled(config, seed=0):
    network = build_network(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return network.eval()


def halved(name):
    """The name that a parameter of a whole block has where each block is two."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(2 * int(parts[1]) + parts[2].startswith("mlp"))
    return ".".join(parts)


@pytest.mark.parametrize("placement", ["pre", "post", "reordered", "sandwich"])
@pytest.mark.parametrize(
    "whole, halves",
    [
        ({"rope": Rope(pattern=[True, False, True])}, {"rope": Rope(pattern=[True, True, False, False, True, True])}),
        (
            {"attention": AttentionConfig(window=5, window_pattern=[True, False, True])},
            {"attention": AttentionConfig(window=5, window_pattern=[True, True, False, False, True, True])},
        ),
        (
            {"linear_attention": LinearAttentionConfig(pattern=[True, False, True], **LINEAR)},
            {"linear_attention": LinearAttentionConfig(pattern=[True, True, False, False, True, True], **LINEAR)},
        ),
        (
            {"experts": ExpertsConfig(count=4, active=2, dense_layers=[1])},
            {"experts": ExpertsConfig(count=4, active=2, dense_layers=[3])},
        ),
    ],
    ids=["rotation", "windows", "linear attention", "experts"],
)
def test_blocks_cut_in_two_compute_what_whole_blocks_compute(placement, whole, halves):
    norm = Norm(placement=placement)
    one = filled(model(layers=3, norm=norm, **whole))
    two = filled(model(layers=6, norm=norm, sublayers=["mixer", "mlp"], **halves), seed=1)
    two.load_state_dict({halved(name): tensor for name, tensor in one.state_dict().items()})
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[4] * 7 + [1] * 17, [2] * 24])
    cache = Cache(layer_specs(two.config), 24)
    with torch.no_grad():
        expected, got = (network(ids, documents_BT=documents) for network in (one, two))
        pieces = [two(ids[:, start:stop], cache=cache) for start, stop in ((0, 5), (5, 6), (6, 24))]
        alone = one(ids)
    assert torch.equal(got, expected)
    assert (torch.cat(pieces, 1) - alone).abs().max() <= 1e-5 and cache.length == 24
    assert [one.flops_per_token(24), one.matmul_parameters()] == [two.flops_per_token(24), two.matmul_parameters()]
    assert sum(two.flops_by_layer(24)) == two.flops_per_token(24)


@pytest.mark.parametrize(
    ("sublayers", "layers", "letters"),
    [
        (["mixer", "mlp"], 8, "M-M-M-*-"),
        (["mlp", "mixer"], 4, "-M-*"),
        (["mixer", "mixer", "mlp"], 12, "MM-M*-MM-M*-"),
        (["mixer", "mlp", "mlp"], 12, "M--M--M--*--"),
        (["mlp", "mlp", "mixer"], 3, "--*"),
    ],
)
def test_a_nemotron_h_has_attention_in_every_fourth_mixer_wherever_its_mixers_are(sublayers, layers, letters):
    """A reviewer's order of layers put Mamba where the MLPs were, and was refused for a key that he had not set."""
    found = model(family="nemotron_h", layers=layers, sublayers=sublayers, head_dim=8)
    assert family_of("nemotron_h").to_hf(found)["hybrid_override_pattern"] == letters


def test_initial_projections_are_scaled_by_how_many_there_are():
    network = build_network(model(layers=5, sublayers=["mlp", "mlp", "both", "mixer", "mlp"]))
    for name in ("layers.0.mlp.down.weight", "layers.2.attention.output.weight"):
        assert network.initial(name) == (0.0, 0.02 / math.sqrt(6))
    assert network.initial("layers.0.mlp.up.weight") == (0.0, 0.02)


def test_a_first_layer_without_attention_leaves_generation_what_it_is():
    network = filled(model(layers=3, sublayers=["mlp", "mixer", "mlp"]))
    cache = Cache(layer_specs(network.config), 9)
    ids = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        network(ids[:, :4], cache=cache)
        cache.select(torch.tensor([2, 0, 0]))
        got = network(ids[[2, 0, 0]][:, 4:], cache=cache)
        expected = network(ids[[2, 0, 0]])[:, 4:]
    assert (got - expected).abs().max() <= 1e-5


def test_linear_attention_is_said_of_layers_that_have_it_alone():
    linear = LinearAttentionConfig(pattern=[True, True, False, True], **LINEAR)
    found = model(layers=4, sublayers=["mixer", "mlp"], linear_attention=linear)
    assert found.linear_attention.pattern == [True, False, False, False]
    assert [(spec.mixer, spec.mlp) for spec in layer_specs(found)] == [("mamba2", "none"), ("none", "mlp"), ("attention", "none"), ("none", "mlp")]


@pytest.mark.parametrize(
    "others, message",
    [
        ({"sublayers": []}, "model.sublayers has 0 entries for model.layers=4; give 1 to 4"),
        ({"sublayers": ["both"] * 5}, "model.sublayers has 5 entries for model.layers=4; give 1 to 4"),
        ({"sublayers": ["mlp"]}, r"model.sublayers=\['mlp'\] leaves none of model.layers=4 with attention"),
        ({"sublayers": ["mixer"]}, r"model.sublayers=\['mixer'\] leaves none of model.layers=4 with an MLP"),
        (
            {"sublayers": ["mixer", "mlp"], "linear_attention": LinearAttentionConfig(pattern=[True], **LINEAR)},
            r"model.sublayers=\['mixer', 'mlp'\] with model.linear_attention.pattern=\[True, False\] leaves none of model.layers=4 with attention",
        ),
        (
            {"sublayers": ["mixer", "mlp"], "experts": ExpertsConfig(count=4, active=2, dense_layers=[2])},
            r"model.experts.dense_layers=\[2\]: layer 2 has no MLP, by model.sublayers",
        ),
        ({"sublayers": ["mixer", "mlp"], "parallel_residual": True}, "model.parallel_residual=true with model.sublayers"),
        ({"sublayers": ["mixer", "mlp"], "predict_ahead": 1}, "model.predict_ahead=1 with model.sublayers=.* is not built"),
        (
            {"sublayers": ["mixer", "mlp"], "rope": Rope(pattern=[False, True])},
            r"model.rope.pattern=\[False, True\] names only layers without attention, by model.sublayers",
        ),
        (
            {"sublayers": ["mixer", "mlp"], "attention": AttentionConfig(window=4, window_pattern=[False, True])},
            "model.attention.window_pattern=.* names only layers without attention",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(others, message):
    with pytest.raises(ConfigError, match=message):
        model(layers=4, **others)


def test_a_family_of_whole_blocks_has_no_others():
    with pytest.raises(ConfigError, match="model.sublayers=.* is not what model.family=llama computes"):
        family_of("llama").to_hf(model(layers=4, sublayers=["mixer", "mlp"], family="llama"))
