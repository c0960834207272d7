"""Time to quality: bits per byte of a text that was not trained on, after minutes of training from nothing, beside other programs.

The text is the Python source of the installed torch, whose version our constraints pin; its hash is kept with each result. A program's time begins when it is
started and ends with its last step. It is told how many steps fit: short runs before, of all programs in turns, say how long they take. So what else the
machine does later changes how long a training takes, and not its result. Further seeds take as many steps as the first one did, on any machine. All
programs see the same tokens, and are tried as often, with settings of their own for a CPU and for a GPU (quality_settings.yaml, quality_settings_gpu.yaml).
Validation is of the whole held-out text, in windows of the setting's length.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.machine import machine
from benchmarks.measure import TOOLS, Options, end, read_lines, require, require_device, run_program
from benchmarks.trainers.quality_task import PROGRAMS, QualityTask
from omegaconf import OmegaConf

from pretrain.data.shards.reader import PreparedData
from pretrain.distributed.cores import cores_of_host
from pretrain.errors import DataError

SETTINGS = {"cpu": "quality_settings.yaml", "cuda": "quality_settings_gpu.yaml"}
VOCABULARY = 4096
TEXT_MB = 46
FEW = {"cpu": 12, "cuda": 201}
"""Steps that are timed beforehand."""
QUIET, TRIES = 0.05, 10
"""The share of the cores that others may use while a step is timed, and how often it is tried."""


@dataclass(frozen=True)
class Text:
    """The prepared text. `digest`: of its bytes; `bytes_per_token`: of the validation text."""

    work: Path
    digest: str
    bytes_per_token: float


@dataclass(frozen=True)
class Contest:
    """What all programs have in common: the text, the `format` of matrix products, and the `device` that computes them, cpu or cuda."""

    text: Text
    format: str
    device: str

    @property
    def settings(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By program and name."""
        return all_settings(self.format, self.device)


@dataclass(frozen=True)
class Result:
    """What a program reached. `seconds`: from its start to its last step; `others`: share of the cores that other programs used meanwhile."""

    program: str
    setting: str
    format: str
    device: str
    minutes: float
    seed: int
    steps: int
    seconds: float
    bits_per_byte: float
    others: float


def prepare_text(options: Options) -> Text:
    """The text, tokenized once into the work folder."""
    work, corpus = options.work, options.work / "corpus.jsonl"
    root = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    size = str(options.scaled(TEXT_MB, 2))
    if (work / "megabytes").exists():
        found = (work / "megabytes").read_text()
        require(found == size, f"{work} holds a text of {found} MB, not of {size}: name another --work, or the same --scale")
    (work / "megabytes").write_text(size)
    if not (work / "tokenizer").exists():  # it is written at once, and after the corpus
        corpus.unlink(missing_ok=True)  # of an interrupted start
        _tool("collect_source.py", "--output", str(corpus), "--root", str(root), "--max-mb", size)
        _tool(
            "train_tokenizer.py", "--input", str(corpus), "--vocab-size", str(VOCABULARY), "--model-type", "bpe",
            "--output", str(work / "tokenizer"),
        )  # fmt: skip
    _tool(  # goes on where it was interrupted, and does nothing when it was done
        "prepare_data.py", "--input", str(corpus), "--tokenizer", str(work / "tokenizer"), "--output", str(work / "data"),
        "--validation-fraction", str(min(0.2, 0.02 / options.scale)),
    )  # fmt: skip
    opened = {name: PreparedData.open(work / "data" / name) for name in ("train", "validation")}
    for name, data in opened.items():
        data.read_joined(np.array([0]), np.array([data.tokens])).astype(np.uint16).tofile(work / f"{name}.bin")
    return Text(work, hashlib.sha256(corpus.read_bytes()).hexdigest(), float(opened["validation"].bytes_per_token))


def _tool(name: str, *arguments: str) -> None:
    done = run_program([sys.executable, str(TOOLS / name), *arguments], threads=2)
    require(done.returncode == 0, f"{name} fails: {' '.join(done.stderr.splitlines()[-1:])}")


def all_settings(format: str, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Settings for a device by program and name, with this format of matrix products."""
    file = Path(__file__).resolve().parent / SETTINGS[device]
    settings = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(file), {"format": format}), resolve=True)
    del settings["format"]
    return settings


class BusyMachine(DataError):
    """Others compute all the time, so that nothing can be timed."""


@dataclass(frozen=True)
class Pace:
    """How fast a program is: seconds from its start to the end of its first step, and of each step after it."""

    first: float
    step: float

    def steps(self, minutes: float) -> int:
        """How many fit."""
        return 1 + int((60 * minutes - self.first) / self.step)


@dataclass(frozen=True)
class Run:
    """What a program has done. `stamps`: steps, counted from 1, and when they were done; `loss`: of validation, in nats per token."""

    steps: int
    started: float
    stamps: Sequence[tuple[int, float]]
    loss: float

    @property
    def pace(self) -> Pace:
        """The first steps are left out: they compile."""
        usual = statistics.median(self._seconds_per_step(2))
        first, at = self.stamps[0]
        return Pace(at - self.started - (first - 1) * usual, usual)

    @property
    def seconds(self) -> float:
        """From its start to its last step."""
        last, at = max(stamp for stamp in self.stamps if stamp[0] < self.steps)
        return at - self.started + (self.steps - last) * self._seconds_per_step(0)[-1]

    def _seconds_per_step(self, after: int) -> list[float]:
        # Without the last step, which some programs stamp when they have validated.
        known = [stamp for stamp in self.stamps if after < stamp[0] < self.steps]
        return [(end - begin) / (later - step) for (step, begin), (later, end) in zip(known, known[1:])]


def paces(cases: Sequence[tuple[str, str]], contest: Contest, options: Options, at_once: int) -> dict[tuple[str, str], Pace]:
    """The pace of each program and setting: the best of some short runs, which are made in turns while nothing else computes. On a GPU, whose
    steps differ little, of one. Before, each runs once, `at_once` at a time: what it compiles then, is found. A program that fails has none.
    """
    warm = {case: functools.partial(_run, *case, FEW[contest.device], 0, contest) for case in cases}
    failed: dict[tuple[str, str], BaseException] = {}

    def fail(case: tuple[str, str], error: BaseException) -> None:
        options.say(f"{', '.join(case)} has no pace: {error}")
        failed[case] = error

    for case, error in _in_parallel(warm, at_once, lambda case, result: None).items():
        fail(case, error)
    found: dict[tuple[str, str], list[Pace]] = {case: [] for case in cases}
    for _ in range(options.turns if contest.device == "cpu" else 1):
        for case in (case for case in cases if case not in failed):
            try:
                found[case].append(_pace(*case, contest, options))
            except BusyMachine:
                raise
            except Exception as error:  # whatever a program leaves behind that cannot be read
                fail(case, error)
    found = {case: turns for case, turns in found.items() if case not in failed}
    best = {case: Pace(min(p.first for p in turns), min(p.step for p in turns)) for case, turns in found.items()}
    for (program, setting), pace in best.items():
        slowest = max(p.step for p in found[program, setting])
        options.say(
            f"{program}, {setting}: {pace.step:.3f} s per step (at most {slowest:.3f}), the first after {pace.first:.1f} s"
        )
    return best


def _pace(program: str, setting: str, contest: Contest, options: Options) -> Pace:
    for _ in range(TRIES):
        others = _OthersShare()
        run = _run(program, setting, FEW[contest.device], 0, contest)
        if (loud := others.now()) < QUIET:
            return run.pace
        options.say(f"{program}, {setting}: others use {loud:.0%} of the cores; its steps are timed again")
    raise BusyMachine(
        f"others have used {loud:.0%} of the cores in each of {TRIES} tries to time a step: start it again when they rest"
    )


def train(program: str, setting: str, minutes: float, seed: int, steps: int, contest: Contest) -> Result:
    """Train once, for as many steps as fit into so many minutes."""
    others = _OthersShare()
    run = _run(program, setting, steps, seed, contest)
    bits = run.loss / math.log(2) / contest.text.bytes_per_token
    return Result(program, setting, contest.format, contest.device, minutes, seed, steps, run.seconds, bits, others.now())


def _in_parallel(acts: dict[Any, Callable[[], Any]], at_once: int, keep: Callable[[Any, Any], None]) -> dict[Any, BaseException]:
    """Do all, and give each name and result to `keep` when it is there. What fails stops no other; its error is returned by its name."""
    failed = {}
    with ThreadPoolExecutor(at_once) as pool:
        pending = {pool.submit(act): name for name, act in acts.items()}
        try:
            for done in as_completed(pending):
                if (error := done.exception()) is None:
                    keep(pending[done], done.result())
                else:
                    failed[pending[done]] = error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end(psutil.Process().children(recursive=True))  # else their threads wait for them
            raise
    return failed


class _OthersShare:
    """The share of the cores that other programs than this one and those that it has started have used since it was made."""

    def __init__(self) -> None:
        self._started, self._busy = time.time(), self._seconds()

    def now(self) -> float:
        return (self._seconds() - self._busy) / (time.time() - self._started) / cores_of_host()

    @staticmethod
    def _seconds() -> float:
        machine, own = psutil.cpu_times(), psutil.Process()
        used = 0.0
        for process in (own, *own.children(recursive=True)):  # with the time of those that have ended, which their parents have
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:4])
        return sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - used


def _run(program: str, setting: str, steps: int, seed: int, contest: Contest) -> Run:
    work = contest.text.work
    result = work / f"quality-{time.monotonic_ns()}"
    task = QualityTask(contest.settings[program][setting], contest.device, steps, seed, VOCABULARY, str(work), str(result))
    typed = [sys.executable, str(TOOLS / "benchmarks" / "trainers" / PROGRAMS[program]), json.dumps(dataclasses.asdict(task))]
    started = time.time()
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # of several the Trainer would take all
    log = Path(f"{result}.log")
    done = run_program(typed, threads=2, log=log, CUDA_VISIBLE_DEVICES=one_gpu)
    last = " ".join(log.read_text(errors="replace").splitlines()[-1:])
    require(done.returncode == 0, f"{program}, {setting} fails: {last} ({log} has all that it printed)")
    found = json.loads(Path(f"{result}-0.json").read_text())
    times = [wall for _, wall in found["stamps"]]
    require(len(times) == len(task.marks), f"{program} stamped {len(times)} of {steps} steps, not {len(task.marks)}; see {log}")
    return Run(steps, started, list(zip(task.marks, times)), found["loss"])


def as_line(result: Result, contest: Contest, typed: str) -> str:
    """A line of JSON with all that belongs to a result. `values`: of its setting, which may change while its name stays."""
    about = {
        "values": contest.settings[result.program][result.setting],
        "text_sha256": contest.text.digest,
        "machine": machine(result.device),
        "command": typed,
    }
    return json.dumps({**dataclasses.asdict(result), **about})


def compare(asked: argparse.Namespace, typed: str) -> str:
    """What `bench.py quality` does: trains what `asked.json` has no result of, adds each result to it, and says what it has: Markdown."""
    require_device(asked.device)
    few, settings = FEW[asked.device], all_settings(asked.format, asked.device)
    known = [name for program in asked.programs for name in settings[program]]
    if unknown := set(asked.settings or ()) - set(known):
        raise DataError(f"--settings {' '.join(sorted(unknown))}: there are {', '.join(known)}")
    if asked.steps and asked.steps < few:
        raise DataError(f"--steps {asked.steps}: a result needs at least {few}")
    asked.json.open("a").close()  # before something is measured and could not be kept
    fields = (*(field.name for field in dataclasses.fields(Result)), "text_sha256", "values")
    kept = read_lines(asked.json, *fields)
    asked.work.mkdir(parents=True, exist_ok=True)
    options = Options(asked.work, scale=asked.scale)
    contest = Contest(prepare_text(options), asked.format, asked.device)

    def is_of_today(line: dict[str, Any]) -> bool:
        """Whether a result is of this text and device, and of a setting as it is now."""
        here = line["text_sha256"] == contest.text.digest and line["device"] == asked.device
        return here and line["values"] == settings.get(line["program"], {}).get(line["setting"])

    cases = [
        (program, setting, asked.minutes, seed)
        for seed in asked.seeds
        for program in asked.programs
        for setting in settings[program]
        if not asked.settings or setting in asked.settings
    ]
    # Rows of other seeds say how many steps fit. What is not known is timed.
    now = [line for line in kept if is_of_today(line)]
    steps = {(line["program"], line["setting"], line["minutes"]): line["steps"] for line in now}
    if asked.steps:
        others = {case[:2]: steps[case[:3]] for case in cases if steps.get(case[:3], asked.steps) != asked.steps}
        for names, taken in others.items():
            raise DataError(f"--steps {asked.steps}: in {asked.json} {', '.join(names)} took {taken}; name another --json")
        steps |= {case[:3]: asked.steps for case in cases}
    done = {(line["program"], line["setting"], line["minutes"], line["seed"]) for line in now}
    cases = [case for case in cases if case not in done]
    unknown_paces = list(dict.fromkeys(case[:2] for case in cases if case[:3] not in steps))
    pace_of = paces(unknown_paces, contest, options, asked.at_once)
    steps |= {(*case, asked.minutes): max(few, pace.steps(asked.minutes)) for case, pace in pace_of.items()}
    without = [case for case in cases if case[:3] not in steps]

    def keep(case: tuple, result: Result) -> None:
        with asked.json.open("a", encoding="utf-8") as file:
            file.write(as_line(result, contest, typed) + "\n")

    trainings = {case: functools.partial(train, *case, steps[case[:3]], contest) for case in cases if case not in without}
    failed = [str(error) for error in _in_parallel(trainings, asked.at_once, keep).values()]
    found = summary([line for line in read_lines(asked.json, *fields) if is_of_today(line)])
    failed += [f"{', '.join(names)} failed when its steps were timed" for names in dict.fromkeys(case[:2] for case in without)]
    if failed:
        print(found)
        raise DataError("; ".join(failed))
    return found


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: for each budget, program, setting and format the mean of the seeds and their spread, best first. The steps are those of quiet minutes;
    what they took, and the share of the cores that others used meanwhile, stand beside them.
    """
    groups: dict[tuple[float, str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["minutes"], line["program"], line["setting"], line["format"]), []).append(line)
    rows = [
        "| minutes | program | setting | format | bits per byte | spread | seeds | steps | seconds | others |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    table = []
    for (minutes, program, setting, format), members in groups.items():
        bits, steps, seconds, others = (
            [line[name] for line in members] for name in ("bits_per_byte", "steps", "seconds", "others")
        )
        mean = statistics.mean(bits)
        row = f"| {minutes:g} | {program} | {setting} | {format} | {mean:.4f} | {max(bits) - min(bits):.4f} | {len(bits)} "
        row += f"| {statistics.mean(steps):,.0f} | {statistics.mean(seconds):,.0f} | {max(others):.0%} |"
        table.append((minutes, mean, row))
    return "\n".join([*rows, *(row for *_, row in sorted(table))])
