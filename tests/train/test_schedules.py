"""Schedules in tokens, and stage by stage, in a run that is interrupted."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import (
    cut_after,
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_main,
    some_slow,
    state_of,
    train,
)

from pretrain.config.data_schema import Data
from pretrain.config.schema import Batch, BatchStage, Config, Run
from pretrain.observe.metrics import read_metrics
from pretrain.train.resolve import unreached_stages


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


def test_a_rate_in_tokens_follows_the_tokens_of_a_growing_batch_also_when_resumed(pool, config_file):
    """Stages of lengths change no tokens."""
    # Until 512 tokens 4 samples of 32 tokens make a step, and 16 then.
    written = (
        "run.steps=1000", "run.tokens=2560", "schedule={name: cosine, warmup_steps: 0, warmup_tokens: 1024, min_ratio: 0.1}", "log.every_steps=1",
        "batch={sequences: 16, micro_sequences: 4, ramp: [{until_tokens: 512, sequences: 4}], lengths: [{until_tokens: 1024, length: 8}]}",
        "checkpoint={every_steps: 3, keep_last: 0}",
    )  # fmt: skip
    straight = train(pool, 1, config_file, "run.name=straight", *written)
    records = read_metrics(straight)
    assert [record["tokens"] for record in records] == [128, 256, 384, 512, 1024, 1536, 2048, 2560]
    falling = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)) for share in (0, 1 / 3, 2 / 3, 1)]
    assert [record["lr"] / 3e-3 for record in records] == pytest.approx([1 / 8, 1 / 4, 3 / 8, 1 / 2, *falling])
    cut_after(straight, 3)
    parts = train(pool, 1, config_file, "run.name=parts", *written)
    assert losses(parts)[-5:] == losses(straight)[-5:]
    assert [record["lr"] for record in read_metrics(parts)] == [record["lr"] for record in records[3:]]


def test_a_run_counted_in_tokens_is_not_miscounted_when_its_batch_changes(pool, config_file):
    # 4 steps of 8 samples of 32 tokens; then 16 per step, and 2,048 tokens are 2 steps more.
    constant = ("schedule={name: constant, warmup_steps: 0}", "run.steps=1000", "batch.micro_sequences=4", "log.every_steps=1")
    train(pool, 1, config_file, *constant, "batch.sequences=8", "run.tokens=1024")
    larger = (*constant, "batch.sequences=16", "run.accept_changes=[batch.sequences]")
    for tokens in (2048, 1024 + 513):
        [(code, printed)] = pool.launch(1, run_main, str(config_file), *larger, f"run.tokens={tokens}")
        assert code == 2, printed
        assert f"run.tokens={tokens} counts 64 samples in the first 4 steps, as the batch is now, and " in printed
        assert "has taken 32; count in steps from here on: run.steps=6 in place of run.tokens; or keep the tokens: batch.ramp=[" in printed
    run = train(pool, 1, config_file, *larger, "run.steps=6")
    assert read_metrics(run)[-1]["tokens"] >= 2048 > read_metrics(run)[-2]["tokens"]


def test_a_larger_batch_in_mid_run_becomes_a_stage_as_the_error_says_and_tokens_stay_tokens(pool, config_file):
    linear = ("schedule={name: linear, warmup_steps: 0, min_ratio: 0}", "run.steps=1000", "run.tokens=3072", "batch.micro_sequences=4", "log.every_steps=1")
    straight = train(pool, 1, config_file, "run.name=straight", *linear, "batch.sequences=8", "checkpoint={every_steps: 4, keep_last: 0}")
    cut_after(straight, 4)
    linear = ("run.name=parts", *linear)
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *linear, "batch.sequences=16")
    assert code == 2
    stage, size = re.search(r"or keep the tokens: (batch.ramp=\[.*\]) and (batch.sequences=16)", printed).groups()
    consent = "run.accept_changes=[batch.sequences,batch.ramp.0.until_tokens,batch.ramp.0.sequences]"
    records = read_metrics(train(pool, 1, config_file, *linear, stage, size, consent))
    assert [record["tokens"] for record in records] == [1536, 2048, 2560, 3072]
    assert [record["lr"] / 3e-3 for record in records] == pytest.approx([1 - record["tokens"] / 3072 for record in records])


def test_a_rate_by_tokens_with_lengths_in_steps_is_refused_where_the_past_had_other_batches(pool, config_file):
    """It was computed from tokens that the run had not consumed."""
    decay = ("schedule={name: wsd, warmup_steps: 0, decay_steps: 8, decay_by_tokens: true}", "run.steps=10", "batch.micro_sequences=4")
    train(pool, 1, config_file, *decay, "run.steps=8", "batch={sequences: 8, ramp: [{until_tokens: 512, sequences: 4}]}", "run.name=run")
    larger = ("batch={sequences: 16, ramp: [{until_tokens: 512, sequences: 4}]}", "run.accept_changes=[batch.sequences,run.steps]")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *decay, *larger)
    assert code == 2
    assert "a schedule that goes by tokens counts 80 samples in the first 8 steps, as the batch is now, and " in printed
    assert "has taken 48; count in steps from here on: by_tokens=false in the schedule" in printed


def test_a_changed_batch_and_a_warm_up_in_tokens_are_refused_once_with_the_steps_that_keep_the_past(pool, config_file):
    common = ("run.steps=12", "schedule.name=wsd", "batch.micro_sequences=4", "log.every_steps=1")
    tokens = ("schedule.warmup_steps=0", "schedule.warmup_tokens=2048", "schedule.decay_tokens=1024")
    # 8 samples of 32 tokens: a warm-up of 8 steps, of which 4 are taken.
    straight = train(pool, 1, config_file, "run.name=straight", *common, *tokens, "batch.sequences=8", "checkpoint={every_steps: 4, keep_last: 0}")
    cut_after(straight, 4)
    larger = ("run.name=parts", *common, "batch.sequences=16", "run.accept_changes=[batch.sequences]")
    for written in ((*larger, *tokens), (*larger[:-1], *tokens)):
        [(code, printed)] = pool.launch(1, run_main, str(config_file), *written)
        assert code == 2 and "schedule.warmup_tokens=2048 and schedule.decay_tokens=1024 count 64 samples in the first 4 steps" in printed
        assert (
            "count in steps from here on: schedule.warmup_steps=8 in place of schedule.warmup_tokens, "
            "schedule.decay_steps=2 in place of schedule.decay_tokens" in printed
        )
    run = train(pool, 1, config_file, *larger, "schedule.warmup_steps=8", "schedule.decay_steps=2")
    rates = [record["lr"] / 3e-3 for record in read_metrics(run)]
    assert rates[:4] == pytest.approx([5 / 8, 6 / 8, 7 / 8, 1])


@pytest.mark.parametrize("stable", ["schedule={name: wsd, warmup_steps: 2, decay_steps: 1, min_ratio: 0}", "schedule={name: constant, warmup_steps: 2}"])
def test_a_decay_from_the_middle_of_a_run_is_that_of_a_run_planned_so(pool, config_file, stable):
    decay = ("schedule={name: wsd, warmup_steps: 2, decay_steps: 3, min_ratio: 0}", "run.steps=7", "log.every_steps=1")
    planned = train(pool, 1, config_file, "run.name=planned", *decay)
    run = train(pool, 1, config_file, "run.steps=12", stable, "log.every_steps=1", "checkpoint={every_steps: 4, keep_last: 0}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    branch = train(pool, 1, config_file, "run.name=branch", f"run.resume={run / 'checkpoints' / 'step-00000004'}", *decay)
    assert losses(branch) == losses(planned)[-3:]
    states = state_of(branch, 7), state_of(planned, 7)
    assert all(states[0][name].equal(states[1][name]) for name in states[1])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_stages_that_outlast_the_run_are_named_and_the_head_counts_what_is_read(config_file):
    # 10 steps of 4 samples of 32 tokens, 5 of 2, and 5 of 8.
    stages = "batch.ramp=[{until_tokens: 1280, sequences: 4}, {until_tokens: 1600, sequences: 2}, {until_tokens: 99999, sequences: 8}]"
    code, printed = run_main(str(config_file), "--check", "batch.micro_sequences=2", stages, "batch.lengths=[{until_tokens: 5000, length: 8}]")
    assert code == 0, printed
    assert "run: 20 steps, 2,880 tokens, in rows of 8 until 5,000 tokens" in printed
    assert "note     batch.lengths.0 lasts until 5000 tokens, and the last step begins after 2624: the run never comes to 32 tokens per sequence" in printed
    assert "note     batch.ramp.2 lasts until 99999 tokens, and the last step begins after 2624: the run never comes to 16 sequences" in printed
    code, printed = run_main(str(config_file), "--check", "batch.micro_sequences=2", stages.replace("99999", "2624"))
    assert code == 0 and "never comes to" not in printed and "has no step" not in printed


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 30))
def test_the_sizes_that_are_named_are_those_that_no_step_has(ramp, sequences, steps):
    until, stages = 0, []
    for more, size in ramp:
        until += more
        stages.append(BatchStage(until_tokens=8 * until, sequences=size))
    sizes = [*(stage.sequences for stage in stages), sequences]
    if any(a == b for a, b in zip(sizes, sizes[1:])):
        return  # refused
    config = Config(batch=Batch(sequences=sequences, ramp=stages), data=Data(sequence_length=8), run=Run(steps=steps))
    consumed, taken = 0, set()
    for _ in range(steps):
        taken.add(next((i for i, stage in enumerate(stages) if 8 * consumed < stage.until_tokens), len(stages)))
        consumed += sizes[max(taken)]
    lines = list(unreached_stages(config))
    named = {int(re.match(r"batch.ramp.(\d+) has no step", line)[1]) for line in lines if "has no step" in line}
    missed = [line.partition("never comes to ")[2].removesuffix(" sequences") for line in lines if "never" in line]
    assert named == set(range(max(taken))) - taken
    assert (missed[0].split(" or ") if missed else []) == [str(size) for size in sizes[max(taken) + 1 :]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # The first step of 64 samples has 2,048 tokens.
        (["batch.ramp=[{until_tokens: 100, sequences: 64}, {until_tokens: 1500, sequences: 32}]"], "batch.ramp.1 has no step, because none begins between 100 and 1500 tokens"),
        (["batch.lengths=[{until_tokens: 520, length: 8}, {until_tokens: 900, length: 16}]", "batch.sequences=32"], "batch.lengths.1 has no step, because none begins between 520 and 900 tokens"),
        (["schedule={name: piecewise, warmup_steps: 0, stages: [{steps: 100, ratio: 0.1}]}"], "schedule.stages.0 lasts until step 100, and the run until 20: it never comes to 0.1 of the rate"),
        (["schedule={name: wsd, warmup_steps: 20}"], "schedule.name=wsd: the warmup leaves 0 of 20 steps for the decay, which would take 2"),
        (["schedule={name: linear, warmup_steps: 20}"], "schedule.name=linear: the warmup takes all 20 steps, so that the rate never falls to schedule.min_ratio=0.1"),
        (["schedule={name: piecewise, warmup_steps: 20, stages: [{steps: 5, ratio: 0.1, shape: constant}]}"], "schedule.stages.0 lasts until step 25, and the run until 20: it never comes to 0.1 of the rate"),
    ],
)  # fmt: skip
def test_stages_that_cannot_come_are_named(config_file, options, said):
    code, printed = run_main(str(config_file), "--check", "run.steps=20", *options)
    assert code == 0 and f"note     {said}" in printed, printed


SHORT_FIRST = (
    "batch={sequences: 16, micro_sequences: 4, lengths: [{until_tokens: 1024, length: 8}, {until_tokens: 2048, length: 16}]}",
    "run.steps=6", "schedule.warmup_steps=1", "log.every_steps=1", "log.gradients_at=[1]", "checkpoint.every_steps=1", "checkpoint.keep_last=0",
    "data.document_mask=true",
)  # fmt: skip
LAYOUTS = {
    "fsdp on 2": (2, "parallel.strategy=fsdp"),
    "ddp on 2": (2, "parallel.strategy=ddp"),
    "context 2": (2, "parallel.strategy=fsdp", "parallel.context=2"),
    "ring 2": (2, "parallel.strategy=fsdp", "parallel.context=2", "parallel.context_method=ring"),
    "tensor 2": (2, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "pipeline 2": (2, "parallel.strategy=fsdp", "parallel.pipeline=2"),
}


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, ["ddp on 2", "ring 2", "tensor 2"]))
def test_stages_of_shorter_sequences_compute_the_same_in_every_layout(pool, trained_run, config_file, layout):
    """The samples and their targets are those of a run without stages. What a row sees of its sample is less, and the loss another."""
    single = trained_run(1, config_file, "run.name=single", *SHORT_FIRST)
    world_size, *overrides = LAYOUTS[layout]
    run = train(pool, world_size, config_file, "run.name=other", *SHORT_FIRST, *overrides)
    assert largest_relative_difference(losses(run), losses(single)) <= 2e-6
    assert largest_gradient_difference(gradients(run), gradients(single)) <= 5e-6


def test_a_run_in_a_stage_of_shorter_sequences_goes_on_as_if_never_interrupted(pool, trained_run, config_file):
    records = read_metrics(trained_run(1, config_file, "run.name=single", *SHORT_FIRST))
    whole = read_metrics(train(pool, 1, config_file, "run.name=whole", *SHORT_FIRST, "batch.lengths=[]"))
    for key in ("batch", "tokens", "lr"):
        assert [record[key] for record in records] == [record[key] for record in whole]
    assert abs(records[0]["loss"] - whole[0]["loss"]) > 1e-4
    straight = train(pool, 1, config_file, "run.name=straight", *SHORT_FIRST)
    cut_after(straight, 3)
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "run.name=parts", *SHORT_FIRST, "batch.lengths=[]")
    assert code == 1 and "batch.lengths" in printed and "run.accept_changes" in printed
    parts = train(pool, 1, config_file, "run.name=parts", *SHORT_FIRST)
    assert losses(parts)[-3:] == losses(straight)[-3:]


@pytest.mark.parametrize(
    "written, problem",
    [
        ("[{until_tokens: 100, length: 12}]", "batch.lengths.0.length=12 is not a divisor of data.sequence_length=32; nearest legal value: 8"),
        ("[{until_tokens: 100, length: 8}, {until_tokens: 200, length: 8}]", "batch.lengths.0 has no effect, because batch.lengths.1, which follows it, has the same size"),
        ("[{until_tokens: 100, length: 32}]", "batch.lengths.0 has no effect, because data.sequence_length=32, which follows it, has the same size"),
        ("[{until_tokens: 100, length: 8}, {until_tokens: 90, length: 16}]", "batch.lengths.1.until_tokens=90 is not beyond the stage before it, 100"),
        ("[{until_tokens: 100, length: 2}]", "batch.lengths.0.length=2 is not above model.predict_ahead=2, whose last block would have nothing to learn"),
    ],
)  # fmt: skip
def test_stages_of_lengths_that_cannot_be_are_refused(config_file, written, problem):
    ahead = ["model.family=custom", "model.predict_ahead=2"] if "predict_ahead" in problem else []
    code, printed = run_main(str(config_file), "--check", f"batch.lengths={written}", *ahead)
    assert code == 2 and problem in printed


def test_samples_without_a_token_as_far_ahead_as_the_model_predicts_are_refused(config_file):
    ahead = ["model.family=custom", "model.predict_ahead=2"]
    code, printed = run_main(str(config_file), "--check", "data.sequence_length=2", *ahead)
    assert code == 2 and "error: command line: data.sequence_length=2 is not above model.predict_ahead=2, whose last block would have nothing to learn; raise it" in printed
    assert run_main(str(config_file), "--check", "data.sequence_length=3", *ahead)[0] == 0


def test_a_stage_of_the_batch_that_changes_nothing_is_refused(config_file):
    code, printed = run_main(str(config_file), "--check", "batch.sequences=8", "batch.ramp=[{until_tokens: 64, sequences: 4}, {until_tokens: 128, sequences: 8}]")
    assert code == 2 and "batch.ramp.1 has no effect, because batch.sequences=8, which follows it, has the same size; remove it" in printed


def test_what_numbers_of_tokens_mean_is_said(config_file):
    code, printed = run_main(str(config_file), "--check", "run.steps=1000", "run.tokens=5000", "schedule.warmup_steps=0", "schedule.warmup_tokens=600")
    assert code == 0
    assert "note     run.tokens=5000: 10 steps" in printed and "note     schedule.warmup_tokens=600: 2 steps" in printed
    code, printed = run_main(str(config_file), "--check", "run.steps=77", "run.tokens=5000")
    assert code == 2 and "run.steps=77 has no effect with run.tokens; remove run.tokens, or set run.steps=1000, its default" in printed
