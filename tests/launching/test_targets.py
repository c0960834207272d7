"""What tools/launch.py would start: checked with the schemas of those who would get it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import tool

from pretrain.distributed.agent import GAINED, STOPPED
from pretrain.errors import LaunchError
from pretrain.launching.targets import Launch, filled, read_target, target_names

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart.yaml"
GIVEN = {
    "local": {},
    "ssh": {"hosts": "a,b"},
    "slurm": {},
    "kubernetes": {"image": "r/p:1", "volume_claim": "runs"},
    "kubernetes-jobset": {"image": "r/p:1", "volume_claim": "runs"},
    "kubernetes-trainjob": {"image": "r/p:1", "volume_claim": "runs"},
    "sagemaker": {
        "image": "1.dkr.ecr.eu-west-1.amazonaws.com/p:1",
        "role": "arn:aws:iam::123456789012:role/train",
        "instance_type": "ml.p5.48xlarge",
        "bucket": "s3://bucket/runs",
    },
    "skypilot": {"accelerator": "H100", "volume": "disk"},
}
FULL = {
    "kubernetes": {"data_claim": "data", "cpu": "32", "memory": "10Gi", "queue": "q", "service_account": "train"},
    "kubernetes-jobset": {"data_claim": "data", "cpu": "32", "memory": "10Gi", "queue": "q", "service_account": "train"},
    "kubernetes-trainjob": {"data_claim": "data", "cpu": "32", "memory": "10Gi", "queue": "q"},
    "sagemaker": {
        "data": "s3://bucket/data",
        "file_system": "fs-0123456789abcdef0",
        "file_system_path": "/fsx/train",
        "subnets": ["subnet-1"],
        "security_groups": ["sg-1"],
        "spot": True,
        "wait_seconds": 100_000,
    },
}


def rendered(target: str, launch: Launch, **more: Any) -> tuple[list[Any], list[str]]:
    """The documents of the manifest, and the command."""
    text, command = read_target(target).rendered(launch, {**GIVEN[target], **more}, "FILE")
    if text is None:
        return [], command
    return ([json.loads(text)] if read_target(target).format == "json" else list(yaml.safe_load_all(text))), command


def lost(wanted: Any, kept: Any, place: str = "") -> list[str]:
    """Where a schema's object does not hold what was given to it."""
    if isinstance(wanted, dict):
        return [
            what
            for key, value in wanted.items()
            for what in ([f"{place}/{key}"] if key not in kept else lost(value, kept[key], f"{place}/{key}"))
        ]
    if isinstance(wanted, list):
        return [
            what for i, (one, other) in enumerate(zip(wanted, kept, strict=True)) for what in lost(one, other, f"{place}/{i}")
        ]
    return [] if wanted == kept else [place]


# ---- schemas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["least", "all settings"])
@pytest.mark.parametrize(("nodes", "fewest"), [(1, 1), (4, 4), (4, 2)])
@pytest.mark.parametrize("target", ["kubernetes", "kubernetes-jobset", "kubernetes-trainjob"])
def test_manifests_are_what_the_schemas_of_kubernetes_and_kubeflow_know(target, nodes, fewest, full):
    """The models are generated from the official OpenAPI schemas of Kubernetes, JobSet and Kubeflow Trainer."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = {
        "Job": models.IoK8sApiBatchV1Job,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    if fewest < nodes and target != "kubernetes":
        pytest.skip("takes no range")
    documents, command = rendered(
        target, Launch(CONFIG, nodes, 8, ["run.steps=7"], fewest=fewest), **(FULL[target] if full else {})
    )
    assert command == ["kubectl", "apply", "-f", "FILE"]
    if documents[0]["kind"] == "Service":
        service = documents.pop(0)
        assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == "quickstart"
    [document] = documents
    read = kinds[document["kind"]].from_dict(document)
    assert lost(document, json.loads(read.to_json())) == []
    text = yaml.safe_dump(document)
    assert "${" not in text and "null" not in text
    assert ("claimName: data" in text) == full and ("queue-name: q" in text) == full


@pytest.mark.parametrize("full", [False, True], ids=["least", "all settings"])
def test_a_training_job_is_what_the_api_of_sagemaker_takes(full):
    import boto3
    from botocore.stub import Stubber

    launch = Launch(CONFIG, 2 if full else 1, 8)
    [request], command = rendered("sagemaker", launch, **(FULL["sagemaker"] if full else {}))
    assert shlex.join(command) == "aws sagemaker create-training-job --cli-input-json file://FILE"
    client = boto3.client("sagemaker", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(client) as stub:
        stub.add_response("create_training_job", {"TrainingJobArn": "arn:aws:sagemaker:eu-west-1:1:training-job/x"}, request)
        client.create_training_job(**request)  # botocore checks names, types and lengths against the service's model
    assert request["ResourceConfig"]["InstanceCount"] == launch.nodes
    assert ("MaxWaitTimeInSeconds" in request["StoppingCondition"]) == request["EnableManagedSpotTraining"] == full


def test_a_range_of_nodes_is_what_the_place_understands_or_is_refused():
    launch = Launch(CONFIG, 4, 8, fewest=2)
    [_, job], _ = rendered("kubernetes", launch)
    assert job["spec"]["completions"] == 4 and job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert {"name": "NODES", "value": "2:4"} in job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "successPolicy" not in rendered("kubernetes", Launch(CONFIG, 4, 8))[0][1]["spec"]
    assert "--nodes=2-4" in rendered("slurm", launch)[1]
    for target in GIVEN.keys() - {"kubernetes", "slurm", "ssh"}:
        with pytest.raises(LaunchError, match=f"--nodes 2:4: {target} takes no range.* --target kubernetes, slurm, ssh"):
            rendered(target, launch)


def test_kubernetes_counts_the_failures_of_each_pod_and_none_after_a_new_checkpoint():
    """backoffLimit counted the pods: a failure of a run of 11 pods or more ended its Job, whatever it had gained."""
    again = {"operator": "In", "values": [STOPPED, GAINED]}
    [_, job], _ = rendered("kubernetes", Launch(CONFIG, 16, 8), restarts=4)
    spec = job["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (4, 0) and "backoffLimit" not in spec
    assert {"action": "Ignore", "onExitCodes": again} in spec["podFailurePolicy"]["rules"]
    [job_set], _ = rendered("kubernetes-jobset", Launch(CONFIG, 16, 8), restarts=4)
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    [group] = job_set["spec"]["replicatedJobs"]
    assert group["template"]["spec"]["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": again}]
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 4


# ---- what is started ---------------------------------------------------------------------------------------------------------


def test_every_target_is_rendered_and_has_an_example_here():
    assert sorted(GIVEN) == target_names()
    for target in GIVEN.keys() - {"ssh"}:
        documents, command = rendered(target, Launch(CONFIG, 1, 2))
        assert command and "${" not in json.dumps([documents, command])


def test_processes_without_devices_ask_for_none():
    [_, job], _ = rendered("kubernetes", Launch(CONFIG, 2, 4, on_cpu=True))
    assert (
        "nvidia" not in json.dumps(job)
        and {"name": "GPUS", "value": "4"} in job["spec"]["template"]["spec"]["containers"][0]["env"]
    )
    assert not any("gpus-per-node" in word for word in rendered("slurm", Launch(CONFIG, 2, 4, on_cpu=True))[1])


def test_the_log_of_a_slurm_job_needs_no_folder_of_its_own():
    """Slurm names the log after the job, and a job whose log lies in a folder that does not exist ends without a word."""
    assert "--job-name=sweep-a" in rendered("slurm", Launch(CONFIG, 1, 1, ["run.name=sweep/a"]))[1]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Llama 3.1_8B", "llama-3-1-8b"),
        ("7b", "run-7b"),
        ("x" * 80, "x" * 40),
        ("a--", "a"),
        ("übung", "bung"),
        ("___", "run-"),
    ],
)
def test_names_are_what_dns_allows(name, label):
    found = Launch(CONFIG, 1, 1, [f"run.name='{name}'"]).facts()
    assert found["name"] == name and found["label"].startswith(label.rstrip("-")) and found["label"][-1] != "-"
    assert __import__("re").fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", found["label"])


@pytest.mark.parametrize(
    ("target", "words", "says"),
    [
        ("local", ["--nodes", "2"], "--nodes 2: local has 1; choose another --target"),
        (
            "slurm",
            ["--set", "tiem=1"],
            "--set tiem: slurm has no such setting; it has partition, account, qos, time, constraint",
        ),
        ("kubernetes", ["--set", "image=x"], "kubernetes needs --set volume_claim=..."),
        (
            "sagemaker",
            ["--nodes", "2", *(f"--set={k}={v}" for k, v in GIVEN["sagemaker"].items())],
            "sagemaker with several nodes needs --set file_system=..., --set file_system_path=..., --set subnets=..., --set security_groups=...",
        ),
        ("ssh", ["--nodes", "4", "--set", "hosts=a,b"], "--nodes 4, and --set hosts= names 2 hosts"),
        ("slurm", ["optim.lrr=1"], "optim.lrr"),
        ("slurm", ["--set", "time"], "is not of the form key=value"),
        # What every process of the job would have found out, when it had started.
        ("slurm", ["--nodes", "2", "--gpus", "8"], "batch.sequences=8 is not divisible by batch.micro_sequences=4 times 16"),
        ("ssh", ["--nodes", "2", "--gpus", "8", "--set", "hosts=a,b"], "batch.sequences=8 is not divisible by batch.micro_sequences=4 times 16"),
        ("slurm", ["optim.name=schedule_free_adamw"], "schedule.name"),
        ("slurm", ["--nodes", "2", "model.ffn_dim=77", "parallel={strategy: fsdp, tensor: 2}"], "model.ffn_dim=77 does not divide by it"),
        ("kubernetes", ["--nodes", "2:3", *(f"--set={k}={v}" for k, v in GIVEN["kubernetes"].items())], "times 3"),
        ("slurm", ["--gpus", "3", "parallel={strategy: fsdp, shard: 2}"], "parallel.shard=2: 3 processes do not divide by 2; choose other"),
        ("slurm", ["--gpus", "3", "parallel={strategy: fsdp, tensor: 2}"], "parallel.tensor=2: 3 processes do not divide by 2; choose other"),
        ("slurm", ["--gpus", "3", "parallel={strategy: fsdp, shard: 2, tensor: -1}"], "3 processes do not divide by parallel.shard=2; choose other"),
        ("slurm", ["--gpus", "2", "parallel.strategy=single"], "runs in one process, but 2 were started; choose other"),
        ("slurm", [], "--nodes 1 --gpus 1: parallel.strategy=ddp expects several processes, 1 started; choose other numbers, or change the key"),
    ],
)
def test_what_cannot_be_launched_is_said_in_one_line(capsys, target, words, says):
    code = tool("launch").main(["--config", str(ROOT / CONFIG), "--target", target, "--dry-run", *words])
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and says in said and said.count("\n") == 1


def test_a_dry_run_prints_exactly_what_a_launch_starts(tmp_path):
    """The clients are scripts that say what they got."""
    clients = tmp_path / "bin"
    clients.mkdir()
    for name in ("sbatch", "kubectl", "aws", "sky"):
        (clients / name).write_text('#!/bin/sh\necho "$(basename "$0")" "$@"\ncase "$*" in *-f*) cat "$3";; esac\n')
        (clients / name).chmod(0o755)
    for target in ("slurm", "kubernetes"):
        words = [sys.executable, ROOT / "tools" / "launch.py", "--config", ROOT / CONFIG, "--target", target, "--nodes", "2"]
        words += [f"--set={key}={value}" for key, value in GIVEN[target].items()]
        environment = {"PATH": f"{clients}:/usr/bin:/bin"}
        run = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path, "env": environment}
        planned = subprocess.run([*words, "--dry-run"], **run).stdout
        assert not (tmp_path / "runs").exists()
        started = subprocess.run(words, **run).stdout.splitlines()
        manifest, command = planned.splitlines()[1:-1], planned.splitlines()[-1]
        assert started == [command, command, *manifest] if target == "kubernetes" else [command]
    assert (tmp_path / "runs" / "launch" / "quickstart.kubernetes.yaml").is_file()


def test_a_client_that_is_not_installed_is_named_and_the_manifest_kept(tmp_path):
    words = [
        sys.executable,
        ROOT / "tools" / "launch.py",
        "--config",
        ROOT / CONFIG,
        "--target",
        "skypilot",
        "--output",
        tmp_path / "t.yaml",
        "--gpus=2",
    ]
    words += [f"--set={key}={value}" for key, value in GIVEN["skypilot"].items()]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert done.returncode == 2 and f"sky is not installed here; the manifest is {tmp_path / 't.yaml'}" in done.stderr
    assert yaml.safe_load((tmp_path / "t.yaml").read_text())["resources"]["accelerators"] == "H100:2"


def test_a_manifest_is_kept_in_the_place_of_no_other_file(tmp_path, monkeypatch, capsys):
    """An unrelated file was replaced without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["--config", str(ROOT / CONFIG), "--target", "kubernetes", "--gpus=2", *[f"--set={k}={v}" for k, v in GIVEN["kubernetes"].items()]]
    (tmp_path / "mine.yaml").write_text("mine")
    refused = "error: --output mine.yaml: already exists with other content; choose another file or remove it first\n"
    assert tool("launch").main([*words, "--output", "mine.yaml"]) == 2 and capsys.readouterr().err == refused
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    for more in (["--output", "a.yaml"], ["--output", "a.yaml"], ["--nodes", "1", "--cpu"], []):  # the same again, or another in its own folder
        assert tool("launch").main([*words, *more]) == 2
        assert "kubectl is not installed here; the manifest is" in capsys.readouterr().err
    assert tool("launch").main([*words, "--cpu", "--output", "a.yaml"]) == 2
    assert "--output a.yaml: already exists" in capsys.readouterr().err
    assert (tmp_path / "a.yaml").read_text() == (tmp_path / "runs" / "launch" / "quickstart.kubernetes.yaml").read_text()


# ---- templates ---------------------------------------------------------------------------------------------------------------


def test_placeholders_keep_their_types_and_nulls_leave_out_what_mentions_them():
    facts = {"n": 2, "none": None, "words": ["a", "b"], "yes": True, "key": "k"}
    template = {
        "${key}": "${n}",
        "text": "${n} of ${key}",
        "gone": "x ${none}",
        "${none}": 1,
        "list": ["${words}", "c", "${none}", ["${words}"]],
        "empty": ["${none}"],
        "kept": {"$if": "${yes}", "a": 1},
        "left": {"$if": "${none}", "a": 1},
    }
    assert filled(template, facts) == {"k": 2, "text": "2 of k", "list": ["a", "b", "c", ["a", "b"]], "kept": {"a": 1}}
    with pytest.raises(LaunchError, match=r"\$\{other\} is no setting and no fact"):
        filled("${other}", facts)
