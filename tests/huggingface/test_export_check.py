"""Every new run tries its export before it has anything to export, in a process that training does not wait for."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import run_main

from pretrain.config.attention_schema import AttentionConfig, Rope
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.directory import plan_weights
from pretrain.huggingface.export_check import ExportCheck, check_map
from pretrain.huggingface.verification import check_expected
from pretrain.models.families import complete, family_of, llama
from pretrain.models.families.declare.weights import entry

ROOT = Path(__file__).resolve().parents[2]
ON = "checkpoint.export_check=true"
PATIENT = "parallel.timeout_seconds=600"  # half of which the check may take
SMALL = complete(Model(dim=32, layers=2, heads=4, ffn_dim=48, vocab_size=257), 64)

ALONE = """
import sys
from pretrain.run import main
code = main(sys.argv[1:])
print("transformers imported:", any(name in sys.modules for name in ("transformers", "tokenizers", "datasets")))
raise SystemExit(code)
"""


def test_a_new_run_is_checked_once_and_training_imports_nothing_for_it(config_file):
    command = [sys.executable, "-c", ALONE, "--config", str(config_file), ON, PATIENT, "checkpoint.every_steps=10"]
    said = []
    for steps in (20, 30):
        done = subprocess.run(
            [*command, f"run.steps={steps}", "run.accept_changes=[run.steps]"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "transformers imported: False" in done.stdout
        said.append(done.stdout + done.stderr)
    assert "export check: 21 tensors and the tokenizer are what transformers' LlamaForCausalLM expects (" in said[0]
    assert "resumed from" in said[1] and "export check" not in said[1]


def test_check_tries_the_export_as_well(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), ON, PATIENT, "--check")
    assert code == 0 and "export check: 21 tensors and the tokenizer are what" in printed
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check")
    assert code == 0 and "export check: switched off by checkpoint.export_check=false" in printed


def test_a_family_without_export_says_so_once(pool, config_file):
    results = pool.launch(2, run_main, str(config_file), ON, "model.family=custom", "parallel.strategy=ddp")
    printed = "".join(text for _, text in results)
    assert [code for code, _ in results] == [0, 0]
    assert printed.count("export check: model.family=custom has no export to transformers") == 1


def run_with_modules_from(folder: str, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose export check finds the Python modules of a folder before the installed ones."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, before])
    try:
        return run_main(config_file, *overrides)
    finally:
        os.environ["PYTHONPATH"] = before


def pretend(tmp_path: Path, source: str) -> str:
    """A folder with a `transformers` that does this when it is imported."""
    (tmp_path / "modules" / "transformers").mkdir(parents=True)
    (tmp_path / "modules" / "transformers" / "__init__.py").write_text(source)
    return str(tmp_path / "modules")


@pytest.mark.parametrize(
    ("world_size", "steps"),
    [(2, 6), *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((1, 6), (1, 100_000), (2, 100_000)))],
)
def test_a_failure_ends_the_run_in_one_line_whether_it_is_long_or_over_by_then(pool, config_file, tmp_path, world_size, steps):
    folder = pretend(tmp_path, "raise RuntimeError('no class of that name')")
    overrides = (ON, PATIENT, f"run.steps={steps}", "parallel.strategy=auto", "schedule.warmup_steps=0")
    for code, printed in pool.launch(world_size, run_with_modules_from, folder, str(config_file), *overrides):
        assert code == 1
        [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert (
            "export check: this run could not be exported: RuntimeError: no class of that name; checkpoint.export_check=false"
            in line
        )
    status = json.loads((config_file.parent / "runs" / "run" / "status.json").read_text())
    assert status["state"] == "failed" and status["step"] <= min(steps, 50_000) and "no class of that name" in status["reason"]
    assert len(list((config_file.parent / "runs" / "run" / "checkpoints").glob("step-*"))) == (steps == 6)


def test_a_check_that_takes_too_long_or_is_killed_is_said_and_fails_nothing(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", pretend(tmp_path, "import time\ntime.sleep(60)"))
    said: list[str] = []
    with ExportCheck(SMALL, byte_tokenizer, [], said.append, limit_seconds=0.5) as check:
        assert check.problem() is None and not said
        assert check.finish() is None and check.problem() is None and check.finish() is None
    assert said == ["export check: not done after 0.5 s; whether this run can be exported is not known"]
    with ExportCheck(SMALL, byte_tokenizer, [], said.append) as check:
        os.kill(check._process.pid, signal.SIGTERM)
        assert check.finish() is None
    assert said[1:] == ["export check: ended by signal 15; whether this run can be exported is not known"]
    began = time.monotonic()
    with ExportCheck(SMALL, byte_tokenizer, [], said.append) as check:
        assert check.finish(lambda: True) is None and time.monotonic() - began < 20
    assert said[2:] == ["export check: left, for a request to stop; whether this run can be exported is not known"]


def test_a_full_disk_says_nothing_of_the_run(byte_tokenizer, tmp_path, monkeypatch):
    """A page left in /tmp ended a run that could be exported."""
    monkeypatch.setenv("PYTHONPATH", pretend(tmp_path, "raise OSError(28, 'No space left on device')"))
    said: list[str] = []
    with ExportCheck(SMALL, byte_tokenizer, [], said.append) as check:
        assert check.finish() is None
    reason = "OSError: [Errno 28] No space left on device"
    assert said == [f"export check: {reason}; whether this run can be exported is not known"]


def test_what_libraries_print_is_not_taken_for_the_answer(byte_tokenizer, tmp_path, monkeypatch):
    """One printed line ended the run with a JSONDecodeError."""
    source = """import atexit, os; print("a notice"); os.write(1, b"of C\\n"); atexit.register(print, "{'a': 'farewell'}")"""
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    custom = dataclasses.replace(SMALL, family="custom")  # is refused before transformers is imported
    with ExportCheck(custom, byte_tokenizer, [], print) as check:
        problem = check.finish()
    assert problem.startswith("export check: this run could not be exported: model.family=custom") and "\n" not in problem


def test_a_run_that_ends_before_the_check_ends_it_too(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", pretend(tmp_path, "import time\ntime.sleep(60)"))
    started = time.monotonic()
    with ExportCheck(SMALL, byte_tokenizer, [], print) as check:
        number = check._process.pid
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


# ---- what it finds ----------------------------------------------------------------------------------------------------


def changed(monkeypatch, **changes) -> None:
    monkeypatch.setattr(llama, "LLAMA", dataclasses.replace(llama.LLAMA, **changes))


def test_a_weight_map_without_a_parameter_of_the_network_is_found(monkeypatch):
    changed(monkeypatch, weights=tuple(e for e in llama.LLAMA.weights if "mlp.up" not in e.ours[0]))
    with pytest.raises(CheckpointError, match="no entry for layers.0.mlp.up.weight"):
        check_map(SMALL)


def test_a_layout_whose_shapes_do_not_come_back_is_found(monkeypatch):
    class Cut:
        def to_theirs(self, ours, model):
            return [ours[0][1:]]

        def to_ours(self, theirs, shapes, model):
            return theirs

    changed(
        monkeypatch,
        weights=tuple(dataclasses.replace(e, layout=Cut()) if e.ours == ("norm.weight",) else e for e in llama.LLAMA.weights),
    )
    with pytest.raises(CheckpointError, match=r"norm.weight \[32\] does not come back from model.norm.weight \[\[31\]\]"):
        check_map(SMALL)


def test_two_parameters_under_one_name_are_found(monkeypatch):
    weights = tuple(entry(e.ours, "model.norm.weight") if e.ours == ("embedding.weight",) else e for e in llama.LLAMA.weights)
    changed(monkeypatch, weights=weights)
    with pytest.raises(CheckpointError, match="does not come back from model.norm.weight"):
        check_map(SMALL)


def test_a_field_of_the_configuration_that_does_not_come_back_is_found(monkeypatch):
    fields = [
        dataclasses.replace(f, to=lambda v, m: v * 2) if f.theirs == "initializer_range" else f for f in llama.LLAMA.fields
    ]
    changed(monkeypatch, fields=tuple(fields))
    with pytest.raises(ConfigError, match="initializer_range=0.04 comes back as 0.08 for llama"):
        check_map(SMALL)


def test_a_value_that_is_lost_on_the_way_out_is_found(monkeypatch):
    """config.json was compared with itself, and what was lost before is in neither side."""
    fields = [dataclasses.replace(f, to=lambda v, m: 1e-6) if f.theirs == "rms_norm_eps" else f for f in llama.LLAMA.fields]
    changed(monkeypatch, fields=tuple(fields))
    check_map(dataclasses.replace(SMALL, norm_eps=1e-6))
    with pytest.raises(ConfigError, match="model.norm_eps=1e-05 comes back as 1e-06 from rms_norm_eps of config.json, so llama of transformers"):
        check_map(SMALL)


@pytest.mark.parametrize(
    "model",
    [
        dict(attention=AttentionConfig(bias=["output", "value", "query", "key"])),  # a list of names has no order
        dict(family="granite", logit_multiplier=1 / 3, attention=AttentionConfig(query_scalar=7.7)),  # inverses are rounded
        dict(family="minimax_m2", rope=Rope(fraction=0.55)),  # of 8 components, 4
        dict(family="gpt_oss", rope=Rope(scaling="yarn", factor=1.0)),  # which is no scaling
    ],
)
def test_what_has_two_spellings_comes_back_as_the_same_model(model):
    experts = ExpertsConfig(count=4, active=2) if model.get("family") in ("gpt_oss", "minimax_m2") else ExpertsConfig()
    check_map(complete(Model(dim=32, layers=2, heads=4, ffn_dim=48, vocab_size=257, experts=experts, **model), 64))


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing from the export"),
        (lambda t: t.update({"model.norm.bias": (32,)}), "model.norm.bias is unknown to it"),
        (lambda t: t.update({"model.norm.weight": (31,)}), r"model.norm.weight has shape \[32\], and the export has \[31\]"),
    ],
)
def test_names_and_shapes_that_transformers_does_not_expect_are_found(change, problem):
    plan, config = plan_weights(SMALL), family_of("llama").to_hf(SMALL)
    check_expected(config, plan)
    theirs = dict(plan.theirs)
    change(theirs)
    with pytest.raises(CheckpointError, match=f"transformers' LlamaForCausalLM: {problem}"):
        check_expected(config, dataclasses.replace(plan, theirs=theirs))


def test_another_architecture_than_transformers_makes_is_found(monkeypatch):
    changed(monkeypatch, architecture="LlamaForEverything")
    config = family_of("llama").to_hf(SMALL)
    with pytest.raises(
        CheckpointError, match="architectures names LlamaForEverything, and transformers makes a LlamaForCausalLM"
    ):
        check_expected(config, plan_weights(SMALL))


def test_tied_tensors_are_expected_once(monkeypatch):
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    plan = plan_weights(tied)
    assert "lm_head.weight" not in plan.theirs
    check_expected(family_of("llama").to_hf(tied), plan)
    assert family_of(tied.family).has_export and not family_of("custom").has_export
