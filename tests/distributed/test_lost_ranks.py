"""Ranks that hang, stop, die or fail: the others end with one line that names them, in time; and slow ones are left alone."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from launch_pool import RankProcess, start_ranks

from pretrain.distributed import ranks as ranks_file
from pretrain.distributed.monitor import Monitor
from pretrain.run import main


def misbehave(how: str, seconds: float) -> None:
    if how == "sleep":
        time.sleep(seconds)
    elif how == "work":
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "fail":
        raise TypeError("a defect of ours")


def train_badly(
    place: str, how: str, seconds: float, limits: dict[str, float], config_file: str, *overrides: str, bad: int | None = 1
) -> int:
    """A run whose rank 1 (or `bad`; None: every rank) misbehaves once, at a place in the code. `limits`: constants of the monitor or of ranks.py."""
    for constant, value in limits.items():
        monitor = importlib.import_module("pretrain.distributed.monitor")
        setattr(monitor if hasattr(monitor, constant) else ranks_file, constant, value)
    from pretrain.checkpoint import save
    from pretrain.data.training_data import Loader
    from pretrain.parallel.pipeline import PipelineAxis
    from pretrain.parallel.ring import _Travelling
    from pretrain.parallel.strategy import Strategy

    owner, name, when = {
        "next batch": (Loader, "read", 4),
        "forward": (Strategy, "_micro_step", 7),  # 2 micro-steps to a step: in step 4
        "pass": (PipelineAxis, "_forward", 7),  # 4 micro-batches to a step: in step 2
        "ring": (_Travelling, "take", 40),  # 4 micro-batches of 2 layers, of which each takes 3 messages: in step 2
        "save": (save.Saving, "write", 1),
        "flush": (save, "flush", 1),
    }[place]
    real, calls = getattr(owner, name), []

    def bent(*arguments):
        calls.append(1)
        if len(calls) == when and (bad is None or os.environ["RANK"] == str(bad)):
            misbehave(how, seconds)
        return real(*arguments)

    with patch.object(owner, name, bent):
        return main(["--config", config_file, *overrides])


@pytest.fixture
def started(tmp_path, config_file) -> Iterator[Callable[..., list[RankProcess]]]:
    """Start two ranks of which one misbehaves; what is left of them is killed at the end of the test."""
    ranks: list[RankProcess] = []

    def start(place: str, how: str, *overrides: str, seconds: float = 1000, world_size: int = 2, **limits: float):
        overrides = ("parallel.strategy=ddp", "data.workers=0", *overrides)
        ranks.extend(start_ranks(tmp_path, world_size, train_badly, place, how, seconds, limits, str(config_file), *overrides))
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()


def status(config_file: Path) -> dict:
    found = json.loads((config_file.parent / "runs" / "run" / "status.json").read_text())
    return {name: found[name] for name in ("state", "step", "reason")}


def log_of(config_file: Path, rank: int) -> str:
    return (config_file.parent / "runs" / "run" / "logs" / f"rank-{rank}.log").read_text()


def errors(rank: RankProcess) -> list[str]:
    assert "gloo" not in rank.printed() and "Traceback" not in rank.printed(), rank.printed()
    return [line for line in rank.printed().splitlines() if line.startswith("error: ")]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


HERE = os.uname().nodename


def test_a_rank_that_hangs_is_named_with_what_it_does_and_ends_too(started, config_file):
    """T-D7: a time-out names the missing rank, its host, the operation and the limit, in status.json as well."""
    zero, one = started("next batch", "sleep", "parallel.timeout_seconds=4", LOST_SECONDS=2.0)
    assert zero.wait(120) == 1
    (line,) = errors(zero)
    assert line.startswith(
        "error: 'start of step 4' was not reached by every rank within 4 s (parallel.timeout_seconds): "
        f"rank 1 ({HERE}) has been in 'step 4: next batch' for "
    )
    assert line.endswith(f"; look at {config_file.parent}/runs/run/logs/rank-1.log")
    assert status(config_file) == {"state": "failed", "step": 3, "reason": line.removeprefix("error: ")}
    assert "Traceback" in log_of(config_file, 0) and "Timed out" in log_of(config_file, 0)
    # The rank that hangs cannot look: its monitor ends it, with the same line, and writes down where it hung.
    assert one.wait(20) == 1
    assert errors(one) == [line]
    assert "the stacks of all threads" in log_of(config_file, 1) and "misbehave" in log_of(config_file, 1)


@pytest.mark.parametrize(("how", "said"), [
    ("die", "rank 1 ({}) is gone without a word (killed?)"),
    ("sleep", "'start of step 4' was not reached by every rank within 4 s (parallel.timeout_seconds): rank 1 ({}) has been in 'step 4: next batch'"),
])  # fmt: skip
def test_a_rank_that_is_lost_is_named_by_all_where_sums_are_made_in_two_stages(started, config_file, how, said):
    """Rank 0 adds up with rank 1, rank 2 with rank 3, and only then with rank 0: it waits for a rank that waits."""
    limits = {"TWO_STAGE_RANKS": 4} | ({"LOST_SECONDS": 2.0} if how == "sleep" else {})
    ranks = started("next batch", how, "parallel.timeout_seconds=4", world_size=4, **limits)
    for rank in (ranks[0], *ranks[2:]):
        assert rank.wait(120) == 1
        (line,) = errors(rank)
        assert said.format(HERE) in line, line


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_in_a_pass_of_a_pipeline_is_named_in_time(started, config_file, tensor):
    """Groups of some of the ranks had torch's time limits: 30 minutes on gloo."""
    layout = "parallel.strategy=fsdp", "parallel.pipeline=2", f"parallel.tensor={tensor}"
    ranks = started("pass", "sleep", *layout, "parallel.timeout_seconds=4", world_size=2 * tensor, LOST_SECONDS=2.0)
    assert ranks[0].wait(60) == 1
    (line,) = errors(ranks[0])
    assert line.startswith(
        "error: 'step 2: forward and backward' did not come to an end within 4 s (parallel.timeout_seconds)"
    ), line
    assert ranks[1].wait(20) == 1


@pytest.mark.parametrize(("how", "said"), [
    ("die", f"'step 2: forward and backward' broke off: rank 1 ({HERE}) is gone without a word (killed?)"),
    pytest.param(
        "stop",
        f"'step 2: forward and backward' did not come to an end within 4 s (parallel.timeout_seconds): rank 1 ({HERE}) does not answer",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_a_rank_that_is_lost_in_a_ring_is_named_in_time(started, config_file, how, said):
    ring = "parallel.strategy=fsdp", "parallel.context=2", "parallel.context_method=ring", "parallel.timeout_seconds=4"
    zero, _ = started("ring", how, *ring)
    assert zero.wait(60) == 1
    (line,) = errors(zero)
    assert said in line, line


def test_a_rank_that_is_killed_is_named_at_once(started, config_file):
    """T-D7: "Connection closed by peer" becomes a line that names the rank that is gone and points at its log."""
    zero, one = started("next batch", "die")
    assert one.wait(120) == -signal.SIGKILL
    began = time.monotonic()
    assert zero.wait(30) == 1
    assert time.monotonic() - began < 10
    (line,) = errors(zero)
    assert f"'start of step 4' broke off: rank 1 ({HERE}) is gone without a word (killed?)" in line
    assert line.endswith("logs/rank-1.log") and status(config_file)["reason"] == line.removeprefix("error: ")


def test_a_rank_that_fails_alone_gives_its_reason_to_the_others(started, config_file):
    """T-D7: the others' line is the failing rank's own, not that a connection was closed."""
    zero, one = started("forward", "fail")
    assert one.wait(120) == 1 and "TypeError: a defect of ours" in one.printed()
    assert zero.wait(30) == 1
    (line,) = errors(zero)
    assert line == (
        f"error: rank 1 ({HERE}) has ended: TypeError: a defect of ours; look at {config_file.parent}/runs/run/logs/rank-1.log"
    )


@pytest.mark.parametrize(("place", "strategy"), [
    ("forward", "ddp"),
    pytest.param("forward", "fsdp", marks=pytest.mark.slow),
    pytest.param("save", "ddp", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_stops_in_a_part_of_a_step_or_of_a_save_is_named(started, config_file, place, strategy):
    """T-D7: in a collective of gradients, or on the way to the end of a save."""
    overrides = ("parallel.timeout_seconds=4", f"parallel.strategy={strategy}", "checkpoint.every_steps=3")
    zero, _ = started(place, "stop", *overrides)
    assert zero.wait(120) == 1
    (line,) = errors(zero)
    what = {
        "forward": "'step 4: forward and backward' did not come to an end",
        "save": "'payload of a checkpoint' was not reached by every rank",
    }[place]
    assert f"error: {what} within 4 s (parallel.timeout_seconds): rank 1 ({HERE}) does" in line
    assert status(config_file)["reason"] == line.removeprefix("error: ")


def test_the_main_rank_itself_is_named_when_it_is_the_one_that_stops(started, config_file):
    """T-D7: without the switchboard, which is in the main rank's process, a rank says what it knows."""
    overrides = ("parallel.strategy=ddp", "data.workers=0", "parallel.timeout_seconds=4")
    ranks = start_ranks(config_file.parent, 2, train_main_badly, {"_VERDICT_SECONDS": 2.0}, str(config_file), *overrides)
    try:
        assert ranks[1].wait(120) == 1
        (line,) = errors(ranks[1])
        assert f"'start of step 4' did not come to an end within 4 s: rank 0 ({HERE}) does not answer" in line
    finally:
        for rank in ranks:
            rank.process.kill()


def train_main_badly(limits: dict[str, float], config_file: str, *overrides: str) -> int:
    return train_badly("next batch", "stop", 0, limits, config_file, *overrides, bad=0)


def test_the_main_rank_says_for_whom_it_waits_and_a_slow_run_goes_on(started, config_file):
    """OP-6.3, T-D7: while it waits, the console says for whom, at growing intervals; nothing is ended that is merely slow."""
    zero, one = started("next batch", "sleep", "run.steps=5", seconds=8, SAY_SECONDS=1.0)
    assert zero.wait(120) == 0 and one.wait(20) == 0
    said = [line for line in zero.printed().splitlines() if line.startswith("waiting ")]
    assert 2 <= len(said) <= 4, said
    assert all(f"at 'start of step 4': rank 1 ({HERE}) has been in 'step 4: next batch' for" in line for line in said)
    assert status(config_file)["state"] == "finished"


def test_a_rank_that_stands_still_in_the_exchange_of_gradients_is_named_while_the_others_wait(started, config_file):
    """OP-3 c: nobody can say that it waits there, so for a minute no line was printed; a host that was cut off for less was never named."""
    zero, one = started("forward", "stop", "run.steps=5", SAY_SECONDS=1.0)
    line = f"at 'step 4: forward and backward': rank 1 ({HERE}) does not answer (stopped, or its host or network is down)"
    wait_until(lambda: line in zero.printed())
    os.kill(one.pid, signal.SIGCONT)
    assert zero.wait(60) == 0 and one.wait(20) == 0
    assert [text for text in zero.printed().splitlines() if text.startswith("waiting ") and line not in text] == []
    assert status(config_file)["state"] == "finished"


def test_ranks_that_compute_for_long_are_not_said_to_be_waited_for(started, config_file):
    """A step may take minutes: all ranks are in it and answer, so there is nothing to say."""
    zero, one = started("forward", "work", "run.steps=5", seconds=5, SAY_SECONDS=1.0)
    assert zero.wait(120) == 0 and one.wait(20) == 0
    assert "waiting " not in zero.printed()


def test_a_hanging_run_that_is_told_to_stop_ends_and_writes_its_stacks(started, config_file):
    """T-D7: SIGTERM is not swallowed by a rank that hangs, nor by those that wait for it in a collective."""
    zero, one = started("next batch", "sleep", STOP_SECONDS=1.0, IDLE_SECONDS=3.0)
    wait_until(lambda: (config_file.parent / "runs" / "run" / "metrics.jsonl").exists())
    wait_until(lambda: len((config_file.parent / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 3)
    time.sleep(0.5)
    for rank in (zero, one):
        os.kill(rank.pid, signal.SIGTERM)
    assert zero.wait(30) == 1 and one.wait(30) == 1
    line = f"error: told to stop by SIGTERM, and the run hangs: rank 1 ({HERE}) has been in 'step 4: next batch' for "
    assert errors(zero)[0].startswith(line) and errors(one)[0].startswith(line)
    assert "told to stop by SIGTERM, and still in" in log_of(config_file, 1) and "misbehave" in log_of(config_file, 1)
    assert status(config_file)["reason"].startswith(line.removeprefix("error: "))


def test_a_busy_run_that_is_told_to_stop_is_left_to_save(started, config_file):
    """T-D7: a long step is no hang: a rank that computes is waited for, and the run saves."""
    zero, one = started("next batch", "work", seconds=8, STOP_SECONDS=1.0, IDLE_SECONDS=3.0)
    wait_until(lambda: (config_file.parent / "runs" / "run" / "metrics.jsonl").exists())
    wait_until(lambda: len((config_file.parent / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 3)
    for rank in (zero, one):
        os.kill(rank.pid, signal.SIGTERM)
    assert zero.wait(60) == 0 and one.wait(30) == 0
    assert status(config_file) == {
        "state": "preempted", "step": 3, "reason": "asked to stop by a signal; the same command continues",
    }  # fmt: skip
    assert "told to stop by SIGTERM, and still in 'step 4: next batch'" in log_of(config_file, 1)


def test_a_run_that_saves_on_slow_storage_is_left_to_save_when_told_to_stop(started, config_file):
    """F5: a flush that waits where it can be interrupted (FUSE, Lustre) was taken for a hang after a minute, and the work was lost."""
    zero, one = started(
        "flush", "sleep", "checkpoint.every_steps=0", "run.steps=100000", seconds=9, STOP_SECONDS=1.0, IDLE_SECONDS=2.0
    )
    wait_until(lambda: (config_file.parent / "runs" / "run" / "metrics.jsonl").exists())
    wait_until(lambda: len((config_file.parent / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) >= 3)
    for rank in (zero, one):
        os.kill(rank.pid, signal.SIGTERM)
    assert zero.wait(60) == 0 and one.wait(30) == 0, zero.printed()
    assert "told to stop by SIGTERM, and still in 'payload of a checkpoint'" in log_of(config_file, 1)
    found = status(config_file)
    assert found["state"] == "preempted"
    assert (config_file.parent / "runs" / "run" / "checkpoints" / f"step-{found['step']:08d}" / "manifest.json").is_file()


def test_a_rank_that_waits_for_storage_is_busy_until_nobody_waits_for_it_any_more():
    """F5: within `parallel.timeout_seconds` a save counts as busy, after that as any other part."""
    monitor = Monitor(0, 0, timeout_seconds=100.0)
    monitor._active -= 200.0
    with monitor.doing("payload of a checkpoint", storage=True):
        monitor.since -= 99.0
        assert monitor._idle() == 0.0
        monitor.since -= 2.0
        assert monitor._idle() == pytest.approx(101.0, abs=0.5)
    with monitor.doing("step 4: next batch"):
        monitor.since -= 99.0
        assert monitor._idle() == pytest.approx(99.0, abs=0.5)


@pytest.mark.parametrize(("world_size", "seconds"), [(8, 8), (1500, 16), (4096, 21)])
def test_the_more_ranks_are_told_to_stop_the_less_often_each_asks_who_hangs(world_size, seconds):
    """4,096 ranks asked every 7.5 s, while the main rank made their last checkpoint. A longer pause than 20 s would outlast the time that Slurm gives."""
    monitor, asked = Monitor(1, 1, 100.0, world_size), []
    monitor.send = lambda kind, **values: asked.append(now - monitor.since)
    monitor._stop_asked, monitor.heard = monitor.since, float("inf")
    for second in range(120):
        now = monitor.since + second
        monitor._look_at_stop(now)
    assert {round(b - a) for a, b in zip(asked, asked[1:], strict=False)} == {seconds}


def lose_a_rank_unnoticed(limits: dict[str, float], config_file: str, *overrides: str) -> int:
    """As under NCCL: rank 1 dies and rank 0 is somewhere where it cannot notice."""
    return train_badly(
        "next batch", "die" if os.environ["RANK"] == "1" else "sleep", 1000, limits, config_file, *overrides, bad=None
    )


def wait_on_a_device(limits: dict[str, float], config_file: str, *overrides: str) -> int:
    """As under NCCL: a collective that does not come to an end says nothing, and rank 1 is stopped before it."""
    from pretrain.distributed.monitor import Monitor
    from pretrain.distributed.pace import Pace

    real = Monitor.__init__
    Monitor.__init__ = lambda self, rank, local_rank, seconds, *more: real(self, rank, local_rank, 3.0, *more)
    Pace.on_gpu = property(lambda self: True, lambda self, value: None)
    return train_badly("forward", "stop", 0, limits, config_file, *overrides)


@pytest.mark.parametrize(("function", "said"), [
    (lose_a_rank_unnoticed, f"error: rank 1 ({HERE}) is gone without a word (killed?)"),
    pytest.param(wait_on_a_device, "error: 'step 4: forward and backward' did not come to an end within 3 s (parallel.timeout_seconds): "
                       f"rank 1 ({HERE}) does not answer", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_whose_collective_never_fails_is_ended_by_its_monitor(config_file, function, said):
    """T-D7: NCCL notices nothing: the monitor ends the process, with the line in status.json. (NCCL itself: not run.)"""
    overrides = ("parallel.strategy=ddp", "data.workers=0", "parallel.timeout_seconds=600")
    ranks = start_ranks(config_file.parent, 2, function, {"LOST_SECONDS": 2.0}, str(config_file), *overrides)
    try:
        assert ranks[0].wait(120) == 1
        (line,) = errors(ranks[0])
        assert line.startswith(said) and line.endswith("logs/rank-1.log")
        assert status(config_file) == {"state": "failed", "step": 3, "reason": line.removeprefix("error: ")}
        assert "the stacks of all threads" in log_of(config_file, 0)
    finally:
        for rank in ranks:
            rank.process.kill()
