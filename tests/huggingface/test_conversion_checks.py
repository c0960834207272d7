"""What conversion compares, refuses and carries over (M-D1, M-D3, M-D4, M-D10, M-D12, M-D13)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
import yaml
from converting import SMALL, edit_config, edit_weights, refused, write
from running import tool

from pretrain.checkpoint.files import load_state
from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.keys import check_effects
from pretrain.config.load import load_config
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.config.schema import Config
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface import verification
from pretrain.huggingface.export_model import RECORD, export
from pretrain.huggingface.import_model import import_model
from pretrain.huggingface.open_model import open_model, read_checkpoint
from pretrain.models import decoder, positions
from pretrain.models.families import complete, families, family_of
from pretrain.models.shape import flat

MOE = dataclasses.replace(SMALL, family="qwen3_moe", experts=ExpertsConfig(count=4, active=2, ffn_dim=22, dense_layers=[0]))


def test_experts_of_any_width_are_compared(byte_tokenizer, tmp_path):
    """M-D1: transformers' grouped kernel refuses widths that are no multiple of 4, and --verify ended in its traceback."""
    export(write(tmp_path / "checkpoint", byte_tokenizer, MOE), tmp_path / "out", verify=True)
    assert import_model(tmp_path / "out", tmp_path / "imported", verify=True).compared.difference <= 1e-5


WINDOWED = dataclasses.replace(SMALL, family="mistral", attention=AttentionConfig(window=80), max_sequence_length=512)
DYNAMIC = dataclasses.replace(SMALL, rope=Rope(scaling="dynamic", factor=4.0), max_sequence_length=70)
LINEAR = dataclasses.replace(SMALL, family="olmo_hybrid", max_sequence_length=512)  # a chunk has 64 positions


@pytest.mark.parametrize(
    ("model", "length", "beyond"),
    [
        (SMALL, 64, None),
        (WINDOWED, 144, "the window of 80"),
        (dataclasses.replace(WINDOWED, max_sequence_length=100), 100, "the window of 80"),
        (dataclasses.replace(WINDOWED, max_sequence_length=60), 60, None),
        (DYNAMIC, 134, "the 70 positions from which dynamic scaling grows"),
        (LINEAR, 128, None),
    ],
)
def test_a_comparison_reaches_beyond_windows_and_says_how_far(byte_tokenizer, tmp_path, capsys, model, length, beyond):
    """M-D4: at most 64 positions were compared, whatever the window, and the record did not say so."""
    write(tmp_path / "checkpoint", byte_tokenizer, model)
    convert = tool("convert_checkpoint").main
    assert convert(["to-hf", "--checkpoint", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out"), "--verify"]) == 0
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    sequences = 2 if model in (SMALL, LINEAR) else 1
    compared = record["logits_compared"]
    assert compared.items() >= {"sequences": sequences, "length": length, "beyond": beyond, "computed_in": "float64"}.items()
    assert compared["difference"] == record["max_logit_difference"] <= compared["limit"] < 1e-8
    assert f"of {length} random tokens" in record["verified"]["logits"]
    assert f"of {length} random tokens" + (f", beyond {beyond}" if beyond else "") in capsys.readouterr().out
    assert convert(["from-hf", "--model", str(tmp_path / "out"), "--output", str(tmp_path / "in"), "--verify"]) == 0
    assert load_state(tmp_path / "in")["imported"]["logits_compared"]["length"] == length


def test_a_window_that_is_computed_otherwise_is_found(byte_tokenizer, tmp_path, monkeypatch):
    """M-D4: with 64 positions, a model without the window passed for one of 80."""
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, WINDOWED)
    specs = decoder.layer_specs
    monkeypatch.setattr(decoder, "layer_specs", lambda model: [replace(spec, window=0) for spec in specs(model)])
    with pytest.raises(CheckpointError, match="transformers' logits differ from ours by .* on 144 tokens"):
        export(checkpoint, tmp_path / "out", verify=True)


def test_dynamic_scaling_that_is_computed_otherwise_is_found(byte_tokenizer, tmp_path, monkeypatch):
    """M-D4: the branch beyond the original length was never taken."""
    checkpoint = write(tmp_path / "checkpoint", byte_tokenizer, DYNAMIC)
    original = positions.rotary_tables

    def unscaled(config, *rest):
        return original(dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling="none")), *rest)

    monkeypatch.setattr(decoder, "rotary_tables", unscaled)
    with pytest.raises(CheckpointError, match="transformers' logits differ from ours by .* on 134 tokens"):
        export(checkpoint, tmp_path / "out", verify=True)


def test_a_model_type_that_contradicts_the_architecture_is_refused(copied, tmp_path):
    """M-D3: transformers goes by model_type and would load a Mistral with its window; we read a Llama."""
    edit_config(copied, model_type="mistral")
    said = refused(ConfigError, copied, tmp_path)
    assert "model_type='mistral' contradicts architectures=['LlamaForCausalLM'], which is of model_type='llama'" in said
    assert "transformers would load a 'mistral'" in said
    with pytest.raises(ConfigError, match="model_type='mistral' contradicts architectures=\\['LlamaForCausalLM'\\]"):
        import_model(copied, tmp_path / "imported", family="hf")
    edit_config(copied, model_type=["x"])
    assert "model_type=['x'] contradicts" in refused(ConfigError, copied, tmp_path)
    edit_config(copied, model_type="llama")
    assert import_model(copied, tmp_path / "imported").parameters > 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(run, copied, tmp_path, value):
    """M-D12: NaN came in without a word, went out again, and generated token 0 for ever."""

    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    edit_weights(copied, spoil)
    said = refused(CheckpointError, copied, tmp_path)
    what = "NaN" if value != value else "infinite numbers"
    # Its own file, and not the hidden directory that the import would have become.
    assert said.startswith(f"{copied}/model.safetensors: model.layers.1.mlp.up_proj.weight holds {what} (1 of 1,536)")
    with pytest.raises(CheckpointError, match=f"up_proj.weight holds {what}"):
        open_model(copied)
    _, weights, _ = read_checkpoint(run)
    bad = weights["layers.1.mlp.up.weight"].clone()
    bad[3, 4] = value
    checkpoint = write(
        tmp_path / "bad", None, dataclasses.replace(SMALL, vocab_size=257), **{"model.layers.1.mlp.up.weight": bad}
    )
    with pytest.raises(CheckpointError, match=f"layers.1.mlp.up.weight holds {what}"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_there_twice_is_refused(copied, tmp_path):
    """M-D13: the last of two values won without a word."""
    path = copied / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_size": 64, ', 1))
    assert "config.json: cannot be read: hidden_size is there twice" in refused(CheckpointError, copied, tmp_path)
    with pytest.raises(ConfigError, match="hidden_size is there twice"):
        complete(Model(family="hf", hf_config=str(copied)), 32)


INITIAL = dict(dim=64, layers=2, heads=4, ffn_dim=128, vocab_size=512, max_sequence_length=128)


def compared(folder, model, **changes):
    """The comparison of an export, whose config.json was changed afterwards, with the model that was exported."""
    checkpoint = write(folder / "checkpoint", None, model)
    export(checkpoint, folder / "out")
    edit_config(folder / "out", **changes)
    model, weights, _ = read_checkpoint(checkpoint)
    return verification.compare_logits(folder / "out", model, sum(w.numel() for w in weights.values()), lambda: weights)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (Model(family="llama", **INITIAL), {"rope_parameters": {"rope_type": "default", "rope_theta": 10100.0}}),
        (Model(family="llama", **INITIAL), {"rms_norm_eps": 1.1e-5}),
        (Model(family="gemma2", **INITIAL), {"final_logit_softcapping": 33.0}),
        (Model(family="gemma2", **INITIAL), {"attn_logit_softcapping": 55.0}),
        (Model(family="gemma2", **INITIAL, init_std=0.15), {"rms_norm_eps": 2e-6}),
    ],
)  # fmt: skip
def test_small_errors_of_a_model_that_hardly_learned_are_found(tmp_path, model, changes):
    """The limit was 1e-4 whatever the logits, and a rotary base off by 1 % or a soft cap off by 10 % passed."""
    assert compared(tmp_path / "right", model).difference < 1e-12
    with pytest.raises(
        CheckpointError, match="transformers' logits differ from ours by .*, both in float64 .*; nothing was written"
    ):
        compared(tmp_path / "wrong", model, **changes)


def test_large_logits_of_a_right_model_are_no_false_alarm(tmp_path, monkeypatch):
    """A right model with logits up to 12.9 was refused: rounding in fp32 moved them by 1.5e-4."""
    model = Model(
        family="llama", dim=256, layers=6, heads=4, ffn_dim=512, vocab_size=1000, max_sequence_length=256, init_std=0.2
    )
    assert compared(tmp_path / "fp64", model).difference < 1e-11
    monkeypatch.setattr(verification, "MOST_IN_FP64", 1000)
    done = compared(tmp_path / "fp32", model)
    assert done.computed_in == "float32" and 1e-6 < done.difference < done.limit < 1e-2
    assert f"(limit {done.limit:.2e}), in float32, on 2 sequences of 64 random tokens" in str(done)
    with pytest.raises(CheckpointError, match="both in float32 .*: 0.001 of the root mean square of ours, "):
        compared(tmp_path / "wrong", model, rope_parameters={"rope_type": "default", "rope_theta": 10100.0})


# ---- models that transformers cannot run -------------------------------------------------------------------------------

GEMMA3 = Model(family="gemma3", dim=32, layers=2, heads=2, ffn_dim=48, vocab_size=61, max_sequence_length=64)
GLM = dataclasses.replace(MOE, family="glm4_moe", vocab_size=61, attention=AttentionConfig())


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (
            GEMMA3,
            {"sliding_window": None, "layer_types": ["full_attention"] * 2},
            "ValueError: Could not find a `sliding_window`",
        ),
        (GLM, {"n_group": 1, "topk_group": 2}, "RuntimeError: selected index k out of range"),
    ],
)
def test_a_model_that_transformers_itself_cannot_run_is_said_in_a_line(tmp_path, model, changes, said):
    """--verify ended in the traceback of whatever transformers raised."""
    export(write(tmp_path / "checkpoint", None, model), tmp_path / "theirs")
    edit_config(tmp_path / "theirs", **changes)
    assert import_model(tmp_path / "theirs", tmp_path / "unverified").parameters > 0
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path / "theirs", tmp_path / "in", verify=True)
    assert str(error.value).startswith(f"transformers itself fails on this model: {said}") and "\n" not in str(error.value)
    assert str(error.value).endswith("; correct config.json, or leave --verify out; nothing was written")
    assert not (tmp_path / "in").exists()


ROBERTA = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61,
               max_position_embeddings=64, is_decoder=True, bos_token_id=0, eos_token_id=2)  # fmt: skip


def roberta(folder, pad):
    """A decoder as transformers itself writes it."""
    from transformers import RobertaConfig, RobertaForCausalLM

    RobertaForCausalLM(RobertaConfig(**ROBERTA, pad_token_id=1)).save_pretrained(folder)
    edit_config(folder, pad_token_id=pad)
    return folder


def test_positions_that_begin_after_the_padding_token_are_fewer(tmp_path):
    """RoBERTa's 64 rows of positions serve 62 tokens: the comparison took 64 and failed, and so would training."""
    done = import_model(roberta(tmp_path / "theirs", 1), tmp_path / "in", verify=True, family="hf")
    assert done.compared.length == 62 and done.compared.difference <= 1e-5
    with pytest.raises(ConfigError, match="data.sequence_length=64: the model of model.hf_config has 62 positions; lower it"):
        complete(Model(family="hf", hf_config=str(tmp_path / "theirs")), 64)


def test_a_decoder_without_the_padding_token_it_counts_from_is_said_in_a_line(tmp_path):
    """transformers' TypeError was a traceback."""
    with pytest.raises(CheckpointError, match="^transformers itself fails on this model: TypeError: "):
        import_model(roberta(tmp_path / "theirs", None), tmp_path / "in", verify=True, family="hf")


# ---- mixtures of experts ----------------------------------------------------------------------------------------------


def test_the_weight_of_the_balancing_loss_comes_in_and_leaves_again(byte_tokenizer, tmp_path, capsys):
    """M-D10: router_aux_loss_coef was read as without effect, and continued pretraining then balanced nothing."""
    model = dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, balance_loss=0.01))
    export(write(tmp_path / "checkpoint", byte_tokenizer, model), tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["router_aux_loss_coef"] == 0.01
    )  # of one layer with experts
    edit_config(tmp_path / "out", router_aux_loss_coef=0.03)
    assert tool("convert_checkpoint").main(["from-hf", "--model", str(tmp_path / "out"), "--output", str(tmp_path / "in")]) == 0
    printed = capsys.readouterr().out
    assert (
        "note: router_aux_loss_coef=0.03 is model.experts.balance_loss=0.03 here: transformers averages its loss over 1 layers"
        in printed
    )
    assert load_state(tmp_path / "in")["model"]["experts"]["balance_loss"] == 0.03
    edit_config(tmp_path / "out", router_aux_loss_coef="much")
    assert "router_aux_loss_coef='much' is not supported" in refused(ConfigError, tmp_path / "out", tmp_path)
    edit_config(tmp_path / "out", router_aux_loss_coef=0.03)
    assert tool("convert_checkpoint").main(
        ["from-hf", "--model", str(tmp_path / "out"), "--output", str(tmp_path / "hf"), "--family", "hf"]
    ) == 0  # fmt: skip
    assert "router_aux_loss_coef=0.03 is not used: with model.family=hf" in capsys.readouterr().out


def test_the_balancing_loss_of_an_import_is_as_strong_as_that_of_transformers(byte_tokenizer, tmp_path):
    """M-D10, M-D11: of a model with one layer of experts and one sequence, ours is transformers' loss itself."""
    import transformers

    model = dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, balance_loss=0.5))
    export(write(tmp_path / "checkpoint", byte_tokenizer, model), tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "imported")
    network = open_model(tmp_path / "imported").network
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_router_logits=True, experts_implementation="eager"
    )
    assert theirs.router_aux_loss_coef == 0.5
    ids = torch.randint(257, (1, 40), generator=torch.Generator().manual_seed(0))
    for layer in theirs.model.layers:  # transformers counts a layer without experts as it would one with
        assert not hasattr(layer.mlp, "experts") or layer is theirs.model.layers[1]
    with torch.no_grad():
        expected = theirs(ids, attention_mask=torch.ones_like(ids)).aux_loss
        plain = network(ids, targets_BT=ids)
    balanced = network(ids, targets_BT=ids)
    assert (balanced - plain).item() / 40 == pytest.approx(0.5 * float(expected), rel=1e-4)


@pytest.mark.parametrize("family", [family.name for family in families() if "router_aux_loss_coef" in family.inert])
def test_every_family_reads_the_weight_that_transformers_has_for_it(family):
    """M-D10: what an absent router_aux_loss_coef means is transformers' own default, and None where its class has no such field."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    entry = family_of(family)
    own = CONFIG_MAPPING[entry.model_type]()
    assert entry.balance == getattr(own, "router_aux_loss_coef", None)


# ---- going on with a published model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        dataclasses.replace(WINDOWED, tie_embeddings=True),
        dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, balance_loss=0.01)),
        dataclasses.replace(SMALL, dim=384, layers=6, heads=6, kv_heads=None, ffn_dim=None, max_sequence_length=2048),
    ],
)
def test_an_import_says_its_model_in_a_file_to_include(byte_tokenizer, tmp_path, model):
    """Newcomer 5: the section `model` of an import had to be written by hand from its config.json."""
    export(write(tmp_path / "checkpoint", byte_tokenizer, model), tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "imported")
    (tmp_path / "run.yaml").write_text("include: imported/model.yaml\nrun: {init_from: imported}\n")
    section = load_config(tmp_path / "run.yaml")[0].model
    imported = read_checkpoint(tmp_path / "imported")[0]
    assert complete(section) == imported
    check_effects(
        Config(model=section), flat(imported, "model."), family_of(section.family).usual_switches(section, imported)
    )
    assert "model.yaml" in json.loads((tmp_path / "imported" / "manifest.json").read_text())["files"]
    # As few keys as can be, so that a person can read it.
    said = family_of(imported.family).smallest_section(imported)
    assert flat(section) == {**flat(Model()), **said} and len(said) <= 16
    assert yaml.safe_load((tmp_path / "imported" / "model.yaml").read_text())["model"]["family"] == model.family


def test_an_import_of_transformers_own_says_its_model_too(tmp_path):
    from hf_configs import write_config

    from pretrain.huggingface.import_model import preset

    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path, "mamba2")), max_sequence_length=100), 32)
    (tmp_path / "model.yaml").write_text(preset(model, "a\nname"))
    assert complete(load_config(tmp_path / "model.yaml")[0].model) == model


def test_the_verification_of_logits_takes_one_model_after_the_other(run, tmp_path, monkeypatch):
    order = []
    theirs, ours = verification._their_logits, verification.build
    monkeypatch.setattr(verification, "_their_logits", lambda *a: order.append("theirs") or theirs(*a))
    monkeypatch.setattr(verification, "build", lambda *a: order.append("ours") or ours(*a))
    export(run, tmp_path / "out", verify=True)
    assert order == ["theirs", "ours"]
