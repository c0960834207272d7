"""From YAML files and `key=value` overrides to a checked `Config` in which the origin of every value is known.

file --include--> tree of values + origins --+
key=value ------> tree of values + origins --+-merge-> keys, types, ranges checked -> OmegaConf -> Config
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrain.config.read import Origin, Tree, apply_override, origin_of, read_file
from pretrain.config.schema import Config
from pretrain.errors import ConfigError


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> tuple[Config, dict[str, Origin]]:
    """The checked configuration of a YAML file (or of the defaults) with `key=value` overrides, and the origin of each value.

    Keys that are absent from the second result have their default. Raises ConfigError with one line that names the key,
    the place and the remedy.
    """
    tree = read_file(Path(path)) if path is not None else Tree()
    for override in overrides or []:
        apply_override(tree, override)
    _check_section(Config, tree.values, "", tree.origins)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(tree.values))
        OmegaConf.resolve(merged)
        resolved = OmegaConf.to_container(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path or 'overrides'}: {str(error).splitlines()[0]}") from error
    _check_section(Config, resolved, "", tree.origins)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), resolved))
    if config.run.name is None and path is not None:
        config.run.name = Path(path).stem
    return config, tree.origins


def _check_section(kind: type, values: Any, path: str, origins: dict[str, Origin]) -> None:
    """Check keys, types and ranges of one section against its dataclass, so that every message has the full path and place."""
    place = origin_of(path, origins)
    if isinstance(values, str) and "${" in values:
        return
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: {path} is a section with keys ({', '.join(names_of(kind))}), got {values!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        if name not in fields:
            raise ConfigError(_unknown_key(kind, name, full, origins))
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            _check_section(hint, value, full, origins)
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            _check_list(typing.get_args(hint)[0], value, full, origins)
        elif not _is_interpolation(value):
            values[name] = _check_leaf(kind, fields[name], hint, value, full, origins)
    missing = [n for n, f in fields.items() if f.default == "???" and values.get(n, "???") == "???"]
    if missing and path:
        raise ConfigError(f"{place}: {path}.{missing[0]} is missing: {fields[missing[0]].metadata['help']}")


def _check_list(kind: type, values: Any, path: str, origins: dict[str, Origin]) -> None:
    if not isinstance(values, list):
        raise ConfigError(f"{origin_of(path, origins)}: {path} is a list, got {values!r}; write [{{...}}] or one `- ` per item")
    for i, item in enumerate(values):
        _check_section(kind, item, f"{path}.{i}", origins)


def _is_interpolation(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and "${" in item for item in items)


def _check_leaf(kind: type, fld: dataclasses.Field, hint: Any, value: Any, full: str, origins: dict[str, Origin]) -> Any:
    where = f"{origin_of(full, origins)}: {full}={_shown(value)}"
    numeric = any(t in (int, float) for t in (hint, *typing.get_args(hint)))
    if numeric and isinstance(value, str) and re.fullmatch(r"[-+]?0[0-9_]+", value):
        raise ConfigError(
            f"{where}: a number with a leading zero is 8-based to some readers; write {int(value.replace('_', ''))}"
        )
    if int in (hint, *typing.get_args(hint)) and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e3 steps are 1000 steps
    if isinstance(value, bool) and not (hint is bool or bool in typing.get_args(hint)):
        raise ConfigError(f"{where}: expected {describe_type(hint)}")
    try:
        OmegaConf.merge(OmegaConf.structured(kind), {fld.name: value})
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{where}: expected {describe_type(hint)}") from error
    for item in value if isinstance(value, (list, tuple)) else [value]:
        _check_range(fld.metadata, item, where)
    return value


def _check_range(limits: Any, value: Any, where: str) -> None:
    if isinstance(value, str) and any(limits.get(k) is not None for k in ("ge", "gt", "le", "lt")):
        value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{where}: must be a finite number")
    if limits.get("only") is not None and value != limits["only"]:
        raise ConfigError(f"{where}: not built yet; the only legal value is {limits['only']}")
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
    near = difflib.get_close_matches(name, names_of(kind), n=1, cutoff=0.5)
    section = full.rpartition(".")[0]
    elsewhere = [p for p in _all_paths(Config) if p.rpartition(".")[2] == name]
    if elsewhere:
        hint = f"the nearest valid name is {elsewhere[0]}"
    elif near:
        hint = f"the nearest valid name is {section + '.' if section else ''}{near[0]}"
    else:
        hint = f"valid names here: {', '.join(names_of(kind))}"
    return f"{origin_of(full, origins)}: unknown key {full}; {hint}"


def names_of(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _all_paths(kind: type, path: str = "") -> list[str]:
    paths = []
    for name, hint in typing.get_type_hints(kind).items():
        full = f"{path}.{name}" if path else name
        paths += _all_paths(hint, full) if dataclasses.is_dataclass(hint) else [full]
    return paths


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe_type(hint: Any) -> str:
    """A type in a reader's words."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if typing.get_origin(hint) is typing.Union:
        return " or ".join("null" if a is type(None) else describe_type(a) for a in args)
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(args)} numbers"
    if typing.get_origin(hint) is list:
        return f"a list, each item {describe_type(args[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(hint, str(hint))
