"""Runs one configuration under many layouts and launchers, as a user would start them, and compares what they computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import TrainingError
from pretrain.observe.metrics import read_metrics

GRADIENT_LIMIT, METRIC_LIMIT = 5e-6, 2e-6
ROOT = Path(__file__).resolve().parents[2]
SINGLE = "single"


@dataclass(frozen=True)
class Case:
    """A layout: how many processes, started by what, with which overrides."""

    name: str
    processes: int
    overrides: tuple[str, ...] = ()
    launcher: str = "torchrun"

    def command(self, config: Path, overrides: list[str]) -> list[str]:
        script = [str(ROOT / "pretrain" / "run.py"), "--config", str(config), *self.overrides, *overrides]
        if self.processes == 1:
            return [sys.executable, *script]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes), *script]
        settings = str(ROOT / "launch" / "accelerate" / "cpu_2.yaml")
        processes = ["--num_processes", str(self.processes), "--main_process_port", "0"]
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, *processes, *script]


@dataclass(frozen=True)
class Row:
    """What a case computed, against the single process: largest relative differences."""

    case: Case
    gradient: float
    loss: float
    grad_norm: float
    same_batches: bool
    seconds: float

    @property
    def equal(self) -> bool:
        return self.gradient <= GRADIENT_LIMIT and max(self.loss, self.grad_norm) <= METRIC_LIMIT and self.same_batches


def cases(sequences: int) -> list[Case]:
    """The layouts of docs/parallelism.md, on 1, 2 and 4 processes, for a global batch of `sequences` (a multiple of 16)."""

    def case(name: str, processes: int, micro_steps: int, *parallel: str, launcher: str = "torchrun") -> Case:
        micro = sequences // processes // micro_steps
        keys = (f"batch.micro_sequences={micro}", *(f"parallel.{p}" for p in parallel))
        return Case(name, processes, keys, launcher)

    hsdp = ("strategy=fsdp", "replicate=2", "shard=2")
    return [
        case(SINGLE, 1, 1, "strategy=single"),
        case("single, accumulation 4", 1, 4, "strategy=single"),
        case("DDP on 2", 2, 1, "strategy=ddp"),
        case("DDP on 4", 4, 1, "strategy=ddp"),
        case("DDP on 2, accumulation 4, no_sync", 2, 4, "strategy=ddp", "grad_sync=last"),
        case("DDP on 2, accumulation 4, sync every", 2, 4, "strategy=ddp", "grad_sync=every"),
        case("FSDP2 on 2", 2, 1, "strategy=fsdp"),
        case("FSDP2 on 4", 4, 1, "strategy=fsdp"),
        case("FSDP2 on 2, accumulation 4, sync last", 2, 4, "strategy=fsdp", "grad_sync=last"),
        case("FSDP2 on 2, accumulation 4, sync every", 2, 4, "strategy=fsdp", "grad_sync=every"),
        case("FSDP2 on 2, recomputed activations", 2, 1, "strategy=fsdp", "activation_checkpointing=true"),
        case("HSDP 2x2", 4, 1, *hsdp),
        case("HSDP 2x2, accumulation 4", 4, 4, *hsdp),
        case("DDP on 2, accelerate launch", 2, 1, "strategy=ddp", launcher="accelerate"),
        case("FSDP2 on 2, accelerate launch", 2, 1, "strategy=fsdp", launcher="accelerate"),
    ]


def compare(config: Path, overrides: list[str], output: Path, wanted: list[Case]) -> list[Row]:
    """Run every case below `output` and compare it with the first; progress on standard output."""
    rows: list[Row] = []
    for number, case in enumerate(wanted):
        started = time.monotonic()
        _run(case, config, overrides, output, number)
        seconds = time.monotonic() - started
        rows.append(_row(case, output / "case-0", output / f"case-{number}", seconds))
        print(f"{number + 1}/{len(wanted)}  {line(rows[-1])}", flush=True)
    return rows


def _run(case: Case, config: Path, overrides: list[str], output: Path, number: int) -> None:
    directory = output / f"case-{number}"
    shutil.rmtree(directory, ignore_errors=True)
    own = [
        f"run.dir={output}",
        f"run.name={directory.name}",
        "log.gradients_at=[1]",
        "log.every_steps=1",
        "log.tensorboard=false",
        "checkpoint.export_check=false",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(case.command(config, [*overrides, *own]), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [text for text in done.stderr.splitlines() if text.startswith("error:")]
        raise TrainingError(f"{case.name}: {errors[0] if errors else done.stderr[-500:]}")


def _row(case: Case, reference: Path, run: Path, seconds: float) -> Row:
    from safetensors.torch import load_file

    file = Path("gradients") / "step-00000001.safetensors"
    ours, theirs = load_file(run / file), load_file(reference / file)
    if ours.keys() != theirs.keys():
        raise TrainingError(f"{case.name}: its gradients have other names than those of {SINGLE}")
    gradient = max(float((ours[n].double() - g.double()).norm() / g.double().norm()) for n, g in theirs.items())
    records = list(zip(read_metrics(run), read_metrics(reference), strict=True))

    def largest(key: str) -> float:
        return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in records)

    same = all(a["batch"] == b["batch"] for a, b in records)
    return Row(case, gradient, largest("loss"), largest("grad_norm"), same, seconds)


def line(row: Row) -> str:
    """A row for the console."""
    verdict = "equal" if row.equal else "DIFFERENT"
    return f"{row.case.name:<42} gradient {row.gradient:.1e}  loss {row.loss:.1e}  norm {row.grad_norm:.1e}  {verdict}"


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    head = [
        "| layout | gradient of step 1 | loss of every step | gradient norm of every step | samples |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(
        head
        + [
            f"| {r.case.name} | {r.gradient:.1e} | {r.loss:.1e} | {r.grad_norm:.1e} | {'same' if r.same_batches else 'OTHER'} |"
            for r in rows
        ]
    )
