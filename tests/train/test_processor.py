"""How a process uses its processor: Python's collector, which runs after the same steps on all ranks, and threads."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from running import run_main

from pretrain.distributed import cores
from pretrain.distributed.cores import cores_near, cores_of_host, share_of_cores
from pretrain.distributed.ranks import Ranks
from pretrain.errors import ConfigError
from pretrain.train import description, session


def collected(config_file: str, *overrides: str) -> tuple[list[int], bool, int]:
    """After which steps of a run Python collected; and whether it collects on its own afterwards."""
    from pretrain.train.trainer import Trainer

    steps, taken, now = [], Trainer.step, 0

    def step(self, batch, *of_all):
        nonlocal now
        now = self.progress.step + 1
        return taken(self, batch, *of_all)

    def seen(phase: str, info: dict) -> None:
        if phase == "start" and now:
            steps.append(now)

    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.enable()
    gc.callbacks.append(seen)
    try:
        with patch.object(Trainer, "step", step), patch("pretrain.train.garbage.EVERY_STEPS", 6):
            code, printed = run_main(config_file, *overrides)
        assert code == 0, printed
        return [step for step in steps if step < 20], gc.isenabled(), bool(gc.get_freeze_count()) == bool(frozen)
    finally:
        gc.callbacks.remove(seen)
        if not enabled:
            gc.disable()


def test_cycles_are_searched_for_after_the_same_steps_on_all_ranks(pool, config_file):
    for steps, enabled, as_before in pool.launch(2, collected, str(config_file), "parallel.strategy=ddp", "run.steps=20"):
        assert steps == [6, 12, 18]
        assert enabled and as_before


WHILE_TORCH_IS_IMPORTED = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, _: collections.append("torch" in sys.modules and not hasattr(sys.modules.get("pretrain.train.session"), "train")))
{before}
from pretrain.run import main
code = main(["--config", sys.argv[1], "--check"])
print(code, sum(collections), gc.isenabled(), gc.get_freeze_count())
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "0 0 True 0"),
        ("gc.disable()", "0 0 False 0"),
        ("gc.collect(); gc.freeze()", "0 [1-9][0-9]* True [1-9][0-9]*"),
    ],
    ids=["as usual", "collections are off", "frozen by a script"],
)
def test_nothing_is_collected_while_torch_is_imported_and_nothing_stays_frozen(config_file, before, expected):
    done = subprocess.run(
        [sys.executable, "-c", WHILE_TORCH_IS_IMPORTED.format(before=before), str(config_file)], capture_output=True, text=True
    )
    assert re.fullmatch(expected, done.stdout.splitlines()[-1]), done.stdout + done.stderr


AFTER_THE_IMPORT = """
import contextlib, gc
from pretrain.train.garbage import GarbageCollection, first_import
with contextlib.ExitStack() as end:
    with first_import(until=end):
        import torch
    made = [[number] for number in range(5000)]
    with GarbageCollection():
        searched = len(gc.get_objects())
print(searched < 1000, gc.isenabled(), gc.get_freeze_count())
"""


def test_a_run_searches_neither_modules_nor_what_was_built_after_their_import():
    done = subprocess.run([sys.executable, "-c", AFTER_THE_IMPORT], capture_output=True, text=True)
    assert done.stdout == "True True 0\n", done.stdout + done.stderr


def test_the_threads_of_a_process_are_said_and_set(pool, config_file):
    import torch

    [(threads, printed)] = pool.launch(
        1, threads_of, str(config_file), "run.threads=3", "run.steps=1", "schedule.warmup_steps=0"
    )
    assert threads == 3 and "threads  3 in 1 process on" in printed
    assert ("more than there are cores; run.threads=" in printed) == (cores_of_host() < 3)
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    with patch.object(description, "cores_of_host", lambda: 2), patch.object(torch, "get_num_threads", lambda: 1):
        assert description.describe_threads(alone, "none") == ["threads  1 in 1 process on 2 cores, 1 idle; run.threads=2 uses more"]
    assert torch.get_num_threads() != 3


def threads_of(config_file: str, *overrides: str) -> tuple[int, str]:
    import torch

    before = torch.get_num_threads()
    try:
        code, printed = run_main(config_file, *overrides)
        return torch.get_num_threads(), printed
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """A host with 8 cores of two threads on two sockets. Linux numbers the second threads after all first ones."""
    for cpu in range(16):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{cpu % 8 // 4}").mkdir()
        (folder / "topology" / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (folder / "topology" / "core_id").write_text(f"{cpu % 4}\n")
    gpu = tmp_path / "bus" / "pci" / "devices" / "0000:8a:00.0"
    gpu.mkdir(parents=True)
    (gpu / "local_cpulist").write_text("4-7,12-15\n")
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)


def test_processes_share_a_host_by_sockets_and_whole_cores(two_sockets, monkeypatch):
    assert [share_of_cores(set(range(16)), place, 2) for place in (0, 1)] == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    shares = [share_of_cores(set(range(16)), place, 8) for place in range(8)]
    assert shares == [{core, core + 8} for core in range(8)]
    uneven = [share_of_cores({1, 2, 3, 4, 5}, place, 3) for place in range(3)]
    assert sorted(map(len, uneven)) == [1, 2, 2] and set().union(*uneven) == {1, 2, 3, 4, 5}
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x8A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert cores_near(torch.device("cuda", 1), set(range(14))) == {4, 5, 6, 7, 12, 13}
    with pytest.raises(ConfigError, match="run.affinity=cores: none of the cores near GPU 0000:8a:00.0 may be used"):
        cores_near(torch.device("cuda", 1), {0, 1})
    gpu.pci_bus_id = 1
    with pytest.raises(ConfigError, match="does not say which cores are near GPU 0000:01:00.0"):
        cores_near(torch.device("cuda", 1), {0, 1})


def cores_of_a_run(config_file: str, *overrides: str) -> tuple[list[set[int]], int, str]:
    """The cores of the thread that trains, in a run and after it, how many the host has in it, and what the run printed."""
    from pretrain.train.trainer import Trainer

    seen, taken = [], Trainer.step

    def step(self, batch, *of_all):
        seen[:] = [os.sched_getaffinity(0), cores_of_host()]
        return taken(self, batch, *of_all)

    with patch.object(Trainer, "step", step):
        code, printed = run_main(config_file, *overrides)
    assert code == 0, printed
    return [seen[0], os.sched_getaffinity(0)], seen[1], printed


@pytest.mark.skipif(cores_of_host() < 2, reason="needs two cores")
def test_each_process_of_a_run_is_kept_on_cores_of_its_own(pool, config_file):
    options = ("run.steps=1", "schedule.warmup_steps=0", "parallel.strategy=ddp", "run.affinity=cores")
    (first, second) = pool.launch(2, cores_of_a_run, str(config_file), *options)
    everything = os.sched_getaffinity(0)
    assert first[0][0] | second[0][0] == everything and not first[0][0] & second[0][0]
    assert first[0][1] == second[0][1] == everything and first[1] == second[1] == len(everything)
    assert f"on {len(everything)} cores, kept on {len(first[0][0])} of them" in first[2]


def cores_of_the_plan(config_file: str, *overrides: str) -> set[int]:
    """The cores that this process may use while it makes the plan, and with it prepares text."""
    seen, made = set(), session.make_plan

    def make_plan(*given):
        seen.update(os.sched_getaffinity(0))
        return made(*given)

    with patch.object(session, "make_plan", make_plan):
        code, printed = run_main(config_file, *overrides)
    assert code == 0, printed
    return seen


@pytest.mark.skipif(cores_of_host() < 2, reason="needs two cores")
def test_text_is_prepared_on_all_cores_while_the_other_processes_wait(pool, config_file):
    options = ("run.steps=1", "schedule.warmup_steps=0", "parallel.strategy=ddp", "run.affinity=cores")
    assert pool.launch(2, cores_of_the_plan, str(config_file), *options) == [os.sched_getaffinity(0)] * 2


def test_cores_that_do_not_suffice_are_an_error(config_file):
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}), pytest.raises(ConfigError, match="4 processes share 2 cores"):
        share_of_cores({0, 1}, 0, 4)


def test_keys_of_another_device_are_refused(config_file):
    assert "precision.tf32=true has no effect on a CPU" in run_main(str(config_file), "--check", "precision.tf32=true")[1]


@pytest.mark.parametrize("given", ["", "0", "two"])
def test_a_number_of_processes_that_is_none_is_taken_as_not_given(config_file, monkeypatch, given):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    options = ("run.steps=1", "schedule.warmup_steps=0", f"run.name=given-{given}", "run.affinity=cores")
    code, printed = run_main(str(config_file), *options)
    assert code == 0 and " in 1 process on " in printed
