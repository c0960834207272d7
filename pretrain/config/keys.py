"""How a key of the configuration is declared: default, documentation, legal range, what a change at a resume means."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

AtResume = Literal["free", "accept", "schedule", "content", "never"]
"""What a value that differs from the checkpoint's means when a run is resumed. It is printed in any case.

    free       speed, memory, place, logging, or only what is still to come: nothing else happens
    accept     the steps to come are computed otherwise: refused unless run.accept_changes names the key
    schedule   like `accept` where the steps already taken would have had other learning rates, else like `free`
    content    judged by what it made of the samples already taken (docs/data.md), not by its own value
    never      another run
"""


def key(default: Any, help: str, *, ge=None, gt=None, le=None, lt=None, only=None, resume: AtResume | None = None) -> Any:
    """A configuration key: default value, one line of documentation with units, and its legal range.

    `only` names the single value that is legal today for a key whose other values are not built yet. `resume` says what a change
    at a resume means; by default what the section says.
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "only": only, "resume": resume}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, resume: AtResume | None = None) -> Any:
    """A nested section with that dataclass's own defaults; its docstring is its documentation. `resume`: that of its keys."""
    return field(default_factory=kind, metadata={"help": kind.__doc__, "resume": resume})


@dataclass(frozen=True)
class Leaf:
    """One value of a configuration. `path`: with the numbers of list items; `key`: the key of the schema, without them and what follows."""

    path: str
    key: str
    value: Any
    resume: AtResume


def leaves(
    kind: type, values: dict[str, Any] | None, path: str = "", key: str = "", resume: AtResume = "free"
) -> Iterator[Leaf]:
    """All values of a section in the order of the schema. A key that `values` lacks has its default.

    `values` None: the keys of the schema, with one item in each list of sections.
    """
    hints = typing.get_type_hints(kind)
    for own in dataclasses.fields(kind):
        hint, rule = hints[own.name], own.metadata.get("resume") or resume
        full = f"{path}.{own.name}" if path else own.name
        value = own.default_factory() if own.default is dataclasses.MISSING else own.default
        if values is not None:
            value = values.get(own.name, value)
        item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if dataclasses.is_dataclass(hint):
            below = None if values is None else value if isinstance(value, dict) else {}
            yield from leaves(hint, below, full, key, rule)
        elif dataclasses.is_dataclass(item):
            for number, below in enumerate([None] if values is None else value or []):
                yield from leaves(item, below, f"{full}.{number}", key or full, rule)
        else:
            yield Leaf(full, key or full, list(value) if isinstance(value, tuple) else value, rule)
