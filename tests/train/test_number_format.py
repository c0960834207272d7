"""`precision.compute: auto` takes what the main rank is faster in, says so, records it, and keeps it in a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import run_directory, run_main, train

from pretrain.config.load import load_config
from pretrain.config.parallel_schema import Precision
from pretrain.errors import ConfigError
from pretrain.train import number_format
from pretrain.train.number_format import FormatChoice, measured_gain
from pretrain.train.plan import make_plan, with_format
from pretrain.train.resolve import resolve

PROCESSORS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
AUTO = "precision.compute=auto"
CONSTANT = ("schedule.name=constant", "schedule.warmup_steps=0")


def on_a_cpu_with(gains: list[float], config_file: str, *overrides: str) -> tuple[int, str]:
    """A run on ranks whose CPUs multiply so many times as fast in bf16."""
    from pretrain.distributed.ranks import launched_ranks

    with patch("pretrain.train.number_format.measured_gain", lambda: gains[launched_ranks()[0] % len(gains)]):
        return run_main(config_file, *overrides)


@pytest.mark.parametrize(("gain", "choice"), [(1.3, "bf16"), (1.1, "fp32"), (0.3, "fp32")])
def test_bf16_is_taken_where_its_products_are_faster_and_the_reason_is_printed(config_file, monkeypatch, gain, choice):
    monkeypatch.setattr("pretrain.train.number_format.measured_gain", lambda: gain)
    config, _ = load_config(config_file, [AUTO, "precision.tf32=false"])
    plan = make_plan(config, 1, torch.device("cpu"))
    assert plan.config.precision.compute == choice
    assert f"precision.compute=auto: {choice}, because products in bf16 are {gain} times as fast as in fp32 on this CPU" in plan.notes


def test_a_cpu_without_bf16_is_found_out_by_few_products(monkeypatch):
    measured = []

    def gain(sizes):
        measured.append(sizes)
        return 0.09

    monkeypatch.setattr(number_format, "_gain", gain)
    monkeypatch.setattr(number_format, "gain_of_few", number_format.gain_of_few.__wrapped__)
    assert measured_gain.__wrapped__() == 0.09 and measured == [number_format.FEW]


def test_a_gain_of_a_few_products_is_told_without_a_number(monkeypatch):
    monkeypatch.setattr(number_format, "measured_gain", lambda: 0.04)
    choice = number_format.chosen_format("auto", torch.device("cpu"))
    assert choice == FormatChoice("fp32", "products in bf16 are far slower than in fp32 on this CPU")


@pytest.mark.parametrize(("gain", "told"), [(0.09, True), (0.8, False)])
def test_bf16_on_a_cpu_without_it_is_said_to_be_slow(config_file, monkeypatch, gain, told):
    monkeypatch.setattr(number_format, "gain_of_few", lambda: gain)
    note = "products in bf16 are far slower than in fp32 on this CPU; to train on it, take precision.compute=fp32"
    bf16, fp32 = (make_plan(load_config(config_file, [f"precision.compute={name}"])[0], 1, torch.device("cpu")) for name in ("bf16", "fp32"))
    assert (note in bf16.notes) == told and note not in fp32.notes
    begun = number_format.notes_on_format("auto", FormatChoice("bf16", "the run began in it"), torch.device("cpu"))
    assert begun == ["precision.compute=auto: bf16, because the run began in it", *([note] if told else [])]


@pytest.mark.skipif(not any(flag in PROCESSORS for flag in ("avx512_bf16", "amx_bf16")), reason="this CPU has no products in bf16")
def test_a_cpu_with_bf16_is_measured_in_full():
    assert number_format.gain_of_few.__wrapped__() >= 2 * number_format.LEAST_OF_FEW


def test_what_has_no_effect_with_the_choice_is_switched_off(config_file):
    config = resolve(load_config(config_file, [AUTO, "precision.tf32=true", "precision.fp8=tensorwise"])[0])
    assert not with_format(config, FormatChoice("bf16")).precision.tf32 and with_format(config, FormatChoice("fp32")).precision.tf32
    assert with_format(config, FormatChoice("bf16")).precision.fp8 == "tensorwise" and with_format(config, FormatChoice("fp32")).precision.fp8 == "none"


@pytest.mark.parametrize("option", ["precision.fp8=tensorwise", "precision.master=bf16", "precision.keep_casts=true"])
def test_a_key_that_needs_bf16_has_no_effect_where_auto_comes_to_fp32_and_a_note_says_so(config_file, option):
    """precision.master was refused there, and the others were not."""
    config, _ = load_config(config_file, [AUTO, option])
    plan = make_plan(config, 1, torch.device("cpu"), FormatChoice("fp32"))
    assert any(note.startswith(f"{option} has no effect with precision.compute=fp32 (the choice of auto); ") for note in plan.notes)
    assert plan.config.precision == Precision()
    assert make_plan(config, 1, torch.device("cpu"), FormatChoice("bf16")).config.precision != Precision(compute="bf16")
    with pytest.raises(ConfigError, match=f"{option} has no effect with precision.compute=fp32; "):
        make_plan(load_config(config_file, ["precision.compute=fp32", option])[0], 1, torch.device("cpu"))


def test_the_measurement_is_about_the_same_twice_and_draws_nothing():
    before = torch.get_rng_state()
    one = measured_gain.__wrapped__()
    other = measured_gain.__wrapped__()
    assert one > 0 and 0.4 < one / other < 2.5
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_keeps_its_choice_though_another_start_would_choose_otherwise(pool, config_file):
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [3.0], str(config_file), AUTO, *CONSTANT, "run.steps=2")
    assert code == 0 and "precision.compute=auto: bf16" in printed
    bf16 = train(pool, 1, config_file, "run.name=bf16", "precision.compute=bf16", *CONSTANT, "run.steps=2")
    recorded = [(run / "config.yaml").read_text() for run in (bf16, run_directory(config_file))]
    assert "compute: bf16" in recorded[0] and "compute: bf16" in recorded[1] and "compute: auto" not in recorded[1]
    longer = (AUTO, *CONSTANT, "run.steps=4")
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [0.5], str(config_file), *longer, "run.resume=never", "run.name=new")
    assert code == 0 and "precision.compute=auto: fp32, because products in bf16 are 0.5 times as fast" in printed
    checkpoint = run_directory(config_file) / "checkpoints" / "step-00000002"
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [0.5], str(config_file), *longer, "run.name=branch", f"run.resume={checkpoint}")
    assert code == 0 and "precision.compute=auto: bf16, because the run began in it" in printed
    (run_directory(config_file).parent / "branch").rename(run_directory(config_file).parent / "elsewhere")
    branch = run_directory(config_file).parent / "branch"  # a start that failed has recorded another format, and no checkpoint
    branch.mkdir()
    (branch / "config.yaml").write_text((run_directory(config_file) / "config.yaml").read_text().replace("compute: bf16", "compute: fp32"))
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [0.5], str(config_file), *longer, "run.name=branch", f"run.resume={checkpoint}")
    assert code == 0 and "precision.compute=auto: bf16, because the run began in it" in printed, printed
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [0.5], str(config_file), *longer)
    assert code == 0 and "precision.compute=auto: bf16, because the run began in it" in printed
    straight = train(pool, 1, config_file, "run.name=straight", "precision.compute=bf16", *longer[1:])
    lines = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (straight, run_directory(config_file))]
    assert lines[0]["step"] == 4 and lines[0]["loss"] == lines[1]["loss"]


@pytest.mark.parametrize(("gains", "choice"), [([3.0, 0.5], "bf16"), ([0.5, 3.0], "fp32")])
def test_the_main_rank_chooses_for_all(pool, config_file, gains, choice):
    results = pool.launch(2, on_a_cpu_with, gains, str(config_file), AUTO, "run.steps=2", "schedule.warmup_steps=0", "parallel.strategy=ddp")
    assert [code for code, _ in results] == [0, 0], results
    assert f"precision.compute=auto: {choice}, because products in bf16 are {gains[0]} times as fast" in results[0][1]
    assert f"compute: {choice}" in (run_directory(config_file) / "config.yaml").read_text()
