"""What a run directory says about its run, for people: all starts, the steps that were repeated, and where the time went."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.written import flatten
from pretrain.errors import DataError
from pretrain.observe.metrics import EVALUATIONS_FILE, METRICS_FILE, STARTS_FILE, duration, read_lines, read_records
from pretrain.storage import read_object, real

SILENT_LINES = 20
"""Nothing was written for the time of so many log lines: the run may be dead."""
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
    evaluations: list[dict[str, Any]]
    """What `tools/evaluate.py --follow` found at steps without a log line, in order of steps."""
    made: list[tuple[dict[str, Any], int, int]]
    """Each log line, dropped ones among them, with the number of steps that it speaks of, and how many of these were made again."""
    starts: list[dict[str, Any]]
    status: dict[str, Any]

    @property
    def name(self) -> str:
        return real(self.directory).name

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds by what they went to. They add up to the time from the first start to the last sign of life."""
        parts = {"steps": 0.0, "waiting for data": 0.0, "evaluation, saving, logging": 0.0, "steps made again": 0.0}
        for record, count, again in self.made:
            parts["steps made again"] += (record.get("seconds") or 0.0) * again
            count -= again
            wall = (record.get("seconds") or 0.0) * count
            data = (record.get("data_wait") or 0.0) * wall
            steps = min((record.get("step_seconds") or 0.0) * count, wall - data)
            parts["steps"] += steps
            parts["waiting for data"] += data
            parts["evaluation, saving, logging"] += wall - data - steps
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
    starts = list(read_lines(directory / STARTS_FILE)) if (directory / STARTS_FILE).is_file() else []
    records, repeated, made = _told(_written_once(read_records(directory / METRICS_FILE)), starts)
    if not any(record.get("loss") is not None for record in records):
        raise DataError(f"{directory / METRICS_FILE}: no step was logged yet")
    evaluations = _add_evaluations(directory / EVALUATIONS_FILE, records)
    return RunStory(directory, records, repeated, evaluations, made, starts, read_object(directory / "status.json"))


def _written_once(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log lines; one that was written again with an evaluation, which a stop had cut short, in place of the line without it."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        if kept and all(kept[-1].get(name) == line.get(name) for name in ("step", "seconds")):
            kept.pop()
        kept.append(line)
    return kept


def _told(lines: list[dict[str, Any]], starts: list[dict[str, Any]]) -> tuple[list, list, list]:
    """`records`, `repeated` and `made` of a story."""
    records: list[int] = []
    repeated, counts, again = [], [0] * len(lines), [0] * len(lines)
    for number, (line, begin) in enumerate(zip(lines, _begins(lines, starts))):
        dropped = []
        while records and lines[records[-1]]["step"] >= line["step"]:
            dropped.insert(0, records.pop())
        for old in dropped:
            again[old] = min(counts[old], max(0, lines[old]["step"] - begin))
        if dropped:
            repeated.append([lines[old] for old in dropped])
        counts[number] = line["step"] - max(begin, lines[records[-1]]["step"] if records else 0)
        records.append(number)
    return [lines[number] for number in records], repeated, list(zip(lines, counts, again))


def _begins(lines: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[int]:
    """By log line, the step from which the start went on that wrote it. Found from the end, as a start has its lines in order of steps."""
    begins, current, after = [], len(starts) - 1, None
    for line in reversed(lines):
        if after is not None and line["step"] >= after:
            current -= 1
        while current >= 0 and starts[current]["step"] >= line["step"]:
            current -= 1
        begins.append(starts[current]["step"] if current >= 0 else 0)
        after = line["step"]
    return begins[::-1]


def _add_evaluations(path: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what tools/evaluate.py --follow found into the records of the same steps. Return those of other steps, for which tokens are known."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(path) if path.is_file() else ():
        if not isinstance(line.get("evaluation"), dict):
            continue
        at = found.setdefault(line["step"], {"step": line["step"], "evaluation": {}})
        at["evaluation"].update(line["evaluation"])
        at |= {"tokens": line["tokens"]} if isinstance(line.get("tokens"), int) else {}
    for record in records:
        if record["step"] in found:
            record["evaluation"] = {**record.get("evaluation", {}), **found.pop(record["step"])["evaluation"]}
    return [found[step] for step in sorted(found) if "tokens" in found[step]]


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


def silence(status: dict[str, Any], steps: Sequence[int], last: dict[str, Any]) -> str:
    """What to say of a run that is running by its status.json, but has written nothing for long; empty for any other.

    `steps`: those of its log lines; `last`: the last line, or nothing.
    """
    passed = time.time() - unix_seconds(status["updated"]) if "updated" in status else 0.0
    usual = (last.get("seconds") or 0.0) * (steps[-1] - steps[-2] if len(steps) > 1 else 1)
    if status.get("state") != "running" or passed <= max(60.0, SILENT_LINES * usual):
        return ""
    return f"nothing was written for {duration(passed)}: is it still alive?"


def costs_until_now(last: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """A run's device hours, their useful share and their cost: those of its last log line, with the time since, which status.json knows."""
    hours = last.get("device_hours")
    now = (status.get("device_seconds") or 0.0) / 3600
    if not hours or now <= hours:
        return last
    factors = {"device_hours": now / hours, "cost": now / hours, "goodput": hours / now}
    return last | {name: last[name] * factor for name, factor in factors.items() if last.get(name) is not None}


def unix_seconds(timestamp: str) -> float:
    """A time as the files of a run have it, in seconds since 1970."""
    return calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ"))
