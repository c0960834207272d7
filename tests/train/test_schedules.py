"""Schedules in tokens, and stage by stage, in a run that is interrupted."""

from __future__ import annotations

import pytest
from running import cut_after, losses, run_main, train

from pretrain.observe.metrics import read_metrics


def test_a_run_counted_in_tokens_with_a_piecewise_rate_goes_on_as_if_never_interrupted(pool, config_file):
    # 16 samples of 32 tokens make a step, and 8 until 1,024 tokens: 4 steps, then 512 tokens each.
    stages = "[{steps: 2, ratio: 0.5}, {steps: 3, ratio: 0.1, shape: exponential}, {steps: 2, ratio: 0.4, shape: constant}]"
    written = (
        "run.steps=1000", "run.tokens=5000", f"schedule={{name: piecewise, warmup_steps: 0, warmup_tokens: 600, stages: {stages}}}",
        "batch={sequences: 16, micro_sequences: 8, ramp: [{until_tokens: 1024, sequences: 8}]}", "checkpoint.every_steps=6", "log.every_steps=1",
    )  # fmt: skip
    straight = train(pool, 1, config_file, "run.name=straight", *written)
    records = read_metrics(straight)
    assert [record["tokens"] for record in records][-1] >= 5000 > [record["tokens"] for record in records][-2]
    wanted = [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.5 * 0.2 ** (1 / 3), 0.5 * 0.2 ** (2 / 3), 0.1, 0.4, 0.4, 0.4, 0.4]
    assert [record["lr"] / 3e-3 for record in records] == pytest.approx(wanted)
    cut_after(straight, 6)
    parts = train(pool, 1, config_file, "run.name=parts", *written)
    assert losses(parts)[-6:] == losses(straight)[-6:]


def test_what_numbers_of_tokens_mean_is_said(config_file):
    code, printed = run_main(str(config_file), "--check", "run.steps=1000", "run.tokens=5000", "schedule.warmup_steps=0", "schedule.warmup_tokens=600")
    assert code == 0
    assert "note     run.tokens=5000: 10 steps" in printed and "note     schedule.warmup_tokens=600: 2 steps" in printed
    code, printed = run_main(str(config_file), "--check", "run.steps=77", "run.tokens=5000")
    assert code == 2 and "run.steps=77 has no effect with run.tokens; remove it" in printed
