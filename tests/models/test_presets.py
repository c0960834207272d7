"""Every file of configs/models/ is a published shape, exactly, and can be put under a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from documentation import model_tables as show
from presets import COUNTS, PRESETS, counted, preset

from pretrain.config.keys import check_effects
from pretrain.config.load import check_recorded, load_config
from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.config.written import to_yaml
from pretrain.huggingface.directory import check_round_trip
from pretrain.models.families import complete, family_of
from pretrain.models.shape import flat
from pretrain.train.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
every_preset = pytest.mark.parametrize("name", PRESETS)
by_family = {yaml.safe_load(path.read_text())["model"]["family"]: name for name, path in PRESETS.items()}


def test_every_preset_has_a_published_count_and_every_count_a_preset():
    assert set(PRESETS) == set(COUNTS)
    assert len(PRESETS) >= 40
    assert min(COUNTS.values()) < 11e6 and max(COUNTS.values()) > 70e9


@every_preset
def test_a_complete_model_is_completed_to_itself(name):
    assert complete(preset(name)) == preset(name)


@every_preset
def test_a_preset_comes_back_from_its_config_json_as_the_same_model(name):
    check_round_trip(preset(name), family_of(preset(name).family).to_hf(preset(name)))


@every_preset
def test_what_a_family_says_by_itself_is_no_switch_without_effect_as_given_or_complete(name):
    model = preset(name)
    sizes = {"dim": 32, "heads": 4, "vocab_size": 61}
    small = Model(family=model.family, **sizes, experts=model.experts, latent=model.latent, head_dim=model.head_dim)
    for given, completed in ((model, model), (small, complete(small, 64))):
        usual = family_of(given.family).usual_switches(given, completed)
        check_effects(Config(model=given), flat(completed, "model."), usual)


@every_preset
def test_a_preset_has_the_published_number_of_parameters(name):
    assert counted(name)[1] == COUNTS[name]


@every_preset
def test_transformers_counts_the_same_from_our_config_json(name):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    model, _ = counted(name)
    fields = {k: v for k, v in family_of(model.family).to_hf(model).items() if k != "architectures"}
    with torch.device("meta"):
        auto = AutoModelForSeq2SeqLM if model.encoder.layers else AutoModelForCausalLM
        theirs = auto.from_config(AutoConfig.for_model(**fields))
        if model.family == "t5" and not model.tie_embeddings:  # only a file with both unties T5's head
            theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.shared.weight))
    assert type(theirs).__name__ == family_of(model.family).architecture
    assert theirs.num_parameters(only_trainable=True) == COUNTS[name]


@every_preset
def test_a_record_of_a_preset_has_values_that_a_configuration_may_have(name):
    """What `checkpoint/files.py` asks of the model in a checkpoint."""
    values = dataclasses.asdict(counted(name)[0])
    check_recorded(Model, json.loads(json.dumps(values)), "model", "state.json")


@every_preset
def test_a_preset_is_a_model_and_the_source_of_its_numbers(name):
    text = PRESETS[name].read_text(encoding="utf-8")
    assert text.startswith("# ") and text.split("\n")[0].endswith(".")
    assert set(yaml.safe_load(text)) == {"model"}


@pytest.mark.parametrize("name", by_family.values())
def test_a_preset_loads_and_what_is_printed_loads_back(name, tmp_path):
    config = resolve(load_config(PRESETS[name])[0])
    (tmp_path / "printed.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "printed.yaml")[0] == config


def test_a_run_includes_a_preset_and_changes_what_it_wants(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"include: {PRESETS['qwen3-0.6b']}\nmodel: {{layers: 3, vocab_size: null}}\ndata: {{sequence_length: 128, sources: [{{path: x}}]}}\n"
    )
    config = load_config(path, ["model.rope.theta=5e5"])[0]
    assert (config.model.family, config.model.dim, config.model.layers) == ("qwen3", 1024, 3)
    assert config.model.vocab_size is None and config.model.rope.theta == 5e5
    assert complete(config.model, config.data.sequence_length).head_dim == 128


def test_a_preset_can_be_the_configuration_itself_with_everything_else_as_overrides():
    config = load_config(
        PRESETS["gemma3-1b"], ["data.sources=[{path: prepared}]", "data.sequence_length=2048", "run.steps=10"]
    )[0]
    assert config.data.sources[0].path == "prepared"
    model = resolve(config).model
    assert (model.attention.window, model.rope.local_theta, model.norm.qk) == (512, 1e4, "head")


def test_the_tables_of_the_documentation_are_those_of_the_code():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    tables = {"families": show.family_table(), "presets": show.preset_table({name: counted(name) for name in PRESETS})}
    assert show.with_tables(page, tables) == page, "run: python tools/make_docs.py"


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="0 places for the table presets"):
        show.with_tables("# Models\n", {"presets": "| |"})
