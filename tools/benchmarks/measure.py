"""How the benchmarks measure and report.

Compared programs run in turns, so that a disturbance of the machine affects all of them. The shortest and the median turn are
reported. Work on one thread is timed in CPU seconds ("cpu"), because a busy machine disturbs these less. Everything else is timed
in seconds of the clock ("wall"). Processes that share a physical core slow each other down even in CPU seconds: look at the load
average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from benchmarks.machine import commit_text, cpu_text

from pretrain.errors import ConfigError, DataError

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent
MILLION = 1e6
_LATER = ("versions", "in_table")
"""Fields of a row that files of earlier commits lack."""


@dataclass(frozen=True)
class Row:
    """One number. `value`: the best turn; `median`: the middle one; `target`: the least value for "higher", the limit for
    "lower". `baseline`: the same number for the comparison that `note` names, in the same turns. `versions`: those of the process
    that was measured, if the benchmark started another program. `in_table`: False if the note of another row shows it.
    """

    part: str
    name: str
    value: float
    unit: str
    clock: Literal["cpu", "wall", "-"] = "-"
    median: float | None = None
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    baseline: float | None = None
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    in_table: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the best turn reaches the target; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value < self.target


@dataclass(frozen=True)
class Options:
    """`seconds`: time for each group of compared programs; `scale`: size of the generated data, 1 for results, less for trying
    out; `work`: a folder for generated data; `source`: globs of text for the preparation, () for this interpreter's libraries;
    `cores`: the number of processes that work together.
    """

    work: Path
    seconds: float = 5.0
    scale: float = 1.0
    source: tuple[str, ...] = ()
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    @property
    def turns(self) -> int:
        """The least number of turns."""
        return 3 if self.scale >= 0.1 else 1

    def scaled(self, count: int, least: int = 1) -> int:
        """`count` at this scale."""
        return max(least, round(count * self.scale))


@dataclass(frozen=True)
class Turns:
    """Seconds of every turn."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rate(self, count: float) -> tuple[float, float]:
        """Units per second in the best and in the median turn. Each turn has `count` units."""
        return count / self.best, count / self.median


def in_turns(
    functions: dict[str, Callable[[], Any]], options: Options, clock: Callable[[], float] = time.process_time
) -> dict[str, Turns]:
    """Call the functions one after the other, again and again for about `options.seconds`."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    begin, turns = time.monotonic(), 0
    while time.monotonic() - begin < options.seconds or turns < options.turns:
        for name, function in functions.items():
            start = clock()
            function()
            taken[name].append(max(clock() - start, 1e-9))
        turns += 1
    return {name: Turns(tuple(values)) for name, values in taken.items()}


def rate_row(part: str, name: str, turns: Turns, count: float, unit: str, clock: Literal["cpu", "wall"], **more: Any) -> Row:
    """A row of `count` units per turn."""
    best, median = turns.rate(count)
    return Row(part, name, best, unit, clock, median, **more)


def require(holds: bool, otherwise: str) -> None:
    """Raise DataError if a result is wrong: the speed of a wrong result is worth nothing."""
    if not holds:
        raise DataError(f"the benchmark stops: {otherwise}")


def require_device(device: str, option: str = "--device cuda") -> None:
    """Raise ConfigError where `option` asks for a GPU on a host without one."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(f"{option}: there is no GPU; leave {option.split()[0]} out")


def environment(threads: int = 1) -> dict[str, str]:
    """The environment of measured processes: this checkout, offline, this many threads for tensors and no threads of the tokenizer."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def run_program(
    typed: Sequence[str], threads: int = 1, log: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does. If this process is interrupted, all that the program has started ends as well.

    `log`: a file for what it prints, which is not returned then; what it leaves running is not waited for. `more`: further variables of its environment.
    """
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(log.open("w")), subprocess.STDOUT) if log else (subprocess.PIPE, subprocess.PIPE)
        process = stack.enter_context(
            subprocess.Popen(typed, stdout=out, stderr=err, text=True, env={**environment(threads), **more})
        )
        try:
            out, err = process.communicate()
        except BaseException:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(process.pid)
                end([started, *started.children(recursive=True)])
            raise
    return subprocess.CompletedProcess(typed, process.returncode, out, err)


def end(family: list[psutil.Process]) -> None:
    """End these processes, by force those that have not ended after ten seconds."""
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(family, timeout=10)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return psutil.Process().memory_info().rss


def command(arguments: Sequence[str]) -> str:
    """The command that measures this again."""
    return shlex.join(["python", *arguments])


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| part | what | best | median | unit | clock | target | met | baseline | note |",
        "|---|---|---:|---:|---|---|---:|---|---:|---|",
    ]
    for row in (row for row in rows if row.in_table):
        target = "" if row.target is None else f"{'≥' if row.better == 'higher' else '<'} {number(row.target)}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        numbers = [number(value) for value in (row.value, row.median, row.baseline)]
        cells = [row.part, row.name, numbers[0], numbers[1], row.unit, row.clock, target, met, numbers[2], row.note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A value as tables show it."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def heading(start: dict[str, Any], end: dict[str, Any], typed: str) -> str:
    """Lines above the table: command, machine, load before and after, versions and commit."""
    versions = [f"{name} {version}" for name, version in start["versions"].items()]
    commit = [f"commit {name}"] if (name := commit_text(start)) else []
    place = ", ".join([cpu_text(start), *([start["gpu"]] if "gpu" in start else []), f"{start['cores']} cores"])
    loads = [", ".join(map(str, when["load_average"])) for when in (start, end)]
    return (
        f"{typed}\n{start['date']}; {place}; load average {loads[0]} before, {loads[1]} after\n"
        f"{', '.join(['Python ' + start['python'], *versions, *commit])}"
    )


def as_lines(rows: Sequence[Row], start: dict[str, Any], end: dict[str, Any], typed: str) -> str:
    """A line of JSON per row, with everything that it takes to judge it."""
    about = {"command": typed, "machine": start, "load_average_after": end["load_average"]}
    return "".join(json.dumps({**dataclasses.asdict(row), **about}) + "\n" for row in rows)


def read_lines(path: Path, *fields: str) -> list[dict[str, Any]]:
    """What `--json` wrote. Raises DataError for a file that it did not write, whose lines lack some of these fields."""
    lines = {}
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if text.strip():
                lines[number] = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: no file that --json wrote ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: no file that --json wrote (line {number}: {error.msg})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: no file that --json wrote (it is not UTF-8)") from None
    for number, line in lines.items():
        missing = [name for name in fields if not isinstance(line, dict) or name not in line]
        if missing:
            raise DataError(
                f"{path}: line {number} is no row that --json wrote for this subject: it lacks {', '.join(missing)}"
            )
    return list(lines.values())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `as_lines` wrote. Raises DataError for anything else."""
    names = [field.name for field in dataclasses.fields(Row) if field.name not in _LATER]
    rows = read_lines(path, *names, "command", "machine")
    for row in rows:
        if type(row["value"]) not in (int, float) or not isinstance(row["machine"], dict) or not isinstance(row["command"], str):
            raise DataError(f"{path}: a row was not written by --json: its value, machine or command is of another type")
    return rows
