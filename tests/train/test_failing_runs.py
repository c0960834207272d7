"""A failure that all ranks know of between two steps: the steps since the last save are kept, and the failure is what is told."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest.mock import patch

import pytest
from running import run_directory, run_main
from test_steps_ahead import settled_late

from pretrain.checkpoint import files
from pretrain.checkpoint.save import Saving
from pretrain.errors import CheckpointError, DataError
from pretrain.run import main
from pretrain.train.callbacks import Callback
from pretrain.train.trainer import Trainer

SHORT = ("run.steps=9", "schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=0")


def unreadable(after: int, full: bool, late: bool, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose last rank cannot read the batch that follows step `after`. `full`: nor can anything be saved. `late`: as on a GPU."""
    reading = Trainer._next

    def gone(self: Trainer, *arguments: object) -> tuple:
        if self.progress.step == after and self.ranks.rank == self.ranks.world_size - 1:
            return None, DataError("shard 7 is gone")
        return reading(self, *arguments)

    def no_room(self: Saving) -> None:
        raise CheckpointError("No space left on device")

    with patch.object(Trainer, "_next", gone), patch.object(Saving, "begin", no_room if full else Saving.begin):
        return settled_late("plain", config_file, *overrides) if late else run_main(config_file, *overrides)


def kept(config_file: Path) -> list[str]:
    return [path.name for path in files.complete_checkpoints(run_directory(config_file) / "checkpoints")]


def error_of(printed: str) -> str:
    assert "Traceback" not in printed
    [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(("ranks", "late"), [(2, False), (1, True), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_batch_that_cannot_be_read_costs_no_step(pool, config_file, ranks, late):
    """Up to checkpoint.every_seconds of good steps were lost, where a stop at the same place saves."""
    strategy = "parallel.strategy=auto"
    for code, printed in pool.launch(ranks, unreadable, 4, False, late, str(config_file), *SHORT, strategy):
        assert code == 1 and error_of(printed).endswith("shard 7 is gone")
    assert kept(config_file) == ["step-00000004"]
    [(code, printed), *_] = pool.launch(ranks, run_main, str(config_file), *SHORT, strategy)
    assert code == 0 and "resumed from" in printed and kept(config_file) == ["step-00000004", "step-00000009"]
    # A start that has made no step has nothing to save.
    [(code, printed), *_] = pool.launch(ranks, unreadable, 9, False, late, str(config_file), *SHORT, strategy, "run.steps=12", "run.accept_changes=[run.steps]")  # fmt: skip
    assert code == 1 and "shard 7 is gone" in printed and kept(config_file) == ["step-00000004", "step-00000009"]


def test_a_run_that_fails_before_its_first_step_leaves_no_checkpoint(pool, config_file):
    [(code, printed)] = pool.launch(1, unreadable, 0, False, False, str(config_file), *SHORT)
    assert code == 1 and error_of(printed) == "error: shard 7 is gone" and kept(config_file) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_does_not_hide_why_the_run_ended(pool, config_file, ranks):
    for code, printed in pool.launch(ranks, unreadable, 4, True, False, str(config_file), *SHORT, "parallel.strategy=auto"):
        assert code == 1 and error_of(printed).endswith("shard 7 is gone")
    assert "could not be saved: checkpoint of step 4 could not be saved: No space left on device" in (
        run_directory(config_file) / "logs" / "rank-0.log"
    ).read_text()
    assert kept(config_file) == []


class Mistaken(Callback):
    def __init__(self, method: str) -> None:
        setattr(self, method, self.fail)

    def fail(self, run: object, step: object) -> dict[str, float]:
        if getattr(step, "step", step) == 3:
            raise ZeroDivisionError("a mistake of mine")
        return {}


def mistaken(method: str, config_file: str, *overrides: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["--config", config_file, *overrides], [Mistaken(method)])
    return code, printed.getvalue()


@pytest.mark.parametrize(("ranks", "method"), [(2, "on_record"), (1, "evaluate")])
def test_a_mistake_in_a_callback_costs_no_step(pool, config_file, ranks, method):
    [(code, printed), *_] = pool.launch(ranks, mistaken, method, str(config_file), *SHORT, "parallel.strategy=auto")
    assert code == 1 and f"the callback Mistaken.{method}: ZeroDivisionError: a mistake of mine" in error_of(printed)
    assert kept(config_file) == ["step-00000003"]
