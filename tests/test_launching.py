"""Launchers: what they may say, the files under launch/, and the commands of docs/launching.md, run as they stand there."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from launch_pool import _free_port

from pretrain.config.schema import Config
from pretrain.distributed import agent
from pretrain.distributed.agent import Gathering
from pretrain.distributed.launcher import check_launcher
from pretrain.errors import LaunchError

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [ROOT / "launch" / name for name in ("torchrun_multinode.sh", "slurm.sbatch", "srun_task.sh", "sagemaker.sh")]
ACCELERATE = sorted((ROOT / "launch" / "accelerate").glob("*.yaml"))
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "launching.md").read_text(encoding="utf-8"), re.DOTALL)

# What accelerate 1.15 exports when nobody chose anything: `--multi_gpu`, and `--use_fsdp --fsdp_version 2` on top.
NOTHING_CHOSEN = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
}
FSDP2 = NOTHING_CHOSEN | {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_VERSION": "2",
}


def configured(**values: object) -> Config:
    """A configuration with keys of `parallel`, `precision.compute` (as `compute`) or `run.device` (as `device`) set."""
    config = Config()
    sections = {"compute": config.precision, "device": config.run}
    for name, value in values.items():
        setattr(sections.get(name, config.parallel), name, value)
    return config


# ---- what a launcher may say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({}, {}),
        (NOTHING_CHOSEN, {"strategy": "ddp", "compute": "bf16", "compile": "blocks"}),
        (FSDP2, {"strategy": "fsdp"}),
        (FSDP2, {"strategy": "fsdp", "reshard_after_forward": "never", "offload": True, "activation_checkpointing": "full"}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"compute": "bf16"}),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"compile": "blocks"}),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"strategy": "fsdp", "reshard_after_forward": "never"}),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "1"}, {"strategy": "fsdp", "shard": 2}),
        ({"ACCELERATE_USE_CPU": "True"}, {"device": "cpu"}),
    ],
)
def test_a_launcher_that_agrees_or_chose_nothing_is_accepted(environ, values):
    check_launcher(configured(**values), dict(environ))


@pytest.mark.parametrize(
    ("environ", "values", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "contradicts precision.compute=fp32 of the configuration; set precision"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "; launch with --mixed_precision no"),
        ({"ACCELERATE_USE_CPU": "True"}, {"device": "cuda"}, "contradicts run.device=cuda"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "launch without --use_deepspeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "launch without --use_megatron_lm"),
        (FSDP2, {"strategy": "ddp"}, "ACCELERATE_USE_FSDP=true contradicts parallel.strategy=ddp"),
        (FSDP2, {"strategy": "auto"}, "set parallel.strategy=fsdp or launch without --use_fsdp"),
        (FSDP2 | {"FSDP_VERSION": "1"}, {"strategy": "fsdp"}, "launch with --fsdp_version 2"),
        # If several are wrong, the error names the one that gives the others their meaning.
        (
            FSDP2 | {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "NO_RESHARD"},
            {"strategy": "fsdp"},
            "FSDP_VERSION=1 contradicts parallel.strategy=fsdp of the configuration",
        ),
        (FSDP2 | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"strategy": "fsdp"}, "launch without --fsdp_sharding_strategy"),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"strategy": "fsdp"}, "set parallel.reshard_after_forward=never or"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, {"strategy": "fsdp"}, "contradicts parallel.offload=false"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"strategy": "fsdp"}, "set parallel.activation_checkpointing=full"),
        ({"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, {}, "set parallel.activation_offload=true or"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "set parallel.compile=blocks or launch with --dynamo_backend no"),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "EAGER"},
            {"compile": "blocks"},
            "parallel.compile=blocks of the configuration",
        ),
        ({"ACCELERATE_DYNAMO_MODE": "max-autotune"}, {"compile": "blocks"}, "launch without --dynamo_mode"),
        ({"ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"}, {"compile": "blocks"}, "launch without --dynamo_use_fullgraph"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}, "contradicts batch.micro_sequences=16 of the configuration; leave it at 1"),
        (
            {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
            {},
            "contradicts parallel.shard=null of the configuration; set parallel.shard=2",
        ),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, "contradicts parallel.tensor=1"),
    ],
)
def test_a_launcher_setting_that_differs_is_refused_in_one_line_that_names_both(environ, values, said):
    with pytest.raises(LaunchError) as caught:
        check_launcher(configured(**values), dict(environ))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("strategy", ["auto", "single", "ddp", "fsdp"])
def test_accelerate_that_was_asked_for_several_processes_and_started_one_is_refused(strategy):
    # `accelerate launch --num_processes 2` on a host without GPU.
    environ = NOTHING_CHOSEN | {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="needs --multi_gpu .* start them with: torchrun --nproc-per-node 2 "):
        check_launcher(configured(strategy=strategy), environ)
    # The command had a count of its own, which left out experts and an axis that takes the rest.
    for axis, size, processes in (("expert", 4, 4), ("tensor", -1, 2), ("pipeline", 8, 8)):
        if strategy != "single":
            with pytest.raises(LaunchError, match=f"start them with: torchrun --nproc-per-node {processes} "):
                check_launcher(configured(strategy=strategy, **{axis: size}), dict(environ))
    del environ["MASTER_ADDR"]
    check_launcher(configured(strategy=strategy), environ)


# What a task of `srun --ntasks 2` sees, and what the batch script itself does (Slurm 22.05).
SRUN = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("strategy", ["auto", "single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SRUN, r"srun started 2 tasks \(SLURM_STEP_NUM_TASKS\) without RANK, .* srun bash launch/srun_task.sh .* sbatch --nodes N launch/slurm.sbatch "),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, r"mpirun \(Open MPI\) started 4 tasks"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, r"mpirun \(MPICH, Intel MPI\) started 2 tasks"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, r"mpirun \(MVAPICH\) started 2 tasks"),
    ],
)
def test_several_tasks_without_ranks_are_refused_with_the_command_to_use(strategy, environ, said):
    """T-D14, OP-6.7: plain srun or mpirun trains alone in every task; only the lock stopped the second."""
    tasks = environ.get("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=said) as caught:
        check_launcher(configured(strategy=strategy), dict(environ))
    assert f"torchrun --nproc-per-node {tasks} " in str(caught.value) and "\n" not in str(caught.value)
    assert "for runs of one process each, set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,  # python in the batch script itself
        SRUN | TORCHRUN,  # torchrun in each of two tasks, as launch/slurm.sbatch does
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},  # srun --ntasks 1
        SRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},  # runs of one process each
        {"OMPI_COMM_WORLD_SIZE": "2"} | TORCHRUN,
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_launcher_task_with_ranks_and_a_single_task_are_accepted(environ):
    """T-D14, OP-6.7: sbatch with one launcher per node goes on working."""
    check_launcher(configured(), dict(environ))


def test_settings_that_make_transformers_skip_loading_weights_are_removed():
    environ = dict(FSDP2)
    check_launcher(configured(strategy="fsdp"), environ)
    assert FSDP2.keys() - environ.keys() == {"FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_FSDP"}


# ---- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_an_accelerate_config_loads_and_chooses_ranks_only(path):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"cpu_2": 2, "gpu_8": 8, "multi_node": 16}[path.stem] == loaded.num_processes
    assert loaded.mixed_precision == "no"
    assert content.keys() <= {
        *("compute_environment", "distributed_type", "use_cpu", "num_machines", "num_processes", "machine_rank"),
        *("main_process_ip", "main_process_port", "main_training_function", "mixed_precision", "same_network", "rdzv_backend"),
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_launch_script_parses(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[0])
def test_a_command_of_the_page_parses(block):
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GPUS": "1", "HEAD": "a"}, "error: NODES is not set"),
        ({"GPUS": "1", "NODES": "2"}, "error: HEAD is not set"),
        ({"GPUS": "0", "NODES": "2", "HEAD": "a"}, "error: GPUS=0 is not a positive number"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a:b"}, "error: HEAD=a:b: the port is not a number"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a:99999999"}, "error: HEAD=a:99999999: the port is not a number in 1..65535"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a:65536"}, "error: HEAD=a:65536: the port is not a number in 1..65535"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a", "SHUTDOWN_TIMEOUT": "abc"}, "error: SHUTDOWN_TIMEOUT=abc is not a number of seconds"),
        ({"GPUS": "1", "NODES": "8", "HEAD": "a", "NODE_RANK": "08"}, "error: NODE_RANK=08 is not in 0..7"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a", "NODE_RANK": "9" * 30}, f"error: NODE_RANK={'9' * 30} is not in 0..1"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "fe80::1"}, "error: HEAD=fe80::1: write an IPv6 address in brackets"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a", "NODE_RANK": "2"}, "error: NODE_RANK=2 is not in 0..1"),
        ({"GPUS": "1", "NODES": "1:2", "HEAD": "a", "NODE_RANK": "2"}, "error: NODE_RANK=2 is not in 0..1"),
        ({"GPUS": "1", "NODES": "3:2", "HEAD": "a"}, "error: NODES=3:2: the fewest nodes come first, then the most"),
        ({"GPUS": "1", "NODES": "1:x", "HEAD": "a"}, "error: NODES=x is not a positive number"),
        ({"GPUS": "1", "NODES": "2", "HEAD": "a", "JOIN_SECONDS": "soon"}, "error: JOIN_SECONDS=soon is not a positive number"),
    ],
)
def test_a_missing_or_wrong_variable_of_the_multi_node_script_is_one_line_and_exit_code_2(variables, said):
    command = ["bash", SCRIPTS[0], "--config", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **variables})
    assert done.returncode == 2
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({"HEAD": "a"}, ["--rdzv-endpoint", "a:29500"]),
        ({"HEAD": "a:1", "NODE_RANK": "0"}, ["--rdzv-endpoint", "a:1", ",is_host=1"]),
        ({"HEAD": "a:65535", "NODES": "9", "NODE_RANK": "08"}, ["--rdzv-endpoint", "a:65535", ",is_host=0"]),
        ({"HEAD": "a:1", "NODE_RANK": "00"}, ["--rdzv-endpoint", "a:1", ",is_host=1"]),
        ({"HEAD": "[::1]:7", "NODE_RANK": "1"}, ["--rdzv-endpoint", "[::1]:7", ",is_host=0"]),
        ({"HEAD": "[::1]", "LOCAL_ADDR": "b"}, ["--rdzv-endpoint", "[::1]:29500", "", "--local-addr", "b"]),
        ({"HEAD": "a", "NODES": "1"}, ["--rdzv-endpoint", "a:29500", "", "--local-addr", "127.0.0.1"]),
        ({"HEAD": "a", "NODES": "1", "LOCAL_ADDR": "b"}, ["--rdzv-endpoint", "a:29500", "", "--local-addr", "b"]),
        ({"HEAD": "a", "NODES": "1:2", "NODE_RANK": "1"}, ["--rdzv-endpoint", "a:29500", ",is_host=0"]),
        ({"HEAD": "a", "JOIN_SECONDS": "30"}, ["--rdzv-endpoint", "a:29500"]),
    ],
)
def test_the_multi_node_script_passes_on_what_it_was_told(variables, options):
    """OP-5, OP-6.3, OP-6.5: the rendezvous' limits are settable, and a range of nodes is passed on."""
    seconds = variables.get("JOIN_SECONDS", "600")
    limits = f"join_timeout={seconds},read_timeout={seconds}" + "".join(options[2:3])
    options = [*options[:2], "--rdzv-conf", limits, *options[3:]]
    environ = {"PATH": os.environ["PATH"], "NODES": "2", "GPUS": "8", "MAX_RESTARTS": "1", "TORCHRUN": "echo", **variables}
    done = subprocess.run(["bash", SCRIPTS[0], "--config", "x y"], capture_output=True, text=True, env=environ)
    before = f"--nnodes {environ['NODES']} --nproc-per-node 8 --max-restarts 1 --rdzv-id pretrain --rdzv-backend c10d".split()
    script = f"{SCRIPTS[0].parent}/../pretrain/run.py"
    assert done.stdout == " ".join([*before, *options, script, "--config", "x y"]) + "\n"


# What a task of `srun` sees of three nodes with 2, 2 and 1 tasks (Slurm 22.05).
STEP = SRUN | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[7-9]",
}


def srun_task(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """launch/srun_task.sh where `python` prints what it was started with, and `scontrol` names two hosts."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    texts = {
        "python": f'for name in {names}; do echo "$name=${{!name:-}}"; done; echo "${{@:2}}"',
        "scontrol": '[ "$*" = "show hostnames n[7-9]" ] && echo n7 && echo n8',
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **STEP, **variables}
    words = ["bash", ROOT / "launch" / "srun_task.sh", "--config", "x y"]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}),
        ({"SLURM_NODEID": "2"}, {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": ""}),
        ({"SLURM_CPUS_PER_TASK": "6"}, {"OMP_NUM_THREADS": "6"}),
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "6"}, {"OMP_NUM_THREADS": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"MASTER_ADDR": "n7", "MASTER_PORT": "10049"}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"LOCAL_WORLD_SIZE": "2"}),  # no GPU: a run on the CPU
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {"LOCAL_WORLD_SIZE": "2"}),  # as Slurm says it
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}),
    ],
)
def test_a_task_of_srun_gets_the_variables_of_a_launcher(tmp_path, variables, said):
    done = srun_task(tmp_path, **variables)
    *lines, arguments = done.stdout.splitlines()
    assert arguments == "--config x y", done.stderr
    assert said.items() <= dict(line.split("=", 1) for line in lines).items()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": ""}, "error: not a task of srun: "),
        ({"SLURM_NODEID": "3"}, "error: Slurm's list of tasks, 2(x2),1, has no node 3"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "error: this task sees one GPU of its node (CUDA_VISIBLE_DEVICES=1); "),
        ({"SLURM_STEP_NODELIST": "n0"}, "error: scontrol cannot say which nodes n0 are; "),
    ],
)
def test_a_task_of_srun_that_cannot_start_says_so_in_one_line(tmp_path, variables, said):
    done = srun_task(tmp_path, **variables)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "told", "gains", "requeued"),
    [
        (agent.GAINED, None, True, "the run has failed, but gained a checkpoint since this start"),
        (137, None, True, "the run has failed, but gained a checkpoint since this start"),  # srun has killed a node that did not end
        (1, None, False, None),
        (137, signal.SIGTERM, True, None),  # scancel
        (agent.STOPPED, None, True, None),  # a signal to a process of the run itself
        (1, signal.SIGUSR1, False, "the run has stopped"),
        (0, None, True, None),
    ],
)
def test_a_job_of_slurm_is_requeued_if_its_run_failed_after_a_new_checkpoint(tmp_path, code, told, gains, requeued):
    """The job ended for good as soon as no restart was left, whatever it had gained."""
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    for step in (8, 9):
        (checkpoints / f"step-0000000{step}").mkdir(parents=True)
    (checkpoints / "step-00000008" / "manifest.json").touch()
    (tmp_path / "a.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    run = [f"kill -{int(told)} $PPID; sleep 0.2"] if told else []
    run += [f"touch {checkpoints}/step-00000009/manifest.json"] if gains else []
    texts = {"scontrol": 'echo "scontrol $*"', "srun": "; ".join([*run, f"exit {code}"]), "sleep": "exec /bin/sleep 0.2", "scancel": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "GPUS": "1"}
    environ = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    words = ["bash", "launch/slurm.sbatch", "--config", tmp_path / "a.yaml", "run.steps=10"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == code and not done.stderr, done.stderr
    end = f" {requeued}; requeueing\nscontrol requeue 7\n"
    assert done.stdout.endswith(end) if requeued else "requeue" not in done.stdout, done.stdout


# ---- the commands of the page, for real -------------------------------------------------------------------------------


class Page:
    """Runs blocks of the page in a folder that looks like the repository root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("pretrain", "tools", "launch", "configs"):
            (folder / name).symlink_to(ROOT / name)

    def start(self, part: str, before: str = "") -> subprocess.Popen:
        """The block of the small data set that has `part` in it."""
        (block,) = [block for block in BLOCKS if part in block and "runs/launching" in block]
        # python, torchrun and accelerate of this interpreter
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-e", "-c", before + block],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, part: str) -> None:
        process = self.start(part)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output

    def metrics(self, name: str) -> list[dict]:
        file = self.folder / "runs" / "launching" / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    page = Page(tmp_path_factory.mktemp("page"))
    page.run("train_tokenizer")
    with (page.folder / "runs" / "launching" / "tiny.yaml").open("a") as file:
        file.write("checkpoint: {export_check: false}\n")  # ten seconds of transformers' imports in each run
    return page


@pytest.fixture(scope="module")
def torchrun_losses(page) -> list[float]:
    page.run("run.name=torchrun")
    return [record["loss"] for record in page.metrics("torchrun")]


@pytest.mark.parametrize(
    "name", [pytest.param("python", marks=pytest.mark.slow), "accelerate", pytest.param("two_nodes", marks=pytest.mark.slow)]
)
def test_every_launcher_of_the_page_trains_to_the_losses_of_torchrun(page, torchrun_losses, name):
    page.run(f"run.name={name}")
    losses = [record["loss"] for record in page.metrics(name)]
    assert len(losses) == 3
    assert losses == pytest.approx(torchrun_losses, abs=2e-6)


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_comes_back_by_itself_and_continues_from_its_last_checkpoint(page):
    agent = page.start("run.name=restarts", before="exec ")
    try:
        run = page.folder / "runs" / "launching" / "restarts"
        deadline = time.monotonic() + 120
        while not (run / "checkpoints" / "step-00000020").exists():
            assert agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        output, _ = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert agent.returncode == 0, output
    resumed = int(re.search(r"resumed from .*: step (\d+),", output).group(1))
    assert resumed >= 20 and resumed % 20 == 0
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    # Steps after the checkpoint are logged again; none is missing.
    assert {record["step"] for record in page.metrics("restarts")} == set(range(1, 121))


# ---- torchrun with words ----------------------------------------------------------------------------------------------


def multi_node(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    """launch/torchrun_multinode.sh; what it prints is in `folder`/NODE_RANK.out."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GPUS": "1", "LOCAL_ADDR": "127.0.0.1", **variables}
    output = (folder / f"{variables.get('NODE_RANK', 'x')}.out").open("w")
    return subprocess.Popen(["bash", SCRIPTS[0], *arguments], env=environ, stdout=output, stderr=subprocess.STDOUT)


def test_nodes_that_do_not_gather_are_waited_for_with_words_and_end_with_one_line(tmp_path):
    """OP-5, OP-6.3: a node that never starts, another HEAD on each: 600 s of silence, then a traceback of torchrun."""
    head, other = _free_port(), _free_port()
    nodes = [
        multi_node(tmp_path, "--config", "x", NODES="2", NODE_RANK=rank, HEAD=f"127.0.0.1:{port}", JOIN_SECONDS="12")
        for rank, port in (("0", head), ("1", other))
    ]
    began = time.monotonic()
    assert [node.wait(120) for node in nodes] == [1, 1]
    assert time.monotonic() - began < 90
    for rank, port, seen in (("0", head, "is there; start the other nodes"), ("1", other, "listens at|start the head node")):
        printed = (tmp_path / f"{rank}.out").read_text()
        assert "Traceback" not in printed and "frame #" not in printed, printed
        assert re.search(rf"waits for 2 nodes at 127.0.0.1:{port} \(1\d of 12 s, JOIN_SECONDS\): ", printed)
        (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert f"error: 2 nodes at 127.0.0.1:{port} did not gather within 12 s (JOIN_SECONDS); this one is " in line
        assert re.search(seen, line)


def test_a_launch_leaves_nothing_in_the_temporary_directory(tmp_path, monkeypatch):
    """torch left a folder torchelastic_* there at each start, for logs that go to the console."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.delenv("PET_LOG_DIR")  # of tests/conftest.py
    node = multi_node(tmp_path, "--config", "x", NODES="1", HEAD=f"127.0.0.1:{_free_port()}", MAX_RESTARTS="0", TMPDIR=str(temporary))
    assert node.wait(90) == 1
    printed = (tmp_path / "x.out").read_text()
    assert "error: the process of rank 0 " in printed and not list(temporary.iterdir()), printed


def test_two_reasons_to_end_are_one_line(monkeypatch, capsys):
    """On a busy machine the watch came to its limit while torchrun's was being told: two lines."""
    monkeypatch.setattr(agent, "_spoken", threading.Event())
    monkeypatch.setattr(agent, "_has_processes", lambda: False)  # pytest may have some: the ranks kept alive between tests
    monkeypatch.setattr(Gathering, "state", lambda self: "is there")
    monkeypatch.setattr(agent.os, "_exit", sys.exit)
    assert agent._fail("torchrun's limit") == 1
    with pytest.raises(SystemExit, match="1"):
        agent._Watch(Gathering("2", "127.0.0.1:1", -agent._GRACE_SECONDS)).run()
    assert capsys.readouterr().err == "error: torchrun's limit\n"


def test_one_node_whose_port_is_taken_is_not_told_to_start_others():
    """F13: NODES=1 said "start the other nodes"."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert Gathering("1", endpoint, 600).state() == f"another program has {endpoint}; choose another port in HEAD"
        assert "start the other nodes" in Gathering("2", endpoint, 600).state()


def test_a_head_whose_port_another_program_has_says_so(tmp_path):
    """OP-5: HEAD port taken by another listener: no message."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        node = multi_node(tmp_path, "--config", "x", NODES="2", NODE_RANK="0", HEAD=f"127.0.0.1:{port}", JOIN_SECONDS="20")
        assert node.wait(90) == 1
    printed = (tmp_path / "0.out").read_text()
    assert f"error: 127.0.0.1:{port} is taken by another program or run; choose another port for HEAD on all nodes\n" in printed


@pytest.mark.slow
def test_an_elastic_run_starts_with_fewer_nodes_and_takes_in_one_that_comes(tmp_path, page):
    """OP-6.5: NODES=1:2 through the script."""
    where = {"NODES": "1:2", "HEAD": f"127.0.0.1:{_free_port()}"}
    arguments = [
        "--config",
        "runs/launching/tiny.yaml",
        "run.name=elastic",
        "run.steps=3000",
        "checkpoint.every_steps=10",
        "log.every_steps=1",
    ]
    before = os.getcwd()
    os.chdir(page.folder)
    try:
        first = multi_node(tmp_path, *arguments, NODE_RANK="0", **where)
        run = page.folder / "runs" / "launching" / "elastic"
        wait_for(lambda: (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step-*")), 180)
        second = multi_node(tmp_path, *arguments, NODE_RANK="1", **where)
        wait_for(lambda: (run / "starts.jsonl").read_text().count("\n") >= 2, 180)
        starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
        assert [start["world_size"] for start in starts[:2]] == [1, 2] and starts[1]["step"] > 0
    finally:
        os.chdir(before)
        for node in (second, first):
            node.terminate()
        for node in (second, first):
            node.wait(120)


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def test_the_setup_works_in_its_own_clone_and_leaves_an_environment_that_it_cannot_renew(tmp_path):
    """From another folder it made a .venv there; and `python -m venv` that failed (a full disk) cost the environment of the runs."""
    (tmp_path / "clone" / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "setup.sh", tmp_path / "clone" / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / "clone" / name).write_text("")
    (tmp_path / "python").write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for mine in ("clone/.venv", ".venv"):
        (tmp_path / mine).mkdir()
        (tmp_path / mine / "mine").touch()
    words = ["bash", tmp_path / "clone" / "launch" / "setup.sh"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHON": str(tmp_path / "python")}, capture_output=True, text=True)
    assert done.returncode == 2 and "-m venv' failed" in done.stderr
    assert (tmp_path / "clone/.venv/mine").exists() and (tmp_path / ".venv/mine").exists()
    shutil.rmtree(tmp_path / "clone/.venv")
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHON": str(tmp_path / "python")}, capture_output=True)
    assert not (tmp_path / "clone/.venv").exists()  # one that it began itself does not stay behind


# ---- the scripts of one data set ----------------------------------------------------------------------------------------


def in_a_clone(folder: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    """Run launch/SCRIPT in a clone whose tools only make the directory that is their --output; a program on stdin runs."""
    (folder / "launch").mkdir(exist_ok=True)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "launch" / script, folder / "launch")
    (folder / "launch" / "setup.sh").write_text("exit 0\n")
    for name in ("python", "torchrun"):
        tool = folder / ".venv" / "bin" / name
        made = 'mkdir -p "$(echo "$*" | sed -n "s/.*--output //p")"'
        tool.write_text(f'#!/bin/sh\ncase "$*" in -\\ *) exec {sys.executable} "$@";; *run.py*) echo trained;; *prepare*) {made};; esac\n')
        tool.chmod(0o755)
    done = subprocess.run(["bash", f"launch/{script}", *arguments], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_script_refuses_to_train_on_an_earlier_text(tmp_path):
    for name, text in (("one.txt", "a text, é"), ("copy.txt", "a text, é"), ("other.txt", "a text, e")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("one.txt", "one.txt", "copy.txt"):
        assert in_a_clone(tmp_path, "shakespeare.sh", name) == (0, "trained\n", "")
        parts = [(tmp_path / f"quickstart/shakespeare/{part}.txt").read_text(encoding="utf-8") for part in ("train", "validation")]
        assert parts == ["a text, ", "é"]  # cut between characters
    code, out, err = in_a_clone(tmp_path, "shakespeare.sh", "other.txt")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"quickstart/shakespeare was prepared from another text than {tmp_path}/other.txt; delete that folder" in err


def test_a_script_refuses_to_train_on_earlier_pairs(tmp_path):
    for folder in ("one", "copy", "other"):
        (tmp_path / folder).mkdir()
        for name in ("train.de", "train.en", "val.de", "val.en"):
            (tmp_path / folder / f"multi30k.{name}.gz").write_text(name + (folder if (folder, name) == ("other", "val.en") else ""))
    for folder in ("one", "one", "copy"):
        assert in_a_clone(tmp_path, "translation.sh", folder) == (0, "trained\n", "")
    code, out, err = in_a_clone(tmp_path, "translation.sh", "other")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"quickstart/translation was prepared from other files than those in {tmp_path}/other, or by an earlier version; delete that folder" in err
