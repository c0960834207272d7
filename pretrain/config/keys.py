"""How a key of the configuration is declared: default, documentation, legal range, effect, what a change at a resume means.

A key that acts only beside certain values of others says so with `when`, a mapping of dotted paths:

    decay_steps: int | None = key(None, "...", when={"schedule.name": ("wsd",)})        one of these values
    chunk_mb: int | None = key(None, "...", when={"model.family": Except("hf")})        any other value
    sequences: int = key(64, "...", when={"data.validation": SET})                      anything but the default
    packing: str = key("concatenate", "...", when={"data.pairs": UNSET})                the default

`check_effects` refuses a key that was changed where it does nothing, and docs/configuration.md shows the conditions.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain.config.read import dump
from pretrain.errors import ConfigError

AtResume = Literal["free", "accept", "schedule", "content", "never"]
"""What a value that differs from the checkpoint's means when a run is resumed. It is printed in any case.

    free       speed, memory, place, logging, or only what is still to come: nothing else happens
    accept     the steps to come are computed otherwise: refused unless run.accept_changes names the key
    schedule   like `accept` where the steps already taken would have had other learning rates, else like `free`
    content    judged by what it made of the samples already taken (docs/data.md), not by its own value
    never      another run
"""


SET, UNSET = "set", "unset"

MOST_STEPS = 10**12
"""The largest number of steps that a key takes."""
TOKENS_OF_A_RUN = 2**62
"""The largest number of tokens that a key of a run, or of a part of it, takes."""


@dataclass(frozen=True)
class Except:
    """The condition that a key has any value but this one."""

    value: Any


Condition = tuple[Any, ...] | Except | str
When = Mapping[str, Condition]


def key(
    default: Any,
    help: str,
    *,
    ge=None,
    gt=None,
    le=None,
    lt=None,
    rest: bool = False,
    when: When | None = None,
    resume: AtResume | None = None,
) -> Any:
    """A configuration key: default value, one line of documentation with units, its legal range, and where it has an effect.

    `rest`: -1 may be written, for what other keys leave; it is null where a key may be null. `resume` says what a change
    at a resume means; by default what the section says.
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "rest": rest, "when": when or {}, "resume": resume}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, when: When | None = None, resume: AtResume | None = None) -> Any:
    """A nested section with that dataclass's own defaults; its docstring is its documentation. `when` and `resume` hold for its keys."""
    return field(default_factory=kind, metadata={"help": kind.__doc__, "when": when or {}, "resume": resume})


@dataclass(frozen=True)
class SetKey:
    """A key of a section: its dotted path, its value, its default, and the conditions under which it acts."""

    path: str
    value: Any
    default: Any
    when: When


def keys_of(values: Any, path: str = "", when: When | None = None) -> Iterator[SetKey]:
    """Every key of a section and of the sections in it; items of lists are not looked into."""
    neutral = type(values)()
    for fld in dataclasses.fields(values):
        value, full = getattr(values, fld.name), f"{path}{fld.name}"
        conditions = {**(when or {}), **fld.metadata["when"]}
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{full}.", conditions)
        else:
            yield SetKey(full, value, getattr(neutral, fld.name), conditions)


def check_effects(
    config: Any, resolved: Mapping[str, Any] | None = None, usual: Mapping[str, Collection[Any]] | None = None
) -> list[str]:
    """Raise ConfigError for a key that differs from its default where it has no effect.

    `usual`: further values of a key that say nothing, for instance those that a family of models gives it. `resolved`: what keys whose
    value is `auto` or `null` came to. Where that alone takes the effect away, the configuration may be meant for other
    machines as well: it is not refused, and the result has a line that says so. What `auto` comes to elsewhere is not known yet.
    """
    keys, resolved, usual, notes = {key.path: key for key in keys_of(config)}, resolved or {}, usual or {}, []
    for own in keys.values():
        if own.value == own.default or own.value in usual.get(own.path, ()):
            continue
        for path, wanted in own.when.items():
            problem = _unmet(path, wanted, keys, resolved)
            if problem is None:
                continue
            line = f"{own.path}={_shown(own.value)} has no effect {problem}"
            if path in keys and keys[path].value == "auto":
                notes.append(line)
            else:
                raise ConfigError(f"{line}, or set {own.path}={_shown(own.default)}, its default")
    return notes


def _unmet(path: str, wanted: Condition, keys: Mapping[str, SetKey], resolved: Mapping[str, Any]) -> str | None:
    """Why a condition is not met, and what would meet it."""
    if wanted in (SET, UNSET):
        parts = [key for name, key in keys.items() if name == path or name.startswith(f"{path}.")]
        is_set = any(part.value != part.default for part in parts)
        if is_set == (wanted == SET):
            return None
        return f"without {path}; set {path}" if wanted == SET else f"with {path}; remove {path}"
    derived = keys[path].default is None and path not in resolved
    value = resolved.get(path, keys[path].value)
    if derived or value == "auto" or is_met(wanted, value):
        return None
    auto = " (the choice of auto)" if keys[path].value == "auto" else ""
    remedy = f"change {path}" if isinstance(wanted, Except) else f"set {path}={' or '.join(map(_shown, wanted))}"
    return f"with {path}={_shown(value)}{auto}; {remedy}"


def is_met(wanted: Condition, value: Any) -> bool:
    """Whether a value of the other key meets a condition that names values."""
    return value != wanted.value if isinstance(wanted, Except) else value in wanted


def _shown(value: Any) -> str:
    items = value if isinstance(value, list) else []
    return dump([dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item for item in items] or value, flow=True)


def describe_when(when: When) -> str:
    """The conditions as docs/configuration.md words them; empty for a key without conditions."""
    sentences = []
    for path, wanted in when.items():
        if isinstance(wanted, Except):
            sentences.append(f"Not with `{path}: {_shown(wanted.value)}`.")
        elif wanted == UNSET:
            sentences.append(f"Not with `{path}`.")
        else:
            values = "" if wanted == SET else f": {' or '.join(map(_shown, wanted))}"
            sentences.append(f"Only with `{path}{values}`.")
    return " ".join(sentences)


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
