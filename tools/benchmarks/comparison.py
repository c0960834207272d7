"""What changed since rows were kept: the numbers, and what was not alike when they were measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.machine import commit_text, cpu_text
from benchmarks.measure import Row, number


def changes(rows: Sequence[Row], earlier: Sequence[dict[str, Any]], typed: str, about: dict[str, Any]) -> list[str]:
    """A line on each row, and what was not alike before: against the last time that this command measured it, or else any command.

    `typed`: the command of now; `about`: the machine of now.
    """
    ours = _what(typed)
    before = {(one["part"], one["name"]): one for one in sorted(earlier, key=lambda one: _what(one["command"]) == ours)}
    return [_change(row, before.get((row.part, row.name)), typed, about) for row in rows]


def not_measured(rows: Sequence[Row], earlier: Sequence[dict[str, Any]], typed: str) -> list[str]:
    """A line on each row that this command measured before, and is not in `rows`, which are all that it measured today."""
    today, ours = {(row.part, row.name) for row in rows}, _what(typed)
    before = {(one["part"], one["name"]): one for one in earlier if _what(one["command"]) == ours}
    return [
        f"{part}: {name}: not measured now, before {number(one['value'])} {one['unit']}"
        for (part, name), one in before.items()
        if (part, name) not in today
    ]


def _change(row: Row, before: dict[str, Any] | None, typed: str, about: dict[str, Any]) -> str:
    now = f"{row.part}: {row.name}: {number(row.value)} {row.unit}"
    if before is None:
        return f"{now}, not measured before"
    then = f"{now}, before {number(before['value'])} {before['unit']}"
    if before["unit"] != row.unit:
        return f"{then}: not compared, because the units differ"
    if before["clock"] != row.clock:
        return f"{then}: not compared, because that is {before['clock']} time, and this {row.clock} time"
    others, unknown = [], []
    for name, old, new in _conditions(row, before, typed, about):
        if old is None and new is not None:
            unknown.append(name)
        elif old != new:
            others.append(f"then {name}: {old}")
    if unknown:
        others.append(f"not kept then: {', '.join(unknown)}")
    gained = (row.value > before["value"]) == (row.better == "higher")
    judged = "" if row.value == before["value"] else ", better" if gained else ", worse"
    ratio = f"{row.value / before['value']:.3f} x" if before["value"] else "no ratio to 0"
    return "; ".join([f"{then}: {ratio}{judged}", *others])


def _conditions(row: Row, before: dict[str, Any], typed: str, about: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What a number depends on: its name, how it was then (None: not kept, or it was not there), and how it is now."""
    machine = before["machine"]
    yield "command", _what(before["command"]), _what(typed)
    if "cpu_family" in machine or "cpu_family" not in about:
        yield "CPU", cpu_text(machine), cpu_text(about)
    else:
        yield "CPU", machine["cpu"], about["cpu"]
        yield "CPU family and model", None, about["cpu_family"]
    yield "GPU", machine.get("gpu"), about.get("gpu")
    yield "cores", machine["cores"], about["cores"]
    here = _software(about)
    now = row.versions or here
    # A program of another environment did not have the versions of the machine's line.
    then = before.get("versions") or (_software(machine) if {**here, **now} == here else {})
    for name in dict.fromkeys([*now, *then]) if then else ():
        yield name, then.get(name), now.get(name)
    if not then:
        yield "versions", None, now
    # Changes that are in no commit may be others now.
    yield "commit", commit_text(machine), None if machine.get("dirty") else commit_text(about)


def _software(machine: dict[str, Any]) -> dict[str, str]:
    return {"Python": machine.get("python"), **machine["versions"]}


def _what(typed: str) -> str:
    """A command without the options that change neither what is measured nor how."""
    words, without = iter(shlex.split(typed)), ("--json", "--compare", "--seconds")
    kept = []
    for word in words:
        if word in without:
            next(words, None)
        elif word.partition("=")[0] not in without:
            kept.append(word)
    return shlex.join(kept)
