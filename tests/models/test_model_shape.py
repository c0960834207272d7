"""What a model section leaves open has one value, whoever fills it in."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.keys import check_effects
from pretrain.config.model_schema import ExpertsConfig, MlpConfig, Model, Norm
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models.families import complete, families, family_of
from pretrain.models.layer_specs import layer_specs
from pretrain.models.positions import rotated_width
from pretrain.models.shape import flat, with_values


def check(given: Model, complete: Model) -> None:
    check_effects(Config(model=given), flat(complete, "model."), family_of(given.family).usual_switches(given, complete))


SIZES = {"dim": 32, "heads": 4, "vocab_size": 61, "max_sequence_length": 64}
NAMES = [family.name for family in families()]
WITH_EXPERTS = {family.name for family in families() if any(field.ours == "experts.count" for field in family.fields)}


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_pattern_of_a_family_fits_any_depth(family, layers):
    experts = ExpertsConfig(count=4, active=2) if family in WITH_EXPERTS else ExpertsConfig()
    if family == "nemotron_h" and layers == 1:
        with pytest.raises(ConfigError, match="leaves none of model.layers=1 with an MLP"):
            complete(Model(family=family, layers=layers, **SIZES, experts=experts))
        return
    model = complete(Model(family=family, layers=layers, **SIZES, experts=experts))
    deep = complete(Model(family=family, layers=60, **SIZES, experts=experts))
    specs, deeper = layer_specs(model), layer_specs(deep)[:layers]
    if not any(spec.has_scores for spec in deeper):  # a small model keeps a layer with attention
        attention = next(spec for spec in layer_specs(deep) if spec.mixer == "attention")
        deeper[max(layer for layer, spec in enumerate(deeper) if spec.mixer != "none")] = attention
    assert specs == deeper


@given(flags=st.lists(st.booleans(), min_size=1, max_size=6), window=st.sampled_from([0, 8]), layers=st.integers(6, 13))
@settings(deadline=None)
def test_a_pattern_is_written_in_one_way_and_means_the_same(flags, window, layers):
    written = AttentionConfig(window=window, window_pattern=flags)
    model = complete(Model(family="custom", layers=layers, **SIZES, attention=written, rope=Rope(pattern=flags)))
    repeated = [flags[i % len(flags)] for i in range(layers)]
    assert [spec.rope for spec in layer_specs(model)] == repeated
    assert [spec.window for spec in layer_specs(model)] == [window if flag else 0 for flag in repeated]
    spelled_out = AttentionConfig(window=window, window_pattern=repeated)
    assert complete(Model(family="custom", layers=layers, **SIZES, attention=spelled_out, rope=Rope(pattern=repeated))) == model


def test_a_pattern_of_more_layers_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"model.attention.window_pattern has 3 entries for model.layers=2; give 1 to 2"):
        complete(Model(layers=2, **SIZES, attention=AttentionConfig(window=8, window_pattern=[True, False, True])))
    with pytest.raises(ConfigError, match=r"model.rope.pattern has 0 entries for model.layers=2"):
        complete(Model(layers=2, **SIZES, rope=Rope(pattern=[])))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Model(family="mistral", **SIZES, attention=AttentionConfig(window=8, window_pattern=[True, False])),
            r"model.attention.window_pattern=\[True, False\] is not what model.family=mistral computes",
        ),
        (
            Model(
                family="mistral", **SIZES, attention=AttentionConfig(window=8), rope=Rope(scaling="linear", scale_local=False)
            ),
            "model.rope.scale_local=false: model.family=mistral scales every layer",
        ),
        (
            Model(family="mistral", **SIZES, attention=AttentionConfig(window=8), rope=Rope(local_theta=5.0)),
            "model.family=mistral has one base",
        ),
        (Model(family="llama", **SIZES, attention=AttentionConfig(window=8)), "model.attention.window=8 is not what"),
        (
            Model(family="qwen2", **SIZES, attention=AttentionConfig(bias=[])),
            r"model.attention.bias=\[\] is not what model.family=qwen2",
        ),
        (Model(family="qwen2", **SIZES, head_dim=16), "model.head_dim=16 is not model.dim / model.heads"),
        (Model(family="phi3", **SIZES, rope=Rope(scaling="yarn")), "rope.scaling=yarn is not one that phi3"),
        (Model(family="gemma2", **SIZES, attention=AttentionConfig(query_scalar=1.5)), "query_scalar=1.5 is no whole number"),
        (
            Model(family="gemma3", **SIZES, attention=AttentionConfig(soft_cap=50.0)),
            "model.attention.soft_cap=50.0 is not what",
        ),
        (Model(family="gemma3", **SIZES, embedding_multiplier=1.0), "model.embedding_multiplier=1.0 is not what"),
        (Model(family="olmo3", **SIZES, rope=Rope(fraction=0.5)), "model.rope.fraction=0.5"),
    ],
)
def test_what_transformers_has_no_name_for_is_refused(model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        family_of(model.family).to_hf(complete(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "olmo2", "gpt_oss", "qwen3_moe", "starcoder2", "ernie4_5"])
@pytest.mark.parametrize("bias", [["query"], ["query", "key", "value"], ["query", "query"]])
def test_biases_that_a_family_has_only_together_are_refused_in_part(family, bias):
    experts = ExpertsConfig(count=4, active=2) if family in WITH_EXPERTS else ExpertsConfig()
    model = complete(Model(family=family, layers=2, **SIZES, attention=AttentionConfig(bias=bias), experts=experts))
    with pytest.raises(ConfigError, match="has biases in all of query, key, value, output or in none"):
        family_of(family).to_hf(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Model(family="custom", parallel_residual=True, norm=Norm(placement="post"), **SIZES),
            "there is no sum of one sublayer to norm",
        ),
        (
            Model(family="custom", mlp=MlpConfig(activation="silu_clamped", gated=False), **SIZES),
            "silu_clamped is of a gated MLP",
        ),
        (
            Model(family="custom", rope=Rope(scaling="dynamic", factor=2.0), head_dim=2, **SIZES),
            "at least 4 rotated components",
        ),
        (
            Model(family="custom", positions="learned", **SIZES | {"max_sequence_length": None}),
            "model.max_sequence_length is missing",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_switches_that_have_no_meaning_together_are_refused(model, message):
    with pytest.raises(ConfigError) as error:
        complete(model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (
            {"rope.factor": 4.0},
            "model.rope.factor=4.0 has no effect with model.rope.scaling=none; change model.rope.scaling, or set model.rope.factor=null",
        ),
        ({"rope.original_length": 32}, "model.rope.original_length=32 has no effect with model.rope.scaling=none"),
        (
            {"rope.low_frequency": 2.0},
            "model.rope.low_frequency=2.0 has no effect with model.rope.scaling=none; set model.rope.scaling=llama3",
        ),
        (
            {"positions": "none", "rope.theta": 5e5},
            "model.rope.theta=500000.0 has no effect with model.positions=none; set model.positions=rope",
        ),
        ({"rope.local_theta": 5e5}, "model.rope.local_theta=500000.0 has no effect with model.attention.window=0"),
        ({"rope.scale_local": False}, "model.rope.scale_local=false has no effect with model.attention.window=0"),
        (
            {"relative.buckets": 16},
            "model.relative.buckets=16 has no effect with model.positions=rope; set model.positions=relative",
        ),
        ({"encoder.decoder_start_id": 0}, "model.encoder.decoder_start_id=0 has no effect with model.encoder.layers=0"),
        ({"latent.query_rank": 8}, "model.latent.query_rank=8 has no effect with model.latent.kv_rank=0"),
        ({"latent.norm_eps": 1e-5}, "model.latent.norm_eps=1.0e-05 has no effect with model.latent.kv_rank=0"),
        ({"experts.count": 4, "experts.active": 2, "experts.active_groups": 2}, "has no effect with model.experts.groups=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_switch_that_is_set_to_no_effect_is_refused(switches, message):
    given = with_values(Model(family="custom", layers=2, **SIZES), switches)
    with pytest.raises(ConfigError) as error:
        check(given, complete(given))
    assert message in str(error.value)


@pytest.mark.parametrize("head_dim, fraction", [(10, 0.01), (10, 0.35), (100, 0.59), (6, 0.99)])
def test_a_rotated_width_that_is_odd_names_a_fraction_that_fits(head_dim, fraction):
    model = Model(family="custom", **SIZES, head_dim=head_dim, rope=Rope(fraction=fraction))
    with pytest.raises(ConfigError, match=r"model\.rope\.fraction=[\d.]+ makes \d+") as caught:
        complete(model)
    proposed = re.search(r"model\.rope\.fraction=([\d.]+) makes (\d+)", str(caught.value))
    fitting = complete(dataclasses.replace(model, rope=Rope(fraction=float(proposed[1]))))
    assert rotated_width(fitting) == int(proposed[2]) and int(proposed[2]) % 2 == 0
