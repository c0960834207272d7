"""A run on hosts over ssh. Here ssh is a script that runs the command on this host; `launch/torchrun_multinode.sh` and all below it are real."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import losses

from pretrain.launching import over_ssh
from pretrain.launching.over_ssh import HostRun, Output, host_commands
from pretrain.launching.targets import Launch

ROOT = Path(__file__).resolve().parents[2]
FAKE_SSH = '#!/bin/sh\n# ssh HOST COMMAND\nshift\nexec sh -c "$*"\n'


@pytest.fixture
def launch(tmp_path, config_file):
    """Starts tools/launch.py --target ssh on two hosts that are this one."""
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    processes = []

    def start(*overrides: str, nodes: str = "2") -> subprocess.Popen:
        words = [
            sys.executable,
            ROOT / "tools" / "launch.py",
            "--config",
            config_file,
            "--target",
            "ssh",
            "--nodes",
            nodes,
            "--cpu",
        ]
        words += ["--set", "hosts=127.0.0.1,localhost", "--set", f"ssh={ssh}", "--set", f"folder={ROOT}", "--set", "port=29737"]
        words += ["--set", f"activate=export PATH={Path(sys.executable).parent}:$PATH", "--set", "restarts=0", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT)
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()


def test_hosts_train_one_run_and_their_output_is_told_apart(launch, config_file):
    process = launch("parallel.strategy=ddp", "run.steps=4", "log.every_steps=1")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert (
        re.search(r"^(127.0.0.1|localhost) +\| .*finished at step 4", printed, re.MULTILINE) and "pretrain-pid" not in printed
    )
    assert len(losses(config_file.parent / "runs" / "run")) == 4


@pytest.mark.slow  # tests/launching/test_real_hosts.py does it over ssh itself
def test_a_signal_to_the_launch_saves_the_run_on_all_hosts(launch, config_file):
    process = launch(
        "parallel.strategy=ddp", "run.steps=100000", "schedule.warmup_steps=0", "checkpoint.every_steps=0", "log.every_steps=1"
    )
    run = config_file.parent / "runs" / "run"
    end = time.monotonic() + 100
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=100)
    assert "SIGINT: asking all hosts to save and stop" in printed and process.returncode == 1
    assert '"state": "preempted"' in (run / "status.json").read_text(), printed
    assert list((run / "checkpoints").iterdir())


def test_when_a_host_cannot_start_the_others_are_stopped(launch):
    process = launch("optim.lr=fast")
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 2 and "optim.lr" in printed  # found here, before any host is asked


@pytest.mark.slow  # a node that is lost and comes is in tests/test_launching.py
def test_a_run_on_one_host_or_two_goes_on_when_one_is_lost(launch, config_file):
    steps = (
        "run.steps=60",
        "checkpoint.every_steps=2",
        "log.every_steps=1",
        "parallel.strategy=auto",
        "parallel.timeout_seconds=20",
    )
    process = launch(*steps, "--set", "restarts=3", nodes="1:2")
    run, end = config_file.parent / "runs" / "run", time.monotonic() + 100
    while not list(run.glob("checkpoints/step-*")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    found = subprocess.run(["pgrep", "-f", "nnodes 1:2 .*is_host=0"], capture_output=True, text=True).stdout.split()
    tree = subprocess.run(["pgrep", "-P", ",".join(found)], capture_output=True, text=True).stdout.split()
    for pid in [*found, *tree]:
        os.kill(int(pid), signal.SIGKILL)
    printed, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and re.search(
        r"localhost ended with exit code \d+: the run goes on with 1 of 2 hosts", printed
    ), printed
    assert '"state": "finished"' in (run / "status.json").read_text() and len(losses(run)) == 60


@pytest.mark.parametrize(("fewest", "code"), [(1, 0), (2, 0), (3, 1), (None, 1)])
def test_a_range_of_hosts_ends_well_if_enough_of_them_do(fewest, code):
    said: list[str] = []
    ends = "echo pretrain-pid $$; trap 'exit 1' TERM; sleep 1 & wait"
    run = HostRun(
        {"a": ["sh", "-c", ends], "b": ["sh", "-c", ends], "c": ["false"]}, ["sh", "-c", 'eval "$2"', "sh"], said.append, fewest
    )
    assert run.wait() == code
    assert (
        any("goes on with 2 of 3 hosts" in line for line in said)
        is (code == 0)
        is not any("asking all" in line for line in said)
    )


def test_a_second_signal_does_not_wait_for_a_host_that_hangs(monkeypatch):
    monkeypatch.setattr(over_ssh, "READ_SECONDS", 0.5)
    said, script = [], "echo pretrain-pid $$; trap '' TERM; sleep 60 & wait; wait"
    run = HostRun({"a": ["sh", "-c", script]}, ["sh", "-c", 'kill -TERM "$@"', "sh"], said.append)
    ends = threading.Thread(target=run.wait, daemon=True)
    ends.start()
    run.stop("SIGINT")
    ends.join(1)
    assert ends.is_alive()  # the host has time to save
    run.stop("SIGINT")
    ends.join(15)
    assert not ends.is_alive() and "not waiting for the hosts" in said[-1]
    assert run.wait() == 1


def test_hosts_are_read_and_told_to_stop_also_where_nobody_reads_the_output(monkeypatch, capsys):
    """Ctrl-C ends `| tee` as well. The signal was not passed on then, and a host that says much stood still before."""
    reader, writer = os.pipe()
    os.close(reader)
    script = "trap 'echo saved >&3; exit 3' TERM; echo pretrain-pid $$; i=0; while [ $i -lt 20000 ]; do echo a line of a host; i=$((i+1)); done; sleep 60 & wait"
    saved, told = os.pipe()
    lost = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", lost)
    run = HostRun({"a": ["bash", "-c", f"exec 3>/proc/{os.getpid()}/fd/{told}; {script}"]}, ["sh", "-c", 'eval "$2"', "sh"], Output())
    end = time.monotonic() + 20
    while run.hosts[0].pid is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    run.stop("SIGINT")
    assert run.wait() == 1
    monkeypatch.undo()
    with contextlib.suppress(BrokenPipeError):
        lost.close()
    os.close(told)
    with os.fdopen(saved) as file:
        assert file.read() == "saved\n" and run.hosts[0].process.returncode == 3
    assert capsys.readouterr().err == "what the hosts say cannot be printed: [Errno 32] Broken pipe; the run goes on, and its logs have it\n"


@pytest.mark.parametrize("by_nohup", [True, False])
def test_a_closed_terminal_stops_a_launch_unless_nohup_has_started_it(monkeypatch, by_nohup):
    """The page says to start it with nohup, and it stopped the run on all hosts all the same."""
    told, before = [], signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    monkeypatch.setattr(over_ssh, "host_commands", lambda *arguments: {"a": ["true"]})
    monkeypatch.setattr(over_ssh, "ssh_words", lambda settings: ["true"])
    monkeypatch.setattr(HostRun, "wait", lambda run: os.kill(os.getpid(), signal.SIGHUP) or 0)
    monkeypatch.setattr(HostRun, "stop", lambda run, why: told.append(why))
    try:
        assert over_ssh.run_over_ssh(SimpleNamespace(fewest_nodes=1), {}) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == ([] if by_nohup else ["SIGHUP"])


@pytest.mark.parametrize(("host", "known"), [("me@10.0.0.7", True), ("fd00::7", True), ("node-a", False), ("127.0.0.1", False)])
def test_a_host_that_is_named_by_its_address_is_found_by_it(host, known):
    settings = {"hosts": [host], "folder": "/f", "activate": None, "port": 1, "restarts": 0, "ssh": "ssh"}
    [command] = host_commands(Launch(str(ROOT / "configs" / "quickstart.yaml"), 1, 1, []), settings).values()
    address = host.rpartition("@")[2]
    assert (f"LOCAL_ADDR={address} " in command[-1]) is known
    assert f"HEAD={f'[{address}]' if ':' in address else address}:1" in command[-1].replace("'\"'\"'", "")


def test_words_reach_a_host_as_they_are():
    config = str(ROOT / "configs" / "quickstart.yaml")
    launch = Launch(config, 1, 1, ["run.name=it's $HOME", "optim.betas=[0.9, 0.95]"])
    settings = {"hosts": ["me@a"], "folder": "/f o", "activate": None, "port": 1, "restarts": 0, "ssh": "ssh -p 22"}
    [command] = host_commands(launch, settings).values()
    assert command[:4] == ["ssh", "-p", "22", "me@a"]
    script = command[4].replace("cd '\"'\"'/f o'\"'\"'", "true")
    shown = subprocess.run(
        ["sh", "-c", script.replace("exec bash launch/torchrun_multinode.sh", "printf '\"'\"'%s\\n'\"'\"'")],
        capture_output=True,
        text=True,
    )
    assert shown.stdout.splitlines()[1:] == ["--config", config, "run.name=it's $HOME", "optim.betas=[0.9, 0.95]"], shown
    assert "HEAD=a:1" in command[4]
