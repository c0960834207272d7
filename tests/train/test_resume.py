"""A run that was interrupted and continued is the run that was not: same samples, same numbers, on any layout."""

import json
from unittest.mock import patch

import pytest
import torch
from running import cut_after, largest_relative_difference, losses, run_main, some_slow, state_of, train

from pretrain.checkpoint import payload
from pretrain.checkpoint.payload import Payload
from pretrain.distributed.shards import local

EVERY = ("log.every_steps=1", "checkpoint.keep_last=0")
DDP2 = (2, "parallel.strategy=ddp")
LAYOUTS = {
    "single": (1,),
    "ddp 2": DDP2,
    "ddp 4": (4, "parallel.strategy=ddp"),
    "fsdp 2": (2, "parallel.strategy=fsdp"),
    "fsdp 3": (3, "parallel.strategy=fsdp", "batch.micro_sequences=8"),
    "fsdp 4": (4, "parallel.strategy=fsdp"),
    "hsdp 2x2": (4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=2"),
    "tensor 2": (2, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "fsdp 2 x tensor 2": (4, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "fsdp 2 x context 2": (4, "parallel.strategy=fsdp", "parallel.context=2"),
    "pipeline 2": (2, "parallel.strategy=fsdp", "parallel.pipeline=2"),
    "fsdp 2 x pipeline 2": (4, "parallel.strategy=fsdp", "parallel.pipeline=2"),
}
# 24 sequences divide over every world size above.
BATCH = ("batch.sequences=24", "batch.micro_sequences=2")
HALVES = ("run.steps=10", "checkpoint.every_steps=5")


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("first", "second"), [
    ("single", "fsdp 3"), pytest.param("hsdp 2x2", "single", marks=pytest.mark.slow), pytest.param("fsdp 2 x tensor 2", "ddp 2", marks=pytest.mark.slow), ("fsdp 2 x pipeline 2", "single"),
    pytest.param("fsdp 2 x tensor 2", "fsdp 2 x pipeline 2", marks=pytest.mark.slow),
    pytest.param("fsdp 2 x tensor 2", "fsdp 2 x context 2", marks=pytest.mark.slow), pytest.param("ddp 2", "fsdp 2 x tensor 2", marks=pytest.mark.slow), pytest.param("tensor 2", "fsdp 4", marks=pytest.mark.slow), pytest.param("ddp 4", "fsdp 2", marks=pytest.mark.slow), pytest.param("fsdp 4", "hsdp 2x2", marks=pytest.mark.slow),
    pytest.param("ddp 2", "fsdp 4", marks=pytest.mark.slow), pytest.param("fsdp 2", "ddp 4", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_checkpoint_resumes_bit_equal_under_another_layout_and_sees_the_same_samples(pool, config_file, first, second):
    (world, *options), (world_after, *options_after) = LAYOUTS[first], LAYOUTS[second]
    whole = train(pool, world, config_file, "run.name=whole", *BATCH, *EVERY, *HALVES, *options)
    parts = cut_after(whole, 5)
    # No step between loading and saving: what is saved must be what was loaded.
    train(
        pool, world_after, config_file, "run.name=parts", *BATCH, *EVERY, "run.steps=10", "run.resume=required", *options_after
    )
    assert losses(parts) and json.loads((parts / "status.json").read_text())["state"] == "finished"
    assert largest_relative_difference(losses(parts), losses(whole)[5:]) <= 2e-6
    ends = [json.loads((r / "checkpoints" / "step-00000010" / "state.json").read_text()) for r in (whole, parts)]
    assert (
        [ends[0][k] for k in ("step", "samples", "tokens")]
        == [ends[1][k] for k in ("step", "samples", "tokens")]
        == [10, 240, 7680]
    )


def reading(config_file: str, *overrides: str) -> tuple[int, int]:
    """A run's exit code, and how many tensors of the state this rank read."""
    read, fill = [], Payload._fill
    Payload._fill = lambda self, tensors: (read.extend(n for n in tensors if not n.startswith("rng.")), fill(self, tensors))[1]
    try:
        return run_main(config_file, *overrides)[0], len(read)
    finally:
        Payload._fill = fill


@pytest.mark.parametrize("layout", some_slow(["ddp 2", "hsdp 2x2"], ["hsdp 2x2"]))
def test_one_replica_reads_a_checkpoint_for_the_others(pool, trained_run, config_file, layout):
    """Each of 128 nodes with a replica read the whole checkpoint."""
    (world, *options), common = LAYOUTS[layout], (*BATCH, *EVERY, "checkpoint.every_steps=5", "run.name=read")
    train(pool, world, config_file, *common, "run.steps=5", *options)
    ranks = pool.launch(world, reading, str(config_file), *common, "run.steps=10", *options)
    assert [code for code, _ in ranks] == [0] * world
    own = [count for _, count in ranks]
    assert own[: world // 2] == [own[0]] * (world // 2) and own[0] > 20 and not any(own[world // 2 :])


def in_portions(config_file: str, *overrides: str) -> tuple[int, list[list[int]]]:
    """A run's exit code, and the bytes of the tensors that this rank read, by portion of at most 3,000."""
    portions, fill = [], Payload._fill

    def recorded(self, tensors):
        portions.append([local(tensor).nbytes for tensor in tensors.values()])
        fill(self, tensors)

    with patch.object(Payload, "_fill", recorded), patch.object(payload, "PORTION_BYTES", 3_000):
        return run_main(config_file, *overrides)[0], portions


@pytest.mark.parametrize("layout", some_slow(["ddp 2", "fsdp 2 x pipeline 2"], ["ddp 2"]))
def test_a_state_is_read_in_portions_so_that_no_rank_waits_long_for_another(pool, trained_run, config_file, layout):
    """Replicas waited for the one that reads in one collective, whose limit ended the start where storage was slow."""
    world, *options = LAYOUTS[layout]
    short = (*BATCH, *EVERY, "run.steps=5", "schedule.warmup_steps=1")
    origin = trained_run(2, config_file, "run.name=origin", *short, "parallel.strategy=fsdp")
    resumed = (*short, "run.name=again", f"run.resume={origin / 'checkpoints' / 'step-00000005'}", *options)
    ranks = pool.launch(world, in_portions, str(config_file), *resumed)
    assert [code for code, _ in ranks] == [0] * world
    counts = [len(portions) for _, portions in ranks]
    assert counts[0] > 10 and (len(set(counts)) > 1 or "pipeline" not in layout)
    assert all(sum(portion) <= 3_000 or len(portion) == 1 for _, portions in ranks for portion in portions)
    assert equal(state_of(config_file.parent / "runs" / "again", 5), state_of(origin, 5))


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, {"ddp 2", "ddp 4", "fsdp 2", "fsdp 3", "tensor 2", "fsdp 2 x tensor 2", "fsdp 2 x context 2", "pipeline 2"}))
def test_loading_under_any_layout_and_saving_again_changes_no_bit(pool, trained_run, config_file, layout):
    world, *options = LAYOUTS[layout]
    short = (*BATCH, *EVERY, "run.steps=5", "schedule.warmup_steps=1")
    origin = trained_run(2, config_file, "run.name=origin", *short, "parallel.strategy=fsdp")
    checkpoint = origin / "checkpoints" / "step-00000005"
    again = train(pool, world, config_file, "run.name=again", *short, f"run.resume={checkpoint}", *options)
    assert equal(state_of(again, 5), state_of(origin, 5))


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, {"ddp 4", "fsdp 2", "fsdp 3", "fsdp 4", "hsdp 2x2", "tensor 2", "fsdp 2 x tensor 2", "fsdp 2 x context 2", "pipeline 2", "fsdp 2 x pipeline 2"}))
def test_the_same_layout_resumes_in_every_bit_when_deterministic(pool, config_file, layout):
    world, *options = LAYOUTS[layout]
    fixed = (*BATCH, *EVERY, "run.deterministic=true", *HALVES, *options)
    whole = train(pool, world, config_file, "run.name=whole", *fixed)
    parts = cut_after(whole, 5)
    train(pool, world, config_file, "run.name=parts", *fixed)
    assert losses(parts) == losses(whole)[5:]
    assert equal(state_of(parts, 10), state_of(whole, 10))


def test_a_finished_run_says_so_when_it_is_started_again(pool, trained_run, config_file):
    run = trained_run(1, config_file)
    before = losses(run)
    [(code, printed)] = pool.launch(1, run_main, str(config_file))
    assert code == 0 and "finished at step 20" in printed
    assert losses(run) == before


def test_a_finished_run_goes_on_when_it_is_given_more_steps(pool, config_file):
    constant = "schedule.name=constant"
    longer = train(pool, 1, config_file, "run.name=longer", "run.steps=30", constant)
    run = train(pool, 1, config_file, constant)
    train(pool, 1, config_file, "run.steps=30", constant)
    assert losses(run) == losses(longer)


def test_training_can_start_from_the_weights_of_another_run(pool, trained_run, config_file):
    first = trained_run(2, config_file, "run.name=first", "parallel.strategy=fsdp")
    second = train(pool, 1, config_file, "run.name=second", f"run.init_from={first}", "run.steps=10")
    assert abs(losses(second)[0] - losses(first)[-1]) < 0.3 < losses(first)[0] - losses(first)[-1]
    state = json.loads((second / "checkpoints" / "step-00000010" / "state.json").read_text())
    assert (state["step"], state["samples"]) == (10, 160)


@pytest.mark.slow
def test_one_run_moves_through_every_kind_of_layout_with_one_loss_curve(pool, config_file):
    """A run that changes its layout four times in mid-run, against one process that was never interrupted."""
    every = (*BATCH, *EVERY, "schedule.name=constant", "schedule.warmup_steps=2")
    single = train(pool, 1, config_file, "run.name=single", *every, "run.steps=18")
    for leg, layout in enumerate(("ddp 2", "fsdp 2 x tensor 2", "hsdp 2x2", "fsdp 2 x context 2", "fsdp 2 x pipeline 2", "single")):
        world, *options = LAYOUTS[layout]
        moving = train(pool, world, config_file, "run.name=moving", *every, f"run.steps={3 * (leg + 1)}", *options)
    assert len(losses(moving)) == 18
    assert largest_relative_difference(losses(moving), losses(single)) <= 2e-6
