"""Commands that are killed at random moments, up to four times, and then run to their end: the result is that of a command nobody killed."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import socket
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from campaign import Case
from processes import Command
from ranks import byte_tokenizer, corpus
from running import state_of

from pretrain.observe.metrics import read_metrics

NAME = "interruptions"
ABOUT = "kill -9 in training, saving, validating and preparing loses nothing and leaves nothing wrong"

SECONDS = 120
STEPS = 6


def case(random: Random, folder: Path) -> Case:
    kills = [random.random() for _ in range(random.choice((1, 1, 2, 3, 4)))]
    what = random.choice(("training", "saving", "validating", "two ranks", "preparing"))
    if what == "preparing":
        settings = {
            "workers": random.choice((1, 2)),
            "shard_tokens": random.choice((2_000, 10_000)),
            "deduplicate": random.random() < 0.5,
        }
        return Case(json.dumps({"what": what, "kills": kills} | settings), lambda: prepare(folder, settings, kills, random))
    strategy = random.choice(("ddp", "fsdp")) if what == "two ranks" else "single"
    overrides = (
        f"parallel.strategy={strategy}",
        f"checkpoint.every_steps={1 if what == 'saving' else random.choice((1, 2, 3))}",
        f"checkpoint.keep_last={random.choice((0, 1, 2))}",
        f"validation.every_steps={1 if what == 'validating' else 0}",
        f"data.packing={random.choice(('concatenate', 'best_fit'))}",
    )
    if what == "two ranks":
        overrides += ("parallel.join_seconds=20",)  # so long is a rank awaited that is killed before its first word
    return Case(
        json.dumps({"what": what, "kills": kills, "overrides": overrides}), lambda: train(folder, overrides, kills, random)
    )


# ---- training ---------------------------------------------------------------------------------------------------------


def train(folder: Path, overrides: tuple[str, ...], kills: list[float], random: Random) -> str | None:
    (run, expected), seconds = straight(overrides), straight_seconds(overrides)
    file = write_config(folder)
    for share in kills:
        commands = start(file, overrides)
        time.sleep(share * seconds)
        victim = random.randrange(len(commands))
        commands[victim].kill()
        for rank, command in enumerate(commands):  # the other one notices, and ends by itself
            if rank != victim:
                ended = command.wait(SECONDS)
                command.kill()
                if ended is None:
                    return f"rank {rank} did not end within {SECONDS} s of rank {victim}'s death"
                # Exit code 1 is that of the monitor as well, which ends a rank whose collective does not fail.
                if ended[0] not in (0, 1, 2) or "Traceback (most recent" in ended[1]:
                    return f"rank {rank} after rank {victim}'s death: exit code {ended[0]}: {ended[1][-500:]}"
    problem = finish(file, overrides)
    if problem:
        return problem
    return differences(folder / "runs" / "run", run, expected)


def start(file: Path, overrides: tuple[str, ...]) -> list[Command]:
    if "parallel.strategy=single" in overrides:
        return [Command("run", "--config", str(file), *overrides)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Command("run", "--config", str(file), *overrides, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]


def finish(file: Path, overrides: tuple[str, ...]) -> str | None:
    commands = start(file, overrides)
    ends = [command.wait(SECONDS) or (-1, f"not done after {SECONDS} s") for command in commands]
    for command in commands:
        command.kill()
    bad = [f"rank {rank}: exit code {code}: {printed[-600:]}" for rank, (code, printed) in enumerate(ends) if code != 0]
    return bad[0] if bad else None


def differences(run: Path, straight_run: Path, expected: dict[str, Any]) -> str | None:
    """Records of all steps and the state of the last one, in every bit."""
    found = records(run)
    if found != expected:
        return (
            f"other numbers: {[pair for pair in zip(found, expected) if pair[0] != pair[1]][:1] or (len(found), len(expected))}"
        )
    one, other = state_of(run, STEPS), state_of(straight_run, STEPS)
    unequal = [name for name in other if name not in one or not torch.equal(one[name], other[name])]
    if unequal or one.keys() != other.keys():
        return f"another state: {unequal[:3]}"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    usual = sorted(path.name for path in (straight_run / "checkpoints").iterdir())
    if kept != usual:
        return f"other checkpoints: {kept}, and not {usual}"
    return None


def records(run: Path) -> list[Any]:
    return [
        {name: record.get(name) for name in ("step", "loss", "grad_norm", "batch", "tokens")} for record in read_metrics(run)
    ]


_straight: dict[tuple[str, ...], tuple[Path, list[Any], float]] = {}


def straight(overrides: tuple[str, ...]) -> tuple[Path, list[Any]]:
    if overrides not in _straight:
        folder = Path(tempfile.mkdtemp(dir=_folder().name))
        file, began = write_config(folder), time.monotonic()
        problem = finish(file, overrides)
        if problem:
            raise RuntimeError(f"the straight run: {problem}")
        _straight[overrides] = (folder / "runs" / "run", records(folder / "runs" / "run"), time.monotonic() - began)
    return _straight[overrides][:2]


def straight_seconds(overrides: tuple[str, ...]) -> float:
    return _straight[overrides][2]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="campaign-straight-")


def write_config(folder: Path) -> Path:
    config = {
        "run": {"dir": str(folder / "runs"), "name": "run", "steps": STEPS, "deterministic": True},
        "model": {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64},
        "data": {"sequence_length": 16, "sources": [{"path": str(corpus(0))}], "validation": [{"path": str(corpus(1))}],
                 "cache": {"dir": str(folder / "cache")}},
        "batch": {"sequences": 8, "micro_sequences": 2},
        "validation": {"sequences": 32},
        "parallel": {"timeout_seconds": 30},
        "checkpoint": {"export_check": False},
        "log": {"every_steps": 1, "tensorboard": False},
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


# ---- preparing --------------------------------------------------------------------------------------------------------


def prepare(folder: Path, settings: dict[str, Any], kills: list[float], random: Random) -> str | None:
    texts = folder / "texts"
    texts.mkdir()
    words = ["".join(random.choices("abcdefgh ", k=random.randint(1, 300))) for _ in range(200)]
    for number in range(4):
        lines = [json.dumps({"text": random.choice(words)}) for _ in range(250)]
        (texts / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["--input", str(texts / "*.jsonl"), "--tokenizer", str(byte_tokenizer()), "--workers", str(settings["workers"])]
    arguments += ["--shard-tokens", str(settings["shard_tokens"])] + ["--deduplicate"] * settings["deduplicate"]
    began = time.monotonic()
    code, printed = run_tool(arguments, folder / "straight")
    seconds = time.monotonic() - began
    if code != 0:
        return f"straight: exit code {code}: {printed[-500:]}"
    for share in kills:
        command = Command("prepare_data", *arguments, "--output", str(folder / "killed"))
        time.sleep(share * seconds)
        command.kill()
    code, printed = run_tool(arguments, folder / "killed")
    if code != 0:
        return f"after the kills: exit code {code}: {printed[-500:]}"
    one, other = contents(folder / "straight"), contents(folder / "killed")
    if one != other:
        return f"other files: {sorted(set(one.items()) ^ set(other.items()))[:3]}"
    left = sorted(path.name for path in folder.iterdir() if path.name not in ("texts", "straight", "killed"))
    return f"left over: {left}" if left else None


def run_tool(arguments: list[str], output: Path) -> tuple[int, str]:
    command = Command("prepare_data", *arguments, "--output", str(output))
    try:
        return command.wait(SECONDS) or (-1, f"not done after {SECONDS} s")
    finally:
        command.kill()


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def close() -> None:
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder().name, ignore_errors=True)
        _folder.cache_clear()
        _straight.clear()
