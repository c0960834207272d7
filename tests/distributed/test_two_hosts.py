"""Two hosts, as two network name spaces with a cable between them: what crosses it, and what happens when it is cut."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES, ADDRESSES = ("hosta", "hostb"), ("10.98.7.1", "10.98.7.2")

pytestmark = pytest.mark.slow


class Hosts:
    """Two name spaces, hosta and hostb, with an address each. `cable(up)` joins and parts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spaces = [f"pretrain-{os.getpid()}-{name}" for name in NAMES]
        self.links = [f"pt{os.getpid() % 100_000}{end}" for end in "ab"]
        self.started: list[subprocess.Popen] = []
        for space in self.spaces:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for space, link, address in zip(self.spaces, self.links, ADDRESSES):
            run("ip", "link", "set", link, "netns", space)
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", space, "link", "set", link, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def cable(self, up: bool) -> None:
        run("ip", "-n", self.spaces[1], "link", "set", self.links[1], "up" if up else "down")

    def start(self, host: int, *command: str | Path, **variables: str) -> subprocess.Popen:
        """A command on a host of that name; its output is in a file, see `printed`."""
        output = (self.folder / f"{NAMES[host]}.out").open("w")
        named = f'hostname {NAMES[host]}; exec "$@"'
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c", named, "sh", *map(str, command)],
            env={**environment, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.links[host], **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def rank(self, host: int, config_file: Path, *overrides: str, **variables: str) -> subprocess.Popen:
        """Rank 0 on hosta or rank 1 on hostb, without a launcher."""
        place = {"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        command = (sys.executable, ROOT / "pretrain" / "run.py", "--config", config_file, "parallel.strategy=ddp", *overrides)
        return self.start(host, *command, **(place | variables))

    def printed(self, host: int) -> str:
        return (self.folder / f"{NAMES[host]}.out").read_text()

    def line(self, host: int) -> str:
        """The one line that a host's process ended with."""
        lines = [line for line in self.printed(host).splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.printed(host), self.printed(host)
        return lines[0].removeprefix("error: ")

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two hosts need root, ip and unshare")
    try:
        hosts = Hosts(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network name spaces here: {error.stderr}")
    yield hosts
    hosts.close()


def status(config_file: Path) -> dict:
    found = json.loads((config_file.parent / "runs" / "run" / "status.json").read_text())
    return {name: found[name] for name in ("state", "step", "reason")}


def wait_for_steps(config_file: Path, count: int) -> None:
    metrics = config_file.parent / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, "no steps"
        time.sleep(0.05)


def test_two_hosts_that_agree_train_and_one_that_differs_is_named_on_both(hosts, config_file):
    """OP-5, OP-6.1: another learning rate on node 2, started as a user starts two nodes."""
    script, variables = (
        ROOT / "launch" / "torchrun_multinode.sh",
        {"NODES": "2", "GPUS": "1", "HEAD": ADDRESSES[0], "MAX_RESTARTS": "0"},
    )
    arguments = ("--config", config_file, "parallel.strategy=ddp", "run.steps=3", "schedule.warmup_steps=1")
    for second, code, state in (("optim.lr=0.01", 1, None), ("optim.lr=0.003", 0, "finished")):
        both = [
            hosts.start(host, "bash", script, *arguments, *more, NODE_RANK=str(host), LOCAL_ADDR=ADDRESSES[host], **variables)
            for host, more in enumerate(((), (second,)))
        ]
        assert [process.wait(180) for process in both] == [code, code]
        if state:
            assert status(config_file)["state"] == state
            continue
        line = "error: rank 1 (hostb) has optim.lr=0.01, rank 0 (hosta) 0.003; start all nodes with the same command and files"
        ranks = [hosts.printed(host).count(line) for host in (0, 1)]
        # torchrun, which numbers the nodes itself, may have made hostb rank 0.
        swapped = (
            "error: rank 1 (hosta) has optim.lr=0.003, rank 0 (hostb) 0.01; start all nodes with the same command and files"
        )
        assert ranks == [1, 1] or [hosts.printed(host).count(swapped) for host in (0, 1)] == [1, 1], hosts.printed(0)


def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, config_file):
    """T-D7, OP-6.2: no connection is closed and nothing comes: each side names the other and its host, in time."""
    both = [hosts.rank(host, config_file, "run.steps=100000", "parallel.timeout_seconds=6") for host in (0, 1)]
    wait_for_steps(config_file, 3)
    hosts.cable(False)
    began = time.monotonic()
    assert [process.wait(60) for process in both] == [1, 1]
    assert time.monotonic() - began < 40
    for host, other in ((0, "rank 1 (hostb)"), (1, "rank 0 (hosta)")):
        assert "within 6 s" in hosts.line(host)
        assert f"{other} does not answer (stopped, or its host or network is down)" in hosts.line(host)
    assert status(config_file)["reason"] == hosts.line(0)


def test_a_cut_that_is_shorter_than_the_limit_is_said_and_survived(hosts, config_file):
    """OP-3 c: the link is down for a while: today no line is printed; nothing may be lost."""
    both = [hosts.rank(host, config_file, "run.steps=400") for host in (0, 1)]
    wait_for_steps(config_file, 3)
    hosts.cable(False)
    time.sleep(16)
    hosts.cable(True)
    assert [process.wait(240) for process in both] == [0, 0]
    assert "waiting 1" in hosts.printed(0) and "rank 1 (hostb) does not answer" in hosts.printed(0)
    assert status(config_file)["state"] == "finished"


def test_a_host_whose_process_is_killed_is_named_at_once(hosts, config_file):
    """OP-3 a: kill -9 on host b; gloo says a port number only."""
    both = [hosts.rank(host, config_file, "run.steps=100000") for host in (0, 1)]
    wait_for_steps(config_file, 3)
    os.killpg(both[1].pid, signal.SIGKILL)
    began = time.monotonic()
    assert both[0].wait(60) == 1
    assert time.monotonic() - began < 15
    assert "broke off: rank 1 (hostb) is gone without a word (killed?)" in hosts.line(0)


def test_a_host_that_never_starts_is_named_with_the_limit(hosts, config_file):
    """OP-5: node 2 never starts, and MASTER_ADDR is reachable: a line while it waits, and one in the end."""
    zero = hosts.rank(0, config_file, "parallel.join_seconds=8")
    assert zero.wait(90) == 2
    assert "1 of 2 processes are here, rank 1 is missing; waiting up to" in hosts.printed(0)
    assert "did not meet within 8 s (parallel.join_seconds): 1 of 2 processes are here, rank 1 is missing" in hosts.line(0)


def test_a_host_that_is_given_the_wrong_head_says_so(hosts, config_file):
    """OP-5: another HEAD on each node."""
    both = [
        hosts.rank(host, config_file, "parallel.join_seconds=8", MASTER_ADDR=address)
        for host, address in ((0, ADDRESSES[0]), (1, "10.98.7.77"))
    ]
    assert [process.wait(90) for process in both] == [2, 2]
    assert "rank 1 is missing" in hosts.line(0)
    assert "10.98.7.77:29500 (MASTER_ADDR:MASTER_PORT) does not answer" in hosts.line(1)
