"""Copies of checkpoints in an object store: a machine that has nothing goes on from there, and nothing torn or foreign is ever taken."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from faulty_server import faulty_server
from object_server import object_server, use_server
from running import losses, run_main, state_of, train

from pretrain.checkpoint.copies_index import CopiesIndex
from pretrain.checkpoint.files import step_name
from pretrain.checkpoint.stored_run import StoredRun
from pretrain.checkpoint.uploads import Uploads
from pretrain.observe.metrics import read_metrics
from pretrain.transfer import Patience, Remote

STEPS = ("run.steps=8", "schedule={name: constant, warmup_steps: 1}", "checkpoint.every_steps=2", "run.deterministic=true")
QUICK = Patience(stall=20, first_delay=0.02, longest_delay=0.1, give_up=20)


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A folder in place of a bucket."""
    monkeypatch.setattr("pretrain.transfer.Patience", lambda: QUICK)
    return tmp_path / "bucket" / "runs"


@pytest.fixture
def uploading(store) -> tuple[str, ...]:
    return (*STEPS, f"checkpoint.upload=file://{store}")


def index_of(store: Path) -> CopiesIndex:
    return CopiesIndex.parse((store / "run" / "run.json").read_bytes())


def copies(store: Path) -> list[int]:
    """Steps of the copies that count, each of which has to be there."""
    found = index_of(store).copies
    assert all((store / "run" / copy.folder / "manifest.json").is_file() for copy in found)
    return [copy.step for copy in found]


def copy_of(store: Path, step: int) -> Path:
    [found] = [copy.folder for copy in index_of(store).copies if copy.step == step]
    return store / "run" / found


def own(run: Path, step: int) -> Path:
    return run / "checkpoints" / step_name(step)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def same_files(one: Path, other: Path) -> bool:
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    return bool(files) and all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def spoil(checkpoint: Path) -> None:
    payload = next(checkpoint.glob("*.distcp"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")


def trained(config_file: Path, *overrides: str) -> Path:
    code, printed = run_main(str(config_file), *overrides)
    assert code == 0, printed
    return config_file.parent / "runs" / "run"


def refused(config_file: Path, *overrides: str) -> str:
    """The line that ends a run."""
    code, printed = run_main(str(config_file), *overrides)
    assert code in (1, 2) and "Traceback" not in printed, printed
    return printed.splitlines()[-1]


def test_each_checkpoint_is_copied_and_kept_like_the_runs_own(config_file, store, uploading):
    run = trained(config_file, *uploading)
    assert names(run) == [step_name(6), step_name(8)] and copies(store) == [6, 8]
    assert len(list((store / "run").glob("step-*"))) == 2
    for step in (6, 8):
        assert same_files(own(run, step), copy_of(store, step))
    assert [json.loads(line)["step"] for line in (copy_of(store, 8) / "records" / "metrics.jsonl").read_text().splitlines()][-1] >= 7


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_machine_continues_from_the_store_as_if_nothing_had_been_lost(pool, config_file, store, uploading, world_size):
    """Losses and weights equal those of a straight run to the last bit; the metrics of the first machine are there."""
    layout = () if world_size == 1 else ("parallel.strategy=fsdp",)
    straight = train(pool, world_size, config_file, *STEPS, *layout, "run.name=straight")
    run = train(pool, world_size, config_file, *uploading, *layout, "run.steps=4")
    shutil.rmtree(run)
    code, printed = pool.launch(world_size, run_main, str(config_file), *uploading, *layout)[0]
    assert code == 0, printed
    assert f"downloaded {own(run, 4)}" in printed and f"resumed from {own(run, 4)}" in printed
    assert losses(run) == losses(straight)  # of all 8 steps
    one, other = state_of(run, 8), state_of(straight, 8)
    assert all(one[name].equal(other[name]) for name in other)
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2


def test_a_directory_with_older_checkpoints_gets_the_newer_one(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    shutil.copytree(run, run.with_name("old"))
    trained(config_file, *uploading, "run.steps=4")
    shutil.rmtree(run)
    run.with_name("old").rename(run)
    (run / "status.json").unlink()
    with (run / "metrics.jsonl").open("a") as log:  # of steps that this disk never saved
        log.write('{"step": 3, "tokens": 1, "loss": 0.5}\n')
    code, printed = run_main(str(config_file), *uploading, "run.steps=6")
    assert code == 0 and f"resumed from {own(run, 4)}" in printed
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6] and 0.5 not in losses(run)
    assert 0.5 in [record["loss"] for record in map(json.loads, (run / "metrics-before-step-4.jsonl").read_text().splitlines())]
    code, printed = run_main(str(config_file), *uploading)
    assert code == 0 and "downloading" not in printed


def test_a_damaged_copy_is_passed_over_and_one_that_is_not_listed_is_not_seen(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=6")
    damaged = copy_of(store, 6)
    spoil(damaged)
    torn = store / "run" / f"{step_name(8)}-0123456789ab"
    shutil.copytree(copy_of(store, 4), torn)
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading)
    assert code == 0, printed
    assert damaged.name in printed and "downloaded 3 times, each time sha256" in printed and "falling back" in printed
    assert f"resumed from {own(run, 4)}" in printed and copies(store) == [6, 8]
    assert torn.is_dir() and copy_of(store, 6) != damaged


def test_where_every_copy_is_damaged_nothing_starts_afresh(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    (copy_of(store, 2) / "manifest.json").write_text("{")
    shutil.rmtree(run)
    said = refused(config_file, *uploading)
    assert "its content does not match the name of its folder" in said and "nothing was started afresh" in said
    assert not (run / "metrics.jsonl").exists()
    (copy_of(store, 2) / "manifest.json").unlink()
    assert "manifest.json: missing, though run.json lists it" in refused(config_file, *uploading)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_checkpoint_of_the_run_is_renewed_from_its_copy(pool, config_file, store, uploading, world_size):
    layout = () if world_size == 1 else ("parallel.strategy=fsdp",)
    run = train(pool, world_size, config_file, *uploading, *layout, "checkpoint.keep_last=1", "run.steps=4")
    spoil(own(run, 4))
    code, printed = pool.launch(world_size, run_main, str(config_file), *uploading, *layout, "run.steps=6")[0]
    assert code == 0 and f"resumed from {own(run, 4)}" in printed, printed
    assert "set aside" in printed and (run / "checkpoints" / "damaged-step-00000004").is_dir()
    assert same_files(own(run, 4), copy_of(store, 4))


def test_a_copy_that_lost_a_file_is_completed_by_a_run_that_has_it(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=4")
    next(copy_of(store, 4).glob("*.distcp")).unlink()
    trained(config_file, *uploading, "run.steps=4")
    assert same_files(own(run, 4), copy_of(store, 4))


def test_going_back_leaves_later_copies_and_no_start_takes_them(config_file, store, uploading, monkeypatch):
    kept = (*uploading, "checkpoint.keep_last=0")
    run = trained(config_file, *kept, "run.steps=6")
    left = [copy_of(store, step) for step in (4, 6)]
    back = (*kept, f"run.resume={own(run, 2)}")
    trained(config_file, *back, "run.steps=4")
    assert copies(store) == [2, 4] and all(path.is_dir() for path in left)
    assert index_of(store).abandoned == tuple(path.name for path in left)
    # On another machine the same command goes on with what was saved since, and so does one that names no checkpoint.
    for again in (back, kept):
        shutil.rmtree(run)
        code, printed = run_main(str(config_file), *again, "run.steps=4")
        assert code == 0 and f"resumed from {own(run, 4)}" in printed, printed
    # One that names a copy gets it, and goes back to it.
    trained(config_file, *kept)
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *kept, f"run.resume={own(run, 4)}")
    assert code == 0 and f"resumed from {own(run, 4)}" in printed, printed


def test_going_back_that_is_interrupted_is_not_forgotten(config_file, store, uploading, monkeypatch):
    """The store had been left, and the run directory had not."""
    run = trained(config_file, *uploading, "checkpoint.keep_last=0", "run.steps=6")

    def killed(self, *arguments):
        raise KeyboardInterrupt

    back = (*uploading, "checkpoint.keep_last=0", f"run.resume={own(run, 2)}")
    with monkeypatch.context() as patched:
        patched.setattr("pretrain.train.continuation.Continuation.set_aside", killed)
        run_main(str(config_file), *back)
    assert f"run.resume={own(run, 6)} leaves the copies" in refused(config_file, *uploading)
    trained(config_file, *back)
    assert copies(store) == [2, 4, 6, 8]


def test_an_upload_that_fails_costs_no_step_and_is_made_up_for(config_file, store, uploading, monkeypatch):
    upload, failing = Remote.upload, [True]

    def unlucky(self, path, url, *more):
        if "step-00000004" in url and failing[0]:
            raise RuntimeError("the bucket is on fire")
        upload(self, path, url, *more)

    monkeypatch.setattr(Remote, "upload", unlucky)
    run = trained(config_file, *uploading, "run.steps=6")
    assert copies(store) == [2, 6]
    said = (run / "logs" / "rank-0.log").read_text()
    assert "the bucket is on fire; " in said and "step-00000004 itself is good" in said
    shutil.rmtree(store)
    shutil.rmtree(run)
    assert "the bucket is on fire" in refused(config_file, *uploading, "run.steps=4")  # the last one
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    failing[0] = False
    trained(config_file, *uploading, "run.steps=4")
    assert 4 in copies(store)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_what_is_kept_for_ever_is_made_up_for_even_by_a_later_start(config_file, store, uploading, monkeypatch):
    upload = Remote.upload

    def unlucky(self, path, url, *more):
        if "step-00000004" in url:
            raise RuntimeError("the bucket is on fire")
        upload(self, path, url, *more)

    kept = (*uploading, "checkpoint.keep_last=1", "checkpoint.keep_every_steps=4")
    with monkeypatch.context() as patched:
        patched.setattr(Remote, "upload", unlucky)
        assert "the bucket is on fire" in refused(config_file, *kept, "run.steps=6")
    assert copies(store) == [6]
    trained(config_file, *kept)
    assert copies(store) == [4, 8]


def test_copies_that_cannot_be_removed_are_a_warning(config_file, store, uploading, monkeypatch):
    def refuse(self, url):
        raise PermissionError("no right to delete")

    monkeypatch.setattr(Remote, "remove_folder", refuse)
    run = trained(config_file, *uploading)
    assert "older copies could not be removed: no right to delete" in (run / "logs" / "rank-0.log").read_text()
    assert copies(store) == [6, 8]


def test_a_start_that_was_replaced_copies_nothing_any_more(config_file, store, uploading, monkeypatch):
    """A machine that was thought dead must not write over what its successor saves; also if it was in the middle of a copy."""
    upload, others = Remote.upload, []

    def replaced(self, path, url, *more):
        upload(self, path, url, *more)
        if "step-00000004" in url and not others:
            others.append(StoredRun(f"file://{store}", "run"))
            others[0].take_over("another", index_of(store).timeline, 2)

    monkeypatch.setattr(Remote, "upload", replaced)
    said = refused(config_file, *uploading)
    assert "is of another start of this run" in said and "end one of the two" in said
    assert copies(store) == [2] and index_of(store).start == "another"


def test_two_machines_that_went_on_from_one_copy_are_told_apart(config_file, store, uploading):
    """The one that comes back has later steps than the other's copies, which it must not put aside unasked."""
    run = trained(config_file, *uploading, "checkpoint.keep_last=0", "run.steps=2")
    first = run.with_name("first")
    shutil.copytree(run, first)
    trained(config_file, *STEPS, "checkpoint.keep_last=0", "run.steps=6")  # without a network, so to say
    run.rename(run.with_name("ahead"))
    first.rename(run)
    trained(config_file, *uploading, "checkpoint.keep_last=0", "run.steps=4")
    shutil.rmtree(run)
    run.with_name("ahead").rename(run)
    said = refused(config_file, *uploading)
    assert f"{own(run, 6)} is not of the time line" in said and f"run.resume={own(run, 6)} leaves the copies" in said
    assert copies(store) == [2, 4]
    trained(config_file, *uploading, f"run.resume={own(run, 6)}")
    assert copies(store) == [6, 8] and len(index_of(store).abandoned) == 1


def test_a_restart_keeps_the_copy_from_before_skipped_steps(config_file, store, uploading, monkeypatch):
    from pretrain.train.trainer import Trainer

    settle = Trainer.settle

    def refuse(self, step):
        if step.number in (3, 4):
            step.figures.read()["objective"].fill_(float("nan"))
        return settle(self, step)

    options = (*uploading, "checkpoint.keep_last=1", "optim.skip_nonfinite=5", "run.steps=4")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "settle", refuse)
        run = trained(config_file, *options)
    assert names(run) == [step_name(2), step_name(4)] and copies(store) == [2, 4]
    trained(config_file, *options)
    assert copies(store) == [2, 4]


def test_a_stale_index_is_not_written_after_a_failure_that_passed(config_file, store, uploading, monkeypatch):
    """The network came back, and the index that had waited for it hid what the other machine had saved meanwhile."""
    from pretrain import transfer

    put, others = transfer._put, []

    def unlucky(url, system, place, content):
        if place.endswith("run.json") and b"step-00000004" in content and not others:
            others.append(StoredRun(f"file://{store}", "run"))
            others[0].take_over("another", index_of(store).timeline, 2)
            raise ConnectionError("no route to host")
        put(url, system, place, content)

    monkeypatch.setattr(transfer, "_put", unlucky)
    assert "is of another start of this run" in refused(config_file, *uploading)
    assert copies(store) == [2] and index_of(store).start == "another"


def test_a_store_whose_copies_were_all_left_is_no_new_one(config_file, store, uploading, monkeypatch):
    run = trained(config_file, *uploading, "run.steps=2")
    StoredRun(f"file://{store}", "run").take_over("another", [], 0)
    shutil.rmtree(run)
    said = refused(config_file, *uploading)
    assert "has copies that are of time lines that the run has left (up to step-00000002-" in said and "to start afresh, choose another" in said
    (store / "run" / "run.json").unlink()
    assert "has copies that are there without run.json (up to step-00000002-" in refused(config_file, *uploading)
    assert not (run / "checkpoints").exists() or names(run) == []


def test_a_copy_of_another_time_line_takes_no_damaged_checkpoints_place(config_file, store, uploading):
    """Two machines had the same step."""
    kept = (*uploading, "checkpoint.keep_last=0")
    run = trained(config_file, *kept, "run.steps=2")
    shutil.copytree(run, run.with_name("other"))
    trained(config_file, *STEPS, "checkpoint.keep_last=0", "run.steps=4")
    run.rename(run.with_name("mine"))
    run.with_name("other").rename(run)
    trained(config_file, *kept, "run.steps=4")
    shutil.rmtree(run)
    run.with_name("mine").rename(run)
    spoil(own(run, 4))
    said = refused(config_file, *kept, f"run.resume={own(run, 4)}")
    assert "its content does not match its sha256" in said and "no other one was tried" in said
    assert copies(store) == [2, 4]


def test_steps_that_were_trained_without_copying_are_made_up_for(config_file, store, uploading):
    trained(config_file, *uploading, "run.steps=2")
    trained(config_file, *STEPS, "run.steps=4")
    run = trained(config_file, *uploading, "run.steps=6")
    assert copies(store) == [4, 6] and names(run) == [step_name(4), step_name(6)]


def test_a_refused_start_leaves_the_directory_as_it_was(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    shutil.copytree(run, run.with_name("old"))
    trained(config_file, *uploading, "run.steps=4")
    shutil.rmtree(run)
    run.with_name("old").rename(run)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "tokens": 1, "loss": 0.5}\n')
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file() and "logs" not in path.parts}
    assert "optim.lr" in refused(config_file, *uploading, "optim.lr=0.1")
    after = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file() and "logs" not in path.parts}
    changed = {str(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"status.json", ".lock"}


def test_a_damaged_older_checkpoint_is_not_copied(config_file, store, uploading):
    kept = ("checkpoint.keep_last=1", "checkpoint.keep_every_steps=4")
    run = trained(config_file, *STEPS, *kept, "run.steps=6")
    spoil(own(run, 4))
    trained(config_file, *uploading, *kept)
    assert copies(store) == [8]
    assert "step-00000004 is not copied: " in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    "place, said",
    [
        ("runs/copies", "is no URL; give s3://"),
        ("https://host/runs", "checkpoints cannot be written there"),
        ("S3://bucket/runs", "checkpoints cannot be written there"),
        ("zip://a::file:///b", "checkpoints cannot be written there"),
        ("s3://", "names no folder"),
        ("file://runs", "names no folder"),
        ("file://{runs}", "is run.dir itself"),
    ],
)
def test_a_place_that_is_no_store_is_refused(config_file, place, said):
    line = refused(config_file, f"checkpoint.upload={place.format(runs=config_file.parent / 'runs')}", "run.steps=2")
    assert said in line and line.startswith("error: command line: checkpoint.upload="), line


def test_a_store_that_cannot_be_written_to_ends_the_start(config_file, store, tmp_path):
    (tmp_path / "file").write_text("")
    line = refused(config_file, f"checkpoint.upload=file://{tmp_path}/file/runs", *STEPS)
    assert line.startswith("error: checkpoint.upload: "), line


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": "pretrain-copies", "version": 2}', b"[" * 100_000, b'{"format": "pretrain-copies", "version": 1, "copies": 3}', b'{"format": "pretrain-copies", "version": 1, "timeline": [Infinity]}']
)
def test_a_strange_index_is_refused_in_one_line(config_file, store, uploading, content):
    (store / "run").mkdir(parents=True)
    (store / "run" / "run.json").write_bytes(content)
    assert f"checkpoint.upload: file://{store}/run/run.json: cannot be read" in refused(config_file, *uploading)


@pytest.mark.parametrize("name", ["", ".", "../up", "/abs", "a/../b", "nul\0", "\ud800", "x" * 300])
def test_a_hostile_manifest_names_no_file_outside(config_file, store, uploading, name):
    run = trained(config_file, *uploading, "run.steps=2")
    copy = copy_of(store, 2)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 3, "sha256": "0" * 64}
    content = json.dumps(manifest).encode()
    import hashlib

    folder = f"{step_name(2)}-{hashlib.sha256(content).hexdigest()[:12]}"
    (copy / "manifest.json").write_bytes(content)
    copy.rename(copy.with_name(folder))
    index = (store / "run" / "run.json").read_text().replace(copy.name, folder)
    (store / "run" / "run.json").write_text(index)
    shutil.rmtree(run)
    assert "its list of files is damaged" in refused(config_file, *uploading)


def test_a_copy_of_another_run_is_not_left_in_the_run_directory(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    shutil.rmtree(run)
    assert "model.dim" in refused(config_file, *uploading, "model.dim=64")
    assert names(run) == [] and not (run / "metrics.jsonl").exists() and copies(store) == [2]


def test_never_refuses_a_store_that_has_the_run_and_a_check_says_what_would_be_downloaded(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    shutil.rmtree(run)
    assert f"run.resume=never, but file://{store}/run has checkpoints up to step-00000002" in refused(config_file, *uploading, "run.resume=never")
    code, printed = run_main(str(config_file), *uploading, "--check")
    assert code == 0 and "would download step-00000002-" in printed and "and resume from it" in printed
    assert not (run / "checkpoints").exists()
    code, printed = run_main(str(config_file), *uploading, "--check", f"run.resume={own(run, 6)}")
    assert code == 1 and "is not one of its checkpoints" in printed


def test_slow_copying_leaves_out_checkpoints_and_never_one_that_is_kept_for_ever(config_file, store, uploading, monkeypatch):
    upload, offer, free, seen = StoredRun.upload, Uploads.offer, threading.Event(), []

    def slow(self, checkpoint, *more):
        free.wait(60)
        seen.append(checkpoint.name)
        return upload(self, checkpoint, *more)

    def offered(self, checkpoint):
        offer(self, checkpoint)
        if checkpoint.name == "step-00000008":
            free.set()

    monkeypatch.setattr(StoredRun, "upload", slow)
    monkeypatch.setattr(Uploads, "offer", offered)
    run = trained(config_file, *uploading, "checkpoint.keep_last=1", "checkpoint.keep_every_steps=4")
    assert seen == [step_name(2), step_name(8), step_name(4)]
    assert "step-00000006 is not copied, because" in (run / "logs" / "rank-0.log").read_text()
    assert copies(store) == [4, 8] and names(run) == [step_name(4), step_name(8)]


def test_a_run_that_fails_says_why_before_it_waits_for_an_upload(config_file, store, uploading, monkeypatch):
    upload, said = StoredRun.upload, []

    def slow(self, checkpoint, *more):
        for _ in range(200):
            log = config_file.parent / "runs" / "run" / "logs" / "rank-0.log"
            if "the batch is on fire" in log.read_text():
                said.append(time.monotonic())
                break
            time.sleep(0.05)
        return upload(self, checkpoint, *more)

    def broken(self, step, *more):
        if step.number == 3:
            raise RuntimeError("the batch is on fire")
        return settle(self, step, *more)

    from pretrain.train.trainer import Trainer

    settle = Trainer.settle
    monkeypatch.setattr(StoredRun, "upload", slow)
    monkeypatch.setattr(Trainer, "settle", broken)
    with pytest.raises(RuntimeError):
        run_main(str(config_file), *uploading)
    assert said and copies(store) == [2]


@pytest.fixture(scope="module")
def server():
    with object_server("models") as (url, client), faulty_server(upstream=url) as proxy:
        yield proxy, client


def test_s3_keeps_a_run_through_failures_that_pass(server, config_file, tmp_path, monkeypatch):
    """Uploaded, removed and downloaded again through a server that answers 503, breaks connections and sends a wrong bit."""
    proxy, client = server
    use_server(monkeypatch, tmp_path, proxy.url)
    monkeypatch.setattr("pretrain.transfer.Patience", lambda: QUICK)
    settings = (*STEPS, "checkpoint.upload=s3://models/runs", "checkpoint.asynchronous=true")
    straight = trained(config_file, *STEPS)
    expected = losses(straight), state_of(straight, 8)
    shutil.rmtree(straight)
    proxy.put_faults |= {"0.distcp": [503, "reset"], "manifest.json": [500], "starts.jsonl": ["reset"], "run.json": [503]}
    run = trained(config_file, *settings, "run.steps=6")
    assert not any(proxy.put_faults.values())
    index = CopiesIndex.parse(client.get_object(Bucket="models", Key="runs/run/run.json")["Body"].read())
    assert index.copies[-1].step == 6  # of those before, some may have come too late
    for path in own(run, 6).rglob("*"):
        if path.is_file():
            key = f"runs/run/{index.copies[-1].folder}/{path.relative_to(own(run, 6))}"
            assert client.get_object(Bucket="models", Key=key)["Body"].read() == path.read_bytes()
    shutil.rmtree(run)
    proxy.faults |= {"0.distcp": [503, "wrong"], "state.json": ["truncate"], "starts.jsonl": ["reset"], "run.json": [500]}
    trained(config_file, *settings)
    assert not any(proxy.faults.values())
    assert losses(run) == expected[0]
    one = state_of(run, 8)
    assert all(one[name].equal(tensor) for name, tensor in expected[1].items())


def test_the_name_of_a_run_is_no_pattern_on_s3(server, config_file, tmp_path, monkeypatch):
    """`exp[12]` removed the copies of exp1 and exp2."""
    proxy, client = server
    use_server(monkeypatch, tmp_path, proxy.url)
    options = (*STEPS, "run.steps=4", "checkpoint.keep_last=1", "checkpoint.upload=s3://models/names")
    for name in ("exp1", "exp[12]", "exp*"):
        assert run_main(str(config_file), *options, f"run.name={name}")[0] == 0
    found = {item["Key"] for item in client.list_objects_v2(Bucket="models", Prefix="names/")["Contents"]}
    for name in ("exp1", "exp[12]", "exp*"):
        steps = {key.split("/")[2].split("-")[1] for key in found if key.startswith(f"names/{name}/step-")}
        assert steps == {"00000004"}


def test_a_bucket_that_is_not_there_or_refuses_ends_the_start_in_one_line(server, config_file, tmp_path, monkeypatch):
    proxy, _ = server
    use_server(monkeypatch, tmp_path, proxy.url)
    line = refused(config_file, *STEPS, "checkpoint.upload=s3://nobucket/runs")
    assert line.startswith("error: checkpoint.upload: s3://nobucket/runs/run/run.json: "), line
    proxy.put_faults["run.json"] = [403]
    line = refused(config_file, *STEPS, "checkpoint.upload=s3://models/others")
    assert "access refused" in line and "set the credentials" in line
    assert not list((config_file.parent / "runs" / "run").glob("checkpoints/step-*"))
