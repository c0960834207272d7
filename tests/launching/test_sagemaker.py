"""SageMaker's container contract, replayed: its files below /opt/ml, checkpoints that come back, an instance that is reclaimed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import losses

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def container(tmp_path, config_file):
    """Starts launch/sagemaker.sh as the container of a host does. `base`: its /opt/ml."""
    processes = []

    def start(base: Path, hosts: list[str], host: str, *overrides: str, name: str = "localhost") -> subprocess.Popen:
        (base / "input" / "config").mkdir(parents=True, exist_ok=True)
        said = {"current_host": host, "hosts": hosts, "network_interface_name": "lo"}
        (base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(said))
        environment = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), "GPUS": "1", "OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        words = ["bash", str(ROOT / "launch" / "sagemaker.sh"), "--config", str(config_file), *overrides]
        processes.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path)
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()


def test_a_reclaimed_instance_saves_and_the_next_one_goes_on(container, tmp_path):
    base, steps = (
        tmp_path / "ml",
        ("run.steps=100000", "schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=0", "log.every_steps=1"),
    )
    run = base / "checkpoints" / "run"
    process = container(base, ["localhost"], "localhost", *steps)
    end = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert "the same job continues from its checkpoint" in printed and not (base / "output" / "failure").exists(), printed
    assert '"state": "preempted"' in (run / "status.json").read_text()
    [saved] = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir()]
    # SageMaker brings the folder back to another instance; everything else is new.
    other = tmp_path / "other"
    other.mkdir()
    (base / "checkpoints").rename(other / "checkpoints")
    process = container(other, ["algo-1"], "algo-1", *steps[1:], f"run.steps={saved + 2}")
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    assert f"resumed from step {saved}" in printed or f"step {saved}" in printed
    assert len(losses(other / "checkpoints" / "run")) == saved + 2


def test_the_reason_of_an_earlier_job_is_not_that_of_this_one(container, tmp_path):
    """A second job with a wrong key was said to have failed because the first one had been asked to stop."""
    base, earlier = tmp_path / "ml", tmp_path / "ml" / "checkpoints" / "run" / "status.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"state": "failed", "reason": "an earlier reason"}')
    os.utime(earlier, (time.time() - 60, time.time() - 60))
    process = container(base, ["localhost"], "localhost", "optim.lrr=1")
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "unknown key optim.lrr" in printed
    assert (base / "output" / "failure").read_text() == "the run ended with exit code 1; its log says why\n"


@pytest.mark.slow
def test_the_reason_of_a_failure_is_where_sagemaker_shows_it(container, tmp_path):
    base = tmp_path / "ml"
    process = container(base, ["localhost"], "localhost", "data.sources=[{path: nowhere}]")
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "nowhere" in printed
    assert (base / "output" / "failure").read_text() == "the run ended with exit code 1; its log says why\n"  # it had no directory yet


def test_several_hosts_need_storage_that_all_see(container, tmp_path):
    base = tmp_path / "ml"
    process = container(base, ["algo-1", "algo-2"], "algo-1")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "2 hosts need a file system that all of them see" in printed
    assert "file system" in (base / "output" / "failure").read_text()


def test_outside_a_container_it_says_what_it_is_for(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch" / "sagemaker.sh"],
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "this script is for a SageMaker training container" in done.stderr
