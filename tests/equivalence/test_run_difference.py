"""tools/compare_runs.py: nothing between two layouts, and the first step and parameter of a real difference."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from running import tool, train
from safetensors.torch import load_file, save_file

SHORT = ("run.steps=4", "schedule.warmup_steps=0", "log.gradients_at=[1,3]", "checkpoint.every_steps=4")


def compared(capsys, *arguments: object) -> tuple[int, dict[str, list[str]]]:
    """Exit code, and the lines by what they are about; the verdict is under `verdict`."""
    code = tool("compare_runs").main([str(argument) for argument in arguments])
    *lines, verdict = capsys.readouterr().out.splitlines()
    found: dict[str, list[str]] = {"verdict": [verdict]}
    for line in lines:
        found.setdefault(line[:14].strip(), []).append(line[15:])
    return code, found


@pytest.fixture
def run(trained_run, config_file):
    return trained_run(1, config_file, *SHORT, "run.name=one")


def test_nothing_differs_between_one_process_and_two(run, pool, config_file, capsys):
    other = train(pool, 2, config_file, *SHORT, "run.name=two", "parallel.strategy=ddp")
    code, said = compared(capsys, run, other)
    assert code == 0 and said["verdict"] == ["nothing differs"], said
    assert said["configuration"] == ["parallel.strategy: auto | ddp"] or "parallel.strategy" in said["configuration"][0]
    assert said["samples"] == ["equal"] and len(said["gradients"]) == 2 and len(said["weights"]) == 1
    assert "parameters equal within 5e-06" in said["gradients"][0]


def test_another_learning_rate_is_found_where_it_begins_to_act(run, pool, config_file, capsys):
    other = train(pool, 1, config_file, *SHORT, "run.name=rate", "optim.lr=1e-3")
    code, said = compared(capsys, run, other)
    assert code == 1 and said["configuration"] == ["optim.lr: 0.003 | 0.001"] and said["samples"] == ["equal"]
    assert (
        said["lr"][0].startswith("differs first at step 1:")
        and "(0.67)" in said["lr"][0]
        and said["loss"][0].startswith("differs first at step 2:")
    )
    assert said["gradients"][0].startswith("step 1: all") and said["gradients"][1].startswith("step 3:")
    assert "parameters differ, from the input on: embedding" in said["gradients"][1] or "tok" in said["gradients"][1]
    assert said["verdict"] == ["the runs part at step 1"]


def test_the_first_parameter_that_differs_is_named_in_order_of_the_forward_pass(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    path = other / "gradients" / "step-00000003.safetensors"
    gradients = load_file(path)
    changed = [name for name in gradients if ".1." in name and "norm" not in name][:2]
    gradients[changed[0]] *= 1.01
    gradients[changed[1]][...] = torch.nan
    save_file(gradients, path)
    code, said = compared(capsys, run, other)
    assert code == 1 and said["verdict"] == ["the runs part at step 3"] and said["configuration"] == ["equal"]
    assert (
        f"2 of {len(gradients)} parameters differ" in said["gradients"][1]
        and f"most: {changed[1]} (nan)" in said["gradients"][1]
    )
    code, said = compared(capsys, run, other, "--tolerance", "0.1")
    assert code == 1 and f"1 of {len(gradients)} parameters differ" in said["gradients"][1]


def test_another_validation_set_is_found_though_training_is_the_same(pool, config_file, prepared, tmp_path, capsys):
    validated = (*SHORT, "validation.every_steps=2", f"data.validation=[{{path: {prepared}, name: books}}]")
    runs = [train(pool, 1, config_file, *validated, f"run.name={name}", f"validation.sequences={n}") for name, n in (("a", 4), ("b", 8))]
    code, said = compared(capsys, *runs)
    assert code == 1 and said["loss"][0].startswith("equal") and said["verdict"] == ["the runs part at step 2"]
    assert said["validation/boo"][0].startswith("s differs first at step 2:")  # names may be longer than their column


def test_a_loss_that_is_no_number_in_one_run_is_where_they_part(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2] |= {"loss": None, "grad_norm": None}
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = compared(capsys, run, other)
    assert code == 1 and said["loss"][0].startswith("differs first at step 3:") and "nan" in said["loss"][0]
    code, said = compared(capsys, other, other)
    assert code == 0 and said["verdict"] == ["nothing differs"]
    del lines[2]["loss"]  # as of a step that was skipped
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = compared(capsys, run, other)
    assert code == 1 and said["loss"][0].startswith("differs first at step 3:")


@pytest.mark.parametrize(
    ("name", "measured"),
    [("bits_per_byte", lambda x: {"v": x}), ("translation", lambda x: {"v": {"bleu": x}}), ("evaluation", lambda x: {"probe": x})],
)
def test_what_was_evaluated_in_both_runs_is_compared(name, measured, run, tmp_path, capsys):
    runs = [tmp_path / "one", tmp_path / "other"]
    for directory, value in zip(runs, (0.5, 0.625)):
        shutil.copytree(run, directory)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[1][name] = measured(value)
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = compared(capsys, *runs)
    assert code == 1 and said["verdict"] == ["the runs part at step 2"]
    code, said = compared(capsys, runs[0], run)  # evaluated in one run only
    assert said[name] == [f"not compared: only {runs[0]} has it at these steps"]
    assert code == 0 and said["verdict"] == ["nothing differs"]


def test_other_samples_are_said_before_their_losses(run, pool, config_file, capsys):
    other = train(pool, 1, config_file, *SHORT, "run.name=seed", "data.seed=5")
    code, said = compared(capsys, run, other)
    assert code == 1 and said["samples"] == ["differ from step 1 on: the runs do not train on the same batches"]


def test_a_folder_without_a_run_is_an_error(run, tmp_path, capsys):
    assert tool("compare_runs").main([str(run), str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
