"""`precision.compute: auto` takes what the device is faster in, says so, records it, and never changes it in a run under way."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from running import run_directory, run_main, train

from pretrain.config.load import load_config
from pretrain.train.number_format import measured_gain
from pretrain.train.plan import make_plan

AUTO = "precision.compute=auto"


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


def test_the_measurement_is_about_the_same_twice_and_draws_nothing():
    before = torch.get_rng_state()
    one = measured_gain.__wrapped__()
    other = measured_gain.__wrapped__()
    assert one > 0 and 0.4 < one / other < 2.5
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_keeps_its_choice_and_ranks_that_choose_otherwise_are_named(pool, config_file):
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [3.0], str(config_file), AUTO, "run.steps=2", "schedule.warmup_steps=0")
    assert code == 0 and "precision.compute=auto: bf16" in printed
    bf16 = train(pool, 1, config_file, "run.name=bf16", "precision.compute=bf16", "run.steps=2", "schedule.warmup_steps=0")
    recorded = [(run / "config.yaml").read_text() for run in (bf16, run_directory(config_file))]
    assert "compute: bf16" in recorded[0] and "compute: bf16" in recorded[1] and "compute: auto" not in recorded[1]
    [(code, printed)] = pool.launch(1, on_a_cpu_with, [0.5], str(config_file), AUTO, "run.steps=4", "schedule.warmup_steps=0")
    assert code == 1 and "precision.compute" in printed.splitlines()[-1] and "bf16" in printed.splitlines()[-1]
    results = pool.launch(2, on_a_cpu_with, [3.0, 0.5], str(config_file), AUTO, "run.name=two", "run.steps=2", "parallel.strategy=ddp")
    assert all(code != 0 for code, _ in results)
    assert any("precision.compute=fp32" in printed and "bf16" in printed for _, printed in results), results
