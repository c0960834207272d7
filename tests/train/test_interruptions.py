"""Runs that are killed, signalled, fed nonsense, or out of disk, started by torchrun as users start them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from launch_pool import RankProcess, start_ranks
from running import largest_relative_difference, losses, run_main, train

from pretrain.distributed.monitor import STOP_SIGNALS
from pretrain.observe.metrics import METRICS_FILE, read_metrics
from pretrain.run import main
from pretrain.train.stop import StopRequest

ROOT = Path(__file__).resolve().parents[2]
SLOW_STEPS = ("model.dim=128", "model.layers=3", "data.sequence_length=128", "model.ffn_dim=256")


@contextlib.contextmanager
def started(config_file: Path, world_size: int, *overrides: str) -> Iterator[subprocess.Popen]:
    """torchrun with a run. No process of it is left at the end, or a test that fails would slow down all others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    arguments = [str(ROOT / "pretrain" / "run.py"), "--config", str(config_file), *overrides]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *arguments], **pipes, env=environment, start_new_session=True) as agent:
        try:
            yield agent
        finally:
            if agent.poll() is None:
                for process in [agent.pid, *rank_processes(agent)]:
                    os.kill(process, signal.SIGKILL)


def wait_for(condition, process: subprocess.Popen | RankProcess, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        assert process.poll() is None, process.printed() if isinstance(process, RankProcess) else process.stdout.read()
        time.sleep(0.02)


def steps_logged(run: Path) -> int:
    try:
        return read_metrics(run)[-1]["step"]
    except (OSError, IndexError):
        return 0


def rank_processes(agent: subprocess.Popen) -> list[int]:
    """Process ids of the ranks, in rank order."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ranks = {}
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [v for v in environment if v.startswith(b"RANK=")]
        if rank:
            ranks[int(rank[0].removeprefix(b"RANK="))] = int(pid)
    return [ranks[rank] for rank in sorted(ranks)]


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


@pytest.mark.parametrize(("world_after", "options"), [
    pytest.param(3, ("parallel.strategy=fsdp", "batch.micro_sequences=2"), marks=pytest.mark.slow),
    pytest.param(2, ("parallel.strategy=ddp", "batch.micro_sequences=2"), marks=pytest.mark.slow),
], ids=["resumed as fsdp on 3", "resumed in the same layout"])  # fmt: skip
def test_a_run_whose_rank_is_killed_continues_as_if_it_had_not_been(pool, config_file, world_after, options):
    shared = (*SLOW_STEPS, "batch.sequences=12", "run.steps=40", "checkpoint.every_steps=20")
    ddp = ("parallel.strategy=ddp", "batch.micro_sequences=2")
    straight = train(pool, 2, config_file, "run.name=straight", *shared, *ddp)
    run = config_file.parent / "runs" / "killed"
    with started(config_file, 2, "run.name=killed", *shared, *ddp) as agent:
        wait_for(lambda: (run / "checkpoints" / "step-00000020").is_dir() and steps_logged(run) >= 23, agent)
        os.kill(rank_processes(agent)[1], signal.SIGKILL)
        printed, _ = agent.communicate(timeout=60)
    assert agent.returncode == 1 and 23 <= steps_logged(run) < 40, printed
    train(pool, world_after, config_file, "run.name=killed", *shared, *options)
    assert status(run).items() >= {"state": "finished", "step": 40, "reason": None, "checkpoint": "step-00000040"}.items()
    batches = [[record["batch"] for record in read_metrics(r)] for r in (run, straight)]
    assert batches[0] == batches[1] and len(set(batches[0])) == 40
    if world_after == 2:
        assert losses(run) == losses(straight)
    else:
        assert largest_relative_difference(losses(run), losses(straight)) <= 2e-6


@pytest.mark.slow  # by default, ranks without torchrun get SIGTERM in a validation, below
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_one_rank_leaves_a_checkpoint_of_the_next_step_and_exit_code_0(config_file, number):
    run = config_file.parent / "runs" / "run"
    with started(config_file, 2, *SLOW_STEPS, "parallel.strategy=ddp", "run.steps=2000") as agent:
        wait_for(lambda: steps_logged(run) >= 3, agent)
        os.kill(rank_processes(agent)[1], number)
        printed, _ = agent.communicate(timeout=60)
    assert agent.returncode == 0, printed
    assert status(run)["state"] == "preempted"
    step = status(run)["step"]
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == [f"step-{step:08d}"]
    assert step == steps_logged(run)


@pytest.mark.parametrize("piece", [0.002, 0.2, 7.0])
def test_long_work_asks_about_once_a_second_whether_to_stop(monkeypatch, piece):
    """T-D2: often enough to be in time, and seldom enough to cost nothing."""
    from types import SimpleNamespace

    from pretrain.train import stop

    clock, asked = SimpleNamespace(now=0.0), []
    ranks = SimpleNamespace(world_size=2, sum=lambda name, values: asked.append(clock.now) or 2 * values)
    monkeypatch.setattr(stop.time, "monotonic", lambda: clock.now)
    request = SimpleNamespace(reason=None)
    poll = stop.StopPoll(request, ranks)
    while clock.now < 30:
        clock.now += piece
        poll.check()
    gaps = [later - earlier for earlier, later in zip(asked[10:], asked[11:])]
    assert len(asked) <= 60 and max(gaps, default=piece) <= max(1.05, piece + 1e-9)
    request.reason = "SIGTERM"
    with pytest.raises(stop.Stopped):
        for _ in range(int(1.1 / piece) + 1):
            clock.now += piece
            poll.check()


def long_validation(prepared: Path) -> str:
    """Sources that take minutes to validate on."""
    return "data.validation=[" + ", ".join(f"{{path: {prepared}, name: v{i}}}" for i in range(40)) + "]"


def test_a_stop_within_validation_saves_first_and_ends_at_once(pool, config_file, prepared, tmp_path):
    """T-D2: SIGTERM during validation was not looked at, and torchrun killed all ranks, whose last checkpoint was long ago."""
    run = config_file.parent / "runs" / "run"
    validating = (
        *SLOW_STEPS,
        long_validation(prepared),
        "validation.sequences=0",
        "batch.micro_sequences=1",
        "checkpoint.every_steps=2",
    )
    short = ("parallel.strategy=ddp", "run.steps=2", "schedule.warmup_steps=0")
    ranks = start_ranks(tmp_path, 2, main, ["--config", str(config_file), *validating, *short])
    try:
        # The checkpoint is there as soon as the validation of that step begins, which is the last one of the run.
        wait_for(lambda: (run / "checkpoints" / "step-00000002").is_dir(), ranks[0])
        time.sleep(1)
        assert steps_logged(run) == 1
        began = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGTERM)
        codes, took = [rank.wait(60) for rank in ranks], time.monotonic() - began
    finally:
        for rank in ranks:
            rank.process.kill()
    printed = ranks[0].printed()
    assert codes == [0, 0] and took < 25, printed  # torchrun would kill after 30
    assert status(run)["state"] == "preempted" and status(run)["checkpoint"] == "step-00000002", printed
    assert "asked to stop: the validation of step 2 was abandoned" in printed
    last = read_metrics(run)[-1]
    assert last["step"] == 2 and last["loss"] > 0 and "validation" not in last
    # The same command finishes what is left, which is the validation of the last step.
    again = (*SLOW_STEPS, "run.steps=2", "schedule.warmup_steps=0", f"data.validation=[{{path: {prepared}, name: v}}]")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *again)
    assert code == 0 and "validation v " in printed and "finished at step 2" in printed
    finished = read_metrics(run)[-1]
    assert finished.items() >= last.items() and 0 < finished["validation"]["v"] < 6
    assert len((run / METRICS_FILE).read_text().splitlines()) == 3 and len(read_metrics(run)) == 2
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *again)  # a finished run has nothing left
    assert code == 0 and "validation v" not in printed


def test_a_validation_that_is_made_up_has_the_numbers_of_its_step_though_the_log_is_lost(pool, config_file, prepared):
    """The line had no loss, though the checkpoint holds it."""
    run = config_file.parent / "runs" / "run"
    options = ("run.steps=2", "schedule.warmup_steps=0", f"data.validation=[{{path: {prepared}, name: v}}]")
    assert pool.launch(1, run_main, str(config_file), *options)[0][0] == 0
    before = read_metrics(run)[-1]
    (run / "status.json").write_text(json.dumps(status(run) | {"state": "preempted"}))
    (run / METRICS_FILE).unlink()
    assert pool.launch(1, run_main, str(config_file), *options)[0][0] == 0
    after = read_metrics(run)[-1]
    assert [after[name] for name in ("step", "loss", "grad_norm", "validation")] == [before[name] for name in ("step", "loss", "grad_norm", "validation")]


def test_ctrl_c_on_a_single_process_saves_and_the_same_command_continues(pool, config_file):
    run = config_file.parent / "runs" / "run"
    command = [
        sys.executable,
        str(ROOT / "pretrain" / "run.py"),
        "--config",
        str(config_file),
        "run.steps=60",
        "log.every_steps=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: steps_logged(run) >= 3, process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "preempted" in printed
    stopped = status(run)["step"]
    assert 3 <= stopped < 60
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "run.steps=60", f"run.resume={run}")
    assert code == 0 and f"step-{stopped:08d}: step {stopped}" in printed and "finished at step 60" in printed


def test_a_terminal_that_is_closed_leaves_a_checkpoint(config_file):
    """SIGHUP ended the run at once, with what it had computed since the last save."""
    run, (ours, its) = config_file.parent / "runs" / "run", os.openpty()
    command = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(config_file), "run.steps=2000"]
    # The tests themselves may have been started by nohup, which a run inherits.
    hears = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=its, stderr=its, preexec_fn=hears)
    os.close(its)
    deadline = time.monotonic() + 90
    while steps_logged(run) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.close(ours)  # from now on it cannot write there
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    step = status(run)["step"]
    assert status(run).items() >= {"state": "preempted", "checkpoint": f"step-{step:08d}"}.items() and step < 2000


def test_signals_after_the_last_line_do_not_make_a_failure_of_a_saved_run(config_file):
    """They were given back before the process had ended: exit code -15, or 130 and a traceback, although the run was saved."""
    command = [sys.executable, "-u", str(ROOT / "pretrain" / "run.py"), "--config", str(config_file), "run.steps=3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        printed, sent = [], 0
        for line in process.stdout:
            printed.append(line)
            if "step" in line and "loss" in line and not sent:
                process.send_signal(signal.SIGTERM)
                sent = 1
            if "preempted at step" in line:
                break
        while process.poll() is None:
            process.send_signal(STOP_SIGNALS[sent % len(STOP_SIGNALS)])
            sent += 1
            time.sleep(0.01)
        printed += process.stdout.readlines()
    assert process.returncode == 0 and sent > 3, printed
    assert "preempted at step" in printed[-1]


def test_a_run_that_nohup_has_started_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_where_nothing_is_trained_is_one_line(capsys):
    """e15: before training began, it printed a traceback."""
    with patch("pretrain.run.run", side_effect=KeyboardInterrupt):
        assert main(["--config", "any.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def fail_and_run_again(config_file: str) -> tuple[list[int], bool]:
    """Exit codes of a run that fails and of another one in the same process, and whether the first gave the signals back."""
    options = ("parallel.strategy=fsdp", "parallel.shard=1", "schedule={name: constant, warmup_steps: 0}")
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    first = run_main(config_file, *options, "optim.lr=1e30", "run.steps=5", "run.name=fails")[0]
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    return [first, run_main(config_file, *options, "run.steps=2", "run.name=next")[0]], after == before


def test_a_script_can_run_again_after_a_failure(pool, config_file):
    """e5, e16: signals stayed with the failed run, and its process groups refused the next one."""
    [(codes, gave_back)] = pool.launch(1, fail_and_run_again, str(config_file))
    assert codes == [1, 0] and gave_back


def test_a_checkpoint_is_saved_when_its_time_has_come(pool, config_file):
    options = ("run.steps=3", "checkpoint.keep_last=0")
    timed = sorted(
        path.name for path in (train(pool, 1, config_file, *options, "checkpoint.every_seconds=1e-6") / "checkpoints").iterdir()
    )
    last = sorted(path.name for path in (train(pool, 1, config_file, *options, "run.name=other") / "checkpoints").iterdir())
    assert last == [timed[-1]] and len(timed) == 4  # one before the first step


def test_a_loss_that_is_not_a_number_stops_the_run_before_the_step_is_taken(pool, config_file):
    overrides = ("optim.lr=1e30", "schedule.warmup_steps=0", "checkpoint.every_steps=1", "parallel.strategy=ddp")
    for code, _ in (results := pool.launch(2, run_main, str(config_file), *overrides)):
        assert code == 1
    assert "error: step 2: loss nan" in results[0][1] and "rank 1: samples" in results[0][1]
    assert "the last checkpoint is " in results[0][1] and "/step-00000001: lower optim.lr" in results[0][1]
    run = config_file.parent / "runs" / "run"
    assert status(run)["state"] == "failed" and "loss nan" in status(run)["reason"]
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert "Traceback" in (run / "logs" / "rank-1.log").read_text() and "Traceback" not in results[0][1]


def save_with_little_room(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run in which no file can grow beyond 20 kB from the second checkpoint on, as on a full disk."""
    import resource

    from pretrain.checkpoint.save import Saving

    write, calls = Saving.write, []
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited(self):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        write(self)

    Saving.write = limited
    try:
        return run_main(config_file, *overrides)
    finally:
        Saving.write = write
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_while_saving_leaves_the_previous_checkpoint_good(pool, config_file, background):
    overrides = ("checkpoint.every_steps=5", f"checkpoint.asynchronous={background}", "parallel.strategy=fsdp", "run.steps=20")
    results = pool.launch(2, save_with_little_room, str(config_file), *overrides)
    run = config_file.parent / "runs" / "run"
    assert [code for code, _ in results] == [1, 1]
    assert "checkpoint of step 10 could not be saved" in results[0][1]
    assert "File too large" in results[0][1] and "step-00000005 stays good" in results[0][1]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000005"]
    assert status(run)["state"] == "failed"
    train(pool, 2, config_file, *overrides)  # with room again, it goes on from there
    assert status(run)["state"] == "finished"


def test_the_numbers_of_a_step_outlive_a_kill_between_its_checkpoint_and_its_line(pool, config_file):
    """Found by the campaign of interruptions: the loss of that step was in no log."""
    straight = read_metrics(train(pool, 1, config_file, "run.steps=4", "run.name=straight", "checkpoint.every_steps=2"))
    run = train(pool, 1, config_file, "run.steps=4", "checkpoint.every_steps=2")
    metrics = run / METRICS_FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3]
    again = read_metrics(train(pool, 1, config_file, "run.steps=4", "checkpoint.every_steps=2"))
    numbers = [
        [{name: record[name] for name in ("step", "loss", "grad_norm", "lr", "batch")} for record in r]
        for r in (again, straight)
    ]
    assert numbers[0] == numbers[1]
