"""What a step costs does not grow with the run: not with steps taken, samples, shards or time, and with layers only in proportion.

Counted are Python's calls, which are the same on every machine, and objects that stay. A GPU waits for exactly these calls.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from running import run_main, some_slow, tool, write_config

from pretrain.config.load import load_config
from pretrain.data.order import ChunkedOrder, FullOrder, Mixture, Stage
from pretrain.data.shards.reader import PreparedData
from pretrain.distributed import ranks as distributed
from pretrain.parallel.strategy import Strategy
from pretrain.run import main
from pretrain.train.callbacks import Callback
from pretrain.train.continuation import Progress
from pretrain.train.plan import make_plan
from pretrain.train.run_directory import RunDirectory
from pretrain.train.starting_point import StartingPoint
from pretrain.train.trainer import Trainer

TINY = ("model={dim: 8, layers: 2, heads: 2, kv_heads: 2, ffn_dim: 8}", "data.sequence_length=8", "batch={sequences: 4, micro_sequences: 2}")


def calls(run: Callable[[], object]) -> int:
    """Calls of Python and of C functions that `run` makes in this thread."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls finalizers
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def trainer_of(config_file: Path, *overrides: str) -> Trainer:
    config, _ = load_config(config_file, [*TINY, "parallel.strategy=single", *overrides])
    plan = make_plan(config, 1, torch.device("cpu"))
    return Trainer(plan, distributed.start(plan.config, alone=True), RunDirectory(Path(config.run.dir) / "growth"), StartingPoint())


def calls_of_steps(trainer: Trainer, step: int) -> int:
    """Calls that two steps make after a number of steps, with their batches."""
    sequences = trainer.config.batch.sequences
    trainer.progress = Progress(step, step * sequences, step * sequences * 8)

    def take() -> None:
        batch = trainer.loader.read(trainer.progress.samples)
        trainer.settle(trainer.step(batch, batch.target_tokens))

    take()  # creates the optimizer's state
    return calls(lambda: (take(), take()))


def test_a_step_costs_the_same_at_the_start_and_after_a_hundred_thousand(config_file):
    trainer = trainer_of(config_file, "run.steps=200000")
    early, late = (calls_of_steps(trainer, step) for step in (10, 100_000))
    assert abs(late - early) <= 0.02 * early, (early, late)


def test_a_step_takes_little_more_time_than_a_loop_that_someone_wrote_for_it(config_file):
    """CPU seconds in turns. The ratio was 1.10 to 1.11 beside other work (2 cores, Zen 4, 2026-11-29). It is measured again if a busy machine may
    have disturbed it.
    """
    trainer = trainer_of(config_file, "model={dim: 64, ffn_dim: 128}", "data.sequence_length=64", "batch={sequences: 8, micro_sequences: 4}", "precision.compute=fp32")
    network = trainer.model
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)
    batch = trainer.loader.read(0)

    def ours() -> None:
        read = trainer.loader.read(trainer.progress.samples)
        trainer.settle(trainer.step(read, read.target_tokens))

    def plain() -> None:
        for i in range(2):
            losses_B = network(**batch.micro(i, 4, torch.device("cpu")))
            (losses_B.sum() / batch.target_tokens).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ratio() -> float:
        taken = {ours: [], plain: []}
        for _ in range(25):
            for one, seconds in taken.items():
                begin = time.process_time()
                one()
                seconds.append(time.process_time() - begin)
        return min(taken[ours]) / min(taken[plain])

    ratios = [ratio()]
    while ratios[-1] > 1.2 and len(ratios) < 3:
        ratios.append(ratio())
    assert ratios[-1] <= 1.2, ratios


OPTIMIZERS = ("name: adamw", "name: muon", "name: lion", "name: adafactor", "name: schedule_free_adamw", "ema_decay: 0.99")


@pytest.mark.parametrize("optim", some_slow(OPTIMIZERS, ["name: lion", "name: adafactor", "name: schedule_free_adamw"]))
def test_a_layer_costs_the_same_in_a_model_of_two_and_of_two_hundred(config_file, optim):
    optim = f"optim={{{optim}, lr: 1.0e-3}}"
    counts = {layers: calls_of_steps(trainer_of(config_file, f"model.layers={layers}", optim, "schedule.name=constant"), 10) for layers in (2, 40, 200)}
    few, many = (counts[40] - counts[2]) / 38, (counts[200] - counts[40]) / 160
    assert 0 < many <= 1.02 * few, (counts, few, many)


@pytest.mark.parametrize("order", [FullOrder, lambda size, key: ChunkedOrder(size, 1 << 12, 8, key)], ids=["full", "chunked"])
def test_ten_billion_samples_are_ordered_by_as_many_calls_as_a_million(order):
    def cost(size: int) -> int:
        made = order(size, (1,))
        made.samples(np.arange(64))
        positions = np.arange(size // 3, size // 3 + 4096)
        return calls(lambda: made.samples(positions))

    assert cost(1 << 34) <= 1.25 * cost(1 << 20)
    assert cost(10**10) <= 4 * cost(1 << 20)  # a size between two powers of four: at most four walks for each sample in the mean


def test_a_mixture_of_many_samples_is_read_by_as_many_calls_as_one_of_few():
    def cost(size: int) -> int:
        mixture = Mixture([Stage(None, (3.0, 1.0))], [size, size], [None, None], 0)
        positions = np.arange(size // 3, size // 3 + 4096)
        return calls(lambda: mixture.locate(positions))

    assert cost(10**10) <= 1.2 * cost(10**6)


def test_samples_are_read_from_ten_thousand_shards_by_as_many_calls_as_from_two_hundred(tmp_path, prepared):
    tool("bench")  # makes its modules known
    from benchmarks.corpora import link_shards

    folders = {}
    for count in (200, 10_000):
        folder = tmp_path / str(count)
        (folder / "data").mkdir(parents=True)
        folders[count] = write_config(folder, link_shards(prepared, folder / "data", count))
    cost = {}
    for count, config_file in folders.items():
        trainer = trainer_of(config_file)
        read = trainer.loader.read
        read(0)
        cost[count] = min(calls(lambda first=first, read=read: read(first)) for first in (64, 128, 192))
    assert cost[10_000] <= 1.1 * cost[200], cost
    opened = {count: calls(lambda count=count: PreparedData.open(tmp_path / str(count) / "data")) for count in folders}
    assert opened[10_000] <= 50.5 * opened[200], opened  # each shard has a line in the manifest


class Probe(Callback):
    """What the process holds after some steps: objects, Python's bytes, those of tensors and all that is in memory."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.held = steps, []

    def evaluate(self, run, step):
        if step in self.steps:
            gc.collect()
            objects = gc.get_objects()
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in objects if type(one) is torch.Tensor}
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            self.held.append((len(objects), tracemalloc.get_traced_memory()[0], sum(storages.values()), resident))
        return {}


def held(config_file: str, *overrides: str) -> list[list[int]]:
    """What this rank holds more after each fifty steps of the last 150, of each kind."""
    probe = Probe(50, 100, 150, 200)
    tracemalloc.start()
    try:
        assert main(["--config", config_file, *overrides], callbacks=[probe]) == 0
    finally:
        tracemalloc.stop()
    return np.diff(probe.held, axis=0).T.tolist()


@pytest.mark.parametrize("layout", [(1, "single"), *(pytest.param((2, name), marks=pytest.mark.slow) for name in ("ddp", "fsdp"))], ids=str)
def test_a_run_holds_as_much_after_two_hundred_steps_as_after_fifty(pool, config_file, layout):
    ranks, strategy = layout
    options = (*TINY, "run.steps=200", f"parallel.strategy={strategy}", "checkpoint={every_steps: 25, keep_last: 1, export_check: false}")
    # What a run keeps of each step grows in every interval. Once 58 kB more were seen without an object more, and not again: what it was
    # is not known. So what grows in a single interval is not found here.
    for more in pool.launch(ranks, held, str(config_file), *options):
        objects, python, tensors, resident = map(min, more)
        assert objects <= 30 and python <= 16_000 and tensors <= 1000 and resident <= 4_000_000, more


@pytest.mark.parametrize("size", [10**6, 10**10])
def test_the_place_of_a_sample_takes_no_memory_in_the_number_of_samples(size):
    tracemalloc.start()
    try:
        FullOrder(size, (0,)).samples(np.arange(1000))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def models_that_stay(config_file: str, *overrides: str) -> int:
    """How many models of this process's runs are in memory after they ended."""
    place, placed = Strategy.place, []

    def noting(strategy, network, *options):
        placed.append(weakref.ref(network))
        return place(strategy, network, *options)

    with patch.object(Strategy, "place", noting):
        code, printed = run_main(config_file, "run.steps=2", "batch.micro_sequences=2", *overrides)
    assert code == 0 and placed, printed
    gc.collect()
    return sum(model() is not None for model in placed)


@pytest.mark.parametrize("options", [
    ("parallel.strategy=ddp", "parallel.replicate=1"),
    ("parallel.strategy=ddp", "parallel.replicate=1", "precision.compute=bf16", "precision.master=bf16", "precision.gradients=fp32"),
    ("parallel.strategy=fsdp", "parallel.shard=1"),
])  # fmt: skip
def test_nothing_of_a_run_that_ended_stays_in_memory(pool, config_file, options):
    """DDP's C++ part held hooks that held the model: each run of a notebook, or of a test's process, stayed whole, with its groups and their threads."""
    assert pool.launch(1, models_that_stay, str(config_file), *options) == [0]
