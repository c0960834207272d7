"""Runs one configuration under many layouts and launchers, as a user would start them, and compares what they computed.

A layout may only change the order in which the gradients of micro-batches are added, in fp32. In bf16 every micro-batch's gradient of a matrix is
also rounded once. So a layout is compared with the single process that has the same micro-batches. Single processes with other micro-batches may
differ by that rounding: each addend by 2^-9 of itself (u, the unit roundoff of bf16). Both sums together may differ by 2 u times the addends'
norms over the norm of their sum. That ratio is at most 4 for the 16 micro-batches here, if they are unrelated.

A layout that splits matrices or positions also adds up activations in another order, so it rounds them elsewhere. A parameter whose gradient is small because
large terms cancel has the rounding of these terms. So differences up to u times the norm of the whole gradient are mere rounding there.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.equivalence.cases import SINGLE, Case
from pretrain.equivalence.measured_run import Measured, read_measured
from pretrain.errors import ConfigError, TrainingError
from pretrain.observe.metrics import read_metrics
from pretrain.train.description import bytes_of

GRADIENT_LIMIT, METRIC_LIMIT = 5e-6, 2e-6
BF16_GRADIENT_LIMIT, BF16_METRIC_LIMIT = 2 * 4 * 2**-9, 2**-8
"""The first limit: see above. The second is for later steps: weights that differ in the last bit of fp32 may round to neighbours in bf16."""
NEGLIGIBLE = 1e-6
"""A gradient below this share of the whole gradient's norm is mere rounding (a bias without effect, say). It is divided by that share."""
END_SECONDS = 30.0
"""What a launcher has to end its ranks."""
UNIT_ROUNDOFF = {"fp32": 2**-24, "bf16": 2**-9}

Start = Callable[[Case, Path, list[str]], None]
"""Runs a case with a configuration file and overrides. Raises TrainingError if it fails."""


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
    measured: tuple[Measured, ...] = ()
    """One for each rank."""

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


def start_processes(case: Case, config: Path, overrides: list[str]) -> None:
    """Run a case as a user would start it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with subprocess.Popen(
        case.command(config, overrides), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        errors = [text for text in said.splitlines() if text.startswith("error:")]
        raise TrainingError(f"{case.name}: {errors[0].removeprefix('error: ') if errors else said[-500:]}")


def _end(process: subprocess.Popen) -> None:
    """End a launcher and with it its ranks, which it would leave alive if it were killed."""
    process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def compare(
    config: Path, overrides: list[str], output: Path, wanted: list[Case], number_format: str, start: Start = start_processes
) -> list[Row]:
    """Run every case below `output` and compare it with a single process; progress on standard output."""
    _refuse_own_source(load_config(config, overrides)[0], output)
    rows: list[Row] = []
    references: dict[int, Path] = {}
    overrides = [*overrides, f"precision.compute={number_format}"]
    for number, case in enumerate(wanted):
        started = time.monotonic()
        run = output / f"{number_format}-{number}"
        _run(case, config, overrides, run, start)
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


def _run(case: Case, config: Path, overrides: list[str], directory: Path, start: Start) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    own = [
        f"run.dir={directory.parent}",
        f"run.name={directory.name}",
        "log.gradients_at=[1]",
        "log.every_steps=1",
        "log.tensorboard=false",
        "checkpoint.export_check=false",
    ]
    start(case, config, [*overrides, *case.resets(load_config(config, overrides)[0]), *own])


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
    gradient = _worst(_share(float((ours[name] - g).norm()), max(least, float(g.norm()))) for name, g in theirs.items())
    records = list(zip(read_metrics(run), read_metrics(reference), strict=True))

    def largest(key: str) -> float:
        return _worst(_apart(a[key], b[key]) for a, b in records)

    same = all(a["batch"] == b["batch"] for a, b in records)
    measured = tuple(read_measured(run, case.processes))
    differences = gradient, largest("loss"), largest("grad_norm")
    return Row(case, number_format, *differences, same, same_micro_batches, seconds, measured)


def _worst(differences: Iterable[float]) -> float:
    """The largest; infinity if one is no number, which `max` may pass over."""
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def _apart(ours: float | None, theirs: float | None) -> float:
    """The relative difference of a number of a step. It is null where it was not finite."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return _share(abs(ours - theirs), abs(theirs))


def _share(difference: float, size: float) -> float:
    return difference / size if size else math.inf if difference else 0.0


def line(row: Row) -> str:
    """A row for the console."""
    verdict = "equal" if row.equal else "DIFFERENT"
    figures = f"gradient {row.gradient:.1e}  loss {row.loss:.1e}  norm {row.grad_norm:.1e}"
    return f"{row.format}  {row.case.name:<42} {figures}  {verdict}"


def table(rows: list[Row]) -> str:
    """A line per layout with the differences in every number format."""
    formats = list(dict.fromkeys(row.format for row in rows))
    titles = [f"{f}: {title}" for f in formats for title in ("gradient of step 1", "loss of every step", "gradient norm")]
    lines = [["layout", *titles, "samples"], ["---"] * (len(titles) + 2)]
    for name in dict.fromkeys(row.case.name for row in rows):
        own = [row for row in rows if row.case.name == name]
        figures = [f"{figure:.1e}" for row in own for figure in (row.gradient, row.loss, row.grad_norm)]
        lines.append([name, *figures, "same" if all(row.same_batches for row in own) else "OTHER"])
    return _markdown(lines)


def costs(rows: list[Row]) -> str:
    """A line per layout and number format: collectives of a step, counted and by formula; bytes that a rank sends and holds; the verdict."""
    titles = [
        "layout",
        "format",
        "micro-steps",
        "collectives of a step, and their formula",
        "sent by a rank",
        "peak memory",
        "verdict",
    ]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        cells = ["-"] * 4
        if row.measured:
            sent = [one.sent for one in row.measured if one.sent is not None]
            shown = (_collectives(row.measured), bytes_of(max(sent))) if sent else ("-", "-")
            cells = [str(row.measured[0].micro_steps), *shown, bytes_of(_peak(row))]
        lines.append([row.case.name, row.format, *cells, verdict(row, rows)])
    return _markdown(lines)


def verdict(row: Row, rows: list[Row]) -> str:
    """What a layout computes, whether it communicates as the formula says, and what it costs more than simpler layouts."""
    said = ["equal" if row.equal else "DIFFERENT"]
    if not row.measured:
        return f"{said[0]}; nothing measured, the run has fewer than 3 steps"
    if not all(one.as_expected for one in row.measured):
        said.append("OTHER COLLECTIVES than the formula's")
    alone = [
        r for r in rows if r.case.processes == 1 and r.format == row.format and r.case.micro == row.case.micro and r.measured
    ]
    if row.case.processes > 1 and alone and _peak(row) > _peak(alone[0]):
        said.append("more memory than single")
    if any((one.sent or 0) > one.sent_by_ddp for one in row.measured):
        said.append("sends more than DDP")
    return "; ".join(said)


def _peak(row: Row) -> int:
    return max(one.peak for one in row.measured)


def _collectives(measured: tuple[Measured, ...]) -> str:
    """Those of a rank, or of each stage's ranks where they differ: `all-gather 28 = 4 x 7`."""
    texts = [_of_rank(one) for one in measured]
    if len(set(texts)) == 1:
        return texts[0]
    ranks = {text: [str(rank) for rank, other in enumerate(texts) if other == text] for text in texts}
    return "; ".join(f"rank {', '.join(own)}: {text}" for text, own in ranks.items())


def _of_rank(one: Measured) -> str:
    parts = []
    for kind in dict.fromkeys([*one.expected, *one.collectives]):
        count = one.collectives.get(kind, 0)
        if one.unknown is None or kind in one.unknown:
            parts.append(f"{kind} {count}, -")
        else:
            sign = "=" if count == one.expected.get(kind, 0) else "≠"
            parts.append(f"{kind} {count} {sign} {one.formula.get(kind, '0')}")
    return ", ".join(parts) or "none"


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
