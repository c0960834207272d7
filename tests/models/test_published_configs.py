"""The config.json files of published models, old and new, mean to us what they mean to transformers."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math

import pytest
from family_cases.llama import llama
from family_cases.phi3 import phi3
from family_cases.qwen2 import qwen2
from presets import PUBLISHED, preset

from pretrain.config.attention_schema import AttentionConfig
from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models import families as models_families
from pretrain.models.families import complete, families, family_of, family_of_hf
from pretrain.models.families.declare.family import REQUIRED
from pretrain.models.shape import with_values

every_file = pytest.mark.parametrize("name", PUBLISHED)


def read(config):
    return family_of_hf(config).from_hf(config)


# A preset says how its model was trained; a config.json may not.
TRAINED = {"experts.balance_loss": 0.0, "experts.router_z_loss": 0.0}


@every_file
def test_a_published_file_is_its_preset(name):
    # tests/models/test_presets.py holds the preset's number of parameters against the published one.
    assert with_values(preset(name), TRAINED) == with_values(read(PUBLISHED[name]), TRAINED)


@every_file
def test_transformers_understands_a_published_file_as_we_do(name):
    config = PUBLISHED[name]
    assert read({**written_again(config), "architectures": config["architectures"]}) == read(config)


def written_again(config):
    """What the transformers of today makes of a file, as it would save it."""
    from transformers import AutoConfig

    fields = {
        k: v
        for k, v in copy.deepcopy(config).items()
        if k not in ("architectures", "model_type", "auto_map", "transformers_version")
    }
    return AutoConfig.for_model(family_of_hf(config).model_type, **fields).to_dict()


def test_two_families_that_read_the_same_files_are_refused(monkeypatch):
    """A newcomer's variant of Llama, which had Llama's architecture, took over all imports of Llama."""
    again = dataclasses.replace(family_of("llama"), name="mine")
    monkeypatch.setattr(models_families, "families", lambda: [*families(), again])
    with pytest.raises(ConfigError, match="model.family=llama and model.family=mine both read files of LlamaForCausalLM"):
        family_of_hf(PUBLISHED["llama3.1-8b"])


SPARSE = {"vocab_size": 61, "hidden_size": 1024, "num_hidden_layers": 13, "num_attention_heads": 128, "intermediate_size": 48}
LLAMA_LIKE = [family.name for family in families() if {f.theirs for f in family.fields if f.default is REQUIRED} <= set(SPARSE)]
LLAMA_LIKE.remove("nemotron_h")  # without the kinds of its layers, transformers takes it for one of four layers, whatever their number


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_an_absent_field_means_what_transformers_takes_it_for(family):
    entry = family_of(family)
    sparse = {"architectures": [entry.architecture], "model_type": entry.model_type, **SPARSE}
    assert read(sparse) == read({**written_again(sparse), "architectures": [entry.architecture]})


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, ("linear", 4.0)),
        ({"rope_type": "linear", "type": "linear", "factor": 4}, ("linear", 4.0)),
        ({"type": "dynamic", "factor": 2.0}, ("dynamic", 2.0)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, ("yarn", 4.0)),
        ({"type": "default"}, ("none", 1.0)),
        (None, ("none", 1.0)),
    ],
)
def test_scaling_in_the_older_spelling_is_understood(scaling, expected):
    model = read(llama(32, 48, 2, 4, 4, 61, max_position_embeddings=512, rope_scaling=scaling))
    assert (model.rope.scaling, model.rope.factor) == expected


LAYERS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": LAYERS}, "layer_types has sliding_attention, but sliding_window is off"),
        ({"use_sliding_window": True, "layer_types": LAYERS[:1]}, r"layer_types=\['full_attention'\] is not supported"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "layer_types=.* is not supported"),
        ({"use_sliding_window": True, "layer_types": "sliding_attention"}, "layer_types='sliding_attention' is not supported"),
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes' is not supported"),
        ({"use_sliding_window": True, "max_window_layers": 1.5}, "max_window_layers=1.5 is not supported"),
        ({"use_sliding_window": True, "sliding_window": -4}, "sliding_window=-4: must be at least 0"),
        ({"use_sliding_window": True, "sliding_window": "4"}, "sliding_window is missing or no whole number"),
        ({"use_mrope": True}, "use_mrope=True is not supported for qwen2"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be at least 1"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2: must be at least 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: must be above 0"),
        ({"rope_theta": None}, "rope_theta=None is not supported"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6' is not supported"),
    ],
)
def test_a_field_with_a_value_that_nobody_wrote_before_is_named_and_refused(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(qwen2(32, 48, 2, 4, 2, 61, tied=False, length=64) | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=.* expected 0 or 1 for each of 36 layers"),
        ({"no_rope_layers": [2] * 36}, "no_rope_layers="),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ],
)
def test_layers_without_rotation_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(PUBLISHED["smollm3-3b"] | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("gemma3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported for gemma3"),
        ("gemma3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma2-2b", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ("phi3-mini", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "rope_scaling"),
        ("phi3-mini", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope.scaling=yarn is not one that phi3"),
        ("qwen3-0.6b", {"partial_rotary_factor": 0.5}, "rope.fraction=0.5: model.family=qwen3 rotates whole heads"),
        ("phi3-mini", {"attention_bias": True}, "attention_bias=True is not supported for phi3"),
        ("qwen2.5-0.5b", {"head_dim": 32}, "head_dim=32 is not model.dim / model.heads"),
    ],
)
def test_what_a_family_does_not_compute_is_named_and_refused(name, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(PUBLISHED[name] | change)
    assert "\n" not in str(caught.value)


def test_layers_with_a_window_follow_the_older_fields():
    qwen = qwen2(32, 48, 4, 4, 2, 61, tied=False, length=64) | {"use_sliding_window": True, "max_window_layers": 3}
    assert read(qwen).attention.window_pattern == [False, False, False, True]
    gemma = PUBLISHED["gemma3-1b"] | {"sliding_window_pattern": 2}
    assert read(gemma).attention.window_pattern == [True, False]
    smollm = PUBLISHED["smollm3-3b"] | {"layer_types": None, "use_sliding_window": True, "sliding_window": 512}
    assert read(smollm).attention.window_pattern == [False, False, False, True]


@every_file
def test_an_export_has_the_fields_that_vllm_and_llama_cpp_read(name):
    model = read(PUBLISHED[name])
    written = family_of(model.family).to_hf(model)
    assert not importlib.import_module(f"family_cases.{model.family}").READ - set(written)
    # Every field of the published file that says something of the network is there again, with the same value.
    derived = {
        "rope_scaling",
        "sliding_window_pattern",
        "max_window_layers",
        "sliding_window",
        "original_max_position_embeddings",
        "num_nextn_predict_layers",
        "time_step_min",  # a limit of the step to transformers alone, and to no model (nemotron_h.py)
    }
    without_effect = family_of(model.family).inert_rope
    published = PUBLISHED[name] | {
        field: {k: v for k, v in value.items() if k not in without_effect}
        for field, value in PUBLISHED[name].items()
        if field == "rope_parameters" and value
    }
    for field in set(written) & set(PUBLISHED[name]) - derived - {"bos_token_id", "eos_token_id", "pad_token_id"}:
        assert written[field] == published[field], field
    if scaling := PUBLISHED[name].get("rope_scaling"):
        renamed = {"rope_type" if field == "type" else field: value for field, value in scaling.items()}
        assert renamed.items() <= written["rope_scaling"].items()
    else:
        assert "rope_scaling" not in written


def test_partial_rotation_of_phi_is_written_where_older_readers_look():
    config = phi3(64, 48, 2, 4, 4, 61) | {"partial_rotary_factor": 0.75}
    model = read(config)
    written = family_of("phi3").to_hf(model)
    assert model.rope.fraction == 0.75
    assert written["partial_rotary_factor"] == written["rope_parameters"]["partial_rotary_factor"] == 0.75


@pytest.mark.parametrize(
    ("layers", "window", "pattern", "expected"),
    [
        (12, 8, [True] * 5 + [False], 6),
        (4, 8, [True], 6),  # the first four of six
        (7, 8, [True], 8),
        (4, 8, [True, False], 2),
        (4, 0, None, 1),
        (4, 8, [False, True], None),
    ],
)
def test_gemma_says_to_readers_without_layer_types_what_one_number_can_say(layers, window, pattern, expected):
    sizes = {"dim": 32, "layers": layers, "heads": 4, "vocab_size": 61, "max_sequence_length": 64}
    model = complete(Model(family="gemma3", **sizes, attention=AttentionConfig(window=window, window_pattern=pattern)))
    written = family_of("gemma3").to_hf(model)
    assert written.get("sliding_window_pattern") == expected
    if expected:
        assert read({k: v for k, v in written.items() if k != "layer_types"}) == model


@pytest.mark.parametrize("field", ["logits_scaling", "attention_multiplier", "embedding_multiplier", "residual_multiplier"])
def test_a_factor_of_granite_comes_back_with_every_digit(field):
    """Ours are the inverse of one of them and of the root of another: numbers that people write must not come back as 0.30000000000000004."""
    granite = family_of("granite")
    for value in (*range(1, 130), *(round(0.001 * n, 3) for n in range(1, 1000)), 0.0078125, 1e-5, 12345.678):
        config = PUBLISHED["granite3.3-2b"] | {field: float(value)}
        assert granite.to_hf(granite.from_hf(config))[field] == float(value)


@pytest.mark.parametrize("value", [0, -1.0, 1e-320, 10**400, math.nan, math.inf, True, "8", None])
def test_a_factor_that_is_no_number_above_zero_is_refused(value):
    for field in ("logits_scaling", "attention_multiplier"):
        with pytest.raises(ConfigError, match=f"config.json: {field}(=| is null)"):
            read(PUBLISHED["granite3.3-2b"] | {field: value})


def test_what_the_families_of_2025_say_of_rotation_is_read_and_contradictions_are_refused():
    minimax = PUBLISHED["minimax-m2"]
    assert read(minimax).rope.fraction == 0.5
    assert read({k: v for k, v in minimax.items() if k != "rotary_dim"}).rope.fraction == 1.0
    assert read(minimax | {"partial_rotary_factor": 0.5}).rope.fraction == 0.5
    with pytest.raises(ConfigError, match="rotary_dim=64 of 128 contradicts partial_rotary_factor=0.25"):
        read(minimax | {"partial_rotary_factor": 0.25})
    with pytest.raises(ConfigError, match="attn_type_list is not supported unless"):
        read(minimax | {"attn_type_list": [1] * 61 + [0]})
    glm = {k: v for k, v in PUBLISHED["glm4-9b"].items() if k != "partial_rotary_factor"}
    assert read(glm).rope.fraction == 0.5 and read(glm | {"partial_rotary_factor": 1.0}).rope.fraction == 1.0


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, [0]),
        ({"moe_layer_start_index": 3}, [0, 1, 2]),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, [*range(0, 28, 2)]),
        (
            {"moe_layer_start_index": 4, "moe_layer_end_index": 9, "moe_layer_interval": 3},
            [i for i in range(28) if i not in (5, 8)],
        ),
        ({"moe_layer_end_index": -1}, [0]),
    ],
)
def test_three_fields_of_ernie_say_which_layers_have_experts(fields, dense):
    model = read(PUBLISHED["ernie4.5-21b-a3b"] | fields)
    assert model.experts.dense_layers == dense
    assert read(family_of("ernie4_5_moe").to_hf(model)) == model
    for name in ("moe_layer_start_index", "moe_layer_interval"):
        with pytest.raises(ConfigError, match=f"{name}='x'.* are not supported"):
            read(PUBLISHED["ernie4.5-21b-a3b"] | {name: "x"})


def test_layers_with_experts_that_ernie_cannot_have_are_refused_by_key():
    model = with_values(read(PUBLISHED["ernie4.5-21b-a3b"]), {"experts.dense_layers": [0, 5]})
    with pytest.raises(ConfigError, match=r"model.experts.dense_layers=\[0, 5\] leaves experts"):
        family_of("ernie4_5_moe").to_hf(model)
