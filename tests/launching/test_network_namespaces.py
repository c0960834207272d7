"""Two hosts with networks of their own, joined by a cable: network namespaces of Linux. torchrun, accelerate and plain ssh's script meet over it. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import losses, train
from test_real_hosts import launching, own_environment, ssh_command, until

ROOT = Path(__file__).resolve().parents[2]
RUN = ("parallel.strategy=ddp", "log.every_steps=1", "schedule.warmup_steps=0", "run.steps=30", "checkpoint.every_steps=10")
DEVICES = ("cable-a", "cable-b")
ADDRESSES = {"pretrain-a": "10.213.77.1", "pretrain-b": "10.213.77.2"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


def remove() -> None:
    for name in ADDRESSES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def networks() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("ip", path=f"/usr/sbin:/sbin:{os.environ['PATH']}") is None:
        pytest.skip("needs root and iproute2")
    remove()
    try:
        for name in ADDRESSES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = ADDRESSES
        ip("link", "add", "cable-a", "netns", first, "type", "veth", "peer", "name", "cable-b", "netns", second)
        for name, device in zip(ADDRESSES, DEVICES):
            ip("-n", name, "address", "add", f"{ADDRESSES[name]}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        remove()


@pytest.fixture
def hosts(networks) -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """`hosts(command_of)` starts `command_of(rank)`, words and environment, on each of two hosts."""
    started: list[subprocess.Popen] = []

    def start(command_of: Callable[[int], tuple[list[object], dict[str, str]]]) -> list[subprocess.Popen]:
        for rank, (name, device) in enumerate(zip(ADDRESSES, DEVICES)):
            words, variables = command_of(rank)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            # A host's name leads nowhere here, as on many clusters, so the device is named.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "GLOO_SOCKET_IFNAME": device, **variables}
            command = ["ip", "netns", "exec", name, *map(str, words)]
            started.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        return started[-2:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def by_torchrun(config_file: Path, *overrides: str) -> Callable[[int], tuple[list[object], dict[str, str]]]:
    def command_of(rank: int) -> tuple[list[object], dict[str, str]]:
        variables = {"NODES": "2", "GPUS": "1", "HEAD": f"{ADDRESSES['pretrain-a']}:29500", "NODE_RANK": str(rank)}
        variables["LOCAL_ADDR"] = list(ADDRESSES.values())[rank]
        return ["bash", "launch/torchrun_multinode.sh", "--config", config_file, *RUN, *overrides], variables

    return command_of


def ended(processes: list[subprocess.Popen], seconds: float = 200) -> list[str]:
    printed = [process.communicate(timeout=seconds)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


def test_torchrun_over_a_cable_trains_as_one_host_does(hosts, pool, config_file):
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")
    ended(hosts(by_torchrun(config_file)))
    assert losses(config_file.parent / "runs" / "run") == losses(straight)


def test_accelerate_over_a_cable_trains_as_one_host_does(hosts, pool, config_file):
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")

    def command_of(rank: int) -> tuple[list[object], dict[str, str]]:
        words = ["accelerate", "launch", "--config_file", "launch/accelerate/multi_node.yaml", "--num_processes", "2"]
        words += ["--machine_rank", rank, "--main_process_ip", ADDRESSES["pretrain-a"], "--main_process_port", "29501"]
        return [*words, "pretrain/run.py", "--config", config_file, *RUN], {}

    ended(hosts(command_of))
    assert losses(config_file.parent / "runs" / "run") == losses(straight)


def test_a_launch_over_ssh_reaches_the_other_network(networks, pool, config_file, tmp_path):
    straight = train(pool, 2, config_file, *RUN, "run.name=straight")
    addresses = list(ADDRESSES.values())
    command, servers = ssh_command(tmp_path, 2222, *addresses)
    started = [subprocess.Popen(["ip", "netns", "exec", name, *words]) for name, words in zip(ADDRESSES, servers)]
    inside = ["ip", "netns", "exec", "pretrain-a"]
    try:
        for address in addresses:
            reached = [*inside, *command.split(), address, "true"]
            until(lambda reached=reached: subprocess.run(reached, capture_output=True).returncode == 0, 20, "no sshd")
        # The device through which a host reaches the other one has another name on each.
        device = "$(ip -o -4 address show to 10.213.77.0/24 | cut -d' ' -f2)"
        activate = (
            f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={device} PATH={Path(sys.executable).parent}:/usr/sbin:/sbin:$PATH"
        )
        words = launching(
            config_file,
            "ssh",
            "--set",
            f"hosts={','.join(addresses)}",
            "--set",
            f"ssh={command}",
            "--set",
            f"activate={activate}",
        )
        done = subprocess.run(
            [*inside, *words, *RUN], cwd=ROOT, env=own_environment(), capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(config_file.parent / "runs" / "run") == losses(straight)
    finally:
        for server in started:
            server.terminate()


def test_a_host_whose_cable_is_cut_is_named_and_the_run_goes_on_when_it_is_back(hosts, pool, config_file):
    straight = train(pool, 2, config_file, *RUN, "run.name=straight", "run.steps=400")
    longer = ("run.steps=400", "parallel.timeout_seconds=15")
    first, second = hosts(by_torchrun(config_file, *longer))
    run = config_file.parent / "runs" / "run"
    end = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file() or len(losses(run)) < 15:
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.1)
    subprocess.run(["ip", "-n", "pretrain-b", "link", "set", "cable-b", "down"], check=True)
    end = time.monotonic() + 90
    while '"state": "failed"' not in (run / "status.json").read_text():
        assert time.monotonic() < end, "the lost host was not noticed"
        time.sleep(0.5)
    assert "rank 1" in (run / "status.json").read_text()
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
    for process in (first, second):
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    subprocess.run(["ip", "-n", "pretrain-b", "link", "set", "cable-b", "up"], check=True)
    ended(hosts(by_torchrun(config_file, *longer)))
    assert losses(run) == losses(straight)
