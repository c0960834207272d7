"""From YAML files and `key=value` overrides to a checked `Config` in which the origin of every value is known.

file --include--> tree of values + origins --+
key=value ------> tree of values + origins --+-merge-> keys, types, ranges checked -> references resolved (OmegaConf) -> Config
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

from pretrain.config.foreign import answer_to, section_advice, value_advice
from pretrain.config.keys import keys_of
from pretrain.config.read import Origin, Tree, apply_override, dump, origin_of, read_file
from pretrain.config.schema import Config
from pretrain.config.written import build_section, flatten
from pretrain.errors import ConfigError


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> tuple[Config, dict[str, Origin]]:
    """The checked configuration of a YAML file (or of the defaults) with `key=value` overrides, and the origin of each value.

    Keys that are absent from the second result have their default. Raises ConfigError with one line that names the key,
    the place and the remedy.
    """
    tree = read_file(Path(path)) if path is not None else Tree()
    for override in overrides or []:
        apply_override(tree, override)
    has_references = _has_references(tree.values, tree.origins)
    _check_section(Config, tree.values, "", tree.origins)
    values = tree.values
    if has_references:
        values = _resolved(tree, str(path or "command line"))
        _check_section(Config, values, "", tree.origins, resolved=True)
    config = build_section(Config, values)
    if config.run.name is None and path is not None:
        config.run.name = Path(path).stem
    return config, tree.origins


def _resolved(tree: Tree, place: str) -> dict[str, Any]:
    """All values, with the defaults, after OmegaConf has put in what they refer to."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(tree.values))
        OmegaConf.resolve(merged)
        return OmegaConf.to_container(merged)
    except OmegaConfBaseException as error:
        full = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")
        where = f"{origin_of(full, tree.origins)}: {full}" if full else place
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def _has_references(values: dict[str, Any], origins: dict[str, Origin]) -> bool:
    """Whether values refer to other keys. Raises ConfigError for a `${...}` that is not the path of another key.

    OmegaConf has more: `${oc.env:X}` reads the environment, which no record of a run shows, and `${oc.decode:X}` parses.
    """
    written = {path: value for path, value in flatten(values).items() if isinstance(value, str) and "${" in value}
    for path, value in written.items():
        for found in re.finditer(r"\$\{([^}]*)\}?", value):
            if not re.fullmatch(r"\.*[A-Za-z_]\w*(\.\w+|\[\d+\])*", found[1]):
                raise ConfigError(
                    f"{origin_of(path, origins)}: {path}={_shown(value)}: {found[0]} is not a reference to another key, such as "
                    "${run.seed}; write the value itself"
                )
    return bool(written)


def check_recorded(kind: type, values: Any, name: str, place: str) -> None:
    """Raise ConfigError, beginning with `place`, for a section of a record that has keys, types or values which no configuration can have."""
    _check_section(kind, copy.deepcopy(values), name, {name: Origin(place)}, resolved=True)


def _check_section(kind: type, values: Any, path: str, origins: dict[str, Origin], resolved: bool = False) -> None:
    """Check keys, types and ranges of one section against its dataclass, so that every message has the full path and place.

    References (`${...}`) are passed over, unless they are `resolved`: then there must be none left.
    """
    place = origin_of(path, origins)
    if _is_interpolation(values) and not resolved:
        return
    if not isinstance(values, dict):
        keys = ", ".join(names_of(kind))
        raise ConfigError(
            f"{place}: {path} is a section with keys ({keys}), got {_shown(values)}{_section_advice(kind, values, path)}"
        )
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        if name not in fields:
            raise ConfigError(_unknown_key(kind, name, full, origins))
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            _check_section(hint, value, full, origins, resolved)
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            _check_list(typing.get_args(hint)[0], value, full, origins, resolved)
        elif resolved or not _is_interpolation(value):
            values[name] = _check_leaf(hint, value, fields[name].metadata, full, origins)
    missing = [n for n, f in fields.items() if f.default == "???" and values.get(n, "???") == "???"]
    if missing and path:
        raise ConfigError(f"{place}: {path}.{missing[0]} is missing: {fields[missing[0]].metadata['help']}")


def _check_list(kind: type, values: Any, path: str, origins: dict[str, Origin], resolved: bool) -> None:
    if _is_interpolation(values) and not resolved:
        return
    if not isinstance(values, list):
        raise ConfigError(
            f"{origin_of(path, origins)}: {path} is a list, got {_shown(values)}; write [{{...}}] or one `- ` per item"
        )
    for i, item in enumerate(values):
        _check_section(kind, item, f"{path}.{i}", origins, resolved)


def _is_interpolation(value: Any) -> bool:
    return any(isinstance(item, str) and "${" in item for item in _items(value))


def _check_leaf(hint: Any, value: Any, limits: Any, full: str, origins: dict[str, Origin]) -> Any:
    """The value in the type of its key. Nothing is guessed: `yes` is not a bool, and 1.5 is not an int."""
    where = f"{origin_of(full, origins)}: {full}={_shown(value)}"
    for item in _items(value):
        if isinstance(item, str):
            _check_text(item, hint, full, where)
    try:
        value = _converted(hint, value, full, origins)
    except ValueError:
        meant = " (true or false)" if hint is bool else ""
        advice = value_advice(full, value) or _type_advice(hint, value)
        raise ConfigError(f"{where}: expected {describe_type(hint)}{meant}{advice}") from None
    if hint is str and (advice := value_advice(full, value)):
        raise ConfigError(f"{where}: not a value of this key{advice}; a path is written ./{value}")
    if limits.get("rest") and value == -1:
        return None if type(None) in typing.get_args(hint) else -1
    for item in _items(value):
        check_range(limits, item, where)
    return value


def _check_text(text: str, hint: Any, full: str, where: str) -> None:
    """Raise ConfigError for a text that would be read as something else than what was meant."""
    if "prompt" not in full:
        if text.startswith("~/"):
            raise ConfigError(f"{where}: ~ would be the name of a folder here; write {os.path.expanduser(text)}")
        if variable := re.match(r"\$[A-Za-z_]\w*(?=/|$)", text):
            raise ConfigError(f"{where}: {variable[0]} would be the name of a folder here; write what it stands for")
    if text == "???" or "${" in text:
        raise ConfigError(f"{where}: {text!r} has a meaning of its own here and cannot be part of a str")
    if "\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ConfigError(f"{where}: has a character that is not allowed in file names and texts")
    if describe_type(hint) != describe_type(str):
        _check_number_text(text, hint, where)


def _type_advice(hint: Any, value: Any) -> str:
    """What may have been meant by a value of another type, to be added to a message; empty if nothing comes to mind."""
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, str) and {int, float} & set(kinds):
        with contextlib.suppress(ValueError):
            float(value)
            return "; write the number without quotes"
    if isinstance(value, str) and (words := [word for kind in kinds for word in _words(kind)]):
        same = [word for word in words if word.lower() == value.lower()]
        near = same or difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.7)
        return f"; the nearest of these is {near[0]}" if near else ""
    if any(typing.get_origin(kind) in (list, tuple) for kind in kinds) and isinstance(value, (str, int, float)):
        return f"; a list is written in brackets: [{value}]"
    return ""


def _words(hint: Any) -> list[str]:
    """The words that a key takes."""
    return (
        [word for word in typing.get_args(hint) if isinstance(word, str)] if typing.get_origin(hint) is typing.Literal else []
    )


def _section_advice(kind: type, value: Any, path: str) -> str:
    """What may have been meant by a value in a section's place, to be added to a message; empty if nothing comes to mind."""
    if value is None:
        return "; give it a key, or remove it"
    if not isinstance(value, str):
        return ""
    if (written := re.match(r"(\w+)\s*[:=]\s*(\S.*)", value)) and written[1] in names_of(kind):
        return f"; YAML wants a space after a colon: {written[1]}: {written[2]}"
    hints = {name: (hint, *typing.get_args(hint)) for name, hint in typing.get_type_hints(kind).items()}
    for name, kinds in hints.items():
        advice = value_advice(f"{path}.{name}", value)
        if value.lower() not in _OF_MANY_KEYS and (advice or any(value in _words(kind) for kind in kinds)):
            return f"; the key for that is {path}.{name}{advice}"
    if advice := section_advice(path):
        return advice
    if not (texts := [name for name, kinds in hints.items() if str in kinds]):
        return ""
    in_list = path.rpartition(".")[2].isdigit()
    return f"; write {{{texts[0]}: {value}}}" if in_list else f"; the key for that is {path}.{texts[0]}"


_OF_MANY_KEYS = {"auto", "none", "never", "always", "required"}
"""Words that are values of several keys, and so say nothing of which is meant."""


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_number_text(text: str, hint: Any, where: str) -> None:
    """Raise ConfigError for a word that looks like a number, saying why it is not one."""
    kinds = {hint, *typing.get_args(hint)}
    if not kinds & {int, float}:
        return
    if re.fullmatch(r"[-+]?\.?(nan|inf|infinity)", text.lower()):
        raise ConfigError(f"{where}: must be a finite number")
    if leading := re.fullmatch(r"([-+]?)0+([0-9_]+.*)", text):
        raise ConfigError(
            f"{where}: a number with a leading zero is 8-based to some readers; write {leading[1]}{leading[2].lstrip('0_') or 0}"
        )


def _converted(hint: Any, value: Any, full: str, origins: dict[str, Origin]) -> Any:
    """`value` as a `hint`; ValueError if it cannot be one. A `str` is what was written, such as `1e-4`."""
    args = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _converted_to_one_of(args, value, full, origins)
    if origin is typing.Literal and value in args:
        return value
    if origin in (list, tuple) and isinstance(value, (list, tuple)) and (origin is list or len(value) == len(args)):
        return [
            _converted(args[i] if origin is tuple else args[0], item, f"{full}.{i}", origins) for i, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, dict):
        return {str(name): _converted(args[1], item, f"{full}.{name}", origins) for name, item in value.items()}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)  # 1e3 steps are 1000 steps
    if hint is float and is_number:
        return _as_float(value)
    if hint is str and (isinstance(value, str) or is_number):
        written = origins[full].text if full in origins else None
        return value if isinstance(value, str) else written or str(value)
    if hint is bool and isinstance(value, bool):
        return value
    raise ValueError


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:  # of an int
        raise ValueError from error


def _converted_to_one_of(kinds: tuple, value: Any, full: str, origins: dict[str, Origin]) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _converted(kind, value, full, origins)
    raise ValueError


def check_range(limits: Any, value: Any, where: str) -> None:
    """Raise ConfigError, beginning with `where`, for a number outside the limits of a key (`config/keys.py`)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: must be a finite number")
    for name, sign, ok in (
        ("ge", "at least", lambda a, b: a >= b),
        ("gt", "above", lambda a, b: a > b),
        ("le", "at most", lambda a, b: a <= b),
        ("lt", "below", lambda a, b: a < b),
    ):
        bound = limits.get(name)
        if bound is not None and not ok(value, bound):
            raise ConfigError(f"{where}: must be {sign} {bound}")


def _unknown_key(kind: type, name: str, full: str, origins: dict[str, Origin]) -> str:
    if answer := _foreign_answer(full, names_of(kind), origins):
        return answer
    if ":" in name:
        return f"{origin_of(full, origins)}: unknown key {full}; YAML wants a space after a colon: {name.replace(':', ': ', 1)}"
    if full in _PATHS and "." in name:
        *sections, last = name.split(".")
        nested = "".join(f"{section}: {{" for section in sections) + f"{last}: ...{'}' * len(sections)}"
        return f"{origin_of(full, origins)}: unknown key {full}; a key in a file has no dots: write {nested}"
    near = difflib.get_close_matches(name, names_of(kind), n=1, cutoff=0.5)
    section = full.removesuffix(name).removesuffix(".")
    in_list = any(part.isdigit() for part in full.split("."))  # whose keys are nowhere else
    longer = [own for own in names_of(kind) if in_list and own.startswith(f"{name}_")]
    elsewhere = _paths_named(name)
    if len(longer) == 1:
        hint = f"the nearest valid name is {section + '.' if section else ''}{longer[0]}"
    elif elsewhere:
        hint = f"the nearest valid name is {elsewhere[0]}"
    elif near:
        hint = f"the nearest valid name is {section + '.' if section else ''}{near[0]}"
    else:
        hint = f"valid names here: {', '.join(names_of(kind))}"
    return f"{origin_of(full, origins)}: unknown key {full}; {hint}"


def _foreign_answer(full: str, known: list[str], origins: dict[str, Origin]) -> str | None:
    """The message about a name of another tool; None if it is no such name, or a slip of one of the `known` names.

    A section that other tools have, such as `train` or `optimizer`, is answered by what is in it, if that has an answer.
    """
    within = [path for path in origins if path.startswith(f"{full}.")]
    answers = [(path, answer_to(path)) for path in within]
    is_slip = answer_to(full) is None and difflib.get_close_matches(full, known, n=1, cutoff=0.75)
    if not is_slip:
        ours = [(path, _paths_named(path.rpartition(".")[2])) for path in within]
        answers += [(path, f"the nearest valid name is {paths[0]}") for path, paths in ours if len(paths) == 1]
    for path, answer in [*answers, (full, answer_to(full))]:
        if answer:
            return f"{origin_of(path, origins)}: unknown key {path}; {answer}"
    return None


_PATHS = [key.path for key in keys_of(Config())]


def _paths_named(name: str) -> list[str]:
    return [path for path in _PATHS if path.rpartition(".")[2] == name]


def names_of(kind: type) -> list[str]:
    """The names of the keys of a section, in the order in which they are declared."""
    return [f.name for f in dataclasses.fields(kind)]


def _shown(value: Any) -> str:
    return dump(value, flow=True)


def describe_type(hint: Any) -> str:
    """A type as Python writes it, and null where it is allowed."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else describe_type(a) for a in args)
    if typing.get_origin(hint) is tuple:
        return f"list[{describe_type(args[0])}] of {len(args)}"
    if typing.get_origin(hint) is dict:
        return f"dict[{', '.join(describe_type(a) for a in args)}]"
    if typing.get_origin(hint) is list:
        return f"list[{describe_type(args[0])}]"
    return hint.__name__
