"""Checkpoints that are written while training goes on hold the step they were begun at, and fail as others do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from running import run_directory, run_main, some_slow, state_of, train

from pretrain.checkpoint import files, retention
from pretrain.checkpoint.host_copies import HostCopies
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.planners import HoldingPlanner
from pretrain.checkpoint.save import AgreedPlan, Saving
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, DataError
from pretrain.optim.optimizer import OptimizerSet
from pretrain.run import main
from pretrain.train import plan, validation
from pretrain.train.callbacks import Callback
from pretrain.train.trainer import Trainer

SHORT = ("run.steps=9", "schedule={name: constant, warmup_steps: 0}", "checkpoint={every_steps: 3, keep_last: 0, export_check: false}")
BESIDE = (*SHORT, "checkpoint.asynchronous=true")


def slowly(
    seconds: float, failing_rank: int | None, config_file: str, *overrides: str, run: Callable[..., tuple[int, str]] = run_main
) -> tuple[int, str]:
    """`run_main`, or `run`, with storage that takes its time, and fails on a rank."""
    write = Saving.write

    def slow(self: Saving) -> None:
        time.sleep(seconds)
        if self.ranks.rank == failing_rank and "step-00000006" in self.target.name:
            self.problem = CheckpointError("No space left on device")
            return
        write(self)

    Saving.write = slow
    try:
        return run(config_file, *overrides)
    finally:
        Saving.write = write


LAYOUTS = {
    "single": (1, "parallel.strategy=single"),
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp x tensor": (4, "parallel={strategy: fsdp, tensor: 2}"),
}


def test_a_save_beside_training_waits_for_nothing_that_training_has_queued(tmp_path, monkeypatch):
    """On a host with a GPU, torch would write what is on the host by way of the GPU's current stream."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dcp.filesystem, "_OverlappingCpuLoader", None)  # not to be called
    saving = Saving(tmp_path / "step-00000001", {"w": torch.ones(3, 4)}, {}, {}, Ranks(0, 0, 1, torch.device("cpu")))
    saving.begin()
    saving.hold(HostCopies())
    saving.write_beside()
    saving.finish()
    assert files.complete_checkpoints(tmp_path)


def counted(config_file: str, *overrides: str) -> tuple[int, int, int]:
    """A run's exit code, how often its ranks agreed on who writes what, and how often its configuration was made YAML."""
    agreed, written = HoldingPlanner.create_global_plan, plan.to_yaml
    agreements, texts = [], []
    with (
        patch.object(HoldingPlanner, "create_global_plan", lambda self, plans: agreements.append(1) or agreed(self, plans)),
        patch.object(plan, "to_yaml", lambda config: texts.append(1) or written(config)),
    ):
        return run_main(config_file, *overrides)[0], len(agreements), len(texts)


def test_what_is_the_same_at_each_save_is_made_once(pool, config_file):
    """At each save the main rank planned for all ranks while they waited: a minute or more for 1,024. And each rank made YAML of the
    configuration, in more time than all the rest took.
    """
    ranks = pool.launch(2, counted, str(config_file), "run.name=counted", *SHORT, "parallel.strategy=fsdp")
    assert ranks == [(0, 1, 1), (0, 0, 1)]
    folder = run_directory(config_file, "run.name=counted") / "checkpoints"
    assert [path.name for path in files.complete_checkpoints(folder)] == [files.step_name(step) for step in (3, 6, 9)]


def test_other_tensors_are_agreed_on_anew(tmp_path):
    agreed, ranks = AgreedPlan(), Ranks(0, 0, 1, torch.device("cpu"))
    for step, tensors in enumerate([{"w": torch.ones(3, 4)}, {"w": torch.full((3, 4), 2.0)}, {"w": torch.ones(5), "v": torch.zeros(2)}]):
        saving = Saving(tmp_path / files.step_name(step), tensors, {}, {}, ranks, agreed=agreed)
        saving.begin()
        saving.write_now()
        saving.finish()
        read = Payload(saving.target).read_all("")
        assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, {"fsdp x tensor"}))
def test_what_is_saved_is_the_step_it_was_begun_at_while_others_are_taken(pool, config_file, layout):
    size, strategy = LAYOUTS[layout]
    at_once = train(pool, size, config_file, "run.name=at_once", *SHORT, strategy)
    # Slower than a step: the next ones are taken meanwhile, and a save that is due waits for the one before.
    ranks = pool.launch(size, slowly, 0.2, None, str(config_file), "run.name=beside", *BESIDE, strategy)
    assert all(code == 0 for code, _ in ranks), ranks
    beside, printed = run_directory(config_file, "run.name=beside"), ranks[0][1]
    for step in (3, 6, 9):
        one, other = state_of(at_once, step), state_of(beside, step)
        assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items()), step
        files.verify(beside / "checkpoints" / files.step_name(step))
    saved, after = printed.index("step-00000003 ("), printed.index("step 4/9")
    assert after < saved and "held training up for" in printed[saved : printed.index("\n", saved)]
    assert printed.index("step-00000009 (") < printed.index("finished at step 9")
    assert not list((beside / "checkpoints").glob(".*"))


def copied_late(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose copies are made as late as a GPU's stream may make them: when something waits for them, or among weights that it must not see."""
    saved: list[HostCopies] = []

    def take(self: HostCopies, sources: dict) -> dict:
        saved[:] = [self]
        self.late, self._buffers = sources, {key: torch.empty_like(source) for key, source in sources.items()}
        return self._buffers

    def copy(self: HostCopies) -> None:
        with lock:
            self._copy(self.__dict__.pop("late", {}))

    @contextmanager
    def averaged(self: OptimizerSet) -> Iterator[None]:
        with real(self):
            for copies in saved:
                copy(copies)
            yield

    lock, real = threading.Lock(), OptimizerSet.averaged
    with patch.multiple(HostCopies, take=take, hold_back=copy, wait=copy), patch.object(OptimizerSet, "averaged", averaged):
        return slowly(0.1, None, config_file, *overrides)


def test_weights_are_copied_before_a_validation_puts_their_means_in_their_place(pool, config_file, prepared):
    mean = ("optim.ema_decay=0.5", "validation.every_steps=3", f"data.validation=[{{path: {prepared}}}]")
    at_once = train(pool, 1, config_file, "run.name=at_once", *SHORT, *mean)
    [(code, printed)] = pool.launch(1, copied_late, str(config_file), "run.name=beside", *BESIDE, *mean)
    assert code == 0, printed
    for step in (3, 6, 9):
        one, other = (state_of(run, step) for run in (at_once, run_directory(config_file, "run.name=beside")))
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), step


def test_a_failure_on_one_rank_ends_the_run_in_one_line_and_the_checkpoint_before_stays_good(pool, config_file):
    ranks = pool.launch(2, slowly, 0.05, 1, str(config_file), *BESIDE, "parallel.strategy=ddp")
    for code, printed in ranks:
        assert code == 1 and "Traceback" not in printed
    line = next(line for line in ranks[0][1].splitlines() if line.startswith("error:"))
    assert re.search(r"checkpoint of step 6 could not be saved: .*rank 1: No space left on device; .*step-00000003 stays good", line)
    run = run_directory(config_file)
    assert [path.name for path in files.complete_checkpoints(run / "checkpoints")] == ["step-00000003"]
    assert not list((run / "checkpoints").glob(".writing*"))
    assert len(state_of(train(pool, 2, config_file, *BESIDE, "parallel.strategy=ddp"), 9)) > 0


def failing(what: str, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run with slow storage whose fourth step fails."""
    from test_bad_steps import with_bad_steps

    if what == "a step that is not finite":
        return slowly(0.3, None, config_file, *overrides, run=partial(with_bad_steps, [4]))
    if what == "validation data that cannot be read":

        def unreadable(evaluation: validation.Evaluation, *arguments: object) -> float:
            evaluation.ranks.agree("reading of validation data", "shard 9 is gone", DataError)

        with patch.object(validation.Evaluation, "_validate", unreadable):
            return slowly(0.3, None, config_file, *overrides)
    reading = Trainer._next

    def gone(self: Trainer, *arguments: object) -> tuple:
        if self.progress.step == 3 and self.ranks.rank == 1:
            return None, DataError("shard 7 is gone")
        return reading(self, *arguments)

    with patch.object(Trainer, "_next", gone):
        return slowly(0.3, None, config_file, *overrides)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a step that is not finite", "step-00000003: lower optim.lr"),
        ("a batch that cannot be read", "rank 1: shard 7 is gone"),
        ("validation data that cannot be read", "rank 0: shard 9 is gone"),
    ],
)
def test_a_run_that_fails_while_a_good_step_is_written_keeps_it(pool, config_file, prepared, what, said):
    validated = ("validation.every_steps=3", f"data.validation=[{{path: {prepared}}}]") if "validation" in what else ()
    ranks = pool.launch(2, failing, what, str(config_file), *BESIDE, "parallel.strategy=ddp", *validated)
    assert all(code == 1 and "Traceback" not in printed for code, printed in ranks), ranks
    run = run_directory(config_file)
    assert [path.name for path in files.complete_checkpoints(run / "checkpoints")] == ["step-00000003"] and said in ranks[0][1]


def cut_short(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose first save ends as torch's file format does when the disk, or the limit of a file, is full."""

    def short(*arguments: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with patch.object(dcp.FileSystemWriter, "write_data", short):
        return run_main(config_file, *overrides)


def test_a_write_that_comes_up_short_asks_about_the_disk(pool, config_file):
    [(code, printed)] = pool.launch(1, cut_short, str(config_file), *SHORT, "parallel.strategy=single")
    [line] = [line for line in printed.splitlines() if line.startswith("error:")]
    assert code == 1 and "is the disk full, or a limit of file sizes reached?" in line and "unexpected pos 704" in line


class Seen(Callback):
    """Remembers what was saved, and ends the run."""

    def __init__(self, until: int) -> None:
        self.until, self.saves = until, []

    def evaluate(self, run, step):
        if step == self.until:
            run.stop("seen enough")
        return {}

    def on_save(self, run, step, checkpoint):
        self.saves.append((step, checkpoint.name, files.exists(checkpoint / files.MANIFEST)))


def stopped(config_file: str, *overrides: str) -> list[tuple[int, str, bool]]:
    seen = Seen(4)
    assert main(["--config", config_file, *overrides], callbacks=[seen]) == 0
    return seen.saves


def test_a_run_that_is_ended_waits_for_its_last_save_and_callbacks_hear_of_complete_ones(pool, config_file):
    [saves] = pool.launch(1, stopped, str(config_file), *BESIDE, "parallel.strategy=single")
    assert saves == [(3, "step-00000003", True), (4, "step-00000004", True)]


KILLED = """
import sys, time
from pretrain.checkpoint.save import Saving
from pretrain.run import main
write = Saving.write
def slow(self):
    if self.target.name == "step-00000006":
        self.writer.write_data(self.plan, self.planner)
        print("WRITING", flush=True)
        time.sleep(600)
    write(self)
Saving.write = slow
sys.exit(main(sys.argv[1:]))
"""


BROKEN = """
import sys, time
from pretrain.checkpoint.save import Saving
from pretrain.run import main
from pretrain.train.trainer import Trainer
write, step = Saving.write, Trainer.step
def slow(self):
    if self.thread is not None:
        time.sleep(1)
    write(self)
def broken(self, *arguments):
    if self.progress.step == 3:
        raise RuntimeError("a defect")
    return step(self, *arguments)
Saving.write, Trainer.step = slow, broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_with_a_defect_ends_with_its_traceback_when_its_save_is_written(config_file):
    """torch's threads would abort a process that ends while they write."""
    words = [sys.executable, "-c", BROKEN, "--config", config_file, *BESIDE, "parallel.strategy=single"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and "RuntimeError: a defect" in done.stdout + done.stderr
    checkpoints = run_directory(config_file) / "checkpoints"
    assert [path.name for path in files.complete_checkpoints(checkpoints)] == ["step-00000003"] and not list(checkpoints.glob(".*"))


def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_before(pool, config_file):
    straight = train(pool, 1, config_file, "run.name=straight", *SHORT, "parallel.strategy=single")
    arguments = ["--config", str(config_file), *BESIDE, "parallel.strategy=single"]
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stdout:
        if "WRITING" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    run = Path(run_directory(config_file))
    assert [path.name for path in files.complete_checkpoints(run / "checkpoints")] == ["step-00000003"]
    assert list((run / "checkpoints").glob(".writing-step-00000006"))
    resumed = train(pool, 1, config_file, *BESIDE, "parallel.strategy=single")
    one, other = state_of(straight, 9), state_of(resumed, 9)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not list((run / "checkpoints").glob(".*"))


def parts_of_removals(config_file: str, *overrides: str) -> tuple[int, list[list[tuple[str, bool]]]]:
    """Exit code of a run, and the part that its main thread is in while old checkpoints are chosen, and at the end of each removal."""
    parts, seen, choose, part, remove = [], [], retention.outdated, Ranks.part, files.remove

    @contextmanager
    def named(self, name, storage=False, **kinds):
        parts.append((name, storage))
        with part(self, name, storage=storage, **kinds):
            yield
        parts.pop()

    def slowly_removed(path):
        if path.exists():  # a save begins with the removal of what an earlier one may have left
            time.sleep(1)
            seen.append(parts[-1:])
        return remove(path)

    chosen = patch.object(retention, "outdated", lambda *a: seen.append(parts[-1:]) or choose(*a))
    with patch.object(Ranks, "part", named), chosen, patch.object(files, "remove", slowly_removed):
        return run_main(config_file, *overrides)[0], seen


def test_a_rank_that_chooses_old_checkpoints_or_waits_for_their_removal_says_so(pool, config_file):
    """On storage that hangs, the others were told of what the rank had done before."""
    options = ("run.steps=2", "schedule.warmup_steps=0", "checkpoint={every_steps: 1, keep_last: 1}")
    [(code, seen)] = pool.launch(1, parts_of_removals, str(config_file), *options)
    assert code == 0 and seen == [[("removal of older checkpoints", True)]] * 3
