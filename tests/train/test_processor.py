"""How a process uses its processor: Python's collector, which runs after the same steps on all ranks, and threads."""

from __future__ import annotations

import gc
from unittest.mock import patch

from running import run_main


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


def test_the_threads_of_a_process_are_said_and_set(pool, config_file):
    import torch

    [(threads, printed)] = pool.launch(
        1, threads_of, str(config_file), "run.threads=3", "run.steps=1", "schedule.warmup_steps=0"
    )
    assert threads == 3 and "threads  3 in each of 1 process on" in printed
    assert torch.get_num_threads() != 3


def threads_of(config_file: str, *overrides: str) -> tuple[int, str]:
    import torch

    before = torch.get_num_threads()
    try:
        code, printed = run_main(config_file, *overrides)
        return torch.get_num_threads(), printed
    finally:
        torch.set_num_threads(before)


def test_keys_of_another_device_are_refused(config_file):
    assert "precision.tf32=true has no effect on a CPU" in run_main(str(config_file), "--check", "precision.tf32=true")[1]
