"""Which checkpoint a run goes on from: what cannot be read, what is damaged, and time lines that part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from running import losses, run_main, tool, train

from pretrain.checkpoint import choose, files, verified
from pretrain.checkpoint.retention import outdated
from pretrain.config.keys import leaves
from pretrain.config.model_schema import Model
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, UnreadableError
from pretrain.observe.metrics import read_metrics
from pretrain.train.run_directory import RunDirectory

PERIODIC = ("run.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=0", "schedule={name: constant, warmup_steps: 0}")
DDP = "parallel.strategy=ddp"


def without_pauses(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run that does not wait between its tries."""
    with patch.object(verified, "RETRY_SECONDS", (0.0, 0.0, 0.0)):
        return run_main(config_file, *overrides)


def unreadable(times: int, rank: str, number: int, name: str, config_file: str, *overrides: str) -> tuple[int, str]:
    """The same, with a rank on which a file cannot be hashed `times` times."""
    describe, failed = files.describe_file, []

    def failing(path, seen=None):
        if path.name == name and os.environ.get("RANK", "0") == rank and len(failed) < times:
            failed.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return describe(path, seen)

    with patch.object(files, "describe_file", failing):
        return without_pauses(config_file, *overrides)


def start(pool, config_file, *overrides: str, ranks: int = 1) -> tuple[int, str]:
    return pool.launch(ranks, without_pauses, str(config_file), *PERIODIC, *overrides)[0]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def state(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def rewrite_state(checkpoint: Path, change) -> None:
    """Another state.json, with a manifest that goes with it."""
    path, manifest = checkpoint / "state.json", json.loads((checkpoint / "manifest.json").read_text())
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    manifest["files"]["state.json"] = files.describe_file(path)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def rewrite_config(checkpoint: Path, content: dict) -> None:
    """Another config.yaml, with a manifest that goes with it."""
    path, manifest = checkpoint / "config.yaml", json.loads((checkpoint / "manifest.json").read_text())
    path.write_text(yaml.safe_dump(content))
    manifest["files"]["config.yaml"] = files.describe_file(path)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def run(trained_run, config_file) -> Path:
    """A run of 6 steps, saved at steps 2, 4 and 6."""
    return trained_run(1, config_file, *PERIODIC)


# ---- what cannot be read is not damaged ---------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_for_a_moment_loses_nothing(pool, trained_run, config_file):
    """T-D3: one ESTALE on one rank made the run fall back to an older checkpoint, and the next start jumped back."""
    run = trained_run(2, config_file, *PERIODIC, DDP)
    arguments = (str(config_file), *PERIODIC, DDP, "run.steps=8")
    results = pool.launch(2, unreadable, 2, "1", 116, "__0_0.distcp", *arguments)
    assert [code for code, _ in results] == [0, 0], results[0][1]
    assert "step-00000006/__0_0.distcp: cannot be read: Stale file handle; tried again for" in results[0][1]
    assert "resumed from" in results[0][1] and "step-00000006: step 6" in results[0][1]
    assert [r["step"] for r in read_metrics(run)] == list(range(1, 9))


def test_a_file_that_stays_unreadable_stops_all_ranks_and_changes_nothing(pool, trained_run, config_file):
    """T-D3: "cannot be read" is not "damaged": the run stops, naming file and rank."""
    run = trained_run(2, config_file, *PERIODIC, DDP)
    before = checkpoints(run)
    results = pool.launch(2, unreadable, 99, "1", 5, "__0_0.distcp", str(config_file), *PERIODIC, DDP, "run.steps=8")
    for code, printed in results:
        assert code == 1, printed
        line = next(line for line in printed.splitlines() if line.startswith("error: "))
        assert "rank 1: " in line and "step-00000006/__0_0.distcp: cannot be read: Input/output error" in line
        assert "nothing was changed" in line and line.endswith(f"instead, run.resume={run / 'checkpoints' / 'step-00000004'}")
    assert checkpoints(run) == before
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_file_that_one_node_does_not_see_yet_is_waited_for(pool, trained_run, config_file):
    """T-D3: ENOENT on one rank alone is a node whose view of the storage is behind; missing everywhere is damage."""
    trained_run(2, config_file, *PERIODIC, DDP)
    arguments = (str(config_file), *PERIODIC, DDP, "run.steps=8")
    results = pool.launch(2, unreadable, 2, "1", 2, "__0_0.distcp", *arguments)
    assert [code for code, _ in results] == [0, 0] and "__0_0.distcp: missing here, and other ranks find it" in results[0][1]
    results = pool.launch(2, unreadable, 99, "1", 2, "__0_0.distcp", *arguments, "run.steps=10")
    assert [code for code, _ in results] == [1, 1]
    assert "rank 1: " in results[0][1] and "__0_0.distcp: missing here, and other ranks find it; tried for" in results[0][1]


def test_a_checkpoint_that_is_known_to_be_there_and_is_not_seen_stops_the_run(pool, config_file, run):
    """T-D3: a stale listing of a directory must not lead to an older checkpoint; who removed the newest by hand says so."""
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    code, printed = start(pool, config_file, "run.steps=8")
    assert code == 1 and "step-00000006 was saved last, as status.json says, and is not there" in printed
    code, printed = start(pool, config_file, "run.steps=8", f"run.resume={run / 'checkpoints' / 'step-00000004'}")
    assert code == 0 and "step-00000004: step 4" in printed
    assert checkpoints(run) == ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]


@pytest.mark.parametrize("resume", ["path", "never", "auto"])
def test_a_run_whose_own_checkpoints_are_lost_starts_from_nowhere_else(pool, trained_run, config_file, run, resume):
    """run.resume=PATH began again from the path, and `never` at step 0, without a look for the run's own checkpoints."""
    other = trained_run(1, config_file, *PERIODIC, "run.name=other")
    start_from = ("run.steps=8", f"run.resume={other if resume == 'path' else resume}")
    folder, hidden = run / "checkpoints", run.parent / "hidden"
    folder.rename(hidden)
    code, printed = start(pool, config_file, "--check", *start_from)
    assert code == 1 and "step-00000006 was saved last, as status.json says, and is not there" in printed
    assert f"if it was removed on purpose, remove {run / 'status.json'} to start afresh" in printed
    # It said how to go back to an earlier checkpoint, where none is; and `never`, which refuses what it sees, waited for the storage.
    assert "run.resume=PATH" not in printed and "run.resume=/" not in printed.replace(f"run.resume={other}", "")
    assert ("tried for" in printed) == (resume != "never")
    (run / "status.json").unlink()
    copy = shutil.copytree(hidden / "step-00000006", folder / "step-00000006")
    (copy / "manifest.json").unlink()
    code, printed = start(pool, config_file, "--check", *start_from)
    assert code == 1 and f"{copy} has no manifest.json, and there is no complete checkpoint: a partial copy?" in printed
    shutil.rmtree(copy)
    code, printed = start(pool, config_file, "--check", *start_from)
    assert code == 0 and ("would resume from step 6" if resume == "path" else "would start at step 0") in printed


def test_a_path_elsewhere_does_not_hide_that_the_newest_checkpoint_is_lost(pool, trained_run, config_file, run):
    other = trained_run(1, config_file, *PERIODIC, "run.name=other")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    code, printed = start(pool, config_file, "--check", "run.steps=8", f"run.resume={other}")
    assert code == 1 and "step-00000006 was saved last, as status.json says, and is not there" in printed


def test_a_kill_between_a_save_and_the_status_is_no_missing_checkpoint(pool, config_file, run):
    """T-D3: the newest may have retired the one that status.json still names."""
    for step in (2, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running", "checkpoint": "step-00000004"}))
    code, printed = start(pool, config_file, "run.steps=8")
    assert code == 0 and "step-00000006: step 6" in printed


def test_a_rank_that_hashes_says_so_to_those_that_wait(run, monkeypatch):
    """Hashing for longer than parallel.timeout_seconds ended a run with the name of what the rank had done before that."""
    parts, seen, describe = [], set(), files.describe_file

    class Parts:
        @contextlib.contextmanager
        def doing(self, name, waiting=False, device=False, storage=False, exchanges=False):
            parts.append((name, storage))
            yield
            parts.pop()

    monkeypatch.setattr(files, "describe_file", lambda *arguments: seen.update(parts) or describe(*arguments))
    ranks = Ranks(0, 0, 1, torch.device("cpu"), monitor=Parts())
    assert verified.first_damage(run / "checkpoints" / "step-00000006", ranks) is None
    assert seen == {("hashes of a checkpoint", True)}


def hashing_for_long(seconds: float, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose rank 1 takes so long for one file of a checkpoint, piece by piece."""
    describe, slow = files.describe_file, []

    def slowly(path, seen=None):
        if os.environ["RANK"] == "1" and not slow:
            slow.append(path)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.1)
                if seen is not None:
                    seen(1)
        return describe(path, seen)

    with patch.object(files, "describe_file", slowly):
        return without_pauses(config_file, *overrides)


def test_hashing_may_take_longer_than_ranks_wait_for_each_other(pool, trained_run, config_file):
    """A checkpoint of one rank is one file. Where others hash nothing, they ended the run after parallel.timeout_seconds."""
    run = trained_run(2, config_file, *PERIODIC, DDP)
    arguments = (str(config_file), *PERIODIC, DDP, "run.steps=7", "parallel.timeout_seconds=5")
    results = pool.launch(2, hashing_for_long, 13.0, *arguments)
    assert [code for code, _ in results] == [0, 0], results[0][1]
    assert "step-00000006: step 6" in results[0][1] and [r["step"] for r in read_metrics(run)] == list(range(1, 8))


def test_a_rank_that_is_alone_with_its_groups_hashes_and_resumes(pool, config_file):
    """A wrapped model needs a group also of one rank, which has nobody to tell how far its hashing is: an AttributeError."""
    options = ("parallel.strategy=fsdp", "parallel.shard=1", "data.verify=full", "run.accept_changes=[run.steps]")
    for steps in (2, 3):
        [(code, printed)] = pool.launch(1, run_main, str(config_file), *options, f"run.steps={steps}", "schedule.warmup_steps=1")
        assert code == 0, printed
    assert "step-00000002: step 2" in printed


def in_own_folder(folders: list[str], config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose ranks were started in folders of their own."""
    before = os.getcwd()
    os.chdir(folders[int(os.environ["RANK"])])
    try:
        return without_pauses(config_file, *overrides)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("option", ["run.init_from", "run.resume"])
def test_a_path_that_means_another_checkpoint_on_another_rank_is_refused(pool, config_file, option):
    """A copy that each node has, and that differ: half of the weights were those of another model, exit 0."""
    folders = []
    for rank, seed in enumerate((0, 1)):
        run = train(pool, 1, config_file, f"run.name=seed{seed}", f"run.seed={seed}", "run.steps=2")
        folders.append(config_file.parent / f"node{rank}")
        shutil.copytree(run / "checkpoints" / "step-00000002", folders[-1] / "weights")
    arguments = (str(config_file), DDP, "run.name=new", "run.steps=2", "run.seed=0", f"{option}=weights")
    for code, printed in pool.launch(2, in_own_folder, [str(folder) for folder in folders], *arguments):
        assert (
            code == 1
            and f"weights is another checkpoint on rank 1 ({os.uname().nodename}: {folders[1]}/weights) than on rank 0"
            in printed
        )
    shutil.rmtree(folders[1] / "weights")
    shutil.copytree(folders[0] / "weights", folders[1] / "weights")
    same = pool.launch(2, in_own_folder, [str(folder) for folder in folders], *arguments[:-1], "run.init_from=weights")
    assert [code for code, _ in same] == [0, 0], same[0][1]


@pytest.mark.parametrize("word", ["auto", "never", "required"])
def test_init_from_is_a_path_and_no_keyword(config_file, word):
    """run.init_from=auto trained from random weights, exit 0."""
    code, printed = run_main(str(config_file), f"run.init_from={word}", "run.steps=2")
    assert code == 1 and f"error: run.init_from={word}: does not exist" in printed


# ---- what is damaged is set aside ---------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_neither_counts_nor_comes_back_nor_is_lost(pool, config_file, run):
    """T-D3: keep_last=2 kept one good checkpoint and the damaged one, and each start warned anew."""
    damaged = run / "checkpoints" / "step-00000006" / "__0_0.distcp"
    flip_bit(damaged)
    content = damaged.read_bytes()
    code, printed = start(pool, config_file, "run.steps=5", "checkpoint.keep_last=2")
    assert code == 0 and f"damaged checkpoint: {damaged}: its content does not match its sha256" in printed
    assert "set aside" in printed and "as damaged-step-00000006; nothing of it is deleted" in printed
    assert checkpoints(run) == ["damaged-step-00000006", "step-00000004", "step-00000005"]
    assert (run / "checkpoints" / "damaged-step-00000006" / "__0_0.distcp").read_bytes() == content
    code, printed = start(pool, config_file, "run.steps=6", "checkpoint.keep_last=2")
    assert code == 0 and "damaged checkpoint" not in printed and "step-00000005: step 5" in printed
    assert checkpoints(run) == ["damaged-step-00000006", "step-00000005", "step-00000006"]
    assert tool("verify_checkpoint").main([str(run)]) == 0
    flip_bit(run / "checkpoints" / "step-00000006" / "__0_0.distcp")  # again: the name is taken
    code, printed = start(pool, config_file, "run.steps=6", "checkpoint.keep_last=2")
    assert code == 0 and "as damaged-step-00000006.1" in printed
    assert "damaged-step-00000006.1" in checkpoints(run)


def test_a_refused_start_sets_nothing_aside(pool, config_file, run):
    """T-D3: what a start leaves behind is renamed when nothing can refuse it any more."""
    flip_bit(run / "checkpoints" / "step-00000006" / "__0_0.distcp")
    code, printed = start(pool, config_file, "run.steps=8", "optim.lr=1e-2")
    assert code == 1 and "falling back to" in printed and "run.accept_changes=[optim.lr]" in printed
    assert checkpoints(run) == ["step-00000002", "step-00000004", "step-00000006"]


# ---- time lines ---------------------------------------------------------------------------------------------------------


def test_every_checkpoint_records_its_parent_and_its_time_line(pool, config_file, run):
    """T-D3: each checkpoint says which one it descends from."""
    first = state(run, 2)
    assert first["parent"] is None and [part["from"] for part in first["timeline"]] == [0]
    assert start(pool, config_file, "run.steps=10")[0] == 0
    for step, parent in ((4, 2), (6, 4), (8, 6), (10, 8)):
        recorded, path = state(run, step)["parent"], run / "checkpoints" / f"step-{parent:08d}"
        assert recorded["path"].endswith(f"/runs/run/checkpoints/{path.name}") and recorded["step"] == parent
        assert recorded["manifest"] == files.describe_file(path / "manifest.json")["sha256"]
    assert [part["from"] for part in state(run, 10)["timeline"]] == [0, 6]
    assert state(run, 10)["timeline"][0] == state(run, 2)["timeline"][0]
    other = train(pool, 1, config_file, *PERIODIC, "run.name=other", "run.steps=12", f"run.resume={run}")
    assert state(other, 12)["parent"]["path"] == str(run / "checkpoints" / "step-00000010")
    assert state(other, 12)["timeline"][:2] == state(run, 10)["timeline"]
    fresh = train(pool, 1, config_file, *PERIODIC, "run.name=fresh", "run.steps=2", f"run.init_from={run}")
    assert state(fresh, 2)["parent"]["step"] == 10 and [part["from"] for part in state(fresh, 2)["timeline"]] == [0]


def test_a_newest_checkpoint_of_another_time_line_is_refused_until_one_is_chosen(pool, config_file, run):
    """T-D3: after a fall back the old newest checkpoint came back, and the run jumped to the line it had left."""
    folder = run / "checkpoints"
    shutil.move(folder / "step-00000006", folder / "elsewhere")
    (run / "status.json").unlink()
    assert start(pool, config_file, "run.steps=5")[0] == 0  # another line, from step 4
    shutil.move(folder / "elsewhere", folder / "step-00000006")
    code, printed = start(pool, config_file, "run.steps=8")
    line = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert code == 1 and f"{folder / 'step-00000006'} does not descend from {folder / 'step-00000005'}" in line
    assert "goes on from step 4" in line and f"run.resume={folder / 'step-00000005'}" in line
    copy = shutil.copytree(run, run.parent / "copy")
    # The new line is chosen.
    code, printed = start(pool, config_file, "run.steps=8", f"run.resume={folder / 'step-00000005'}")
    assert code == 0 and "step-00000005: step 5" in printed and "as abandoned-step-00000006" in printed
    # The old one is chosen.
    chosen = copy / "checkpoints" / "step-00000006"
    code, printed = start(pool, config_file, "run.name=copy", "run.steps=8", f"run.resume={chosen}")
    assert code == 0 and "step-00000006: step 6" in printed and "as abandoned-step-00000005" in printed
    for directory in (run, copy):
        assert start(pool, config_file, f"run.name={directory.name}", "run.steps=9")[0] == 0


def test_a_run_goes_back_to_an_older_checkpoint_and_keeps_what_it_left(pool, config_file, run):
    """T-D3: run.resume=PATH of an older checkpoint was refused; and given again after an interruption it goes on, not back."""
    folder, back = run / "checkpoints", f"run.resume={run / 'checkpoints' / 'step-00000002'}"
    changed = ("optim.lr=1e-3", "run.accept_changes=[optim.lr]", back)
    code, printed = start(pool, config_file, "--check", *changed)
    assert code == 0 and "would resume from step 2" in printed and f"would set aside {folder / 'step-00000006'}" in printed
    assert checkpoints(run) == ["step-00000002", "step-00000004", "step-00000006"]
    code, printed = start(pool, config_file, "run.steps=4", *changed)
    assert code == 0 and "step-00000002: step 2" in printed
    names = ["abandoned-step-00000004", "abandoned-step-00000006", "step-00000002", "step-00000004"]
    assert checkpoints(run) == names
    assert [r["step"] for r in read_metrics(run)] == [1, 2, 3, 4] and read_metrics(run)[-1]["lr"] == 1e-3
    # Given again, as after an interruption, the command continues what it began.
    code, printed = start(pool, config_file, "run.steps=6", *changed)
    assert code == 0 and "went back to it before" in printed and "step-00000004: step 4" in printed
    assert start(pool, config_file, "run.steps=8", "optim.lr=1e-3")[0] == 0  # and so does the plain command
    assert checkpoints(run) == sorted([*names, "step-00000006", "step-00000008"])
    files.verify(folder / "abandoned-step-00000006")
    # Also when retention has removed the checkpoint that it went back to.
    assert start(pool, config_file, "run.steps=10", "checkpoint.keep_last=1", "optim.lr=1e-3")[0] == 0
    assert "step-00000002" not in checkpoints(run)
    code, printed = start(pool, config_file, "run.steps=12", *changed)
    assert code == 0 and "has checkpoints of its own and continues from those" in printed and "step-00000010: step 10" in printed


@pytest.mark.parametrize(("name", "remedy"), [
    ("checkpoints/step-0000002", "the run has step-00000002, step-00000004, step-00000006 there; name one of those, or run.resume=auto"),
    ("checkpoints/step-00000003", "the run has step-00000002, step-00000004, step-00000006 there; name one of those, or run.resume=auto"),
    ("checkpoints", "step-00000006 there; name one of those"),
    ("best/step-00000004", "to go on from it, choose another run.name"),
    ("checkpoints/abandoned-step-00000005", "step-00000005 and name that, or choose another run.name"),
])  # fmt: skip
def test_a_path_in_the_runs_own_directory_that_is_none_of_its_checkpoints_is_refused(pool, config_file, run, name, remedy):
    """One digit short, the path was passed over: the run went on from the newest, and retention removed the one that was meant."""
    folder, path = run / "checkpoints", run / name
    if name.startswith("best") or "abandoned" in name:
        shutil.copytree(folder / "step-00000004", path)
    before = checkpoints(run)
    code, printed = start(pool, config_file, "run.steps=8", "checkpoint.keep_last=2", f"run.resume={path}")
    line = next(line for line in printed.splitlines() if line.startswith("error: "))
    assert code == 1 and f"run.resume={path} lies in the run's own directory and is not one of its checkpoints in {folder}" in line
    assert remedy in line and checkpoints(run) == before


def test_a_checkpoint_that_was_set_aside_starts_another_run_or_comes_back_as_a_copy(pool, config_file, run):
    """What the errors and the documentation say of one."""
    folder = run / "checkpoints"
    aside = files.set_aside(folder / "step-00000004", "abandoned")
    code, printed = start(pool, config_file, "--check", "run.name=new", f"run.resume={aside}")
    assert code == 0 and f"would resume from step 4 of {aside}" in printed
    shutil.copytree(aside, folder / "step-00000004")
    code, printed = start(pool, config_file, "--check", f"run.resume={folder / 'step-00000004'}")
    assert code == 0 and "would resume from step 4" in printed and f"would set aside {folder / 'step-00000006'}" in printed


def test_a_run_that_was_interrupted_at_a_step_can_go_back_to_it(pool, config_file):
    """T-D3: a plain restart from a checkpoint is no going back to it."""
    train(pool, 1, config_file, *PERIODIC, "run.steps=2")
    run = train(pool, 1, config_file, *PERIODIC, "run.steps=4")
    code, printed = start(pool, config_file, f"run.resume={run / 'checkpoints' / 'step-00000002'}", "run.steps=3")
    assert code == 0 and "step-00000002: step 2" in printed and "as abandoned-step-00000004" in printed


def test_going_back_that_is_interrupted_before_its_first_save_is_not_begun_again_and_again(pool, config_file, run):
    """The second start of the same command did not record that it had gone back; the third one set aside what the second had saved."""
    command = (f"run.resume={run / 'checkpoints' / 'step-00000002'}", "checkpoint.every_steps=1000")
    code, printed = start(pool, config_file, "run.steps=2", *command)  # ends where it begins, and saves nothing new
    assert code == 0 and "as abandoned-step-00000004" in printed
    assert start(pool, config_file, "run.steps=5", *command)[0] == 0
    code, printed = start(pool, config_file, "run.steps=7", *command)
    assert code == 0 and "step-00000005: step 5" in printed and "as abandoned-step-00000005" not in printed
    assert [r["step"] for r in read_metrics(run)] == list(range(1, 8))


def test_a_checkpoint_that_was_named_is_not_fallen_back_from(pool, config_file, run):
    newest = run / "checkpoints" / "step-00000006"
    flip_bit(newest / "__0_0.distcp")
    code, printed = start(pool, config_file, "run.steps=8", f"run.resume={newest}")
    assert code == 1 and "run.resume names it, so no other one was tried, and nothing was started afresh" in printed
    assert checkpoints(run) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_kill_after_a_checkpoint_was_set_aside_keeps_no_start_from_going_on(pool, config_file, run):
    """status.json still names the checkpoint that the program itself renamed; every later start waited for it and ended."""
    flip_bit(run / "checkpoints" / "step-00000006" / "__0_0.distcp")
    files.set_aside(run / "checkpoints" / "step-00000006", "damaged")
    assert json.loads((run / "status.json").read_text())["checkpoint"] == "step-00000006"
    code, printed = start(pool, config_file, "run.steps=8")
    assert code == 0 and "step-00000004: step 4" in printed


def edited_while_training(config_file: str, folder: str, content: str | None, *overrides: str) -> tuple[int, str]:
    """A run whose config.yaml somebody edits, or removes, after its start."""
    record, path = RunDirectory.record_start, Path(folder) / "config.yaml"

    def recorded(self, *arguments) -> None:
        record(self, *arguments)
        path.unlink() if content is None else path.write_text(content)

    with patch.object(RunDirectory, "record_start", recorded):
        return run_main(config_file, *overrides)


@pytest.mark.parametrize("content", [None, "optim: {lr: 0.5}\n"])
def test_a_checkpoint_holds_the_configuration_that_it_was_trained_with(pool, config_file, content):
    """It held the config.yaml of the run directory as that was at the save; and without one, the save failed."""
    run = config_file.parent / "runs" / "run"
    [(code, printed)] = pool.launch(1, edited_while_training, str(config_file), str(run), content, *PERIODIC)
    assert code == 0, printed
    code, printed = start(pool, config_file, "run.steps=8", "optim.lr=0.5")
    assert code == 1 and "optim.lr" in printed and "run.accept_changes=[optim.lr]" in printed


def test_a_full_disk_at_the_start_is_one_line_with_the_name_of_the_file(tmp_path):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with patch.object(Path, "write_text", full), pytest.raises(OSError, match="identity.json"):
        RunDirectory(tmp_path).record_start({}, "", {})


def test_a_checkpoint_of_the_same_step_of_another_line_is_never_overwritten(pool, config_file, run):
    """T-D3: two time lines with equal step numbers; the older directory was removed by the rename."""
    folder = run / "checkpoints"
    stray = shutil.copytree(folder / "step-00000006", folder / "hidden")
    shutil.rmtree(folder / "step-00000006")
    (run / "status.json").unlink()
    marker = stray / "marker"
    marker.write_text("mine")
    with_it_back = pool.launch(1, appears_while_training, str(stray), str(config_file), *PERIODIC)
    code, printed = with_it_back[0]
    assert code == 0 and "step-00000006 was there already, of a time line that this run has left" in printed
    assert (folder / "abandoned-step-00000006" / "marker").read_text() == "mine"
    files.verify(folder / "step-00000006")


def appears_while_training(stray: str, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run in whose folder a checkpoint appears after it has started: a listing was stale."""
    from pretrain.train.trainer import Trainer

    fit = Trainer.fit

    def late(self, *arguments):
        os.rename(stray, Path(stray).with_name("step-00000006"))
        return fit(self, *arguments)

    with patch.object(Trainer, "fit", late):
        return without_pauses(config_file, *overrides)


def test_a_later_checkpoint_of_another_line_neither_counts_for_retention_nor_is_removed(tmp_path):
    """T-D3: retention counted by number, so that it removed the common ancestor of two lines."""
    for step in (2, 3, 9):
        (tmp_path / files.step_name(step)).mkdir()
        files.write_json(tmp_path / files.step_name(step) / files.MANIFEST, {})
    assert outdated(files.complete_checkpoints(tmp_path), tmp_path / "step-00000003", keep_last=2, keep_every_steps=0) == []
    assert [p.name for p in files.complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000003", "step-00000009"]


def test_checkpoints_of_the_program_before_are_continued(pool, config_file, run):
    """T-D3: commit 84cbca3 recorded neither parent nor time line nor skipped steps, and its manifests are of the same version."""
    new = ("parent", "timeline", "skipped")
    for checkpoint in files.complete_checkpoints(run / "checkpoints"):
        rewrite_state(checkpoint, lambda content: [content.pop(name) for name in new])
    (run / "status.json").write_text('{"state": "finished", "step": 6, "reason": null}\n')
    before = losses(run)
    assert start(pool, config_file, "run.steps=10")[0] == 0
    straight = train(pool, 1, config_file, *PERIODIC, "run.name=straight", "run.steps=10")
    assert losses(run) == losses(straight) and losses(run)[:6] == before
    assert [part["from"] for part in state(run, 10)["timeline"]] == [6] and state(run, 8)["parent"]["step"] == 6
    assert start(pool, config_file, "run.steps=12")[0] == 0


def test_other_keys_of_the_model_make_another_format_version():
    """The model of a checkpoint from before such a key would be refused for a value that nobody had changed."""
    keys = sorted(leaf.path for leaf in leaves(Model, None, resume="never") if leaf.resume == "never")
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]
    assert (files.VERSION, digest) == (2, "ec32e5147d16"), "raise files.VERSION, and write the new pair here"


def test_a_record_that_lacks_a_key_has_its_default(pool, config_file, run):
    """A new key needs no new version of the format. A record with a key that is gone is refused."""
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    del recorded["optim"]["ema_decay"], recorded["log"]["profile"]
    for checkpoint in files.complete_checkpoints(run / "checkpoints"):
        rewrite_config(checkpoint, recorded)
    code, printed = start(pool, config_file, "run.steps=7")
    assert code == 0 and "ema_decay" not in printed
    for checkpoint in files.complete_checkpoints(run / "checkpoints"):
        rewrite_config(checkpoint, recorded | {"optim": recorded["optim"] | {"colour": 1}})
    code, printed = start(pool, config_file, "run.steps=8")
    assert code == 2 and "config.yaml: not a configuration of this version of the program" in printed and "'colour'" in printed
    assert printed.rstrip().endswith("take the version that wrote it")


@pytest.mark.parametrize("number", [1, 2])
def test_another_format_version_is_no_damage(pool, config_file, run, number, capsys):
    """The run does not fall back from it: one line, and everything stays."""
    manifest = run / "checkpoints" / "step-00000006" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 3}))
    before = checkpoints(run)
    results = pool.launch(number, run_main, str(config_file), *PERIODIC, "run.steps=8", *([DDP] if number > 1 else []))
    assert [code for code, _ in results] == [1] * number and not any("damaged" in printed for _, printed in results)
    said = [line for _, printed in results for line in printed.splitlines() if line.startswith("error: ")]
    assert set(said) == {f"error: {manifest}: format version 3, this program reads 2; take the version of the program that wrote it"}
    assert checkpoints(run) == before
    assert tool("verify_checkpoint").main([str(run)]) == 1
    assert f"other    {manifest}: format version 3" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink, lambda path: path.write_text("[1]")])
def test_an_older_checkpoint_that_is_damaged_keeps_no_run_from_going_on(pool, config_file, run, damage):
    damage(run / "checkpoints" / "step-00000004" / "state.json")
    code, printed = start(pool, config_file, "run.steps=7")
    assert code == 0 and "step-00000006: step 6" in printed


# ---- what is removed ----------------------------------------------------------------------------------------------------


def test_only_a_saves_own_leftovers_are_removed(pool, config_file, run):
    """T-D10: any hidden directory whose name ended in -step-N was removed, with what a user kept in it."""
    folder = run / "checkpoints"
    mine = [".keep-step-00000004", ".removing-step-4", ".writing-step-00000009-mine", ".my.writing-step-00000009", "kept"]
    left = [".writing-step-00000008", ".removing-step-00000002", ".removing-step-00000002.1"]
    for name in (*mine, *left):
        (folder / name).mkdir()
        (folder / name / "precious").write_text(name)
    code, printed = start(pool, config_file)
    assert code == 0 and printed.count("which an interrupted save left behind") == len(left)
    assert checkpoints(run) == sorted([*mine, "step-00000002", "step-00000004", "step-00000006"])
    assert all((folder / name / "precious").read_text() == name for name in mine)


def without_removal(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run in which the first removal of an old checkpoint fails."""
    rename, failed = os.rename, []

    def failing(source, target):
        if ".removing-" in str(target) and not failed:
            failed.append(target)
            raise OSError(39, "Directory not empty", str(source))
        return rename(source, target)

    with patch.object(os, "rename", failing):
        return run_main(config_file, *overrides)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(pool, config_file):
    """T-D5: it ended the run, after the commit and on one rank alone, with tracebacks."""
    keep_one = (*PERIODIC, "checkpoint.keep_last=1", DDP)
    results = pool.launch(2, without_removal, str(config_file), *keep_one)
    assert [code for code, _ in results] == [0, 0], results
    assert "an older checkpoint could not be removed" in results[0][1] and "Directory not empty" in results[0][1]
    assert "Traceback" not in results[0][1] + results[1][1]
    run = config_file.parent / "runs" / "run"
    assert checkpoints(run) == ["step-00000006"]  # it was tried again
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_name_that_is_taken_does_not_stop_a_removal(tmp_path):
    """T-D5: an earlier removal that left something (a file that is open on NFS) made the next one fail."""
    for step in (1, 2):
        (tmp_path / files.step_name(step)).mkdir()
        files.write_json(tmp_path / files.step_name(step) / files.MANIFEST, {})
    left = tmp_path / ".removing-step-00000001"
    left.mkdir()
    (left / ".nfs0001").write_text("open elsewhere")
    [given_up] = map(files.give_up, outdated(files.complete_checkpoints(tmp_path), tmp_path / "step-00000002", 1, 0))
    assert given_up.name == ".removing-step-00000001.1" and files.remove(given_up)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".removing-step-00000001", "step-00000002"]


def test_a_checkpoint_that_is_a_link_is_retired_once_and_what_it_points_at_stays(tmp_path):
    """F12: the link could not be removed, and each start said that it had been."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for path in (elsewhere, folder / files.step_name(4)):
        path.mkdir(parents=True)
        files.write_json(path / files.MANIFEST, {})
    (folder / files.step_name(2)).symlink_to(elsewhere)
    [link] = outdated(files.complete_checkpoints(folder), folder / files.step_name(4), keep_last=1, keep_every_steps=0)
    assert files.remove(files.give_up(link))
    assert [path.name for path in folder.iterdir()] == ["step-00000004"] and (elsewhere / files.MANIFEST).is_file()
    (folder / ".removing-step-00000002").symlink_to(elsewhere)  # as versions before left it
    assert files.discard_unfinished(folder) == [".removing-step-00000002"] and files.discard_unfinished(folder) == []


def test_only_what_is_gone_is_named_as_removed(tmp_path):
    """F12: a directory that cannot be removed was named at every start."""
    (tmp_path / ".writing-step-00000002").mkdir()
    with patch("shutil.rmtree"):
        assert files.discard_unfinished(tmp_path) == []
    assert files.discard_unfinished(tmp_path) == [".writing-step-00000002"]


def test_a_file_where_checkpoints_belong_is_said_at_once(tmp_path):
    """F13: --check looked for half a minute whether the storage came back."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints: is a file") as raised:
        files.complete_checkpoints(tmp_path / "checkpoints")
    assert not isinstance(raised.value, UnreadableError)


def test_a_run_may_start_from_one_whose_directory_is_below_its_own(tmp_path):
    """`run.name=a run.resume=runs/a/first`: that is no checkpoint of its own that was mistyped."""
    own, other = tmp_path / "a" / "checkpoints", tmp_path / "a" / "first" / "checkpoints" / "step-00000002"
    own.mkdir(parents=True)
    other.mkdir(parents=True)
    for path in (other, tmp_path / "a" / "first"):
        choose._refuse_inside(own, [], path)
    for path in (own / "step-00000002", tmp_path / "a" / "best" / "step-00000002", tmp_path / "a" / "step-00000002"):
        with pytest.raises(CheckpointError, match="lies in the run's own directory and is not one of its checkpoints"):
            choose._refuse_inside(own, [], path)


def test_a_path_that_no_start_of_the_run_gave_is_refused_once_it_has_checkpoints(pool, config_file, run):
    """The run went on from its newest checkpoint, with a line of information, and trained the other way than was meant."""
    step, nowhere = run / "checkpoints" / "step-00000002", config_file.parent / "nowhere" / "checkpoints"
    code, printed = start(pool, config_file, f"run.resume={nowhere / step.name}")
    assert code == 1 and f"does not exist, and the run has checkpoints of its own, up to {run}/checkpoints/step-00000006" in printed
    assert f"for its step-00000002, set run.resume={step}" in printed
    code, printed = start(pool, config_file, f"run.resume={nowhere}/newest")
    assert code == 1 and f"to start from {nowhere}/newest, choose another run.name" in printed
    other = shutil.copytree(run, config_file.parent / "other")
    code, printed = start(pool, config_file, f"run.resume={other}")
    assert code == 1 and f"run.resume={other} is not where this run began" in printed
    # What an earlier start gave may be gone since: the same command continues.
    options = ("run.name=second", f"run.resume={other}", "run.steps=8", "run.accept_changes=[run.steps]")
    assert start(pool, config_file, *options)[0] == 0
    shutil.rmtree(other)
    code, printed = start(pool, config_file, *options)
    assert code == 0 and "has checkpoints of its own and continues from those" in printed, printed
