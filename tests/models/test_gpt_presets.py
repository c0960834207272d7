"""GPT-2 and Pythia: what an absent field means, and what is refused."""

from __future__ import annotations

import pytest
from presets import PUBLISHED
from running import losses, run_main, train

from pretrain.config.attention_schema import Rope
from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models.families import complete, family_of

GPT2_FILE, PYTHIA_FILE = PUBLISHED["gpt2-124m"], PUBLISHED["pythia-160m"]


def test_an_absent_share_of_rotation_is_a_quarter_in_gpt_neox_as_transformers_has_it():
    entry = family_of("gpt_neox")
    file = {k: v for k, v in PYTHIA_FILE.items() if k != "rotary_pct"}
    assert entry.from_hf(file).rope.fraction == 0.25
    assert entry.from_hf(file | {"rotary_pct": 1.0}).rope.fraction == 1.0
    del file["rotary_emb_base"]
    assert entry.from_hf(file | {"rope_parameters": {"rope_theta": 5e5}}).rope == Rope(
        **{**vars(entry.from_hf(PYTHIA_FILE).rope), "theta": 5e5, "local_theta": 5e5}
    )


def test_what_gpt2_does_not_compute_is_refused_by_name():
    entry = family_of("gpt2")
    for field, value in (
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("activation_function", "mish"),
    ):
        with pytest.raises(ConfigError, match=f"config.json: {field}={value!r} is not supported"):
            entry.from_hf(GPT2_FILE | {field: value})
    small = {"family": "gpt2", "dim": 32, "layers": 1, "heads": 4, "vocab_size": 61, "max_sequence_length": 16}
    for model, key in ((Model(**small, kv_heads=2), "kv_heads=2"), (Model(**small, rope=Rope(theta=5.0)), "rope.theta=5.0")):
        with pytest.raises(ConfigError, match=f"model.{key} is not what model.family=gpt2 computes"):
            entry.to_hf(complete(model))


def test_the_rows_of_learned_positions_make_a_run_the_run_it_is(pool, config_file):
    gpt2 = ("model.family=gpt2", "model.kv_heads=null", "schedule.warmup_steps=1", "model.max_sequence_length=40")
    run = train(pool, 1, config_file, *gpt2, "run.steps=4")
    code, printed = run_main(str(config_file), *gpt2[:3], "run.steps=6", "model.max_sequence_length=64")
    assert code == 1 and "model.max_sequence_length was 40 and is 64" in printed
    code, printed = run_main(str(config_file), *gpt2[:3], "run.steps=6", "model.max_sequence_length=31")
    assert code != 0 and "model.max_sequence_length=31 is below data.sequence_length=32" in printed
    assert train(pool, 2, config_file, *gpt2, "run.steps=6", "run.accept_changes=[run.steps]", "parallel.strategy=ddp") == run
    assert len(losses(run)) == 6
