"""Fields of config.json, tried on published files of every family. A field that is absent or null means what it means to transformers.
Contradictions and impossible values are refused in one line. A field that changes no logit is ignored.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from presets import PUBLISHED
from test_t5 import config_json

from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.errors import ConfigError, UserError
from pretrain.huggingface.directory import plan_weights
from pretrain.models import families as declared_families
from pretrain.models.families import complete, families, family_of, family_of_hf
from pretrain.models.families.declare.common import projections
from pretrain.models.families.declare.family import Field
from pretrain.models.shape import flat, with_values

ROOT = Path(__file__).resolve().parents[2]
EVERY = PUBLISHED | {
    "t5": config_json(),
    "t5-v1.1": config_json(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
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
    theirs = read(AutoConfig.for_model(config["model_type"], **fields).to_dict() | {"architectures": config["architectures"]})
    if theirs["family"] == "t5" and theirs["logit_multiplier"] == 1:  # transformers 5 leaves it to the tensors whether such a head is tied
        theirs["tie_embeddings"] = config.get("tie_word_embeddings") is not False
    return theirs


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


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "qwen3.5-9b", "glm4-9b", "pythia-160m"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_share_of_rotated_components_that_is_null_is_refused(name, inside):
    """transformers 5 rotates whole heads then, where an absent field means a quarter or a half of each."""
    config = {key: value for key, value in EVERY[name].items() if key != "partial_rotary_factor"}
    share = {"partial_rotary_factor": None}
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read(config | ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **share}} if inside else share))


HOSTILE = [
    -1, 0, 2**63, 10**400, 1e308, math.nan, math.inf, -0.5, 1.5, "x", "", [], [None], [1] * 5, [[1]], {}, {"a": [1]}, True, None,
    {"rope_type": ["a"]}, {"full_attention": 1}, {"full_attention": {"rope_type": "yarn", "factor": -1}},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}, {"rope_type": "linear", "factor": 0},
]  # fmt: skip
EXTRA = {"rope_parameters", "rope_scaling", "layer_types", "sliding_window", "head_dim", "partial_rotary_factor", "architectures",
         "original_max_position_embeddings", "mlp_only_layers", "qk_head_dim", "rope_local_base_freq", "attn_type_list", "layers_block_type", "aux_loss_alpha"}  # fmt: skip
DEPTHS = {"num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}


@pytest.mark.parametrize("family", ONE_OF_A_FAMILY)
def test_a_hostile_value_is_read_or_refused_in_one_line(family):
    published = EVERY[ONE_OF_A_FAMILY[family]]
    small = dict.fromkeys(DEPTHS & set(published), 2) | dict.fromkeys(EXPERTS & set(published), 16)
    small |= dict.fromkeys({"full_attention_interval"} & set(published), 2) | dict.fromkeys({"first_k_dense_replace"} & set(published), 1)
    lists = {"layer_types": None, "no_rope_layers": None, "attn_type_list": None}  # of so many layers as there were
    config = {k: v for k, v in (published | small).items() if k not in lists}
    if "mamba" in published.get("layer_types", []):  # where these may not be absent
        config["layer_types"] = ["mamba", "attention"]
    if "hybrid_override_pattern" in published:
        config |= {"hybrid_override_pattern": "M*E", "num_hidden_layers": 3}
    read(config)
    refused = 0
    for field in sorted({*config, *EXTRA} - {"model_type"}):
        for value in HOSTILE:
            try:
                given = config | {field: value}
                model = family_of_hf(given).from_hf(given)
                plan_weights(model)
                family_of_hf(given).import_notes(given, model)
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
            "qwen2.5-0.5b",
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta=10000.0 contradicts that of rope_parameters, 500000.0",
        ),
        (  # as exports have them: in three places
            "qwen2.5-0.5b",
            {"rope_theta": 1e4, "rope_parameters": {**yarn(), "rope_theta": 5e5}, "rope_scaling": yarn()},
            "rope_theta=10000.0 contradicts that of rope_parameters, 500000.0",
        ),
        (
            "glm4-9b",
            {"partial_rotary_factor": 0.5, "rope_parameters": {**yarn(), "partial_rotary_factor": 1.0}, "rope_scaling": yarn()},
            "partial_rotary_factor=0.5 contradicts that of rope_parameters, 1.0",
        ),
        (
            "llama2-7b",
            {"rope_parameters": {**yarn(), "rope_theta": 5e5}, "rope_scaling": yarn()},
            "rope_theta=500000.0 of rope_parameters is not read by transformers beside rope_scaling; write rope_theta beside both",
        ),
        (
            "qwen2.5-0.5b",
            {"rope_parameters": {**yarn(), "rope_theta": 1e6}, "rope_scaling": yarn(factor=8.0)},
            "rope_scaling={'rope_type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 64} contradicts rope_parameters={",
        ),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(attention_factor=0)}, "attention_factor=0 makes every rotated query and key 0 in transformers"),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(attention_factor=0.0)}, "remove it to derive it from factor"),
        ("qwen2.5-0.5b", {"rope_scaling": yarn(beta_fast=0)}, "beta_fast=0.0: must be above 0"),
        (
            "llama3.1-8b",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "model.rope.low_frequency=4 (low_freq_factor of config.json) must be below model.rope.high_frequency=1 (high_freq_factor)",
        ),
        ("qwen2.5-0.5b", {"rotary_emb_base": 2e4}, "rotary_emb_base=20000.0 contradicts rope_theta, 1000000.0"),
        ("glm4-9b", {"rotary_pct": 0.25}, "rotary_pct=0.25 contradicts partial_rotary_factor, 0.5"),
        # transformers reads these two for GPT-NeoX alone
        ("llama2-7b", {"rotary_emb_base": 2e4}, "rotary_emb_base=20000.0 is not known for llama"),
        ("glm4-9b", {"rotary_pct": 0.5}, "rotary_pct=0.5 is not known for glm4"),
        ("mixtral-8x7b", {"sliding_window": 0}, "sliding_window=0 lets no token see another one"),
        ("starcoder2-3b", {"sliding_window": 0}, "write null for no window"),
        ("mistral-7b-v0.1", {"sliding_window": 0}, "write null for no window"),
        ("qwen2.5-0.5b", {"use_sliding_window": True, "sliding_window": 0}, "write null for no window"),
        ("gemma2-2b", {"sliding_window": 0}, "write null for no window"),
        ("gemma2-2b", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0 leaves nothing of what it caps"),
        ("gemma3-1b", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0 leaves nothing of what it caps"),
        ("olmo3-7b", {"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0 contradicts what transformers takes, which does not read it"),
        (
            "qwen2.5-0.5b",
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
            "rope_theta=10000.0 contradicts that of rope_scaling, 30000.0",
        ),
        (
            "gemma3-1b",
            {"rope_local_base_freq": 3e4, "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_local_base_freq=30000.0 contradicts that of rope_parameters, 10000.0",
        ),
        (
            "gemma3-1b",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
            "which has them by layer type",
        ),
        ("olmo3-7b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "which has them by layer type"),
        ("gemma3-1b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type='linear' is not read by transformers 5 for gemma3; write rope_type"),
        (
            "gemma3-1b",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **yarn(truncate=False)}, "sliding_attention": {"rope_theta": 1e4}}},
            "truncate=false is not read by transformers for gemma3",
        ),
        ("olmo3-7b", {"rope_scaling": yarn(truncate=False)}, "truncate=false is not read by transformers for olmo3"),
        ("olmo3-7b", {"rope_theta": 1e4}, "rope_theta=10000 is for layers without a window in transformers 5, and for all layers in 4"),
        (
            "olmo3-7b",
            {
                "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "default"}},
                "rope_theta": 1e4,
                "rope_scaling": None,
            },
            "rope_theta=10000 is for layers without a window",
        ),
        (
            "pythia-160m",
            {"rope_parameters": {**yarn(), "rope_theta": 1e4, "partial_rotary_factor": 1.0}, "rope_scaling": yarn(), "rotary_pct": 0.25},
            "partial_rotary_factor=1.0 of rope_parameters is not read for gpt_neox beside rope_scaling; write rotary_pct",
        ),
        ("pythia-160m", {"rope_theta": 20000}, "rope_theta=20000 is not read for gpt_neox, whose other field says 10000"),
        ("pythia-160m", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not read for gpt_neox"),
        ("deepseek-v3", {"first_k_dense_replace": -3}, "first_k_dense_replace=-3 must be a number of layers"),
        ("gpt2-124m", {"scale_attn_weights": None}, "scale_attn_weights=None is not supported for gpt2; only True is"),
        ("granite4.0-h-tiny", {"mamba_conv_bias": None}, "mamba_conv_bias=None is not supported for granite_hybrid; only True is"),
        ("granite4.0-h-tiny", {"mamba_d_head": None}, "mamba_d_head=None"),
        ("granite4.0-h-tiny", {"mamba_d_head": 32}, "mamba_expand=2 times hidden_size is not mamba_n_heads=48 times mamba_d_head=32"),
        ("granite4.0-h-tiny", {"mamba_n_groups": 7}, "mamba_n_groups=7 does not divide mamba_n_heads=48"),
        ("granite4.0-h-tiny", {"time_step_limit": [0.001, 0.1]}, "time_step_limit=[0.001, 0.1] is not supported"),
        ("granite4.0-h-tiny", {"layer_types": ["mamba"] * 40}, "has no layer with attention"),
        ("granite4.0-h-tiny", {"layer_types": None}, "layer_types is missing"),
        ("granite4.0-h-tiny", {"position_embedding_type": "learned"}, "position_embedding_type='learned' is not supported"),
        ("granite4.0-h-tiny", {"shared_intermediate_size": 1000}, "shared_intermediate_size=1000 is no multiple of intermediate_size=512"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern='M-*X' is not supported: expected 1 to 4096 layers, each one of linear_attention, full_attention, moe, mlp, or as letters M * E -"),
        ("nemotron-h-8b", {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing, and layers_block_type"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-" * 26}, "has no layer with attention, or none with an MLP"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-*-"}, "num_hidden_layers=52, and 4 layers have a kind"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M|-|M*E"}, "hybrid_override_pattern='M|-|M*E' is not supported: expected 1 to 4096 layers"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-*E" * 2000, "num_hidden_layers": None}, "(8,002 characters) is not supported: expected 1 to 4096 layers"),
        ("nemotron-h-8b", {"layers_block_type": ["attention", "mlp"] * 26}, " contradict each other"),
        ("nemotron-h-8b", {"layers_block_type": ["mamba", "mlp"] * 26}, "layers_block_type=['mamba', 'mlp', 'mamba'"),
        ("nemotron-h-8b", {"layers_block_type": [["mamba"]] * 52}, "is not supported: expected 1 to 4096 layers, each one of"),
        ("nemotron-h-8b", {"n_groups": 7}, "n_groups=7 does not divide mamba_num_heads=128"),
        ("nemotron-h-8b", {"n_groups": 0}, "n_groups=0"),
        ("nemotron-h-8b", {"time_step_limit": [0.001, 0.1]}, "time_step_limit=[0.001, 0.1] is not supported"),
        ("nemotron-h-8b", {"use_conv_bias": False}, "use_conv_bias=False is not supported for nemotron_h; only True is"),
        ("nemotron-h-8b", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for nemotron_h; only False is"),
        ("nemotron-h-8b", {"attention_head_dim": 96}, "attention_head_dim=96 contradicts head_dim=128"),
        ("nemotron3-nano-30b-a3b", {"norm_eps": 1e-6}, "norm_eps=1e-06 contradicts layer_norm_epsilon=1e-05"),
        ("nemotron3-nano-30b-a3b", {"moe_latent_size": 1024}, "moe_latent_size=1024 is not supported for nemotron_h; only None is"),
        ("nemotron3-nano-30b-a3b", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported for nemotron_h; only 1 is"),
        (
            "nemotron3-nano-30b-a3b",
            {"moe_shared_expert_intermediate_size": 3000},
            "moe_shared_expert_intermediate_size=3000 is no multiple of moe_intermediate_size=1856",
        ),
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
        ("qwen2.5-0.5b", {"use_sliding_window": False, "sliding_window": 0}),
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
    from pretrain.huggingface.open_model import read_hf

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / field).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UserError) as error:
        read_hf(tmp_path)
    assert field in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_the_weights_cannot_have_are_refused_before_a_network_is_built(tmp_path):
    import torch
    from safetensors.torch import save_file

    from pretrain.errors import CheckpointError
    from pretrain.huggingface.open_model import read_hf

    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    for changes, said in (
        ({"num_hidden_layers": 2000}, "config.json says 2000 layers, and the weights are 1 tensors"),
        ({"num_hidden_layers": 60, "hidden_size": 2**16}, "config.json describes at least .* weights, and the files hold 3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        with pytest.raises(CheckpointError, match=said):
            read_hf(tmp_path)


IMPORTING = """
import json, resource, sys, time
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file
from pretrain.huggingface.directory import HfDirectory
from pretrain.errors import UserError

folder = Path(sys.argv[1])
save_file({"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
for config, family in json.loads(sys.stdin.read()):
    (folder / "config.json").write_text(json.dumps(config))
    try:
        HfDirectory(folder, family)
        said = "nothing"
    except UserError as error:
        said = str(error)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([time.process_time(), peak, said]))
"""


def test_absurd_sizes_are_refused_within_a_second_and_100_mb(tmp_path):
    """M-D2: 10^9 layers in a config.json of 1 kB made from-hf run for minutes and take 8 GB."""
    many = 10**9
    qwen, mixtral = EVERY["qwen3-30b-a3b"], EVERY["mixtral-8x7b"]
    cases = [
        (LLAMA, None),  # what it takes without
        *(
            (LLAMA | {name: many}, None)
            for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
        ),
        *((LLAMA | {name: 2**31 - 1}, None) for name in ("vocab_size", "intermediate_size", "max_position_embeddings")),
        *(
            (qwen | {name: many}, None)
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers")
        ),
        (mixtral | {"num_local_experts": 99_999, "num_hidden_layers": 64}, None),
        (EVERY["gpt2-124m"] | {"n_positions": 2**31 - 1}, None),
        ({"model_type": "granite"}, "hf"),
        *(
            ({"model_type": "granite", name: many}, "hf")
            for name in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        ),
        ({"model_type": "qwen3_next", "num_experts": many}, "hf"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 10_000}, "hf"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": many}}, "hf"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, str(tmp_path)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(cases) and done.stderr == ""
    plain = {None: lines[0], "hf": lines[[family for _, family in cases].index("hf")]}
    before = 0.0
    for (config, family), (seconds, peak, said) in zip(cases, lines):
        assert said != "nothing" and "\n" not in said and len(said) < 400
        if (seconds, peak, said) not in map(tuple, plain.values()):
            assert seconds - before < 1.0, config
            assert peak - plain[family][1] < 100e6, config
        before = seconds


ONE_BIAS = {name: value for name, value in LLAMA.items() if name not in ("attention_bias", "mlp_bias")}
LLAMA_FIELDS = [field for field in family_of("llama").fields if field.ours not in ("attention.bias", "mlp.bias")]
ONE_FIELD = (
    Field("attention.bias", "use_bias", True, *projections("query", "key", "value", "output")),
    Field("mlp.bias", "use_bias", True, back=lambda flag, config: flag),
)


def test_two_keys_of_ours_that_share_a_field_of_theirs_both_get_its_value():
    """M-D8: the second key silently got its default, since the first one had taken the field out of the file."""
    one = dataclasses.replace(family_of("llama"), fields=(*LLAMA_FIELDS, *ONE_FIELD))
    written = one.to_hf(one.from_hf(ONE_BIAS))
    assert written["use_bias"] is True
    for flag in (True, False):
        model = one.from_hf(ONE_BIAS | {"use_bias": flag})
        assert (bool(model.attention.bias), model.mlp.bias) == (flag, flag)
        assert one.to_hf(model)["use_bias"] is flag


def test_two_keys_of_ours_that_would_write_one_field_differently_are_refused():
    """M-D8: the last one overwrote what the first had written, so that an export said something else than the model."""
    one = dataclasses.replace(family_of("llama"), fields=(*LLAMA_FIELDS, *ONE_FIELD))
    model = with_values(one.from_hf(ONE_BIAS), {"attention.bias": []})
    with pytest.raises(ConfigError, match=r"model.mlp.bias=True with model.attention.bias=\[\]: .* in one field, use_bias"):
        one.to_hf(model)


@pytest.mark.parametrize(
    "second",
    [
        Field("mlp.bias", "use_bias", True),  # reads the field as it is: nobody has thought of what it means to this key
        Field("mlp.bias", "use_bias", False, back=lambda flag, config: flag),  # an absent field cannot mean two things
    ],
)
def test_a_family_whose_keys_share_a_field_without_saying_what_each_gets_is_refused_when_it_is_declared(second):
    """M-D8."""
    with pytest.raises(ValueError, match="family llama: attention.bias, mlp.bias all read use_bias"):
        dataclasses.replace(family_of("llama"), fields=(*LLAMA_FIELDS, ONE_FIELD[0], second))


@pytest.mark.parametrize(
    ("slip", "says"),
    [
        ({"fields": (*LLAMA_FIELDS, Field("mlp.biass", "x", False))}, "family llama: mlp.biass is no key of .*; the nearest is mlp.bias"),
        ({"fixed": {"mlp.gatedd": True}}, "family llama: mlp.gatedd is no key of .*; the nearest is mlp.gated"),
        ({"defaults": {"experts": 4}}, "family llama: experts is no key of pretrain/config/model_schema.py"),
    ],
)
def test_a_name_that_is_no_key_of_ours_is_refused_when_a_family_is_declared(slip, says):
    """They were a KeyError and a TypeError of a run, or of an import."""
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(family_of("llama"), **slip)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, 'pretrain/models/families/beginner.py must have BEGINNER = Family(name="beginner", ...)'),
        ("Beginner = 1", 'pretrain/models/families/beginner.py must have BEGINNER = Family(name="beginner", ...)'),
        ("from pretrain.models.families.llama import LLAMA as BEGINNER", 'must have BEGINNER = Family(name="beginner", ...)'),
        (
            "from pretrain.models.families.declare.family import Family\n"
            "BEGINNER = Family(name='beginner', model_type='x', architecture='X', fields=(), weights=(), fixed={'norm.kin': 1})",
            "model.family=beginner: family beginner: norm.kin is no key of pretrain/config/model_schema.py; the nearest is norm.kind",
        ),
    ],
)
def test_a_family_whose_file_is_not_as_its_name_says_is_an_error_of_one_line(tmp_path, monkeypatch, text, says):
    """A family under another name than its file's was trained, and an import gave the other name."""
    monkeypatch.setattr(declared_families, "__path__", [*declared_families.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pretrain.models.families.beginner", raising=False)
    if text is not None:
        (tmp_path / "beginner.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        family_of("beginner")
    sys.modules.pop("pretrain.models.families.beginner", None)


@pytest.mark.parametrize("name", [family.name for family in families() if family.partial])
def test_the_rotated_share_is_written_where_it_is_one_too(name):
    """M-D9: without the field a reader takes the family's own share, a quarter or a half of each head, for the model's."""
    model = with_values(
        family_of_hf(EVERY[ONE_OF_A_FAMILY[name]]).from_hf(EVERY[ONE_OF_A_FAMILY[name]]), {"rope.fraction": 1.0}
    )
    written = family_of(name).to_hf(model)
    assert written["partial_rotary_factor"] == written["rope_parameters"]["partial_rotary_factor"] == 1.0
    assert family_of(name).from_hf(written).rope.fraction == 1.0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Model(family="minimax_m2", attention=AttentionConfig(window=4), experts=ExpertsConfig(count=4, active=2)),
            "model.attention.window=4: MiniMax-M2 has full attention in every layer, so it is no model of model.family=minimax_m2 in transformers",
        ),
        (
            Model(family="gemma3", rope=Rope(scaling="yarn", factor=4.0, truncate=False), attention=AttentionConfig(window=4)),
            "model.rope.truncate=false: transformers does not read it for model.family=gemma3",
        ),
    ],
)
def test_what_transformers_would_not_compute_is_not_exported(model, message):
    """A run of either trained, and its export had other logits."""
    model = complete(dataclasses.replace(model, dim=32, layers=2, heads=4, head_dim=8, ffn_dim=24, vocab_size=64, max_sequence_length=64))
    with pytest.raises(ConfigError, match=re.escape(message)):
        family_of(model.family).to_hf(model)


def test_without_layers_that_have_a_window_their_rotation_is_that_of_the_others():
    """An import wrote model.rope.local_theta, which the run then refused as without effect."""
    changes = {"layer_types": ["full_attention"] * EVERY["gemma3-1b"]["num_hidden_layers"], "rope_local_base_freq": 300.0}
    model = read(EVERY["gemma3-1b"] | changes)
    assert model["attention.window"] == 0 and model["rope.local_theta"] == model["rope.theta"] == 1e6
