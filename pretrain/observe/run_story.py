"""What a run directory says about its run, for people: all starts, the steps that were repeated, and where the time went."""

from __future__ import annotations

import calendar
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.written import flatten
from pretrain.errors import DataError
from pretrain.observe.metrics import EVALUATIONS_FILE, METRICS_FILE, STARTS_FILE, read_lines

MOST_RECORDS = 3000
"""Log lines of a run that a picture shows; of a longer run evenly chosen ones, and each of an evaluation."""


@dataclass(frozen=True)
class RunStory:
    """A run from its first start to its last log line."""

    directory: Path
    records: list[dict[str, Any]]
    """The log lines that count, in order of steps."""
    repeated: list[list[dict[str, Any]]]
    """Stretches of log lines that were dropped when the run went back to a checkpoint, oldest first."""
    starts: list[dict[str, Any]]
    status: dict[str, Any]

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def steps_of(self, records: list[dict[str, Any]]) -> list[int]:
        """How many steps each log line speaks of: those since the line before it, or since the start that made it."""
        begins = sorted({0, *(start["step"] for start in self.starts)})
        counts = []
        for before, record in zip([None, *records], records):
            begin = max(step for step in begins if step < record["step"])
            counts.append(record["step"] - max(begin, before["step"] if before else 0))
        return counts

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds by what they went to. They add up to the time from the first start to the last sign of life."""
        parts = {"steps": 0.0, "waiting for data": 0.0, "evaluation, saving, logging": 0.0, "steps made again": 0.0}
        for record, count in zip(self.records, self.steps_of(self.records)):
            wall = (record.get("seconds") or 0.0) * count
            data = (record.get("data_wait") or 0.0) * wall
            steps = min((record.get("step_seconds") or 0.0) * count, wall - data)
            parts["steps"] += steps
            parts["waiting for data"] += data
            parts["evaluation, saving, logging"] += wall - data - steps
        for stretch in self.repeated:
            parts["steps made again"] += sum((r.get("seconds") or 0.0) * n for r, n in zip(stretch, self.steps_of(stretch)))
        first, last = (self.starts[0].get("time") if self.starts else None), self.status.get("updated")
        if first and last:
            parts["start-up, and time between starts"] = max(
                0.0, unix_seconds(last) - unix_seconds(first) - sum(parts.values())
            )
        return parts


def read_story(directory: Path) -> RunStory:
    """Read a run directory. Raises DataError if no step was logged."""
    if not (directory / METRICS_FILE).is_file():
        raise DataError(
            f"{directory / METRICS_FILE}: missing; {directory} is not the directory of a run that has logged a step"
        )
    records: list[dict[str, Any]] = []
    repeated = []
    for record in read_lines(directory / METRICS_FILE):
        dropped = []
        while records and records[-1]["step"] >= record["step"]:
            dropped.insert(0, records.pop())
        if len(dropped) > 1 or (
            dropped and dropped[0]["step"] != record["step"]
        ):  # a line alone is one that got its evaluation later
            repeated.append(dropped)
        records.append(record)
    if not any(record.get("loss") is not None for record in records):
        raise DataError(f"{directory / METRICS_FILE}: no step was logged yet")
    _add_evaluations(directory / EVALUATIONS_FILE, records)
    starts = list(read_lines(directory / STARTS_FILE)) if (directory / STARTS_FILE).is_file() else []
    return RunStory(directory, records, repeated, starts, read_object(directory / "status.json"))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty if there is none, or if it cannot be read at the moment."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _add_evaluations(path: Path, records: list[dict[str, Any]]) -> None:
    """Put what tools/evaluate.py --follow found into the records of the same steps."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(path) if path.is_file() else ():
        found.setdefault(line["step"], {}).update(line.get("evaluation", {}))
    for record in records:
        if record["step"] in found:
            record["evaluation"] = {**record.get("evaluation", {}), **found[record["step"]]}


def thinned(records: list[dict[str, Any]], most: int = MOST_RECORDS) -> list[dict[str, Any]]:
    """At most about `most` records, evenly chosen. The first, the last and those with evaluations always stay."""
    every = -(-len(records) // most)
    evaluations = ("validation", "translation", "evaluation")
    chosen = [i for i, r in enumerate(records) if i % every == 0 or i == len(records) - 1 or any(e in r for e in evaluations)]
    return [records[i] for i in chosen]


def configuration_of(start: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a start as one mapping of dotted keys."""
    return flatten(start.get("config", {}))


def differences(configurations: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """By key, the values in each configuration, where they are not all the same. A missing key counts as None."""
    keys = sorted({key for configuration in configurations for key in configuration})
    values = {key: [configuration.get(key) for configuration in configurations] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def unix_seconds(timestamp: str) -> float:
    """A time as the files of a run have it, in seconds since 1970."""
    return calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ"))
