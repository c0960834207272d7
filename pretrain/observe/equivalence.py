"""Runs one configuration under many layouts and launchers, as a user would start them, and compares what they computed.

A layout may only change the order in which the gradients of micro-batches are added, in fp32. In bf16 every micro-batch's gradient of a matrix is
also rounded once. So a layout is compared with the single process that has the same micro-batches. Single processes with other micro-batches may
differ by that rounding: each addend by 2^-9 of itself (u, the unit roundoff of bf16). Both sums together may differ by 2 u times the addends'
norms over the norm of their sum. That ratio is at most 4 for the 16 micro-batches here, if they are unrelated.

A layout that splits matrices or positions also adds up activations in another order, so it rounds them elsewhere. A parameter whose gradient is small because
large terms cancel has the rounding of these terms. So differences up to u times the norm of the whole gradient are mere rounding there.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.keys import SetKey, is_met, keys_of
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.errors import ConfigError, TrainingError
from pretrain.observe.metrics import read_metrics

GRADIENT_LIMIT, METRIC_LIMIT = 5e-6, 2e-6
BF16_GRADIENT_LIMIT, BF16_METRIC_LIMIT = 2 * 4 * 2**-9, 2**-8
"""The first limit: see above. The second is for later steps: weights that differ in the last bit of fp32 may round to neighbours in bf16."""
NEGLIGIBLE = 1e-6
"""A gradient below this share of the whole gradient's norm is mere rounding (a bias without effect, say). It is divided by that share."""
UNIT_ROUNDOFF = {"fp32": 2**-24, "bf16": 2**-9}
ROOT = Path(__file__).resolve().parents[2]
SINGLE = "single"
_SIZES = ("parallel.replicate", "parallel.shard", "parallel.context", "parallel.tensor", "parallel.pipeline", "parallel.expert")


@dataclass(frozen=True)
class Case:
    """A layout: the number of processes, the samples of a micro-batch, the launcher and the overrides."""

    name: str
    processes: int
    micro: int
    overrides: tuple[str, ...] = ()
    launcher: str = "torchrun"

    @property
    def splits(self) -> bool:
        """Whether ranks share matrices, positions or experts."""
        return any(
            override.startswith(("parallel.tensor=", "parallel.context=", "parallel.expert=")) for override in self.overrides
        )

    def command(self, config: Path, overrides: list[str]) -> list[str]:
        script = [str(ROOT / "pretrain" / "run.py"), "--config", str(config), *self.overrides, *overrides]
        if self.processes == 1:
            return [sys.executable, *script]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes), *script]
        settings = str(ROOT / "launch" / "accelerate" / "cpu_2.yaml")
        processes = ["--num_processes", str(self.processes), "--main_process_port", "0"]
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, *processes, *script]

    def resets(self, config: Config) -> list[str]:
        """Overrides that undo settings of `config` for another layout: copies, shards, and keys that this strategy refuses."""
        own = dict(override.split("=", 1) for override in self.overrides)
        strategy = own["parallel.strategy"]

        def is_of_another(key: SetKey) -> bool:
            wanted = key.when.get("parallel.strategy", (strategy,))
            return key.path in _SIZES or not is_met(wanted, strategy)

        changed = [key for key in keys_of(config) if key.value != key.default and key.path not in own]
        return [f"{key.path}={json.dumps(key.default)}" for key in changed if is_of_another(key)]


@dataclass(frozen=True)
class Row:
    """The largest relative differences between a case and a single process, in one number format."""

    case: Case
    format: str
    gradient: float
    loss: float
    grad_norm: float
    same_batches: bool
    same_micro_batches: bool
    seconds: float

    @property
    def equal(self) -> bool:
        loss = norm = METRIC_LIMIT if self.format == "fp32" else BF16_METRIC_LIMIT
        gradient = gradient_limit(self.case, self.format, self.same_micro_batches)
        if self.case.splits or gradient == BF16_GRADIENT_LIMIT:
            norm = gradient
        return self.gradient <= gradient and self.loss <= loss and self.grad_norm <= norm and self.same_batches


def gradient_limit(case: Case, number_format: str, same_micro_batches: bool) -> float:
    """The largest relative difference that rounding explains."""
    rounds_elsewhere = number_format == "bf16" and (case.splits or not same_micro_batches)
    return BF16_GRADIENT_LIMIT if rounds_elsewhere else GRADIENT_LIMIT


def cases(sequences: int, experts: bool = False) -> list[Case]:
    """The layouts of docs/parallelism.md, on 1, 2 and 4 processes, for a global batch of `sequences` (a multiple of 16).

    Each size of micro-batches has a case with a single process. `experts`: with the layouts of a mixture of experts.
    """

    def case(name: str, processes: int, micro_steps: int, *parallel: str, launcher: str = "torchrun", model: int = 1) -> Case:
        micro = sequences * model // processes // micro_steps
        return Case(name, processes, micro, (f"batch.micro_sequences={micro}", *(f"parallel.{p}" for p in parallel)), launcher)

    hsdp = ("strategy=fsdp", "replicate=2", "shard=2")
    with_experts = [
        case("expert parallel on 2", 2, 1, "strategy=fsdp", "expert=2"),
        case("expert parallel on 4", 4, 1, "strategy=fsdp", "expert=4"),
        case("FSDP2 on 4, expert parallel on 2, accumulation 4", 4, 4, "strategy=fsdp", "expert=2"),
        case("HSDP 2x2, expert parallel on 2", 4, 1, *hsdp, "expert=2"),
        case("FSDP2 on 2 x tensor parallel on 2, expert parallel on 2", 4, 1, "strategy=fsdp", "tensor=2", "expert=2", model=2),
        case(
            "FSDP2 on 2 x context parallel on 2, expert parallel on 4", 4, 1, "strategy=fsdp", "context=2", "expert=4", model=2
        ),
    ]
    return [
        case(SINGLE, 1, 1, "strategy=single"),
        *(case(f"{SINGLE}, accumulation {n}", 1, n, "strategy=single") for n in (2, 4, 8, 16)),
        case("DDP on 2", 2, 1, "strategy=ddp"),
        case("DDP on 4", 4, 1, "strategy=ddp"),
        case("DDP on 2, accumulation 4, no_sync", 2, 4, "strategy=ddp", "grad_sync=last"),
        case("DDP on 2, accumulation 4, sync every", 2, 4, "strategy=ddp", "grad_sync=every"),
        case("FSDP2 on 2", 2, 1, "strategy=fsdp"),
        case("FSDP2 on 4", 4, 1, "strategy=fsdp"),
        case("FSDP2 on 2, accumulation 4, sync last", 2, 4, "strategy=fsdp", "grad_sync=last"),
        case("FSDP2 on 2, accumulation 4, sync every", 2, 4, "strategy=fsdp", "grad_sync=every"),
        case("FSDP2 on 2, recomputed activations", 2, 1, "strategy=fsdp", "activation_checkpointing=full"),
        case("HSDP 2x2", 4, 1, *hsdp),
        case("HSDP 2x2, accumulation 4", 4, 4, *hsdp),
        case("tensor parallel on 2", 2, 1, "strategy=fsdp", "tensor=2", model=2),
        case("tensor parallel on 4", 4, 1, "strategy=fsdp", "tensor=4", model=4),
        case("FSDP2 on 2 x tensor parallel on 2", 4, 1, "strategy=fsdp", "shard=2", "tensor=2", model=2),
        case(
            "replicated 2 x tensor parallel on 2, accumulation 4",
            4,
            4,
            "strategy=fsdp",
            "replicate=2",
            "shard=1",
            "tensor=2",
            model=2,
        ),
        case("context parallel on 2", 2, 1, "strategy=fsdp", "context=2", model=2),
        case("context parallel on 4", 4, 1, "strategy=fsdp", "context=4", model=4),
        case("FSDP2 on 2 x context parallel on 2, accumulation 4", 4, 4, "strategy=fsdp", "shard=2", "context=2", model=2),
        case("pipeline on 2, accumulation 4", 2, 4, "strategy=fsdp", "pipeline=2", model=2),
        case("FSDP2 on 2 x pipeline on 2, accumulation 4", 4, 4, "strategy=fsdp", "shard=2", "pipeline=2", model=2),
        case(
            "tensor parallel on 2 x pipeline on 2, accumulation 4",
            4,
            4,
            "strategy=fsdp",
            "shard=1",
            "tensor=2",
            "pipeline=2",
            model=4,
        ),
        case("DDP on 2, accelerate launch", 2, 1, "strategy=ddp", launcher="accelerate"),
        case("FSDP2 on 2, accelerate launch", 2, 1, "strategy=fsdp", launcher="accelerate"),
        *(with_experts if experts else []),
    ]


def selected(every: list[Case], text: str) -> list[Case]:
    """The cases with `text` in their name, and the single processes that they are compared with."""
    wanted = [case for case in every if text in case.name]
    sizes = {case.micro for case in wanted}
    return [case for case in every if case in wanted or case is every[0] or (case.processes == 1 and case.micro in sizes)]


def compare(config: Path, overrides: list[str], output: Path, wanted: list[Case], number_format: str) -> list[Row]:
    """Run every case below `output` and compare it with a single process; progress on standard output."""
    _refuse_own_source(load_config(config, overrides)[0], output)
    rows: list[Row] = []
    references: dict[int, Path] = {}
    overrides = [*overrides, f"precision.compute={number_format}"]
    for number, case in enumerate(wanted):
        started = time.monotonic()
        run = output / f"{number_format}-{number}"
        _run(case, config, overrides, run)
        first = references.setdefault(wanted[0].micro, run)
        if case.processes == 1:
            references[case.micro] = run
        reference = references[case.micro] if number_format == "bf16" and case.processes > 1 else first
        same = references[case.micro] == reference
        rows.append(_row(case, number_format, reference, run, same, time.monotonic() - started))
        print(f"{number + 1}/{len(wanted)}  {line(rows[-1])}", flush=True)
    return rows


def _refuse_own_source(config: Config, output: Path) -> None:
    """Refuse to start from a directory of a case, because every case first removes its own."""
    source, folder = Path(config.run.init_from or "."), output.resolve()
    inside = source.resolve().relative_to(folder).parts if source.resolve().is_relative_to(folder) else ()
    if config.run.init_from and inside and re.fullmatch(r"(fp32|bf16)-\d+", inside[0]):
        raise ConfigError(f"{source} is a run of this tool in {output}, which it would remove; choose another --output")


def _run(case: Case, config: Path, overrides: list[str], directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    own = [
        f"run.dir={directory.parent}",
        f"run.name={directory.name}",
        "log.gradients_at=[1]",
        "log.every_steps=1",
        "log.tensorboard=false",
        "checkpoint.export_check=false",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    resets = case.resets(load_config(config, overrides)[0])
    done = subprocess.run(case.command(config, [*overrides, *resets, *own]), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [text for text in done.stderr.splitlines() if text.startswith("error:")]
        raise TrainingError(f"{case.name}: {errors[0].removeprefix('error: ') if errors else done.stderr[-500:]}")


def _row(case: Case, number_format: str, reference: Path, run: Path, same_micro_batches: bool, seconds: float) -> Row:
    from safetensors.torch import load_file

    file = Path("gradients") / "step-00000001.safetensors"
    ours, theirs = ({n: g.double() for n, g in load_file(path / file).items()} for path in (run, reference))
    if ours.keys() != theirs.keys():
        raise TrainingError(f"{case.name}: its gradients have other names than those of {SINGLE}")
    share = NEGLIGIBLE
    if case.splits:
        share = UNIT_ROUNDOFF[number_format] / gradient_limit(case, number_format, same_micro_batches)
    least = share * math.sqrt(sum(float(g.square().sum()) for g in theirs.values()))
    gradient = max(float((ours[name] - g).norm()) / max(float(g.norm()), least) for name, g in theirs.items())
    records = list(zip(read_metrics(run), read_metrics(reference), strict=True))

    def largest(key: str) -> float:
        return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in records)

    same = all(a["batch"] == b["batch"] for a, b in records)
    return Row(case, number_format, gradient, largest("loss"), largest("grad_norm"), same, same_micro_batches, seconds)


def line(row: Row) -> str:
    """A row for the console."""
    verdict = "equal" if row.equal else "DIFFERENT"
    figures = f"gradient {row.gradient:.1e}  loss {row.loss:.1e}  norm {row.grad_norm:.1e}"
    return f"{row.format}  {row.case.name:<42} {figures}  {verdict}"


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table: a line per layout with the figures of every number format."""
    formats = list(dict.fromkeys(row.format for row in rows))
    titles = [f"{f}: {title}" for f in formats for title in ("gradient of step 1", "loss of every step", "gradient norm")]
    lines = [["layout", *titles, "samples"], ["---"] * (len(titles) + 2)]
    for name in dict.fromkeys(row.case.name for row in rows):
        own = [row for row in rows if row.case.name == name]
        figures = [f"{figure:.1e}" for row in own for figure in (row.gradient, row.loss, row.grad_norm)]
        lines.append([name, *figures, "same" if all(row.same_batches for row in own) else "OTHER"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
