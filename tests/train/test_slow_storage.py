"""A run on slow storage: what observes it is written beside training, in order, and nothing of it is lost."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from unittest.mock import patch

import pytest
from launch_pool import start_ranks
from running import losses, run_main, train
from test_interruptions import steps_logged, wait_for

from pretrain.observe.metrics import METRICS_FILE, read_metrics
from pretrain.run import main

SHORT = ("run.steps=6", "schedule={name: constant, warmup_steps: 0}", "log.every_steps=1")


def with_slow_storage(seconds: float, failing: str, config_file: str, *overrides: str) -> tuple[int, str, list[float]]:
    """A run whose metrics and status take so long to write, and when its steps began. `failing`: a defect in the third line, or none."""
    from pretrain.observe import sinks
    from pretrain.train import run_directory, trainer

    append, replace, step, began = sinks.append_line, run_directory.replace_text, trainer.Trainer.step, []

    def slow_append(path, text):
        time.sleep(seconds)
        if failing and json.loads(text)["step"] == 3:
            raise ZeroDivisionError(failing)
        append(path, text)

    def slow_replace(path, text, durable):
        time.sleep(seconds if path.name == "status.json" else 0)
        replace(path, text, durable)

    def timed(trainer, *batch):
        began.append(time.monotonic())
        return step(trainer, *batch)

    with (
        patch.object(sinks, "append_line", slow_append),
        patch.object(run_directory, "replace_text", lambda path, text, durable=True: slow_replace(path, text, durable)),
        patch.object(trainer.Trainer, "step", timed),
    ):
        return *run_main(config_file, *overrides), began


def test_slow_storage_does_not_hold_up_a_step_and_all_lines_are_written(pool, config_file):
    """s51: with 0.3 s for each write, a step took 0.68 s in place of 0.09."""
    [(code, printed, began)] = pool.launch(1, with_slow_storage, 0.25, "", str(config_file), *SHORT)
    assert code == 0, printed
    assert statistics.median(later - earlier for earlier, later in zip(began, began[1:])) < 0.25  # it waited for two writes
    run = config_file.parent / "runs" / "run"
    lines = [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5, 6]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 6


def test_a_defect_in_writing_ends_the_run_as_any_other(pool, config_file):
    """Only an OSError of our own sinks is tolerated: whatever else fails there is raised in the training thread."""
    [error] = pool.launch(1, defect_of, str(config_file), *SHORT)
    run = config_file.parent / "runs" / "run"
    assert error == "ZeroDivisionError: a defect of ours"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and status["reason"] == "a defect of ours"
    logged = [record["step"] for record in read_metrics(run)]
    assert logged[:2] == [1, 2] and 3 not in logged


def defect_of(config_file: str, *overrides: str) -> str:
    try:
        code, printed, _ = with_slow_storage(0.0, "a defect of ours", config_file, *overrides)
    except ZeroDivisionError as error:
        return f"ZeroDivisionError: {error}"
    return f"{code}: {printed}"


def test_a_run_that_fails_has_the_lines_of_all_its_steps(pool, config_file):
    [(code, printed)] = pool.launch(1, failing_late, str(config_file), *SHORT)
    assert code == 1 and "error: step 5 fails" in printed
    run = config_file.parent / "runs" / "run"
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"


def failing_late(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run that ends by an exception in step 5, while its lines are slow to write."""
    from pretrain.errors import TrainingError
    from pretrain.observe import sinks
    from pretrain.train.trainer import Trainer

    append, step = sinks.append_line, Trainer.step

    def fail(trainer, *batch):
        if trainer.progress.step == 4:
            raise TrainingError("step 5 fails")
        return step(trainer, *batch)

    with patch.object(sinks, "append_line", lambda *line: (time.sleep(0.1), append(*line))), patch.object(Trainer, "step", fail):
        return run_main(config_file, *overrides)


def slowly(kills: bool, config_file: str, *overrides: str) -> int:
    """A run whose lines take 0.1 s each; it may be killed when its first checkpoint is there."""
    from pretrain.checkpoint.save import Saving
    from pretrain.observe import sinks

    append, finish = sinks.append_line, Saving.finish

    def killed(saving):
        finish(saving)
        os.kill(os.getpid(), signal.SIGKILL)

    sinks.append_line, Saving.finish = lambda *line: (time.sleep(0.1), append(*line)), killed if kills else finish
    return main(["--config", config_file, *overrides])


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_kill_right_after_a_checkpoint_loses_no_line_before_it(pool, config_file, tmp_path, asynchronous):
    """The start from it makes up for the line of its own step, and for no other."""
    options = (*SHORT, "checkpoint.every_steps=4", f"checkpoint.asynchronous={asynchronous}")
    [process] = start_ranks(tmp_path, 1, slowly, True, str(config_file), *options)
    assert process.wait(60) == -signal.SIGKILL, process.printed()
    run = config_file.parent / "runs" / "run"
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert [record["step"] for record in read_metrics(run)][:3] == [1, 2, 3]
    train(pool, 1, config_file, *options)
    assert len(losses(run)) == 6


def test_a_kill_right_after_a_checkpoint_loses_no_line_with_statistics_of_layers(pool, config_file, tmp_path):
    """The start from it made up only for lines of `log.every_steps`."""
    options = (*SHORT, "log={every_steps: 10, layers_every_steps: 4}", "checkpoint.every_steps=4")
    [process] = start_ranks(tmp_path, 1, slowly, True, str(config_file), *options)
    assert process.wait(60) == -signal.SIGKILL, process.printed()
    run = config_file.parent / "runs" / "run"
    assert [record["step"] for record in read_metrics(run)] == [1]
    train(pool, 1, config_file, *options)
    assert [(record["step"], "gradient_norms" in record) for record in read_metrics(run)] == [(1, False), (4, True), (6, False)]


def test_a_stop_by_a_signal_writes_all_lines_before_the_status(config_file, tmp_path):
    run = config_file.parent / "runs" / "run"
    [process] = start_ranks(tmp_path, 1, slowly, False, str(config_file), *SHORT, "run.steps=3000")
    try:
        wait_for(lambda: steps_logged(run) >= 3, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, process.printed()
    finally:
        process.process.kill()
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "preempted"
    assert [record["step"] for record in read_metrics(run)] == list(range(1, status["step"] + 1))
