"""Copies of checkpoints in an object store: a machine that has nothing goes on from there, and nothing torn or foreign is ever taken."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from faulty_server import faulty_server
from object_server import object_server, use_server
from running import losses, run_main, state_of, train

from pretrain.checkpoint.stored_run import StoredRun
from pretrain.checkpoint.uploads import Uploads
from pretrain.transfer import Remote

STEPS = ("run.steps=8", "schedule={name: constant, warmup_steps: 1}", "checkpoint.every_steps=2", "run.deterministic=true")


@pytest.fixture
def store(tmp_path) -> Path:
    """A folder in place of a bucket."""
    return tmp_path / "bucket" / "runs"


@pytest.fixture
def uploading(store) -> tuple[str, ...]:
    return (*STEPS, f"checkpoint.upload=file://{store}")


def checkpoints_in(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "run" / "checkpoints").iterdir())


def same_files(one: Path, other: Path) -> bool:
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    return files and all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def trained(config_file: Path, *overrides: str) -> Path:
    code, printed = run_main(str(config_file), *overrides)
    assert code == 0, printed
    return config_file.parent / "runs" / "run"


def test_each_checkpoint_is_copied_and_kept_like_the_runs_own(config_file, store, uploading):
    run = trained(config_file, *uploading)
    own = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert own == checkpoints_in(store) == ["step-00000006", "step-00000008"]
    for name in own:
        assert same_files(run / "checkpoints" / name, store / "run" / "checkpoints" / name)
    for name in ("config.yaml", "identity.json", "starts.jsonl", "metrics.jsonl"):
        assert (store / "run" / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_machine_continues_from_the_store_as_if_nothing_had_been_lost(pool, config_file, store, uploading, world_size):
    """Losses and weights equal those of a straight run to the last bit; the metrics of the first machine are there."""
    layout = () if world_size == 1 else ("parallel.strategy=fsdp",)
    straight = train(pool, world_size, config_file, *STEPS, *layout, "run.name=straight")
    run = train(pool, world_size, config_file, *uploading, *layout, "run.steps=4")
    shutil.rmtree(run)
    code, printed = pool.launch(world_size, run_main, str(config_file), *uploading, *layout)[0]
    assert code == 0, printed
    assert f"downloaded {run}/checkpoints/step-00000004" in printed and "resumed from" in printed
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
    code, printed = run_main(str(config_file), *uploading, "run.steps=6")
    assert code == 0 and "resumed from " + str(run / "checkpoints" / "step-00000004") in printed
    assert len(losses(run)) == 6  # the log of steps 3 and 4 came with it
    before = printed
    code, printed = run_main(str(config_file), *uploading)
    assert code == 0 and "downloading" in before and "downloading" not in printed


def test_a_damaged_copy_is_passed_over_and_a_torn_one_is_not_seen(config_file, store, uploading, monkeypatch):
    monkeypatch.setattr("pretrain.transfer.Patience.first_delay", 0.01)
    run = trained(config_file, *uploading, "run.steps=6")
    copies = store / "run" / "checkpoints"
    payload = next((copies / "step-00000006").glob("*.distcp"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    torn = copies / "step-00000008"
    shutil.copytree(copies / "step-00000004", torn)
    (torn / "manifest.json").unlink()
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading)
    assert code == 0, printed
    assert "step-00000006" in printed and "downloaded 3 times, each time sha256" in printed and "falling back" in printed
    assert f"resumed from {run}/checkpoints/step-00000004" in printed
    assert same_files(run / "checkpoints" / "step-00000008", torn)


def test_where_every_copy_is_damaged_nothing_starts_afresh(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    [manifest] = (store / "run" / "checkpoints").glob("*/manifest.json")
    manifest.write_text("{")
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading)
    assert code == 1 and "manifest.json: cannot be read" in printed and "nothing was started afresh" in printed
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_checkpoint_of_the_run_is_renewed_from_its_copy(pool, config_file, store, uploading, world_size):
    layout = () if world_size == 1 else ("parallel.strategy=fsdp",)
    run = train(pool, world_size, config_file, *uploading, *layout, "checkpoint.keep_last=1", "run.steps=4")
    payload = next((run / "checkpoints" / "step-00000004").glob("*.distcp"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    code, printed = pool.launch(world_size, run_main, str(config_file), *uploading, *layout, "run.steps=6")[0]
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000004" in printed, printed
    assert "set aside" in printed and (run / "checkpoints" / "damaged-step-00000004").is_dir()
    assert same_files(store / "run" / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000004")


def test_going_back_sets_later_copies_aside(config_file, store, uploading):
    run = trained(config_file, *uploading, "checkpoint.keep_last=0", "run.steps=6")
    first = (store / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_bytes()
    back = (*uploading, "checkpoint.keep_last=0", f"run.resume={run}/checkpoints/step-00000002")
    trained(config_file, *back, "run.steps=4")
    assert checkpoints_in(store) == ["abandoned-step-00000004", "abandoned-step-00000006", "step-00000002", "step-00000004"]
    aside = store / "run" / "checkpoints" / "abandoned-step-00000006"
    assert (aside / "manifest.json").read_bytes() == first and same_files(run / "checkpoints" / aside.name, aside)
    # On another machine the same command goes on with what was saved since, and one that names a copy fetches that as well.
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *back)
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000004" in printed, printed
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading, "checkpoint.keep_last=0", f"run.resume={run}/checkpoints/step-00000004")
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000004" in printed, printed
    assert "abandoned-step-00000008" in checkpoints_in(store)


def test_an_upload_that_fails_costs_no_step_and_is_made_up_for(config_file, store, uploading, monkeypatch):
    upload, failing = Remote.upload, [True]

    def unlucky(self, path, url):
        if "step-00000004" in url and failing[0]:
            raise RuntimeError("the bucket is on fire")
        upload(self, path, url)

    monkeypatch.setattr(Remote, "upload", unlucky)
    run = trained(config_file, *uploading, "run.steps=6")
    assert checkpoints_in(store) == ["step-00000002", "step-00000006"]
    said = (run / "logs" / "rank-0.log").read_text()
    assert "the bucket is on fire; " in said and "step-00000004 itself is good" in said
    shutil.rmtree(store)
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading, "run.steps=4")
    assert code == 1 and "the bucket is on fire" in printed  # the last one
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    failing[0] = False
    trained(config_file, *uploading, "run.steps=4")
    assert "step-00000004" in checkpoints_in(store)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_start_that_was_replaced_copies_nothing_any_more(config_file, store, uploading, monkeypatch):
    """A machine that was thought dead must not write over what its successor saves."""
    retire, others = StoredRun.retire, []

    def replaced(self, newest, policy, skipped):
        retire(self, newest, policy, skipped)
        if not others:
            others.append(StoredRun(f"file://{store}", "run"))
            others[0].begin("another", 10**6)

    monkeypatch.setattr(StoredRun, "retire", replaced)
    code, printed = run_main(str(config_file), *uploading)
    assert code == 1 and "belongs to another start of this run" in printed and "end one of the two" in printed
    assert checkpoints_in(store) == ["step-00000002"]


@pytest.mark.parametrize(
    "place, said",
    [
        ("runs/copies", "is no URL; give s3://"),
        ("https://host/runs", "checkpoints cannot be written there"),
        ("zip://a::file:///b", "checkpoints cannot be written there"),
    ],
)
def test_a_place_that_is_no_store_is_refused(config_file, place, said):
    code, printed = run_main(str(config_file), f"checkpoint.upload={place}", "run.steps=2")
    assert code == 2 and said in printed and "checkpoint.upload" in printed


def test_a_store_that_cannot_be_written_to_ends_the_start(config_file, tmp_path):
    (tmp_path / "file").write_text("")
    code, printed = run_main(str(config_file), f"checkpoint.upload=file://{tmp_path}/file/runs", *STEPS)
    assert code == 1 and printed.splitlines()[-1].startswith("error: checkpoint.upload: "), printed


def test_never_refuses_a_store_that_has_the_run_and_a_check_says_what_would_be_downloaded(config_file, store, uploading):
    run = trained(config_file, *uploading, "run.steps=2")
    shutil.rmtree(run)
    code, printed = run_main(str(config_file), *uploading, "run.resume=never")
    assert code == 1 and f"run.resume=never, but file://{store}/run has checkpoints up to step-00000002" in printed
    code, printed = run_main(str(config_file), *uploading, "--check")
    assert code == 0 and f"would download step-00000002 from file://{store}/run, and resume from it" in printed
    assert not (run / "checkpoints").exists()


def test_slow_copying_leaves_out_checkpoints_and_never_one_that_is_kept_for_ever(config_file, store, uploading, monkeypatch):
    upload, offer, free, seen = StoredRun.upload, Uploads.offer, threading.Event(), []

    def slow(self, checkpoint):
        free.wait(60)
        upload(self, checkpoint)
        seen.append(checkpoint.name)

    def offered(self, checkpoint, skipped):
        offer(self, checkpoint, skipped)
        if checkpoint.name == "step-00000008":
            free.set()

    monkeypatch.setattr(StoredRun, "upload", slow)
    monkeypatch.setattr(Uploads, "offer", offered)
    run = trained(config_file, *uploading, "checkpoint.keep_last=1", "checkpoint.keep_every_steps=4")
    assert seen == ["step-00000002", "step-00000004", "step-00000008"]
    assert "step-00000006 is not copied, because" in (run / "logs" / "rank-0.log").read_text()
    assert checkpoints_in(store) == ["step-00000004", "step-00000008"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


@pytest.fixture(scope="module")
def server():
    with object_server("models") as (url, client), faulty_server(upstream=url) as proxy:
        yield proxy, client


def test_s3_keeps_a_run_through_failures_that_pass(server, config_file, tmp_path, monkeypatch):
    """Uploaded, removed and downloaded again through a server that answers 503, breaks connections and sends a wrong bit."""
    proxy, client = server
    use_server(monkeypatch, tmp_path, proxy.url)
    monkeypatch.setattr("pretrain.transfer.Patience.first_delay", 0.01)
    settings = (*STEPS, "checkpoint.upload=s3://models/runs", "checkpoint.asynchronous=true")
    straight = trained(config_file, *STEPS)
    expected = losses(straight), state_of(straight, 8)
    shutil.rmtree(straight)
    proxy.put_faults |= {"0.distcp": [503, "reset"], "step-00000002/manifest.json": [500], "starts.jsonl": ["reset"]}
    run = trained(config_file, *settings, "run.steps=6")
    assert not any(proxy.put_faults.values())
    own = run / "checkpoints" / "step-00000006"  # of those before, some may have come too late
    for path in own.rglob("*"):
        if path.is_file():
            stored = client.get_object(Bucket="models", Key=f"runs/run/checkpoints/{own.name}/{path.relative_to(own)}")
            assert stored["Body"].read() == path.read_bytes()
    shutil.rmtree(run)
    proxy.faults |= {"0.distcp": [503, "wrong"], "state.json": ["truncate"], "starts.jsonl": ["reset"]}
    trained(config_file, *settings)
    assert not any(proxy.faults.values())
    assert losses(run) == expected[0]
    one = state_of(run, 8)
    assert all(one[name].equal(tensor) for name, tensor in expected[1].items())


def test_a_bucket_that_is_not_there_or_refuses_ends_the_start_in_one_line(server, config_file, tmp_path, monkeypatch):
    proxy, _ = server
    use_server(monkeypatch, tmp_path, proxy.url)
    code, printed = run_main(str(config_file), *STEPS, "checkpoint.upload=s3://nobucket/runs")
    assert code == 1 and printed.splitlines()[-1].startswith("error: checkpoint.upload: s3://nobucket/runs/run/owner.json: "), printed
    proxy.put_faults["owner.json"] = [403]
    code, printed = run_main(str(config_file), *STEPS, "checkpoint.upload=s3://models/others")
    assert code == 1 and "access refused" in printed and "set the credentials" in printed
    assert not list((config_file.parent / "runs" / "run").glob("checkpoints/step-*"))
