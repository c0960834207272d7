"""How long a training step waits for its data, and how long a person waits to see them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.corpora import byte_tokenizer, write_tokens
from benchmarks.measure import ROOT, Options, Row, require, run_program

from pretrain.observe.metrics import read_metrics

_THREADS = 2
_STEPS, _FEWEST_STEPS = 30, 4
_QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def wait(options: Options) -> list[Row]:
    """The share of a run's time that steps wait for their batches, with the quickstart's model and batch, on random tokens."""
    run = _train(options)
    records = read_metrics(run)
    first, *rest = records
    waited = sum(record["data_wait"] * record["seconds"] for record in rest) / sum(record["seconds"] for record in rest)
    seconds = sorted(record["seconds"] for record in rest)[len(rest) // 2]
    note = (
        f"metrics.jsonl, steps 2 to {records[-1]['step']} of {seconds:.2f} s, {_THREADS} threads; the first step waited "
        f"{1000 * first['data_wait'] * first['seconds']:.0f} ms"
    )
    largest = 100 * max(record["data_wait"] for record in rest)
    return [
        Row("wait", "time in which training waits for data", 100 * waited, "%", "wall", None, 1.0, "lower", note=note),
        Row("wait", "the same, the step that waited longest", largest, "%", "wall", better="lower"),
    ]


def inspect(options: Options) -> list[Row]:
    """Seconds until tools/inspect_data.py has shown a step of a run, and a document."""
    tool = ROOT / "tools" / "inspect_data.py"
    require(tool.is_file(), f"{tool} is missing")
    run = _train(options)
    rows = []
    questions = {
        "a step": ["--step", "2"],
        "the same as JSON": ["--step", "2", "--json"],
        "a document": ["--document", "7"],
    }
    for name, arguments in questions.items():
        seconds = sorted(_seconds([str(tool), "--run", str(run), *arguments]) for _ in range(options.turns))
        name, median = f"{name}, from the command to its last line", seconds[len(seconds) // 2]
        baseline, note = min(_seconds(["-c", "import numpy"]) for _ in range(options.turns)), "baseline: python starts and imports numpy"
        rows.append(Row("inspect", name, seconds[0], "s", "wall", median, target=1.0, better="lower", baseline=baseline, note=note))
    return rows


def _train(options: Options) -> Path:
    """Run the quickstart's configuration on random tokens, once, in a separate process. Return the run's directory."""
    run = options.work / "runs" / "quickstart"
    if run.is_dir():
        return run
    data, steps = options.work / "training", options.scaled(_STEPS, _FEWEST_STEPS)
    write_tokens(data, byte_tokenizer(options.work), options.scaled(4 << 20, 1 << 17), 1 << 20)
    options.say(f"training {steps} steps")
    values = [
        f"run.dir={options.work / 'runs'}",
        "run.name=quickstart",
        f"run.steps={steps}",
        "run.resume=never",
        f"data.sources=[{{path: {data}}}]",
        "data.validation=[]",
        "validation.every_steps=0",
        "validation.sequences=64",
        "schedule.warmup_steps=2",
        "parallel.strategy=single",
        f"data.sequence_length={min(256, options.scaled(256, 16))}",
        "log.every_steps=1",
        "log.tensorboard=false",
        "checkpoint.every_steps=0",
        "checkpoint.export_check=false",
    ]
    typed = [sys.executable, str(ROOT / "pretrain" / "run.py"), "--config", str(_QUICKSTART), *values]
    done = run_program(typed, threads=_THREADS)
    require(done.returncode == 0, f"training fails: {' '.join(done.stderr.splitlines()[-1:])}")
    return run


def _seconds(arguments: list[str]) -> float:
    begin = time.monotonic()
    done = run_program([sys.executable, *arguments])
    require(done.returncode == 0, f"{Path(arguments[0]).name} fails: {' '.join(done.stderr.splitlines()[-1:])}")
    return time.monotonic() - begin
