"""tools/launch.py with the programs that it is for: OpenSSH, and a Slurm of two nodes, both on this machine. Needs root, Debian's packages and minutes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_pool import _free_port
from running import losses, train

ROOT = Path(__file__).resolve().parents[2]
STRAIGHT = ("parallel.strategy=ddp", "log.every_steps=1", "schedule.warmup_steps=0", "checkpoint.every_steps=0")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def need(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name, path=f"/usr/sbin:/sbin:{os.environ['PATH']}") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing or programs)} (Debian: apt install openssh-server slurm-wlm munge)")


def until(condition: Callable[[], object], seconds: float, what: str) -> object:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


def own_environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:/usr/sbin:/sbin:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def launching(config_file: Path, target: str, *words: str) -> list[str]:
    return [
        sys.executable,
        "tools/launch.py",
        "--config",
        str(config_file),
        "--target",
        target,
        "--nodes",
        "2",
        "--cpu",
        *words,
    ]


# ---- ssh --------------------------------------------------------------------------------------------------------------------


def ssh_command(folder: Path, port: int, *addresses: str) -> tuple[str, list[list[object]]]:
    """An ssh command that gets in by a key of its own, and for each address the command of a server that knows the key."""
    need("sshd", "ssh", "ssh-keygen")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "keys").write_text((folder / "user.pub").read_text())
    servers = []
    for address in addresses:
        (folder / f"{address}.conf").write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/keys\n"
            f"PidFile {folder}/{address}.pid\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
        )
        servers.append([shutil.which("sshd", path="/usr/sbin:/usr/bin"), "-D", "-f", folder / f"{address}.conf"])
    Path("/run/sshd").mkdir(exist_ok=True)
    options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return f"ssh -p {port} -i {folder}/user {options}", servers


@pytest.fixture
def ssh(tmp_path) -> Iterator[str]:
    """An ssh command that gets into this machine."""
    command, [words] = ssh_command(tmp_path, _free_port(), "127.0.0.1")
    server = subprocess.Popen(words)
    until(lambda: subprocess.run([*command.split(), "127.0.0.1", "true"], capture_output=True).returncode == 0, 20, "no sshd")
    yield command
    server.terminate()


def test_a_run_over_ssh_trains_stops_and_goes_on(ssh, pool, config_file):
    straight = train(pool, 2, config_file, *STRAIGHT, "run.name=straight", "run.steps=400")
    words = launching(
        config_file, "ssh", "--set", "hosts=root@127.0.0.1,localhost", "--set", f"ssh={ssh}", "--set", f"port={_free_port()}"
    )
    words += [
        "--set",
        f"activate=export OMP_NUM_THREADS=1 PATH={Path(sys.executable).parent}:$PATH",
        *STRAIGHT,
        "run.steps=400",
    ]
    run = config_file.parent / "runs" / "run"
    process = subprocess.Popen(
        words, cwd=ROOT, env=own_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until(lambda: (run / "metrics.jsonl").is_file() and len(losses(run)) > 20 or process.poll() is not None, 100, "no step")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=100)
    assert '"state": "preempted"' in (run / "status.json").read_text(), printed
    before = len(losses(run))
    assert 20 < before < 400
    done = subprocess.run(words, cwd=ROOT, env=own_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == losses(straight)
    assert not subprocess.run(["pgrep", "-f", f"run.py --config {config_file}"], capture_output=True).stdout


# ---- Slurm --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path) -> Iterator[Callable[..., str]]:
    """`slurm(command, ...)` runs a client of a Slurm of two nodes, in a folder that looks like the repository's root."""
    need("slurmctld", "slurmd", "munged", "sbatch")
    folder = tmp_path / "slurm"
    folder.mkdir(mode=0o755)
    for name in ("pretrain", "launch", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = {name: _free_port() for name in ("controller", "first", "second")}
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=socket.gethostname().split(".")[0], folder=folder, **ports))
    (folder / "state").mkdir()
    environment = own_environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "HEAD": f"127.0.0.1:{_free_port()}"}
    options = ["--force", "--foreground", "--key-file", folder / "munge.key", "--socket", folder / "munge.socket"]
    options += ["--pid-file", folder / "munge.pid", "--log-file", folder / "munge.log", "--seed-file", folder / "munge.seed"]
    started = []

    def start(*command: object) -> None:
        log = (folder / f"{Path(str(command[0])).name}{len(started)}.out").open("w")
        started.append(subprocess.Popen([str(word) for word in command], env=environment, stdout=log, stderr=log))

    def client(*command: object) -> str:
        done = subprocess.run([str(word) for word in command], env=environment, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        start("munged", *options)
        until((folder / "munge.socket").exists, 20, "no munged")
        start("slurmctld", "-D")
        for name in ("n1", "n2"):
            start("slurmd", "-D", "-N", name)
        until(
            lambda: "idle" in client("sinfo", "-h", "-o", "%D %t") and "2 idle" in client("sinfo", "-h", "-o", "%D %t"),
            60,
            "no nodes",
        )
        yield client
    finally:
        with contextlib.suppress(AssertionError):
            client("scancel", "--user=root")
        time.sleep(1)
        for process in reversed(started):
            process.kill()
            process.wait()


def test_a_job_of_two_nodes_saves_at_its_signal_requeues_and_goes_on(slurm, pool, config_file):
    straight = train(pool, 2, config_file, *STRAIGHT, "run.name=straight", "run.steps=600")
    said = slurm(*launching(config_file, "slurm", "--set", "time=0:30:00", *STRAIGHT, "run.steps=600"))
    job = re.search(r"Submitted batch job (\d+)", said)[1]
    run = config_file.parent / "runs" / "run"
    until(lambda: (run / "metrics.jsonl").is_file() and len(losses(run)) > 20, 120, slurm("scontrol", "show", "job", job))
    slurm("scancel", "--signal=USR1", "--batch", job)
    until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job), 60, "not requeued")
    saved = len(losses(run))
    assert 20 < saved < 600 and '"state": "preempted"' in (run / "status.json").read_text()
    until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", job), 60, "not pending")
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm itself waits for two minutes
    until(lambda: '"state": "finished"' in (run / "status.json").read_text(), 200, slurm("scontrol", "show", "job", job))
    assert losses(run) == losses(straight)
    first, second = [line for line in (run / "starts.jsonl").read_text().splitlines()]
    assert f'"platform": "Slurm job {job}"' in first and f'"platform": "Slurm job {job}, start 2"' in second


def test_a_cancelled_job_saves_and_is_not_requeued(slurm, config_file):
    job = re.search(r"batch job (\d+)", slurm(*launching(config_file, "slurm", *STRAIGHT, "run.steps=100000")))[1]
    run = config_file.parent / "runs" / "run"
    until(lambda: (run / "metrics.jsonl").is_file() and len(losses(run)) > 5, 120, slurm("scontrol", "show", "job", job))
    slurm("scancel", job)
    until(lambda: '"state": "preempted"' in (run / "status.json").read_text(), 60, "not saved")
    until(lambda: "JobState=CANCELLED" in slurm("scontrol", "show", "job", job), 60, "not cancelled")
    assert list((run / "checkpoints").iterdir()) and "Restarts=0" in slurm("scontrol", "show", "job", job)


def test_a_task_of_srun_per_process_trains_as_torchrun_does(slurm, pool, config_file):
    straight = train(pool, 4, config_file, *STRAIGHT, "run.name=straight", "run.steps=20")
    words = ["--nodes=2", "--ntasks-per-node=2", "--overcommit", "--immediate=60", "--time=2", "--label"]
    place = [f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}", "MASTER_ADDR=127.0.0.1"]
    task = ["env", *place, "bash", "launch/srun_task.sh", "--config", config_file, *STRAIGHT, "run.steps=20"]
    printed = slurm("srun", *words, *task)
    run = config_file.parent / "runs" / "run"
    assert losses(run) == losses(straight), printed
    # Without the script each task would train alone.
    with pytest.raises(AssertionError, match="launch/srun_task.sh"):
        slurm("srun", *words, sys.executable, "pretrain/run.py", "--config", config_file)


def test_an_array_prepares_data_as_one_process_does(slurm, byte_tokenizer, tmp_path):
    """The command of docs/data.md: each task of the array prepares a part, and anyone merges."""
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"text {number}: " + "all work and no play " * (number + 1))
    words = [
        sys.executable,
        ROOT / "tools" / "prepare_data.py",
        "--input",
        tmp_path / "*.txt",
        "--tokenizer",
        byte_tokenizer,
        "--output",
    ]
    subprocess.run([*map(str, words), str(tmp_path / "alone")], check=True, capture_output=True)
    shared = tmp_path / "shared"
    command = " ".join(f"'{word}'" for word in [*words, shared])
    script = tmp_path / "slurm" / "prepare.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=0-2\n#SBATCH --output=prepare-%a.log\n"
        f"{command} --task $SLURM_ARRAY_TASK_ID --tasks $SLURM_ARRAY_TASK_COUNT\n"
    )
    job = re.search(r"Submitted batch job (\d+)", slurm("sbatch", script))[1]
    until(lambda: not slurm("squeue", "-h", "-j", job), 120, "the array did not end")
    merged = subprocess.run([*map(str, words[:2]), "merge", "--output", str(shared)], capture_output=True, text=True)
    assert merged.returncode == 0, merged.stderr + "".join(
        path.read_text() for path in (tmp_path / "slurm").glob("prepare-*.log")
    )
    one, other = ({path.name: path.read_bytes() for path in folder.glob("*.bin")} for folder in (tmp_path / "alone", shared))
    assert b"".join(one.values()) == b"".join(other.values()) and one
