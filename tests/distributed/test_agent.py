"""torchrun's agent of a node: how it ends, and what it takes for the processes of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_pool import _free_port

from pretrain.distributed import agent

AGENT = Path(agent.__file__)
A_RUN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[2]).parent / "runs" / "told"
def write(state):
    (folder / "aside").write_text('{"state": "%s", "by": "this start"}' % state)
    os.replace(folder / "aside", folder / "status.json")
signal.signal(signal.SIGTERM, lambda *_: write("preempted"))
if os.environ["RANK"] == "0":
    write("running")
(folder / f"{os.environ['RANK']}.up").touch()
while '"preempted", "by"' not in (folder / "status.json").read_text():
    time.sleep(0.1)
"""


@pytest.mark.parametrize("told", [0, 1])  # 0: the head, which takes the rendezvous with it
def test_when_one_node_is_told_to_stop_all_agents_end_at_once_and_none_says_finished(tmp_path, told):
    """The other node's agent waited five minutes, told one to start the other nodes, and ended with 0: a Job of Kubernetes took it for finished."""
    run, nodes = tmp_path / "runs" / "told", []
    run.mkdir(parents=True)
    (run / "status.json").write_text('{"state": "preempted"}')  # of an earlier start: no reason to end
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: told}}\n")
    (tmp_path / "run.py").write_text(A_RUN)
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d", "--local-addr=127.0.0.1", "--rdzv-id=t"]
    options.append(f"--rdzv-endpoint=127.0.0.1:{_free_port()}")
    for node in range(2):
        words = [sys.executable, AGENT, *options, f"--rdzv-conf=join_timeout=60,read_timeout=60,is_host={1 - node}"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{node}.out").open("w") as output:
            words += [tmp_path / "run.py", "--config", tmp_path / "run.yaml"]
            nodes.append(subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        end = time.monotonic() + 100
        while len(list(run.glob("*.up"))) < 2:
            assert time.monotonic() < end and None in [node.poll() for node in nodes]
            time.sleep(0.1)
        nodes[told].send_signal(signal.SIGTERM)
        codes = [node.wait(60) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    printed = [(tmp_path / f"{node}.out").read_text() for node in range(2)]
    assert codes == [agent.STOPPED, agent.STOPPED], printed
    for text in printed:
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert "was told to stop; the run is saved, and the same command on all nodes continues it" in line
        assert "Traceback" not in text and "start the other nodes" not in text


def test_only_what_this_start_has_written_says_that_a_run_was_stopped(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "a.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    file = tmp_path / "runs" / "a" / "status.json"
    file.write_text('{"state": "preempted", "step": 3}')
    status = agent.LeftByRun(["--config", str(tmp_path / "a.yaml")])
    assert not status.is_stopped()
    for state, is_stopped in (("running", False), ("preempted", True), ("finished", False)):
        file.write_text(json.dumps({"state": state, "step": 5}))
        assert status.is_stopped() is is_stopped
    assert not agent.LeftByRun(["--config", str(tmp_path / "none.yaml")]).is_stopped()


A_RUN_THAT_FAILS = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[2]).parent / "runs" / "fails"
(folder / "starts" / os.environ["TORCHELASTIC_RESTART_COUNT"]).mkdir(parents=True)
step = 10 * min(len(list((folder / "starts").iterdir())), 2)  # the third start gains nothing
checkpoints = folder / "checkpoints"
(checkpoints / f"step-{step:08d}").mkdir(exist_ok=True)
(checkpoints / f"step-{step:08d}" / "manifest.json").touch()
(checkpoints / f"step-{step + 1:08d}").mkdir(exist_ok=True)  # not complete
sys.exit(3)
"""


def test_only_restarts_without_a_new_checkpoint_are_counted(tmp_path):
    """The fourth failure of a run ended it, after however many weeks, and its exit code was that of a run that never trained."""
    run = tmp_path / "runs" / "fails"
    (run / "checkpoints" / "step-00000000").mkdir(parents=True)  # of an earlier start: no progress
    (run / "checkpoints" / "step-00000000" / "manifest.json").touch()
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: fails}}\n")
    (tmp_path / "run.py").write_text(A_RUN_THAT_FAILS)
    words = [sys.executable, AGENT, "--nnodes=1", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=f"]
    words += ["--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--monitor-interval=0.1"]
    words += [tmp_path / "run.py", "--config", tmp_path / "run.yaml"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert "ended with exit code 3; its last lines say why" in done.stderr
    assert sorted(int(start.name) for start in (run / "starts").iterdir()) == [0, 1, 2], done.stderr
    assert done.returncode == agent.GAINED


def test_a_failure_is_told_from_one_after_a_new_checkpoint(tmp_path):
    (tmp_path / "a.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"

    def complete(name: str) -> None:
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "manifest.json").touch()

    complete("step-00000007")
    left = agent.LeftByRun(["--config", str(tmp_path / "a.yaml")])
    (checkpoints / "step-00000009").mkdir()  # not complete
    for name in (".writing-step-00000010", "damaged-step-00000011", "step-00000006"):
        complete(name)
    assert (left.newest, left.has_new_checkpoint(), left.code_of_failure()) == (7, False, 1)
    complete("step-00000008")
    assert (left.has_new_checkpoint(), left.has_new_checkpoint(), left.code_of_failure()) == (True, False, agent.GAINED)
    assert agent.LeftByRun(["--config", str(tmp_path / "none.yaml")]).newest == -1


def test_where_the_system_does_not_say_who_has_children_no_run_is_ended(tmp_path):
    """Linux without CONFIG_PROC_CHILDREN has no such file: after JOIN_SECONDS the agent ended a run that trained, because its nodes had not gathered."""
    (tmp_path / "17").mkdir()
    assert agent._has_processes(tmp_path)
    (tmp_path / "17" / "children").write_text("")
    assert not agent._has_processes(tmp_path)
    (tmp_path / "17" / "children").write_text("18 ")
    assert agent._has_processes(tmp_path)
