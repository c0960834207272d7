"""Fields of config.json: what is absent or null means what it means to transformers, what contradicts itself or is no value at all is
refused in one line, and what changes no logit is read past. Of published files of every family.
"""

from __future__ import annotations

import copy
import json
import math

import pytest
from published_configs import PUBLISHED
from test_gpt_presets import GPT2_FILE, PYTHIA_FILE
from test_moe_presets import FILES
from test_t5 import config_json

from pretrain.checkpoint.weight_plan import plan_weights
from pretrain.errors import ConfigError, UserError
from pretrain.models.families import families, family_of_hf
from pretrain.models.shape import flat

EVERY = {**PUBLISHED, **FILES, "gpt2-124m": GPT2_FILE, "pythia-160m": PYTHIA_FILE, "t5": config_json(),
         "t5-v1.1": config_json(feed_forward_proj="gated-gelu", tie_word_embeddings=False)}  # fmt: skip
every_file = pytest.mark.parametrize("name", EVERY)
ONE_OF_A_FAMILY = {family_of_hf(config).name: name for name, config in reversed(EVERY.items())}


def test_there_is_a_file_of_every_family():
    assert set(ONE_OF_A_FAMILY) == {family.name for family in families()}


def read(config: dict) -> dict:
    return flat(family_of_hf(config).from_hf(config))


def as_transformers_reads(config: dict) -> dict:
    """The same, of what transformers itself makes of a file."""
    from transformers import AutoConfig

    fields = {k: v for k, v in copy.deepcopy(config).items() if k not in ("architectures", "model_type", "auto_map")}
    return read(AutoConfig.for_model(config["model_type"], **fields).to_dict() | {"architectures": config["architectures"]})


@every_file
def test_an_absent_field_means_what_transformers_takes_it_for_or_is_missed(name):
    config, missed = EVERY[name], set()
    for field in set(config) - {"architectures", "model_type"}:
        sparse = {key: value for key, value in config.items() if key != field}
        try:
            ours = read(sparse)
        except ConfigError as error:
            assert (
                field in str(error) or field == "num_key_value_heads"
            )  # 32 of them, which do not divide every number of heads
            missed.add(field)
            continue
        assert ours == as_transformers_reads(sparse), field
    # Sizes that nobody leaves out, and what would contradict the rest without them.
    assert len(missed) <= 9, missed


@every_file
def test_a_field_that_is_null_means_what_transformers_takes_it_for_or_is_refused(name):
    config, read_as_null = EVERY[name], 0
    for field in set(config) - {"architectures", "model_type"}:
        empty = config | {field: None}
        try:
            expected = as_transformers_reads(empty)
        except Exception:  # noqa: B902 - whatever transformers makes of it, it is no meaning
            continue
        try:
            ours = read(empty)
        except ConfigError:
            continue
        read_as_null += 1
        assert ours == expected, field
    assert read_as_null


HOSTILE = [
    -1, 0, 2**63, 10**400, 1e308, math.nan, math.inf, -0.5, 1.5, "x", "", [], [None], [1] * 5, [[1]], {}, {"a": [1]}, True, None,
    {"rope_type": ["a"]}, {"full_attention": 1}, {"full_attention": {"rope_type": "yarn", "factor": -1}},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}, {"rope_type": "linear", "factor": 0},
]  # fmt: skip
EXTRA = {"rope_parameters", "rope_scaling", "layer_types", "sliding_window", "head_dim", "partial_rotary_factor", "architectures",
         "original_max_position_embeddings", "mlp_only_layers", "qk_head_dim", "rope_local_base_freq"}  # fmt: skip
DEPTHS = {"num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"}


@pytest.mark.parametrize("family", ONE_OF_A_FAMILY)
def test_a_hostile_value_is_read_or_refused_in_one_line(family):
    depth = {field: 2 for field in DEPTHS & set(EVERY[ONE_OF_A_FAMILY[family]])}
    lists = {"layer_types": None, "no_rope_layers": None}  # of so many layers as there were
    config = {k: v for k, v in (EVERY[ONE_OF_A_FAMILY[family]] | depth).items() if k not in lists}
    read(config)
    refused = 0
    for field in sorted({*config, *EXTRA} - {"model_type"}):
        for value in HOSTILE:
            if field in DEPTHS and isinstance(value, int) and value > 1000:
                continue
            try:
                plan_weights(family_of_hf(config | {field: value}).from_hf(config | {field: value}))
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 2000
                refused += 1
    assert refused > 200


LLAMA = EVERY["llama3.1-8b"]


def yarn(**changes) -> dict:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | changes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2.5-0.5b", {"rope_scaling": yarn(factor=None)}, "factor is missing, which yarn needs"),
        ("qwen2.5-0.5b", {"rope_scaling": {"type": "linear"}}, "factor is missing, which linear needs"),
        ("qwen2.5-0.5b", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing, which llama3 needs"),
        (
            "qwen2.5-0.5b",
            {"rope_scaling": yarn(), "original_max_position_embeddings": 16},
            "contradicts that of the rotary parameters, 64",
        ),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(original_max_position_embeddings="64")}, "rope_parameters"),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(original_max_position_embeddings=-64)}, "must be at least 1"),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(truncate="no")}, "rope_parameters"),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(factor=0)}, "must be at least 1"),
        ("qwen2.5-0.5b", {"rope_theta": 0}, "must be above 1"),
        (
            "gemma3-1b",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
            "which has them by layer type",
        ),
        ("olmo3-7b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "which has them by layer type"),
        ("pythia-160m", {"rope_theta": 20000}, "rope_theta=20000 is not read for gpt_neox, whose other field says 10000"),
        ("pythia-160m", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not read for gpt_neox"),
        ("deepseek-v3", {"first_k_dense_replace": -3}, "first_k_dense_replace=-3 is not supported"),
        ("llama3.1-8b", {"hidden_size": 4096.0}, "hidden_size is missing or no whole number"),
        ("llama3.1-8b", {"is_decoder": True}, "is_decoder=True is not supported"),
        ("llama3.1-8b", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
    ],
)
def test_a_contradiction_or_a_value_that_transformers_reads_otherwise_is_named(name, changes, message):
    with pytest.raises(ConfigError) as error:
        read(EVERY[name] | changes)
    assert message in str(error.value)


def test_null_where_transformers_takes_it_for_false_is_false():
    assert read(EVERY["deepseek-v3"] | {"norm_topk_prob": None})["experts.normalise"] is False


# gpt2-medium and -xl, Qwen3 as written by transformers 4.51, a full dump of transformers 4.30.
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2-124m", {"n_special": 0, "predict_special_tokens": True, "output_past": True}),
        ("qwen3-0.6b", {"_attn_implementation_autoset": True, "tokenizer_class": "Qwen2Tokenizer"}),
        ("pythia-160m", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
        ("llama2-7b", {"torchscript": False, "use_bfloat16": False, "is_decoder": False, "add_cross_attention": False, "pruned_heads": {},
                       "tie_encoder_decoder": False, "max_length": 20, "temperature": 1.0, "num_labels": 2, "prefix": None}),
    ],
)  # fmt: skip
def test_fields_that_change_no_logit_are_read_past(name, changes):
    assert read(EVERY[name] | changes) == read(EVERY[name])


@pytest.mark.parametrize("field", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_beyond_reason_is_refused_in_one_line(field, tmp_path):
    from pretrain.checkpoint.open_model import read_hf

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / field).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError) as error:
        read_hf(tmp_path)
    assert field in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_the_weights_cannot_have_are_refused_before_a_network_is_built(tmp_path):
    import torch
    from safetensors.torch import save_file

    from pretrain.checkpoint.open_model import read_hf
    from pretrain.errors import CheckpointError

    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 200_000}))
    with pytest.raises(CheckpointError, match="config.json says 200000 layers, and the weights are 1 tensors"):
        read_hf(tmp_path)
