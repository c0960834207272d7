"""Random values, sensible and not, for random keys of the configuration: a run trains, or says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from random import Random
from typing import Any

import yaml
from campaign import REFUSED, Case
from processes import is_refusal, outcome
from ranks import corpus

from pretrain.config.schema import Config

NAME = "hostile_configs"
ABOUT = "no configuration ends in a traceback, in silence, or in the machine's memory"

SECONDS = 90  # for --check and a step, with one core of a busy machine
LONGEST = {"run.steps": 1000, "run.tokens": 64_000}  # a longer run is checked and not started
INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    16,
    64,
    1000,
    10**6,
    2**31,
    2**62,
    2**63,
    10**19,
    3.5,
    True,
    "12",
    "0x10",
    "1_000",
    None,
    [],
    {},
)
NUMBERS = (
    -1.0,
    0.0,
    1e-320,
    1e-8,
    0.1,
    0.5,
    0.999,
    1.0,
    2.0,
    100.0,
    1e15,
    1e38,
    1e308,
    "1e400",
    ".inf",
    ".nan",
    "1e-3",
    None,
    True,
    [1.0],
)
TEXTS = (
    "",
    " ",
    "x",
    "a/b",
    "../x",
    "/dev/null",
    "x" * 300,
    "${run.seed}",
    "${oc.env:HOME}",
    "${nowhere}",
    "ünï",
    "a\nb",
    "\0",
    "-",
    "null",
    7,
    None,
    [],
)
TRUTHS = (True, False, "yes", "true", 1, 0, None, [])
# What would make a case long or leave the machine, and is tried elsewhere.
PASSED_OVER = {"parallel.compile", "run.device", "run.dir", "parallel.timeout_seconds"}


def case(random: Random, folder: Path) -> Case:
    keys = leaves(Config)
    changes = {}
    for path in random.sample(sorted(keys), random.choice((1, 1, 2, 3, 4))):
        changes[path] = value_for(random, keys[path])
    return Case(json.dumps(changes), lambda: attempt(folder, changes))


def leaves(kind: type, path: str = "") -> dict[str, Any]:
    """Every key with its type."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        full = f"{path}{name}"
        if dataclasses.is_dataclass(hint):
            found |= leaves(hint, f"{full}.")
        elif full not in PASSED_OVER:
            found[full] = hint
    return found


def value_for(random: Random, hint: Any) -> Any:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return random.choice((*arguments, *arguments, "nonsense", None, 3))
    if origin is list:
        item = arguments[0]
        if dataclasses.is_dataclass(item):
            names = typing.get_type_hints(item)
            return [
                {n: value_for(random, h) for n, h in names.items() if random.random() < 0.7}
                for _ in range(random.randint(0, 2))
            ]
        return random.choice(([value_for(random, item) for _ in range(random.randint(0, 3))], "x", None, {}))
    if origin is tuple:
        return random.choice(([value_for(random, float) for _ in range(2)], [0.9], None, "0.9,0.95"))
    if origin is dict:
        return random.choice(({"0": value_for(random, float)}, {}, None, []))
    if arguments:  # a type or null
        return value_for(random, arguments[0])
    return random.choice({int: INTEGERS, float: NUMBERS, str: TEXTS, bool: TRUTHS}[hint])


def attempt(folder: Path, changes: dict[str, Any]) -> str | None:
    config = {
        "run": {"dir": str(folder / "runs"), "steps": 1},
        "model": {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 16},
        "data": {"sequence_length": 16, "sources": [{"path": str(corpus(0))}], "cache": {"dir": str(folder / "cache")}},
        "batch": {"sequences": 4, "micro_sequences": 2},
        "checkpoint": {"export_check": False},
        "log": {"tensorboard": False},
    }
    for path, value in changes.items():
        *parents, last = path.split(".")
        section: Any = config
        for name in parents:
            section = section.setdefault(name, {}) if isinstance(section, dict) else {}
        section[last] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, allow_unicode=True))
    for arguments in (["--check"], []):
        code, printed = outcome("run", "--config", str(file), *arguments, seconds=SECONDS)
        if code != 0:
            return REFUSED if is_refusal(code, printed) else f"{arguments or 'a step'}: exit code {code}: {printed[-600:]}"
        if any(int(changes.get(key) or 0) > most for key, most in LONGEST.items()):
            return None
    return None
