"""Steps and states that are not finite: skipped as far as that is allowed, never committed."""

from __future__ import annotations

import json
import math
from unittest.mock import patch

import pytest
import torch
from running import losses, run_main, run_main_with, state_of, train

from pretrain.checkpoint.payload import first_nonfinite
from pretrain.config.load import load_config
from pretrain.observe.metrics import METRICS_FILE, read_metrics
from pretrain.parallel.layout import plan_layout
from pretrain.parallel.strategy import Strategy
from pretrain.train.continuation import Continuation
from pretrain.train.out_of_memory import remedies

STEADY = ("run.steps=6", "schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=1", "checkpoint.keep_last=0")
EXPERTS = (
    "model.family=custom",
    "model.experts={count: 4, active: 2, ffn_dim: 16, correction: true, correction_rate: 0.01, scoring: sigmoid}",
)
DDP, FSDP = (2, "parallel.strategy=ddp"), (2, "parallel.strategy=fsdp")
PIPELINE = (*FSDP, "parallel.pipeline=2", "batch.micro_sequences=4")
KEPT = (*FSDP, "parallel.reshard_after_forward=never", "batch.micro_sequences=2")  # gathered weights stay for a second micro-step


def with_bad_steps(bad: list[int], config_file: str, *overrides: str) -> tuple[int, str]:
    """A run in which the loss and gradients of the last rank are NaN in the steps `bad`."""
    from pretrain.parallel.strategy import Strategy
    from pretrain.train.trainer import Trainer

    computed, taken, number = Strategy._micro_step, Trainer.step, 0

    def step(self, batch, *of_all):
        nonlocal number
        number = self.progress.step + 1
        return taken(self, batch, *of_all)

    def spoiled(self, batch, index, last, target_tokens):
        found = computed(self, batch, index, last, target_tokens)
        ranks = self.mesh.ranks
        if number not in bad or ranks.rank != ranks.world_size - 1:
            return found
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
        return type(found)(*(part * math.nan for part in found))

    with patch.object(Trainer, "step", step), patch.object(Strategy, "_micro_step", spoiled):
        return run_main(config_file, *overrides)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    "layout",
    [KEPT, *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((1, *EXPERTS), FSDP, DDP))],
    ids=["fsdp, kept", "experts", "fsdp", "ddp"],
)
def test_a_skipped_step_changes_no_weight_and_no_moment_and_its_samples_are_consumed(pool, config_file, layout):
    """T-D4: any single step that was not finite ended the run, and each restart met the same samples again."""
    ranks, *options = layout
    straight = train(pool, ranks, config_file, "run.name=straight", *STEADY, *options)
    overrides = (*STEADY, *options, "optim.skip_nonfinite=2")
    results = pool.launch(ranks, with_bad_steps, [3, 4], str(config_file), *overrides)
    assert [code for code, _ in results] == [0] * ranks, results
    assert "step 3: loss nan, gradient norm nan" in results[0][1] and "skipped, 2 in a row of at most 2" in results[0][1]
    run = config_file.parent / "runs" / "run"
    assert equal(state_of(run, 2), state_of(straight, 2))
    assert equal(state_of(run, 3), state_of(run, 2)) and equal(state_of(run, 4), state_of(run, 2))
    assert not equal(state_of(run, 5), state_of(run, 4))
    records, before = read_metrics(run), read_metrics(straight)
    assert [r["batch"] for r in records] == [r["batch"] for r in before]
    assert [r["tokens"] for r in records] == [r["tokens"] for r in before]
    assert [r.get("skipped") for r in records] == [None, None, 1, 2, 2, 2]
    assert [r["loss"] is None for r in records] == [False, False, True, True, False, False]
    assert "NaN" not in (run / METRICS_FILE).read_text()
    useful = [r["goodput"] * r["device_hours"] * 3600 for r in records]
    for one, other, record in zip(useful, useful[1:], records[1:]):  # the time in skipped steps trained nothing
        assert other - one == pytest.approx(0 if record["loss"] is None else ranks * record["step_seconds"], abs=1e-6)
    states = [(run / "checkpoints" / f"step-0000000{step}" / "state.json").read_text() for step in (3, 6)]
    assert json.loads(states[0])["record"]["loss"] is None and "NaN" not in states[0]  # F13: NaN is no JSON
    assert "skipped 2" in results[0][1] and "loss nan" in results[0][1]
    step = state_of(run, 6)["optim.step.norm.weight"]
    assert float(step) == 4  # AdamW's own count, which its bias correction goes by
    assert json.loads(states[1])["skipped"] == 2
    train(pool, ranks, config_file, *STEADY, *options, "run.steps=7")
    assert read_metrics(run)[-1]["skipped"] == 2


def test_one_step_more_than_may_be_skipped_ends_the_run_which_can_then_go_on_with_more(pool, config_file):
    """T-D4: a restart loop on the same samples has a way out."""
    overrides = (*STEADY, "checkpoint.keep_last=1", "parallel.strategy=ddp")
    run = config_file.parent / "runs" / "run"
    for allowed, message in (
        (0, "the step was not taken; "),
        (2, "the step was not taken, after 2 in a row that were skipped"),
    ):
        results = pool.launch(2, with_bad_steps, [3, 4, 5], str(config_file), *overrides, f"optim.skip_nonfinite={allowed}")
        assert [code for code, _ in results] == [1, 1]
        assert message in results[0][1] and "rank 1: samples" in results[0][1] and "optim.skip_nonfinite=N" in results[0][1]
        assert "Traceback" not in results[0][1]
        assert ("the last checkpoint is " if not allowed else "no checkpoint from before that step is left; ") in results[0][1]
    results = pool.launch(2, with_bad_steps, [3, 4, 5], str(config_file), *overrides, "optim.skip_nonfinite=3")
    assert [code for code, _ in results] == [0, 0]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_steps_in_a_row_are_counted_over_restarts(pool, config_file):
    """A launcher that restarts would otherwise read all the data, two steps at a time, and train nothing."""
    for _ in range(2):
        options = ("optim.skip_nonfinite=2", "checkpoint.keep_last=1")
        [(code, printed)] = pool.launch(1, with_bad_steps, list(range(3, 20)), str(config_file), *STEADY, *options, "run.steps=12")
        assert code == 1 and "step 5: loss nan" in printed and "step 6" not in printed
    [(code, printed)] = pool.launch(1, with_bad_steps, [7, 8], str(config_file), *STEADY, "optim.skip_nonfinite=2", "run.steps=9")
    assert code == 0  # a good step begins the count anew


def with_norm_of_one_rank(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run in which one rank alone, which counts no losses where others do, finds a gradient norm that is not finite in step 3."""
    from pretrain.optim.optimizer import OptimizerSet
    from pretrain.train.trainer import Trainer

    clip, build, number, rank = OptimizerSet.clip, Trainer._build, 0, 0

    def built(self):
        nonlocal rank
        rank = self.ranks.rank
        build(self)

    def spoiled(self, max_norm):
        nonlocal number
        number += 1
        norm = clip(self, max_norm)
        return norm * math.inf if number == 3 and rank == 1 else norm

    with patch.object(OptimizerSet, "clip", spoiled), patch.object(Trainer, "_build", built):
        return run_main(config_file, *overrides)


@pytest.mark.parametrize("layout", [DDP, (2, "parallel.strategy=fsdp", "parallel.tensor=2")], ids=["ddp", "tensor"])
def test_a_norm_that_is_not_finite_on_one_rank_is_refused_by_all(pool, config_file, layout):
    """Each decided for itself. The others took the step, and their weights were no longer those of this one."""
    ranks, *options = layout
    overrides = (*STEADY, *options, "optim.skip_nonfinite=1", "parallel.timeout_seconds=10")
    results = pool.launch(ranks, with_norm_of_one_rank, str(config_file), *overrides)
    assert [code for code, _ in results] == [0] * ranks, results
    assert "skipped, 1 in a row of at most 1" in results[0][1] and "step 3: loss " in results[0][1]
    run = config_file.parent / "runs" / "run"
    assert equal(state_of(run, 3), state_of(run, 2)) and read_metrics(run)[-1]["skipped"] == 1


@pytest.mark.parametrize("background", [False, True])
def test_steps_in_a_row_that_are_skipped_retire_no_checkpoint_from_before_them(pool, config_file, background):
    """What was saved among them has the weights of the last step taken, which may have ruined them. It drove out the good checkpoints."""
    options = (*STEADY, "run.steps=20", "checkpoint={every_steps: 2, keep_last: 2}", "optim.skip_nonfinite=5")
    options = (*options, f"checkpoint.asynchronous={str(background).lower()}", "parallel.strategy=fsdp")
    checkpoints = config_file.parent / "runs" / "run" / "checkpoints"
    for _ in range(2):  # the second start goes on from within the row
        code, printed = pool.launch(2, with_bad_steps, list(range(6, 30)), str(config_file), *options)[0]
        assert code == 1 and "step 11: loss nan" in printed
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004", "step-00000010"]
        back = f"run.resume={checkpoints / 'step-00000004'}"
        assert f"the weights are those of step 5: lower optim.lr or look at the samples, then run again; if that step ruined the weights, set {back}" in printed
    code, printed = pool.launch(2, run_main, str(config_file), *options, back)[0]
    assert code == 0, printed
    assert sorted(path.name for path in checkpoints.iterdir()) == ["abandoned-step-00000010", "step-00000018", "step-00000020"]


def test_a_first_step_that_is_not_finite_says_that_there_is_no_checkpoint(pool, config_file):
    """T-D4: it said "the last checkpoint is of step None"."""
    code, printed = pool.launch(1, with_bad_steps, [1], str(config_file), "checkpoint.every_steps=5")[0]
    assert code == 1 and "there is no checkpoint yet" in printed and "None" not in printed.splitlines()[-1]


@pytest.mark.parametrize(
    "layout", [FSDP, PIPELINE, pytest.param(DDP, marks=pytest.mark.slow), pytest.param((1,), marks=pytest.mark.slow)]
)
def test_poisoned_weights_are_not_committed_and_retire_no_good_checkpoint(pool, config_file, layout):
    """T-D4: optim.lr=1e308 made every weight infinite, which was saved as a good checkpoint and retired the one before."""
    ranks, *options = layout
    keep_one = (*options, "schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    run = train(pool, ranks, config_file, *keep_one, "run.steps=2")
    poison = ("optim.lr=1e38", "optim.clip=0", "run.accept_changes=[optim.lr, optim.clip]", "run.steps=5")
    results = pool.launch(ranks, run_main, str(config_file), *keep_one, *poison)
    assert [code for code, _ in results] == [1] * ranks
    line = next(line for line in results[0][1].splitlines() if line.startswith("error: "))
    assert "step 3: model." in line and "is not finite" in line and "so the state was not saved" in line
    assert f"the last checkpoint is {run / 'checkpoints' / 'step-00000002'}" in line and "lower optim.lr" in line
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert all(tensor.isfinite().all() for tensor in state_of(run, 2).values())
    train(pool, ranks, config_file, *keep_one, "run.steps=4")
    assert losses(run)[-1] < losses(run)[0]


def test_the_first_tensor_that_is_not_finite_is_found_whatever_its_size_and_format():
    tensors = {
        "count": torch.arange(3),
        "empty": torch.empty(0, 4),
        "huge": torch.full((8,), 1e30),  # the squares of finite values overflow
        "half": torch.full((3,), 1e4, dtype=torch.float16),
        "scalar": torch.tensor(2.0),
    }
    assert first_nonfinite(tensors) is None
    for name in ("scalar", "half", "huge"):
        for value in (math.nan, math.inf, -math.inf):
            spoiled = {n: t.clone() for n, t in tensors.items()}
            spoiled[name].view(-1)[-1] = value
            spoiled["z"] = torch.tensor(math.nan)
            assert first_nonfinite(spoiled) == name


# ---- memory ---------------------------------------------------------------------------------------------------------------

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.1 GiB is free."


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        ((), ["precision.compute=bf16", "batch.micro_sequences=4", "activation_checkpointing=full"], ["fsdp", "more GPUs"]),
        (
            ("batch.micro_sequences=1", "parallel.activation_checkpointing=full"),
            ["activation_offload=true"],
            ["micro_sequences=1,"],
        ),
    ],
)
def test_a_step_that_does_not_fit_says_which_keys_to_change(config_file, overrides, said, unsaid):
    def full(*_):
        raise torch.OutOfMemoryError(FULL)

    code, printed = run_main_with(
        Strategy, "forward_backward", full, str(config_file), "run.steps=2", "schedule.warmup_steps=0", *overrides
    )
    error = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert code == 1 and "step 1 needs more memory than there is (CUDA out of memory. Tried to allocate 2.00 GiB)" in error
    assert all(part in error for part in said) and not any(part in error for part in unsaid), error
    assert "log.memory_history=true writes what lies in memory" in error


@pytest.mark.parametrize(
    ("owner", "name", "doing"),
    [(Continuation, "restore", "the construction of the model"), (Strategy, "evaluate", "the evaluation after step 1")],
)
def test_memory_that_runs_out_outside_a_step_is_a_line_as_well(config_file, prepared, owner, name, doing):
    """It was a traceback."""

    def full(*_, **__):
        raise torch.OutOfMemoryError(FULL)

    options = ("run.steps=2", "schedule.warmup_steps=0", "validation.every_steps=1", f"data.validation=[{{path: {prepared}, name: v}}]")
    code, printed = run_main_with(owner, name, full, str(config_file), *options)
    error = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert code == 1 and f"{doing} needs more memory than there is (CUDA out of memory." in error and "Traceback" not in printed


ADVICE = {
    "selective": (["parallel.activation_checkpointing=selective"], "activation_checkpointing=full", "activation_offload"),
    "all compiled": (["parallel.activation_checkpointing=full", "parallel.compile=model"], "micro_sequences", "activation_offload"),
    "batches of tokens": (["batch.tokens=4096"], "set batch.micro_tokens to less", "micro_sequences"),
    "their micro-steps": (["batch={tokens: 4096, micro_tokens: 512}"], "lower batch.micro_tokens=512", "micro_sequences"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_what_is_advised_without_memory_can_be_done_and_is_the_next_step(config_file, case):
    overrides, said, unsaid = ADVICE[case]
    config = load_config(config_file, overrides)[0]
    advice = "; ".join(remedies(config, plan_layout(config, 1, 1000, None)))
    assert said in advice and unsaid not in advice


def test_a_history_of_a_gpu_s_memory_is_refused_on_a_cpu(config_file):
    code, printed = run_main(str(config_file), "log.memory_history=true")
    assert code == 2 and "log.memory_history=true has no effect on a CPU" in printed
