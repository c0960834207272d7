"""What a start goes on from: the difference to the checkpoint's configuration, consent to it, and `--check`, which asks the same."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import typing
from pathlib import Path

import pytest
import torch
from running import run_main

from pretrain.checkpoint.payload import Payload
from pretrain.config.data_schema import Data
from pretrain.config.keys import AtResume, leaves
from pretrain.config.load import load_config
from pretrain.config.optim_schema import Optim, ParameterGroup, RateStage, Schedule
from pretrain.config.read import read_file
from pretrain.config.schema import Batch, BatchStage, Config, Run
from pretrain.config.written import from_recorded
from pretrain.distributed.ranks import choose_device
from pretrain.errors import LaunchError
from pretrain.optim.schedule import learning_rate
from pretrain.run import main
from pretrain.train.identity import difference_lines, setting_changes
from pretrain.train.resolve import resolve, tokens_as_steps

COSINE = ("run.steps=4", "schedule={name: cosine, warmup_steps: 1}", "optim.lr=3e-3")


@pytest.fixture
def run(trained_run, config_file) -> Path:
    """A run of 4 steps on a cosine."""
    return trained_run(1, config_file, *COSINE)


def check(config_file: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and last line of a run's `--check`."""
    code, printed = run_main(str(config_file), *COSINE, *overrides, "--check")
    assert "Traceback" not in printed
    return code, printed.splitlines()[-1] if code else printed


def content(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


# ---- keys ---------------------------------------------------------------------------------------------------------------


def test_every_key_says_what_a_change_at_a_resume_means():
    """T-D9: one declaration at the key, from which the check and docs/configuration.md follow."""
    rules = {leaf.path: leaf.resume for leaf in leaves(Config, None)}
    assert set(rules.values()) == set(typing.get_args(AtResume)) and len(rules) > 150
    expected = {
        "run.steps": "schedule", "run.seed": "accept", "run.name": "free", "model.dim": "never", "model.rope.theta": "never",
        "model.dropout": "accept", "model.attention_backend": "free", "data.sources.0.path": "content", "data.seed": "content",
        "data.validation.0.path": "free", "data.workers": "free", "batch.sequences": "accept", "batch.micro_sequences": "free",
        "batch.ramp.0.sequences": "accept", "loss.z_loss": "accept", "loss.chunk_mb": "free", "optim.name": "never", "optim.lr": "accept",
        "optim.betas": "accept", "optim.skip_nonfinite": "free", "schedule.name": "schedule", "parallel.strategy": "free",
        "parallel.ddp.bucket_mb": "free", "precision.compute": "accept", "checkpoint.every_steps": "free", "log.every_steps": "free",
        "validation.translation.beam": "free",
    }  # fmt: skip
    assert {path: rules[path] for path in expected} == expected


FREE = [
    "batch.micro_sequences=2", "log.every_steps=3", "parallel.activation_checkpointing=full", "parallel.timeout_seconds=99",
    "checkpoint.keep_last=7", "optim.skip_nonfinite=3", "data.workers=2", "run.deterministic=true", "loss.chunk_mb=3",
    "model.max_sequence_length=64",
]  # fmt: skip


def test_what_changes_only_speed_memory_or_logs_is_free_and_said(config_file, run):
    """T-D9: every day's changes need no ceremony, and are printed all the same."""
    code, printed = check(config_file, *FREE)
    assert code == 0 and f"configuration since {run / 'checkpoints' / 'step-00000004'}, " in printed
    for change in (
        "batch.micro_sequences: 4 -> 2",
        "log.every_steps: 1 -> 3",
        "optim.skip_nonfinite: 0 -> 3",
        "data.workers: 1 -> 2",
    ):
        assert f"  {change}" in printed.splitlines()


NEEDS_CONSENT = {
    "optim.lr": "optim.lr=1e-3", "optim.betas": "optim.betas=[0.5, 0.5]", "optim.eps": "optim.eps=1e-6",
    "optim.weight_decay": "optim.weight_decay=0", "optim.clip": "optim.clip=0.5", "loss.z_loss": "loss.z_loss=0.1",
    "loss.label_smoothing": "loss.label_smoothing=0.1", "batch.sequences": "batch.sequences=4",
    "batch.ramp": "batch.ramp=[{until_tokens: 999, sequences: 4}]", "precision.compute": "precision.compute=bf16",
    "run.steps": "run.steps=9", "schedule.name": "schedule.name=constant", "schedule.warmup_steps": "schedule.warmup_steps=3",
    "schedule.min_ratio": "schedule.min_ratio=0.5",
}  # fmt: skip


def test_what_changes_the_numbers_needs_consent_by_name(config_file, run):
    """T-D9: a resume accepted another optimizer, loss, precision, seed and schedule without a word."""
    saved = from_recorded(read_file(run / "checkpoints" / "step-00000004" / "config.yaml").values, "config.yaml")
    for key, override in NEEDS_CONSENT.items():
        changed, _ = load_config(config_file, [*COSINE, override])
        assert {change.consent for change in setting_changes(saved, resolve(changed), 4)} == {key}
    before = content(run)
    for key in ("optim.lr", "run.steps", "batch.ramp"):
        code, line = check(config_file, NEEDS_CONSENT[key])
        assert code == 1 and (f"{key} was" in line or f"{key}.0.sequences was null and is 4" in line)
        assert line.endswith(f"restore these values; if you mean it, set run.accept_changes=[{key}]")
        code, printed = check(config_file, NEEDS_CONSENT[key], f"run.accept_changes=[{key}]")
        assert code == 0 and "would resume from step 4" in printed
    assert content(run) == before


def test_all_changes_are_listed_at_once_with_what_to_type(config_file, run):
    """T-D9: the reproduction of the review, where nothing was said of nine changed keys."""
    changes = (
        "run.steps=12 optim.lr=5e-2 optim.weight_decay=0 schedule.name=constant batch.sequences=4 precision.compute=bf16 "
        "loss.z_loss=0.1 run.seed=77 data.seed=3"
    ).split()
    code, line = check(config_file, *changes)
    assert code == 1 and "holds another run: data.seed was 7 and is 3 (the next samples" in line
    keys = "data.seed, run.seed, run.steps, batch.sequences, loss.z_loss, optim.lr, optim.weight_decay, schedule.name, precision.compute"
    accepted = line.rpartition("run.accept_changes=[")[2].removesuffix("]")
    assert set(accepted.split(", ")) == set(keys.split(", "))
    assert check(config_file, *changes, f"run.accept_changes=[{accepted}]")[0] == 0
    assert check(config_file, *changes, f"run.accept_changes=[{keys}, optim.clip]")[0] == 0


def test_a_resume_prints_and_logs_the_difference_and_keeps_the_history(pool, config_file, run):
    """T-D9: config.yaml was overwritten, and nothing was printed."""
    changed = ("run.steps=6", "schedule.name=constant", "batch.micro_sequences=2")
    consent = "run.accept_changes=[run.steps, schedule.name]"
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *COSINE, *changed, consent)
    log = (run / "logs" / "rank-0.log").read_text()
    lines = ["run.steps: 4 -> 6", "batch.micro_sequences: 4 -> 2", "schedule.name: cosine -> constant"]
    assert code == 0 and all(f"  {line}" in printed.splitlines() and line in log for line in lines)
    assert "accepted run.steps was 4 and is 6" in printed and "accepted run.steps was 4" in log
    starts = [json.loads(line)["config"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["schedule"]["name"] for start in starts] == ["cosine", "constant"]
    assert "name: constant" in (run / "config.yaml").read_text()
    # From here on this is the run's configuration.
    code, printed = check(config_file, *changed, "run.steps=9")
    assert code == 0 and "  run.steps: 6 -> 9" in printed.splitlines() and "schedule.name" not in printed


def test_a_directory_without_a_checkpoint_says_what_is_other_than_at_its_first_start(config_file, run):
    """T-D9: config.yaml is not replaced in silence by another meaning."""
    shutil.rmtree(run / "checkpoints")
    (run / "status.json").unlink()
    code, printed = check(config_file, "optim.lr=1e-2")
    assert code == 0 and "would start at step 0" in printed and f"configuration since {run}, " in printed
    assert "  optim.lr: 0.003 -> 0.01" in printed.splitlines()


# ---- schedules ----------------------------------------------------------------------------------------------------------


def config(steps: int, **schedule) -> Config:
    made = Config()
    made.run.steps = steps
    for name, value in schedule.items():
        setattr(made.schedule, name, value)
    return made


@pytest.mark.parametrize(("old", "new", "step", "refused"), [
    (config(100, name="constant"), config(200, name="constant"), 100, []),
    (config(100, name="inverse_sqrt", warmup_steps=9), config(200, name="inverse_sqrt", warmup_steps=9), 100, []),
    (config(100, name="wsd", decay_steps=20), config(200, name="wsd", decay_steps=20), 80, []),
    (config(100, name="wsd", decay_steps=20), config(200, name="wsd", decay_steps=20), 81, ["run.steps"]),
    (config(100, name="wsd", decay_steps=20), config(100, name="wsd", decay_steps=40), 60, []),
    (config(100, name="wsd", decay_steps=20), config(100, name="wsd", decay_steps=40), 70, ["schedule.decay_steps"]),
    (config(100, name="wsd"), config(200, name="wsd"), 90, []),  # a tenth of the steps
    (config(100, name="wsd"), config(200, name="wsd"), 91, ["run.steps"]),
    (config(100, name="cosine"), config(200, name="cosine"), 50, ["run.steps"]),
    (config(100, name="linear"), config(50, name="linear"), 20, ["run.steps"]),
    (config(100, name="cosine", warmup_steps=10), config(200, name="cosine", warmup_steps=10), 10, []),  # not yet on the curve
    (config(100, name="cosine", warmup_steps=10), config(200, name="linear", warmup_steps=10), 30, ["run.steps", "schedule.name"]),
    (config(100, name="constant"), config(100, name="wsd", decay_steps=20), 80, []),
    (config(100, name="constant"), config(100, name="constant", warmup_steps=5), 80, ["schedule.warmup_steps"]),
    (config(100, name="cosine"), config(200, name="cosine"), 0, []),
])  # fmt: skip
def test_a_schedule_may_change_where_the_steps_taken_keep_their_learning_rates(old, new, step, refused):
    """T-D9: extending run.steps re-shaped a cosine retroactively, in silence."""
    changes = setting_changes(old, new, step)
    assert [change.name for change in changes] == refused
    curves = [
        [learning_rate(c.schedule, 1.0, c.run.steps, n) for n in range(1, step + 1)] for c in (old, new)
    ]  # the definition, at every step
    assert (curves[0] != curves[1]) == bool(refused)


def piecewise(*stages: RateStage, steps: int = 10_000) -> Config:
    return Config(schedule=Schedule(name="piecewise", stages=list(stages)), run=Run(steps=steps))


def test_the_same_past_written_otherwise_is_no_other_past():
    """A linear stage that is cut in two where the line is has the same rates, but for their rounding."""
    old = piecewise(RateStage(7, 0.1))
    for cut in range(1, 7):
        new = piecewise(RateStage(cut, 1 + (0.1 - 1) * cut / 7), RateStage(9, 0.05))
        assert setting_changes(old, new, cut) == []


@pytest.mark.parametrize("place", [1234, 4321, 8888])
def test_one_step_of_the_past_that_differs_is_found(place):
    """A thousand points of a longer past missed it."""
    old = piecewise(RateStage(9000, 1.0, "constant"))
    new = piecewise(RateStage(place, 1.0, "constant"), RateStage(1, 0.5, "constant"), RateStage(9000, 1.0, "constant"))
    [text] = {change.consequence for change in setting_changes(old, new, 9000)}
    assert text == f"the learning rate of step {place + 1} would be 0.00015 instead of 0.0003"


def test_a_cosine_that_is_extended_says_what_becomes_of_the_learning_rate(config_file, run):
    """T-D9: what an extension does is said in numbers."""
    code, line = check(config_file, "run.steps=10")
    now = learning_rate(Config().schedule, 3e-3, 4, 5)
    later = learning_rate(dataclasses.replace(Config().schedule, warmup_steps=1), 3e-3, 10, 5)
    assert code == 1 and f"the learning rate of step 5 would be {later:.3g} instead of {now:.3g}" in line


def test_the_step_that_a_message_names_shows_the_difference(config_file, tmp_path):
    """Two stages, of which the second ends alike: the last step before the end of both is the same."""
    old, new = (
        Config(schedule=Schedule(name="piecewise", stages=[RateStage(4, ratio), RateStage(2, 0.1)]), run=Run(steps=steps))
        for ratio, steps in ((0.5, 7), (0.6, 9))
    )
    [text] = {change.consequence for change in setting_changes(old, new, 6)}
    assert text == "the learning rate of step 5 would be 0.000105 instead of 9e-05"


def test_a_warmup_that_was_shortened_to_the_run_is_said_to_be():
    """A newcomer had written 30 both times, and was told that 12 had become 24."""
    old, new = (Config(schedule=Schedule(warmup_steps=min(30, steps)), run=Run(steps=steps)) for steps in (12, 24))
    [text] = {change.consequence for change in setting_changes(old, new, 6) if change.name == "schedule.warmup_steps"}
    assert text.endswith(" (a warmup longer than the run is shortened to run.steps, which has changed)")
    old, new = (Config(schedule=Schedule(warmup_steps=warmup), run=Run(steps=24)) for warmup in (5, 8))
    [text] = {change.consequence for change in setting_changes(old, new, 6)}
    assert "shortened" not in text


def test_a_key_that_is_absent_on_one_side_and_null_on_the_other_is_no_change(config_file):
    old, new = Config(), Config(optim=Optim(groups=[ParameterGroup("norm.*", 0.5)]))
    names = [change.name for change in setting_changes(old, new, 4)]
    assert names == ["optim.groups.0.pattern", "optim.groups.0.lr_scale"]


def test_a_number_of_tokens_is_accepted_by_the_name_of_its_key(config_file, run):
    """Its steps are what the run records."""
    tokens = "run.steps=1000", "run.tokens=2560"
    code, line = check(config_file, *tokens)
    assert code == 1 and "the learning rate of step" in line
    for name in ("run.tokens", "run.steps"):
        code, printed = check(config_file, *tokens, f"run.accept_changes=[{name}]")
        assert code == 0 and "would resume from step 4" in printed


def test_a_ramp_that_begins_in_mid_run_leaves_a_cosine_in_tokens_as_it_was():
    """By steps, the past would have had other rates."""
    written = Config(run=Run(tokens=20480), schedule=Schedule(warmup_tokens=1024), batch=Batch(4), data=Data(sequence_length=32))
    saved = tokens_as_steps(written)
    ramped = dataclasses.replace(written, batch=Batch(16, ramp=[BatchStage(5120, 4)]))
    names = [change.name for change in setting_changes(saved, tokens_as_steps(ramped), 40)]
    assert names == ["batch.sequences", "batch.ramp.0.until_tokens", "batch.ramp.0.sequences"]


def test_a_key_that_is_new_since_the_checkpoint_had_its_default(config_file, run):
    recorded = dataclasses.asdict(Config())
    del recorded["optim"]["skip_nonfinite"], recorded["loss"]
    saved = from_recorded(recorded, "config.yaml")
    assert difference_lines(saved, Config()) == [] == setting_changes(saved, Config(), 10)
    changed = Config()
    changed.loss.z_loss = 0.1
    assert difference_lines(saved, changed) == ["loss.z_loss: 0.0 -> 0.1"]
    assert [change.name for change in setting_changes(saved, changed, 10)] == ["loss.z_loss"]


# ---- --check ------------------------------------------------------------------------------------------------------------


def test_check_says_what_the_run_would_do(config_file, run):
    """T-D13: `--check` did not look at the run directory."""
    code, printed = check(config_file)
    checkpoint = run / "checkpoints" / "step-00000004"
    assert code == 0 and f"would resume from step 4 of {checkpoint}, with no step left to train" in printed
    code, printed = check(config_file, "run.name=other", f"run.init_from={run}")
    assert code == 0 and f"would start at step 0 with the weights of {checkpoint}" in printed
    assert not (run.parent / "other").exists()
    assert check(config_file, "run.name=other")[1].count("would start at step 0\n") == 1


def test_another_model_is_named_by_what_was_typed(config_file, run):
    """Newcomer: the refusal listed query_scalar, head_dim and ffn_dim, which follow from the width, and advised another run.name."""
    changed = ("run.name=new", f"run.init_from={run}", "model={dim: 64, layers: 3, heads: 8, kv_heads: null, ffn_dim: null}")
    code, line = check(config_file, *changed)
    assert code == 1 and "model.dim was 32 and is 64" in line and "model.layers was 2 and is 3" in line
    assert not [key for key in ("query_scalar", "head_dim", "run.name") if key in line]
    assert "copy `model` of" in line


def test_check_assumes_as_many_processes_as_it_is_told(config_file, capsys, monkeypatch):
    arguments = ["--config", str(config_file), "batch.sequences=16", "batch.micro_sequences=2", "--check", "--ranks"]
    assert main([*arguments, "8", "parallel.strategy=fsdp"]) == 0
    assert "layout   fsdp 8 on 8 processes: 16 sequences = 8 ranks x 1 micro-step x 2" in capsys.readouterr().out
    assert main([*arguments, "6", "parallel.strategy=ddp"]) == 2
    assert (
        "batch.sequences=16 is not divisible by batch.micro_sequences=2 times 6 data-parallel ranks" in capsys.readouterr().err
    )
    monkeypatch.setattr(sys, "argv", ["pretrain/run.py", *arguments, "8", "parallel={strategy: fsdp, shard: 4}"])
    assert main([*arguments, "8", "parallel={strategy: fsdp, shard: 4, replicate: 1}"]) == 2
    command = capsys.readouterr().err.partition("start them with: ")[2]
    assert (
        command.startswith("torchrun --nproc-per-node 4 pretrain/run.py --config ")
        and "--ranks" not in command
        and "--check" not in command
    )
    with pytest.raises(SystemExit):
        main(["--config", str(config_file), "--ranks", "8"])
    assert "--ranks goes with --check" in capsys.readouterr().err


def test_check_says_what_the_state_and_a_checkpoint_take(config_file, capsys):
    arguments = ["--config", str(config_file), "model.dim=256", "model.heads=4", "--check"]
    assert main(arguments) == 0
    whole = capsys.readouterr().out
    parameters = int(re.search(r"([\d,]+) parameters", whole)[1].replace(",", ""))
    assert (
        f"memory   {16 * parameters / 1e6:.3g} MB per rank for weights, gradients and moments (16 bytes per parameter)" in whole
    )
    assert f"saves    {12 * parameters / 1e6:.3g} MB each" in whole
    assert main([*arguments, "--ranks", "4", "parallel.strategy=fsdp"]) == 0
    assert f"memory   {16 * parameters / 4e6:.3g} MB per rank for" in capsys.readouterr().out
    # The first and the last part of a pipeline also have the embedding and the head.
    assert main([*arguments, "--ranks", "4", "parallel={strategy: fsdp, pipeline: 2}"]) == 0
    assert f"memory   {16 * parameters / 4e6:.3g} MB per rank on average for" in capsys.readouterr().out
    assert (
        main([*arguments, "--ranks", "4", "parallel={strategy: fsdp, reshard_after_forward: never}", "precision.compute=bf16"])
        == 0
    )
    printed = capsys.readouterr().out
    tables = 2 * 256 * int(re.search(r"vocabulary (\d+)", printed)[1])  # neither is kept from forward to backward
    vectors = 256 * (2 * 2 + 1)  # the norms, which are never gathered
    assert f"memory   {(16 / 4 * parameters + 2 * (parameters - tables - vectors)) / 1e6:.3g} MB" in printed


def test_a_check_of_auto_without_gpus_says_what_gpus_would_change(config_file, capsys):
    arguments = ["--config", str(config_file), "model.dim=256", "model.heads=4", "--check", "--ranks"]
    assert main([*arguments, "2"]) == 0
    said = capsys.readouterr().out
    parameters = int(re.search(r"([\d,]+) parameters", said)[1].replace(",", ""))
    assert f"on GPUs of less than {16 * parameters / 0.4 / 1e6:.3g} MB it takes fsdp" in said
    assert main([*arguments, "1"]) == 0 and main([*arguments, "2", "parallel.strategy=ddp"]) == 0
    assert "on GPUs" not in capsys.readouterr().out


def test_a_run_on_gpus_that_are_not_there_is_told_what_to_set(config_file, capsys, monkeypatch):
    """Newcomer: "this host shows 0 GPUs; start at most 0 processes here"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--config", str(config_file), "run.device=cuda", "--check"]) == 2
    assert "run.device=cuda, but torch sees no GPU on this host; set run.device=auto" in capsys.readouterr().err


def test_processes_share_a_gpu_by_gloo_and_not_by_nccl(config_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = ["run.device=cuda", "parallel.strategy=ddp"]
    by_gloo, _ = load_config(config_file, [*options, "parallel.backend=gloo"])
    assert [choose_device(by_gloo, rank).index for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(LaunchError, match="torch sees 2 GPUs on this host; start at most 2 processes here"):
        choose_device(load_config(config_file, options)[0], 2)


def test_a_checkpoint_takes_twelve_bytes_per_parameter(trained_run, config_file):
    run = trained_run(1, config_file, "model.dim=256", "model.heads=4", "run.steps=1", "schedule.warmup_steps=0")
    [checkpoint] = (run / "checkpoints").iterdir()
    parameters = sum(tensor.numel() for tensor in Payload(checkpoint).read_all("model.").values())
    payload = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    assert 1.0 <= payload / (12 * parameters) < 1.02


@pytest.mark.parametrize(("overrides", "message"), [
    (("run.name=new", "run.resume=nowhere"), "run.resume=nowhere: does not exist"),
    (("run.name=new", "run.init_from=nowhere"), "run.init_from=nowhere: does not exist"),
    (("run.name=new", "run.resume=required"), "run.resume=required, but"),
    (("run.resume=never",), "run.resume=never, but"),
    (("run.steps=3", "schedule.warmup_steps=1"), "run.steps=3 is below the step 4"),
    (("data.seed=3",), "data.seed was 7 and is 3"),
    (("model.dim=64",), "model.dim was 32 and is 64"),
    (("run.name=new", "run.init_from=RUN", "model.rope.theta=77"), "run.init_from=RUN/checkpoints/step-00000004 holds another model: "
     "model.rope.theta was 10000.0 and is 77.0; copy `model` of RUN/checkpoints/step-00000004/config.yaml to the configuration"),
    (("run.dir=CONFIG",), "run.dir=CONFIG: CONFIG is a file; give a folder"),
    (("run.dir=CONFIG/below",), "run.dir=CONFIG/below: CONFIG is a file; give a folder"),
    (("run.name=../elsewhere",), "run.name=../elsewhere"),
    (("run.name=a/../../elsewhere",), "the run must lie below run.dir"),
    (("run.name=/tmp/elsewhere",), "the run must lie below run.dir"),
    (("run.name=.",), "the run must lie below run.dir"),
    (("run.dir=''",), "the run must lie below run.dir"),
])  # fmt: skip
def test_check_refuses_what_a_start_would_refuse(pool, config_file, run, overrides, message):
    """T-D13: "the configuration is valid" was said of runs that the start refuses, after hours in a queue."""
    overrides = [o.replace("RUN", str(run)).replace("CONFIG", str(config_file)) for o in overrides]
    message, before = message.replace("RUN", str(run)).replace("CONFIG", str(config_file)), content(run)
    code, line = check(config_file, *overrides)
    assert code in (1, 2) and line.startswith("error: ") and message in line
    assert content(run) == before
    [(started, printed)] = pool.launch(1, run_main, str(config_file), *COSINE, *overrides)
    assert started == code and message in printed.splitlines()[-1]
    assert {n: b for n, b in content(run).items() if n not in (".lock", "logs/rank-0.log")} == {
        n: b for n, b in before.items() if n not in (".lock", "logs/rank-0.log")
    }


def test_a_name_may_have_folders_below_the_run_directory(config_file):
    code, printed = check(config_file, "run.name=sweep/1")
    assert code == 0 and "/runs/sweep/1: 4 steps" in printed


def test_check_refuses_a_directory_that_is_in_use(config_file, run):
    """T-D13: a locked directory."""
    from pretrain.train.run_directory import RunDirectory

    holder = RunDirectory(run)
    holder.claim()
    code, line = check(config_file)
    assert code == 1 and f"{run} is in use by process {os.getpid()}" in line
    holder.release()
    assert check(config_file)[0] == 0


def test_check_refuses_a_directory_that_cannot_be_written_to(config_file, run, monkeypatch):
    """T-D13: not writable."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run and allowed(path, mode))
    code, line = check(config_file)
    assert code == 1 and f"{run}: this process may not write there" in line


def test_check_finds_a_checkpoint_that_was_cut_short(config_file, run):
    os.truncate(run / "checkpoints" / "step-00000004" / "__0_0.distcp", 100)
    code, line = check(config_file)
    assert code == 1 and "__0_0.distcp: 100 bytes instead of" in line


# ---- what is printed ----------------------------------------------------------------------------------------------------


def test_epochs_count_the_samples_that_were_read_in_steps_of_another_size(config_file, run):
    """The line said the epochs of a run that had always had today's batch: 0.56 where it was 0.29."""
    consent = "run.accept_changes=[batch.sequences, run.steps]"
    code, printed = check(config_file, "batch.sequences=64", "run.steps=14", consent)
    samples = 4 * 16 + 10 * 64
    assert code == 0 and f"{samples / 1874:.2f} epochs" in printed and f"{14 * 64 / 1874:.2f} epochs" not in printed
