"""Launches on the two hosts of `test_two_hosts.py`: torchrun, accelerate and ssh train what one host trains, also after the cable was cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import losses, train
from test_two_hosts import ADDRESSES, ROOT, Hosts, hosts, status, wait_for_steps  # noqa: F401

sys.path.insert(0, str(ROOT / "tests" / "launching"))
from test_real_hosts import launching, own_environment, ssh_command, until  # noqa: E402

RUN = ("parallel.strategy=ddp", "log.every_steps=1", "schedule.warmup_steps=0", "run.steps=30", "checkpoint.every_steps=10")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def by_torchrun(hosts: Hosts, config_file: Path, *overrides: str) -> list[subprocess.Popen]:  # noqa: F811
    script, variables = ROOT / "launch" / "torchrun_multinode.sh", {"NODES": "2", "GPUS": "1", "HEAD": ADDRESSES[0]}
    words = ("bash", script, "--config", config_file, *RUN, *overrides)
    return [hosts.start(host, *words, NODE_RANK=str(host), LOCAL_ADDR=ADDRESSES[host], **variables) for host in (0, 1)]


def ended(hosts: Hosts, both: list[subprocess.Popen]) -> None:  # noqa: F811
    assert [process.wait(200) for process in both] == [0, 0], hosts.printed(0) + hosts.printed(1)


def test_torchrun_on_two_hosts_trains_as_on_one(hosts, pool, config_file):  # noqa: F811
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")
    ended(hosts, by_torchrun(hosts, config_file))
    assert losses(config_file.parent / "runs" / "run") == losses(straight)


def test_accelerate_on_two_hosts_trains_as_on_one(hosts, pool, config_file):  # noqa: F811
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")
    words = [
        "accelerate",
        "launch",
        "--config_file",
        ROOT / "launch" / "accelerate" / "multi_node.yaml",
        "--num_processes",
        "2",
    ]
    words += ["--main_process_ip", ADDRESSES[0], "--main_process_port", "29501", "--machine_rank"]
    run = [ROOT / "pretrain" / "run.py", "--config", config_file, *RUN]
    ended(hosts, [hosts.start(host, *words, str(host), *run) for host in (0, 1)])
    assert losses(config_file.parent / "runs" / "run") == losses(straight)


def test_a_launch_over_ssh_reaches_the_other_host(hosts, pool, config_file, tmp_path):  # noqa: F811
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")
    command, servers = ssh_command(tmp_path, 2222, *ADDRESSES)
    for host, words in enumerate(servers):
        hosts.start(host, *words)
    inside = ["ip", "netns", "exec", hosts.spaces[0]]
    for address in ADDRESSES:
        reached = [*inside, *command.split(), address, "true"]
        until(lambda reached=reached: subprocess.run(reached, capture_output=True).returncode == 0, 20, "no sshd")
    # The device through which a host reaches the other one has another name on each.
    device = f"$(ip -o -4 address show to {ADDRESSES[0]}/24 | cut -d' ' -f2)"
    activate = f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={device} PATH={Path(sys.executable).parent}:/usr/sbin:/sbin:$PATH"
    settings = {"hosts": ",".join(ADDRESSES), "ssh": command, "activate": activate}
    words = launching(config_file, "ssh", *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")))
    done = subprocess.run([*inside, *words, *RUN], cwd=ROOT, env=own_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(config_file.parent / "runs" / "run") == losses(straight)


def test_after_a_cut_the_lost_rank_is_named_and_the_same_command_goes_on(hosts, pool, config_file):  # noqa: F811
    straight = train(pool, 2, config_file, *RUN, "run.name=straight", "run.steps=400")
    longer = ("run.steps=400", "parallel.timeout_seconds=15")
    both = by_torchrun(hosts, config_file, *longer)
    wait_for_steps(config_file, 15)
    hosts.cable(False)
    until(lambda: status(config_file)["state"] == "failed", 90, "the lost host was not noticed")
    assert "rank 1" in status(config_file)["reason"]
    for process in both:
        process.terminate()
    for process in both:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    hosts.cable(True)
    ended(hosts, by_torchrun(hosts, config_file, *longer))
    assert losses(config_file.parent / "runs" / "run") == losses(straight)
