"""What is said of programs other than transformers 5, and the fields of config.json that are written for them."""

from __future__ import annotations

import dataclasses

import pytest

from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, MlpConfig, Model
from pretrain.models.families import complete, families, family_of
from pretrain.models.families.declare.other_readers import llama_cpp_problem, reader_notes
from pretrain.models.shape import flat, with_values

SIZES = {"dim": 64, "layers": 4, "heads": 4, "ffn_dim": 256, "vocab_size": 61}
SPARSE = ExpertsConfig(count=4, active=2)


def made(family: str, longest: int = 64, **switches) -> Model:
    return complete(Model(family=family, **{**SIZES, **switches}), longest)


def fields(model: Model) -> dict:
    return family_of(model.family).to_hf(model)


def problem(model: Model) -> str | None:
    return llama_cpp_problem(family_of(model.family), model)


# ---- fields -----------------------------------------------------------------------------------------------------------


def test_gpt2_says_its_length_by_the_name_that_llama_cpp_reads():
    """CL-1i: n_ctx, which published GPT-2s have."""
    assert fields(made("gpt2", longest=48))["n_ctx"] == 48 == fields(made("gpt2", longest=48))["n_positions"]
    assert family_of("gpt2").from_hf(fields(made("gpt2"))) == made("gpt2")


def test_gpt_oss_without_scaling_means_that_to_every_reader():
    """CL-4a, CL-4c: an absent scaling means YaRN by 32 to transformers 4, and vLLM knows no other kind: it is written as YaRN by 1."""
    model = made("gpt_oss", experts=SPARSE)
    config = fields(model)
    yarn = {"factor": 1.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    assert config["rope_scaling"] == {"rope_type": "yarn", **yarn}
    assert config["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 150000.0, **yarn}
    assert family_of("gpt_oss").from_hf(config) == model and model.rope.scaling == "none"
    scaled = made("gpt_oss", experts=SPARSE, rope=Rope(scaling="yarn", factor=4.0, original_length=16))
    assert fields(scaled)["rope_scaling"]["factor"] == 4.0
    assert family_of("gpt_oss").from_hf(fields(scaled)) == scaled


def test_olmo2_names_its_scaling_as_transformers_4_insists():
    """CL-4g: two fields, of which one is `type`."""
    model = made("olmo2", rope=Rope(scaling="linear", factor=4.0))
    assert fields(model)["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert family_of("olmo2").from_hf(fields(model)) == model
    assert "rope_scaling" not in fields(made("olmo2"))


# ---- notes ------------------------------------------------------------------------------------------------------------


def test_a_pattern_of_windows_that_vllm_ignores_is_said():
    """CL-4b: vLLM gives gpt-oss a window in every other layer, whatever layer_types says."""
    usual = made("gpt_oss", experts=SPARSE, attention=AttentionConfig(window=8))
    other = made("gpt_oss", experts=SPARSE, attention=AttentionConfig(window=8, window_pattern=[False, True]))
    assert reader_notes(family_of("gpt_oss"), usual) == []
    [note] = reader_notes(family_of("gpt_oss"), other)
    assert note.startswith("vLLM 0.33 gives a window to every other layer from the first")
    some = made("qwen2", attention=AttentionConfig(window=8, window_pattern=[False, False, True, True]))
    assert any(
        note.startswith("vLLM 0.33 refuses a sliding window in some layers") for note in reader_notes(family_of("qwen2"), some)
    )


@pytest.mark.parametrize(
    "model, note",
    [
        (made("olmo2", rope=Rope(scaling="yarn", factor=4.0)), "transformers 4 does not load model.rope.scaling=yarn of OLMo 2"),
        (made("olmo3", attention=AttentionConfig(window=8), rope=Rope(local_theta=100.0)), "model.rope.local_theta=100.0 is ignored by transformers 4"),
        (
            made("olmo3", attention=AttentionConfig(window=8), rope=Rope(scaling="yarn", factor=4.0, scale_local=True)),
            "model.rope.scale_local=true is ignored by transformers 4",
        ),
    ],
    ids=["olmo2", "olmo3 bases", "olmo3 scaling"],
)  # fmt: skip
def test_what_transformers_4_cannot_read_is_said(model, note):
    """CL-4h: found by loading every configuration of every family there."""
    assert any(text.startswith(note) for text in reader_notes(family_of(model.family), model))
    assert not any("transformers 4" in text for text in reader_notes(family_of(model.family), made(model.family)))


# ---- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [family for family in families() if family.llama_cpp is not None], ids=lambda family: family.name
)
def test_a_family_as_it_comes_is_one_that_llama_cpp_computes(family):
    sparse = {"experts": SPARSE} if family.name in ("mixtral", "gpt_oss", "glm4_moe", "olmoe", "minimax_m2") else {}
    if family.name == "qwen3_moe":
        sparse = {"experts": ExpertsConfig(count=4, active=2, normalise=True)}
    if family.name == "deepseek_v3":
        from pretrain.config.attention_schema import Latent

        latent = Latent(kv_rank=12, query_rank=20, rope_dim=4, plain_dim=10, value_dim=6)
        sparse = {"latent": latent, "experts": ExpertsConfig(count=8, active=3, ffn_dim=20, scale=2.5)}
    assert llama_cpp_problem(family, made(family.name, **sparse)) is None


@pytest.mark.parametrize(
    "model, key",
    [
        (made("mistral", attention=AttentionConfig(window=8)), "attention.window=8"),
        (made("phi3", attention=AttentionConfig(window=8)), "attention.window=8"),
        (made("qwen2", attention=AttentionConfig(window=8)), "attention.window=8"),
        (made("llama", rope=Rope(scaling="dynamic", factor=2.0)), "rope.scaling=dynamic"),
        (made("llama", rope=Rope(scaling="yarn", factor=2.0, truncate=False)), "rope.truncate=False"),
        (made("llama", rope=Rope(scaling="yarn", factor=2.0, attention_factor=1.2)), "rope.attention_factor=1.2"),
        (made("gpt2", ffn_dim=72), "ffn_dim=72"),
        (made("gpt_neox", rope=Rope(theta=500.0)), "rope.theta=500.0"),
        (made("gemma2", tie_embeddings=False), "tie_embeddings=False"),
        (made("gemma3", attention=AttentionConfig(query_scalar=9.0)), "attention.query_scalar=9.0"),
        (made("smollm3", rope=Rope(pattern=[True])), "rope.pattern="),
        (made("qwen3_moe", experts=ExpertsConfig(count=4, active=2, normalise=False)), "experts.normalise=False"),
        (made("granite", head_dim=32), "head_dim=32"),
        (made("starcoder2", attention=AttentionConfig(window=8)), "attention.window=8"),
        (made("starcoder2", mlp=MlpConfig(activation="gelu")), "mlp.activation=gelu"),
        (made("olmoe", kv_heads=2, experts=SPARSE), "kv_heads=2"),
        (made("minimax_m2", tie_embeddings=True, experts=SPARSE), "tie_embeddings=True"),
        (made("glm4", rope=Rope(scaling="llama3", factor=2.0)), "rope.scaling=llama3"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.family,
)  # fmt: skip
def test_a_switch_that_llama_cpp_does_not_obey_is_named(model, key):
    """CL-1k: found by computing every configuration of every family there; a window as long as the sequence does not count."""
    assert problem(model).startswith(f"model.{key}") and "\n" not in problem(model)
    if key == "attention.window=8":
        assert problem(dataclasses.replace(model, max_sequence_length=8)) is None


def test_a_switch_that_nobody_tried_is_refused_at_any_other_value():
    model = made("llama")
    for name, value in {
        "logit_multiplier": 0.5,
        "attention.soft_cap": 30.0,
        "norm.placement": "post",
        "mlp.activation": "gelu",
    }.items():
        assert name in flat(model) and problem(with_values(model, {name: value})).startswith(f"model.{name}={value}")
    assert "has not been tried" in llama_cpp_problem(family_of("t5"), made("llama"))
