"""How fast pretrain trains beside other programs: the same architecture, shapes, precision and numbers of tokens, in turns."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from benchmarks.corpora import byte_tokenizer, write_tokens
from benchmarks.measure import Options, Row, require, run_program
from benchmarks.trainers.clock import Task

from pretrain.errors import DataError

TRAINERS = Path(__file__).resolve().parent / "trainers"
PROGRAMS = {
    "pretrain": "ours.py",
    "HF Trainer": "hf_trainer.py",
    "plain loop": "loop.py",
    "LitGPT": "litgpt_fabric.py",
    "products alone": "ceiling.py",
}
ALONE = ("pretrain", "products alone")
WITHOUT_LOSS = ("products alone",)
PACKAGES = {"HF Trainer": ("transformers", "accelerate", "torch"), "LitGPT": ("litgpt", "lightning", "torch")}
"""What a program needs that may run in another environment: by the Python that `--trainer` or `--litgpt` names."""
ONLY_IN_ANOTHER = "LitGPT"
"""Its packages do not go with ours."""
SHAPES = {
    "A": {"dim": 384, "layers": 6, "heads": 6, "vocabulary": 8192, "length": 256, "micro": 8},
    "B": {"dim": 768, "layers": 12, "heads": 12, "vocabulary": 32_000, "length": 512, "micro": 4},
}
WARM_UP = 2
"""Steps that are not measured: the first one allocates, and DDP lays out its buckets after it."""


@dataclass(frozen=True)
class Case:
    """What is compared under one heading."""

    shape: str
    format: str
    ranks: int
    accumulation: int
    compiled: bool = False

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        micro_steps = f"{self.accumulation} micro-step{'s' if self.accumulation > 1 else ''}"
        return f"{self.shape} {self.format}, {ranks}, {micro_steps}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class Measured:
    """A program's turn: seconds per token of all ranks together and of the clock, in the median step."""

    cpu: float
    wall: float
    first_step: float
    """Seconds from the start of the program to the end of its first step."""
    peak_mib: float
    """The sum over all ranks."""
    versions: dict[str, str]
    """Versions of packages in its own process, which may run in another environment."""


def environments(trainer: str | None, litgpt: str | None) -> dict[str, str]:
    """The Pythons of programs that run in another environment, as `--trainer` and `--litgpt` name them. Raises DataError for one that lacks
    what the program needs: now, not after the first programs.
    """
    named = {"HF Trainer": ("--trainer", trainer), "LitGPT": ("--litgpt", litgpt)}
    found = {program: (option, python) for program, (option, python) in named.items() if python}
    for program, (option, python) in found.items():
        _look_for_packages(option, program, python)
    return {program: python for program, (_, python) in found.items()}


def _look_for_packages(option: str, program: str, python: str) -> None:
    first, *_ = needed = PACKAGES[program]
    code = f"import importlib.util; print('found', *[name for name in {needed} if importlib.util.find_spec(name) is None])"
    try:
        printed = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.splitlines()
    except OSError as error:
        raise DataError(f"{option} {python} cannot be started: {error.strerror}; name the Python of an environment") from error
    _, *missing = printed[-1].split() if printed and printed[-1].startswith("found") else ("found", first)
    if missing:
        wanted = "litgpt==0.5.13" if first == "litgpt" else " ".join(needed)
        raise DataError(f"{option} {python} has no {missing[0]}: install it there with `{python} -m pip install {wanted}`")


def compare_trainers(
    cases: Sequence[Case], programs: Sequence[str], steps: int, options: Options, pythons: Mapping[str, str] = MappingProxyType({})
) -> list[Row]:
    """A row for the CPU microseconds per token of each program, and how they compare. Rows of wall time, first step and peak memory follow it.

    `pythons`: those of programs that run in another environment.
    """
    write_tokens(options.work / "tokens", byte_tokenizer(options.work), options.scaled(1 << 22, 1 << 16), 1 << 22)
    np.random.default_rng(0).integers(0, 256, options.scaled(1 << 22, 1 << 16)).astype(np.uint16).tofile(
        options.work / "tokens.bin"
    )
    rows = []
    for case in cases:
        found: dict[str, list[Measured]] = {name: [] for name in programs}
        for turn in range(options.turns):
            for name in programs:
                options.say(f"{case.name}, turn {turn + 1} of {options.turns}: {name}")
                found[name].append(_turn(case, name, steps, options, pythons.get(name, sys.executable)))
        rows += _rows(case, found)
    return rows


def _turn(case: Case, name: str, steps: int, options: Options, python: str) -> Measured:
    shape = {
        key: options.scaled(value, 8 if key in ("length", "vocabulary") else 1) for key, value in SHAPES[case.shape].items()
    }
    if options.scale < 1:
        shape |= {"dim": 32, "heads": 2, "vocabulary": 512}
    result = options.work / f"{name.replace(' ', '-')}-{time.monotonic_ns()}"
    task = Task(
        **shape, accumulation=case.accumulation, ranks=case.ranks, steps=steps + WARM_UP, format=case.format,
        compiled=case.compiled, work=str(options.work), result=str(result),
    )  # fmt: skip
    start = [python]
    if case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    typed = [*start, str(TRAINERS / PROGRAMS[name]), json.dumps(dataclasses.asdict(task))]
    launched = time.time()
    done = run_program(typed)
    require(done.returncode == 0, f"{name} fails: {' '.join(done.stderr.splitlines()[-1:])}")
    ranks = [json.loads(Path(f"{result}-{rank}.json").read_text()) for rank in range(case.ranks)]
    require(all(len(rank["stamps"]) == task.steps for rank in ranks), f"{name} took other steps than {task.steps}")
    loss = ranks[0]["loss"]
    # Tokens are random below 256, so a first loss is near that of the vocabulary and later ones near that of 256.
    low, high = math.log(256) - 0.5, math.log(task.vocabulary) + 1
    require(name in WITHOUT_LOSS or low < loss < high, f"{name} has a loss of {loss}")
    tokens = task.micro * task.length * task.accumulation * task.ranks
    cpu, wall = (
        [[after[clock] - before[clock] for before, after in zip(rank["stamps"][WARM_UP - 1 :], rank["stamps"][WARM_UP:])] for rank in ranks]
        for clock in (0, 1)
    )  # fmt: skip
    return Measured(
        sum(statistics.median(steps) for steps in cpu) / tokens,
        statistics.median(wall[0]) / tokens,
        ranks[0]["stamps"][0][1] - launched,
        sum(rank["peak_kib"] for rank in ranks) / 1024,
        ranks[0]["versions"],
    )


def _rows(case: Case, found: dict[str, list[Measured]]) -> list[Row]:
    def row(name: str, what: str, unit: str, clock: Literal["cpu", "wall", "-"], value: Callable[[Measured], float], **more: Any) -> Row:
        values = {program: [value(turn) for turn in turns] for program, turns in found.items()}
        return Row(
            case.name, f"{name}{what}", min(values[name]), unit, clock, statistics.median(values[name]), better="lower",
            baseline=min(values["pretrain"]), versions=found[name][0].versions, **more,
        )  # fmt: skip

    rows = []
    for name in found:
        beside = [
            row(name, ": wall time", "µs/token", "wall", lambda turn: turn.wall * 1e6, in_table=False),
            row(name, ": first step", "s", "wall", lambda turn: turn.first_step, in_table=False),
            row(name, ": peak memory", "MiB", "-", lambda turn: turn.peak_mib, in_table=False),
        ]
        wall, first, peak = (one.value for one in beside)
        notes = [f"{1e6 / wall:,.0f} tokens/s, first step after {first:.1f} s, {peak:,.0f} MiB"]
        cpu = row(name, "", "µs/token", "cpu", lambda turn: turn.cpu * 1e6)
        if name != "pretrain":
            notes.append(f"takes {cpu.value / cpu.baseline:.2f} x pretrain's time")
        if found[name][0].versions != found["pretrain"][0].versions:
            notes.append(", ".join(f"{package} {cpu.versions[package]}" for package in PACKAGES.get(name, ()) if package in cpu.versions))
        rows += [dataclasses.replace(cpu, note="; ".join(notes)), *beside]
    return rows
