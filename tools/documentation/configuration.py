"""docs/configuration.md, from the schema."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from pretrain.config import foreign
from pretrain.config.keys import AtResume, When, describe_when
from pretrain.config.load import describe_type
from pretrain.config.read import dump
from pretrain.config.schema import Config


def configuration_page() -> str:
    """docs/configuration.md, from the schema."""
    parts = [
        "# Configuration",
        "<!-- Generated: python tools/make_docs.py -->",
        "A run is one YAML file and any number of `key=value` overrides on the command line. `include: other.yaml` (or a list) "
        "puts a file over others, relative to itself; lists are replaced, sections are merged. An unknown key, a wrong type, a "
        "value out of range or two values that cannot go together stop the run before anything is allocated, with one line "
        "that names the key, the file and the line.",
        "```\npython pretrain/run.py --config configs/quickstart.yaml --print-config           # resolved, loads back\n"
        "python pretrain/run.py --config configs/quickstart.yaml --print-config --origins # with the origin of every value\n"
        "python pretrain/run.py --config configs/quickstart.yaml --check run.name=try optim.lr=1e-3 # validate and stop\n```",
        "`null`: the value is derived, as the key's text says. Numbers are YAML 1.2's: `1e-4` is a number, and `010` in a "
        "number's place is refused. `${run.seed}` refers to another key; nothing else is read that way. "
        "A sample is one sequence of `data.sequence_length` tokens.",
        "The last column says what happens at a resume if the value differs from the checkpoint's. Every difference is printed; "
        "`free` ones need nothing more. `accept`: the next steps would be computed differently, so the run stops unless "
        "`run.accept_changes` names the key. `schedule`: like `accept` if the steps already taken would have had another learning rate, "
        "else like `free`. So `run.steps` may be raised freely with `constant`, `inverse_sqrt`, `piecewise` and a `wsd` whose decay has not started. "
        "`content`: judged by its effect on the samples already taken ([data.md](data.md#what-makes-a-run-this-run)). `never`: another run.",
    ]
    for section in dataclasses.fields(Config):
        hint = typing.get_type_hints(Config)[section.name]
        rows = _table(hint, section.name, section.metadata["resume"] or "free", section.metadata["when"])
        parts.append(f"## `{section.name}`\n\n{_text(hint.__doc__)}\n\n" + "\n".join(rows))
    return "\n\n".join([*parts, foreign.to_markdown()]) + "\n"


def _text(doc: str | None) -> str:
    return " ".join((doc or "").split())


def _table(kind: type, path: str, resume: AtResume, outer: When | None = None) -> list[str]:
    rows = ["| key | type | default | meaning | at a resume |", "|---|---|---|---|---|"]
    hints = typing.get_type_hints(kind)
    for fld in dataclasses.fields(kind):
        hint, full, rule = hints[fld.name], f"{path}.{fld.name}", fld.metadata["resume"] or resume
        when = {**(outer or {}), **fld.metadata["when"]}
        if dataclasses.is_dataclass(hint):
            rows += _table(hint, full, rule, when)[2:]
            continue
        item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if dataclasses.is_dataclass(item):
            rows.append(f"| `{full}` | list | `[]` | {_meaning(fld, full, when)} Each item: | {rule} |")
            rows += _table(item, f"{full}[]", rule)[2:]
            continue
        default = fld.default_factory() if fld.default is dataclasses.MISSING else fld.default
        shown = (
            "required" if default == "???" else f"`{dump(list(default) if isinstance(default, tuple) else default, flow=True)}`"
        )
        rows.append(
            f"| `{full}` | {describe_type(hint)}{_range(fld.metadata)} | {shown} | {_meaning(fld, full, when)} | {rule} |"
        )
    return rows


def _meaning(fld: dataclasses.Field, full: str, when: When) -> str:
    others = {name: wanted for name, wanted in when.items() if name != full}
    return f"{fld.metadata['help']} {describe_when(others)}".strip()


def _range(limits: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = "".join(f", {sign} {limits[name]}" for name, sign in signs.items() if limits[name] is not None)
    return f"{bounds}, or -1" if limits["rest"] else bounds
