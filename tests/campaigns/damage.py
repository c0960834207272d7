"""Random damage to a random file that is read: the program says so in one line, or does what it would have done with the file as it was."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from campaign import REFUSED, Case
from interruptions import contents, records, write_config
from processes import is_refusal, outcome
from ranks import byte_tokenizer, corpus

NAME = "damage"
ABOUT = "a damaged file is named, or was of no account; no wrong result, no traceback, no code run"

SECONDS = 120
KINDS = ("flip", "flip early", "cut", "zero", "delete", "swap", "append", "odd line", "empty", "garbage")
ODD_LINES = (b"\xff\xfe{}", b"null", b"{}", b"5", b'{"step": "4"}', b'{"step": null}', b"[]", b"[" * 100_000)


def case(random: Random, folder: Path) -> Case:
    what = random.choice(("checkpoint", "checkpoint", "run", "data", "data", "work", "cache", "export", "tokenizer"))
    kind, pick, place, bit = random.choice(KINDS), random.random(), random.random(), random.randrange(8)
    return Case(
        json.dumps([what, kind, pick, place, bit]),
        lambda: READERS[what](folder, lambda top: damage(top, kind, pick, place, bit)),
    )


def damage(top: Path, kind: str, pick: float, place: float, bit: int) -> str:
    """Damage one file below `top`; its name. Each folder is as likely: those of checkpoints have most of a run's files."""
    files = sorted(path for path in top.rglob("*") if path.is_file())
    folders = sorted({file.parent for file in files})
    inside = [file for file in files if file.parent == folders[int(pick * len(folders))]]
    file = inside[int(pick * len(folders) % 1 * len(inside))]
    data = bytearray(file.read_bytes())
    at = int(place * min(len(data), 200 if kind == "flip early" else len(data)))
    if kind == "delete":
        file.unlink()
    elif kind.startswith("flip") and data:
        data[at] ^= 1 << bit
    elif kind == "cut":
        data = data[:at]
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "swap":
        data = bytearray(files[int(place * len(files))].read_bytes())
    elif kind in ("append", "odd line"):
        data += b'\n{"step": 1, "loss": 0}\n' if kind == "append" else ODD_LINES[bit] + b"\n"
    elif kind == "empty":
        data = bytearray()
    elif kind == "garbage":
        data = bytearray(b"\x80\x04cos\nsystem\n(S'touch /tmp/pretrain-was-here'\ntR." * 3)
    if kind != "delete":
        file.write_bytes(data)
    return f"{kind} {file.relative_to(top)}"


def judged(code: int, printed: str, where: str, is_right: bool, seen: str = "") -> str | None:
    if Path("/tmp/pretrain-was-here").exists():
        Path("/tmp/pretrain-was-here").unlink()
        return f"{where}: code was run"
    if code != 0:
        return REFUSED if is_refusal(code, printed) else f"{where}: exit code {code}: {printed[-600:]}"
    return None if is_right else f"{where}: taken without a word, and the result is another {seen}"


# ---- what reads -------------------------------------------------------------------------------------------------------


@functools.cache
def _pristine() -> Path:
    """A run of 4 steps with 2 checkpoints, its straight continuation to 6, prepared data with a packing index, an export, unfinished work."""
    top = Path(tempfile.mkdtemp(prefix="campaign-pristine-"))
    for name, steps in (("short", 4), ("long", 6)):
        (top / name).mkdir()
        _do("run", "--config", write_config(top / name), *_steps(steps), "data.packing=best_fit")
    shutil.copytree(corpus(0), top / "data")
    export = ("to-hf", "--checkpoint", top / "short/runs/run/checkpoints/step-00000004", "--output", top / "export")
    _do("convert_checkpoint", *export)
    texts = [json.dumps({"text": f"{number} " * (number % 50 + 1)}) for number in range(400)]
    (top / "texts.jsonl").write_text("\n".join(texts) + "\n")
    _do("prepare_data", *_preparation(top), "--output", top / "whole")
    for task in ("0", "1"):
        _do(
            "prepare_data",
            *_preparation(top),
            "--output",
            top / "work" / "out",
            "--task",
            task,
            "--tasks",
            "2",
        )
    return top


def _do(tool: str, *arguments: Any) -> None:
    code, printed = outcome(tool, *map(str, arguments), seconds=SECONDS)
    if code != 0:
        raise RuntimeError(f"{tool}: {printed[-800:]}")


def _steps(steps: int) -> tuple[str, ...]:
    return (f"run.steps={steps}", "schedule.name=constant", "checkpoint.every_steps=2", "checkpoint.keep_last=0")


def _preparation(top: Path) -> list[Any]:
    return ["--input", top / "texts.jsonl", "--tokenizer", byte_tokenizer(), "--workers", "1", "--shard-tokens", "5000"]


def continued(folder: Path, damaged: Any, part: str) -> str | None:
    top = _pristine()
    shutil.copytree(top / "short", folder / "short", symlinks=True)
    where = damaged(folder / "short" / part)
    file = write_config(folder / "short")
    code, printed = outcome("run", "--config", str(file), *_steps(6), "data.packing=best_fit", seconds=SECONDS)
    expected = records(top / "long/runs/run")
    found = records(folder / "short/runs/run") if code == 0 else []
    # Lines of steps that were taken before may be what was damaged; those that this start took may not.
    return judged(code, printed, where, found[-2:] == expected[-2:], str(found[-2:]))


def from_data(folder: Path, damaged: Any) -> str | None:
    top = _pristine()
    shutil.copytree(top / "data", folder / "data")
    where = damaged(folder / "data")
    file = write_config(folder)
    source = f"data.sources=[{{path: {folder / 'data'}}}]"
    code, printed = outcome("run", "--config", str(file), *_steps(4), source, "data.packing=best_fit", seconds=SECONDS)
    found = records(folder / "runs/run") if code == 0 else []
    return judged(code, printed, where, found == records(top / "short/runs/run"))


def from_cache(folder: Path, damaged: Any) -> str | None:
    top = _pristine()
    shutil.copytree(top / "short/cache", folder / "cache")
    where = damaged(folder / "cache")
    code, printed = outcome("run", "--config", str(write_config(folder)), *_steps(4), "data.packing=best_fit", seconds=SECONDS)
    found = records(folder / "runs/run") if code == 0 else []
    return judged(code, printed, where, found == records(top / "short/runs/run"))


def from_work(folder: Path, damaged: Any) -> str | None:
    top = _pristine()
    shutil.copytree(top / "work", folder / "work")
    where = damaged(folder / "work" / ".out.preparing")
    arguments = [*_preparation(top), "--output", folder / "work/out"]
    code, printed = outcome("prepare_data", *map(str, arguments), seconds=SECONDS)
    return judged(code, printed, where, code != 0 or contents(folder / "work/out") == contents(top / "whole"))


def from_export(folder: Path, damaged: Any) -> str | None:
    top = _pristine()
    shutil.copytree(top / "export", folder / "export")
    where = damaged(folder / "export")
    arguments = ["from-hf", "--model", folder / "export", "--output", folder / "back"]
    code, printed = outcome("convert_checkpoint", *map(str, arguments), seconds=SECONDS)
    return judged(code, printed, where, True)  # the hub's format has no hashes: a changed number is a number


def from_tokenizer(folder: Path, damaged: Any) -> str | None:
    top = _pristine()
    shutil.copytree(byte_tokenizer(), folder / "tokenizer")
    where = damaged(folder / "tokenizer")
    arguments = [
        "--input",
        top / "texts.jsonl",
        "--tokenizer",
        folder / "tokenizer",
        "--workers",
        "1",
        "--output",
        folder / "out",
    ]
    code, printed = outcome("prepare_data", *map(str, arguments), seconds=SECONDS)
    return judged(code, printed, where, True)


READERS = {
    "checkpoint": lambda folder, damaged: continued(folder, damaged, "runs/run/checkpoints"),
    "run": lambda folder, damaged: continued(folder, damaged, "runs/run"),
    "data": from_data,
    "cache": from_cache,
    "work": from_work,
    "export": from_export,
    "tokenizer": from_tokenizer,
}


def close() -> None:
    if _pristine.cache_info().currsize:
        shutil.rmtree(_pristine(), ignore_errors=True)
        _pristine.cache_clear()
