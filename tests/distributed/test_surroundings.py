"""What a run says of its place, and keeps in starts.jsonl."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
from running import run_main, train

from pretrain.distributed import surroundings
from pretrain.distributed.surroundings import describe_surroundings, platform_of


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "12"}, "Slurm job 12"),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}, "Slurm job 12, start 3"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "run-0"}, "Kubernetes pod run-0"),
        ({"SKYPILOT_TASK_ID": "sky-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "SkyPilot task sky-1"),
        ({"TRAINING_JOB_NAME": "j"}, "SageMaker job j"),
    ],
)
def test_platforms_are_known_by_their_environment(environ, name):
    assert platform_of(environ) == name


def test_a_run_says_where_it_is_and_keeps_it(pool, config_file):
    results = pool.launch(2, run_main, str(config_file), "run.steps=1", "schedule.warmup_steps=0", "parallel.strategy=ddp")
    [line] = [line for line in results[0][1].splitlines() if line.startswith("place ")]
    assert "1 host (" in line and "with 2 ranks" in line and "CPU" in line and "torch 2." in line
    start = json.loads((config_file.parent / "runs" / "run" / "starts.jsonl").read_text())
    assert sum(start["environment"]["hosts"].values()) == 2 and start["environment"]["version of torch"].startswith("2.")


def test_what_is_odd_is_said_with_the_hosts_that_it_is_true_of(config_file, pool):
    everywhere = {
        "platform": "", "hosts": {"a": 8, "b": 4}, "devices": {"H200": 8, "H100": 4}, "address": "10.0.0.1",
        "interfaces": {"GLOO_SOCKET_IFNAME": "eth0"}, "odd": {"has another number of ranks than other hosts": ["b"]}, "version of torch": "2.13",
    }  # fmt: skip
    assert describe_surroundings(everywhere) == [
        "place    2 hosts (a, b) with 4 to 8 ranks each; 8 x H200, 4 x H100; torch 2.13; network address 10.0.0.1, GLOO_SOCKET_IFNAME=eth0",
        "note     b: has another number of ranks than other hosts",
    ]
    with patch.object(surroundings.resource, "getrlimit", lambda _: (256, 256)):
        code, printed = run_main(str(config_file), "run.steps=1", "schedule.warmup_steps=0")
    assert code == 0 and "a process may open 256 files only; raise it with ulimit -n 4096" in printed


def test_memory_of_the_ranks_is_logged(pool, config_file):
    from pretrain.observe.metrics import read_metrics

    run = train(pool, 2, config_file, "run.steps=2", "schedule.warmup_steps=0", "parallel.strategy=ddp")
    memory = read_metrics(run)[-1]["memory"]
    assert 1e8 < memory["mean"] <= memory["largest"] < 1e11
