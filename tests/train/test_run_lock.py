"""One trainer in a run directory, with flock and without, on one host and on several."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from running import losses, train

from pretrain.config.schema import Run
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run import main
from pretrain.train import run_lock
from pretrain.train.callbacks import Callback
from pretrain.train.run_directory import RunDirectory, directory_of
from pretrain.train.run_lock import RunLock, sees_token


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"BEAT_SECONDS": 0.2, "STALE_SECONDS": 1.5, "SIGHT_SECONDS": 2.0, "_CONFIRM_SECONDS": 0.2}.items():
        monkeypatch.setattr(run_lock, name, value)


def hold(path: str, kind: str, elsewhere: bool, events) -> None:
    """Another trainer. `elsewhere`: of another host."""
    run_lock.BEAT_SECONDS, run_lock._CONFIRM_SECONDS, run_lock.STALE_SECONDS = 0.2, 0.2, 1.5
    if elsewhere:
        run_lock._where = lambda: "another host"
    try:
        RunLock(Path(path), kind).acquire()
    except CheckpointError as error:
        events.put(str(error))
        return
    events.put("held")
    time.sleep(1000)


@pytest.fixture
def other(tmp_path):
    """Start another trainer in the directory; (process, what it said)."""
    context = multiprocessing.get_context("fork")
    processes = []

    def start(kind: str, elsewhere: bool = False):
        events = context.SimpleQueue()
        process = context.Process(target=hold, args=(str(tmp_path), kind, elsewhere, events), daemon=True)
        process.start()
        processes.append(process)
        return process, events.get()

    yield start
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)


def test_the_lock_file_is_flushed_and_names_its_owner(tmp_path, monkeypatch):
    """T-D14: `.lock` was written and never flushed: another node could read it empty."""
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), real(file)))
    directory = RunDirectory(tmp_path)
    directory.claim()
    assert (tmp_path / ".lock").stat().st_ino in flushed
    held = json.loads((tmp_path / ".lock").read_text())
    assert (held["process"], held["host"], held["token"]) == (os.getpid(), os.uname().nodename, directory.token)
    directory.release()


@pytest.mark.parametrize("kind", ["flock", "file"])
def test_a_lock_that_finds_no_room_is_named_and_its_release_does_not_fail_as_well(tmp_path, kind):
    """The error named no file, and closing the lock tried to write again: a traceback took the place of the run's one line."""
    lock, (soft, hard) = RunLock(tmp_path, kind), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(OSError) as raised:
            lock.acquire()
        lock.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(tmp_path / ".lock")
    again = RunLock(tmp_path, "flock")
    again.acquire()
    again.release()


def test_a_rank_that_sees_the_lock_late_or_empty_looks_again(tmp_path):
    """T-D14: an empty or old `.lock`, as another node's cache may show it, is no other directory."""
    (tmp_path / ".lock").write_text("")
    main = RunDirectory(tmp_path)
    threading.Timer(0.7, lambda: setattr(main, "token", RunLock(tmp_path, "flock").acquire())).start()
    began = time.monotonic()
    while not main.token and time.monotonic() - began < 0.6:
        time.sleep(0.05)
    assert not sees_token(tmp_path / "elsewhere", "x")  # after SIGHT_SECONDS
    assert sees_token(tmp_path, main.token)


@pytest.mark.parametrize("kind", ["flock", "file"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_second_trainer_is_refused_by_name_and_comes_in_after_the_first(tmp_path, other, kind, elsewhere):
    """T-D14: never two trainers in one directory, whichever way it is locked."""
    process, said = other(kind, elsewhere)
    assert said == "held"
    with pytest.raises(CheckpointError, match=f"is in use by process {process.pid} on {os.uname().nodename}; wait for it"):
        RunLock(tmp_path, kind).acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    lock = RunLock(tmp_path, kind)
    lock.acquire()
    # Only silence shows that a process of another host is gone. The system knows it on this host, and with flock.
    assert (time.monotonic() - began > 1.5) == (kind == "file" and elsewhere)
    lock.release()
    began = time.monotonic()
    RunLock(tmp_path, kind).acquire()
    assert time.monotonic() - began < 1.0  # one that was released is free


@pytest.mark.parametrize("dies", [False, True])
def test_a_lock_that_holds_on_one_host_only_protects_nobody_and_auto_looks_twice(tmp_path, other, monkeypatch, dies):
    """Lustre with localflock, NFS with local_lock: a second start on another host took the directory over, and ended the run that trained there."""
    process, said = other("auto", elsewhere=True)
    assert said == "held"
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    if dies:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    for take in (RunLock(tmp_path, "auto").check, RunLock(tmp_path, "auto").acquire):
        with contextlib.nullcontext() if dies else pytest.raises(CheckpointError, match=f"is in use by process {process.pid} on "):
            take()
    assert process.is_alive() is not dies


@pytest.mark.parametrize(("first", "second"), [("flock", "file"), ("file", "flock")])
def test_nodes_with_and_without_flock_do_not_come_together(tmp_path, other, first, second):
    """T-D14: one node mounts the file system with flock, another without."""
    process, said = other(first, elsewhere=True)
    assert said == "held"
    with pytest.raises(CheckpointError, match=f"is in use by process {process.pid}"):
        RunLock(tmp_path, second).acquire()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK])
def test_a_file_system_without_flock_gets_the_other_way_and_says_so(tmp_path, monkeypatch, caplog, number):
    """T-D14: Lustre without `-o flock` could not train at all."""

    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock.log, "propagate", True)
    monkeypatch.setattr(run_lock.logging.getLogger("pretrain"), "propagate", True)
    with caplog.at_level("INFO"):
        directory = RunDirectory(tmp_path)
        directory.claim()
    assert "the file system has no flock" in caplog.text and "run.lock=file is used" in caplog.text
    with pytest.raises(CheckpointError, match="is in use by process"):
        RunDirectory(tmp_path).claim()
    directory.release()
    with pytest.raises(
        CheckpointError, match="cannot be locked: .*; set run.lock=auto or file for a file system without flock"
    ):
        RunDirectory(tmp_path / "new" if (tmp_path / "new").mkdir() else tmp_path, "flock").claim()


def test_two_that_come_at_the_same_moment_are_one_in_the_end(tmp_path):
    """T-D14: of two starts in one moment one is refused."""
    outcomes = []

    def come() -> None:
        try:
            outcomes.append(RunLock(tmp_path, "file").acquire())
        except CheckpointError:
            outcomes.append(None)

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcome is not None for outcome in outcomes) == 1


def test_an_owner_that_was_taken_for_dead_ends_when_it_wakes(tmp_path, other):
    """T-D14: a process that was stopped for longer than it may be silent does not go on beside its successor."""
    process, said = other("file", elsewhere=True)
    assert said == "held"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    RunLock(tmp_path, "file").acquire()
    os.kill(process.pid, signal.SIGCONT)
    process.join(10)
    assert process.exitcode == 1


@pytest.mark.parametrize("kind", ["auto", "flock"])
def test_a_lock_that_cannot_be_opened_is_one_line_of_a_check(tmp_path, kind):
    """F11: --check ended with IsADirectoryError, and with PermissionError in the run directory of another user."""
    (tmp_path / ".lock").mkdir()
    with pytest.raises(CheckpointError, match=r"\.lock: Is a directory"):
        RunDirectory(tmp_path, kind).check()
    (tmp_path / ".lock").rmdir()
    (tmp_path / ".lock").write_text("")
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".lock"))
    with patch.object(Path, "open", side_effect=denied), pytest.raises(CheckpointError, match=r"\.lock: Permission denied"):
        RunDirectory(tmp_path, kind).check()


class Removes(Callback):
    """Removes the directory of its run after a step, as somebody does who tidies up."""

    def evaluate(self, run, step):
        if step == 5:
            shutil.rmtree(run.directory)
        return {}


def tidied_up(config_file: str, *overrides: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(["--config", config_file, *overrides], callbacks=[Removes()])
    return code, out.getvalue()


def test_a_link_that_leads_nowhere_is_refused_in_the_place_of_a_run(tmp_path):
    """--check called it valid, and the start ended with 'File exists'."""
    (tmp_path / "gone").symlink_to(tmp_path / "scratch")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, target in (("gone", "scratch"), ("loop", "loop")):
        for run in (Run(dir=str(tmp_path / name), name="r"), Run(dir=str(tmp_path), name=name)):
            with pytest.raises(ConfigError, match=f"{name} is a link to .*{target}, which leads nowhere"):
                directory_of(run)


def test_a_name_that_is_too_long_is_refused_before_its_folder_exists(tmp_path):
    """--check called it valid where run.dir was missing, and the start ended with 'File name too long'."""
    for name in ("x" * 256, "ж" * 128, "a/" + "x" * 256):
        with pytest.raises(ConfigError, match="run.name=.*: File name too long"):
            directory_of(Run(dir=str(tmp_path / "missing"), name=name))
    directory_of(Run(dir=str(tmp_path / "missing"), name="x" * 255))


def test_what_a_killed_process_left_of_the_files_that_it_wrote_is_removed(tmp_path):
    """What was left of ranks.json, which is written every few seconds, stayed for ever."""
    directory = RunDirectory(tmp_path)
    for name in ("status", "ranks", "trackers", "identity"):
        (tmp_path / f".{name}.json.0a1b2c3d").write_text("{")
    directory.claim()
    directory.release()
    assert not list(tmp_path.glob(".*.json.*"))


def test_a_directory_that_cannot_be_looked_at_is_a_warning(tmp_path, monkeypatch, caplog):
    def closed(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    directory = RunDirectory(tmp_path)
    directory.record_start({}, "", {})
    monkeypatch.setattr("pretrain.train.run_directory.exists", closed)
    directory.restore_record()
    assert f"{tmp_path}: cannot be looked at: " in caplog.text and "Permission denied" in caplog.text


def test_storage_that_is_not_mounted_any_more_is_told_from_a_removed_directory(tmp_path, caplog):
    """The message said that the earlier checkpoints were lost, which were on the storage."""
    directory = RunDirectory(tmp_path / "run")
    directory.claim()
    directory.record_start({}, "", {})
    (directory.path / "identity.json").unlink()
    with patch.object(directory, "_device", -1):
        directory.restore_record()
    directory.release()
    assert "its storage is not mounted any more" in caplog.text and "are lost" not in caplog.text
    assert (directory.path / "identity.json").exists()


def test_a_directory_that_is_removed_is_said_and_what_the_run_still_saves_can_be_resumed(pool, config_file):
    constant = "schedule={name: constant, warmup_steps: 0}"
    options = ("run.steps=8", constant, "checkpoint.every_steps=4", "parallel.strategy=single")
    [(code, printed)] = pool.launch(1, tidied_up, str(config_file), *options)
    assert code == 0 and "identity.json is gone, so somebody has removed the directory" in printed
    resumed = train(pool, 1, config_file, *options, "run.steps=9")
    assert len(losses(resumed)) >= 2  # those of step 8 and 9
    assert [json.loads(line)["step"] for line in (resumed / "starts.jsonl").read_text().splitlines()] == [0, 8]
