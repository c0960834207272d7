"""The scripts for a day on a GPU are programs that exist, with options and keys that exist: nobody has the minutes to find a typing error there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.quality import all_settings
from running import tool

from pretrain.config.load import load_config
from pretrain.train.resolve import resolve

ROOT = Path(__file__).resolve().parents[1]
PARTS = sorted((ROOT / "tools" / "gpu_day").glob("part*.sh"))
RECORDER = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def with_an_h200(folder: Path, name: str = "NVIDIA H200") -> dict[str, str]:
    """An environment whose `nvidia-smi` says so."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{name}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}


def calls_of(part: Path, folder: Path) -> list[list[str]]:
    """What the script would start, with Python replaced by a program that writes down its arguments."""
    recorder, calls = folder / "python", folder / "calls"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    text = folder / "tinyshakespeare.txt"
    text.write_text("To be, or not to be\n")
    environment = {**with_an_h200(folder), "OUT": str(folder / "out"), "PY": str(recorder), "CALLS": str(calls), "TEXT": str(text), "TRY": "", "SECONDS_LEFT": "9999"}
    done = subprocess.run(["bash", str(part)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]
    assert len({row["row"] for row in rows}) == len(rows), "two rows of one name"
    assert (folder / "out" / f"{part.stem}.tgz").is_file(), "logs came back under another name"
    return [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.stem)
def test_every_row_is_a_command_that_exists(part, tmp_path):
    bench = tool("bench")

    checked = 0
    for program, *arguments in calls_of(part, tmp_path):
        if program in ("-", "-c", "-m"):
            continue
        assert (ROOT / program).is_file(), program
        asked = bench.parser().parse_args(arguments) if program == "tools/bench.py" else None
        if asked is not None and asked.subject == "quality":
            known = {setting for tries in all_settings(asked.format, asked.device).values() for setting in tries}
            assert asked.device == "cuda" and set(asked.settings) <= known
            checked += 1
            continue
        if asked is not None and asked.subject == "speed":
            config, _ = load_config(ROOT / asked.config, [f"data.sequence_length={asked.length}", *asked.overrides])
        elif program == "tools/check_equivalence.py":
            config, _ = load_config(ROOT / arguments[1], [argument for argument in arguments if argument.startswith(("run.", "parallel."))])
        elif program == "pretrain/run.py":
            config, _ = load_config(ROOT / arguments[1], [argument for argument in arguments[2:] if argument != "--check"])
        else:
            continue
        resolve(config)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.stem)
def test_another_gpu_is_refused(part, tmp_path):
    environment = {**with_an_h200(tmp_path, "NVIDIA H100 80GB HBM3"), "OUT": str(tmp_path / "out"), "PY": "false", "TRY": ""}
    done = subprocess.run(["bash", str(part)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "made for an H200" in done.stderr


@pytest.mark.parametrize("minutes", ["0.5", "0", "08", "five"])
def test_minutes_that_are_not_whole_are_refused_in_one_line(tmp_path, minutes):
    """bash calculates with whole numbers: 0.5 was a syntax error for each row."""
    environment = {**with_an_h200(tmp_path), "OUT": str(tmp_path / "out"), "PY": "false", "TRY": "", "MINUTES": minutes}
    done = subprocess.run(["bash", str(PARTS[2])], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith(f"MINUTES={minutes} is not a number of whole minutes; ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_row_without_time_is_left_out_with_a_line(tmp_path):
    environment = {**with_an_h200(tmp_path), "OUT": str(tmp_path / "out"), "PY": "false", "SECONDS_LEFT": "9", "TRY": ""}
    done = subprocess.run(["bash", str(PARTS[1])], env=environment, capture_output=True, text=True, timeout=120)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) > 5 and all(row["rc"] is None for row in rows)
    assert done.stdout.count("left out, because the part has taken") == len(rows)
