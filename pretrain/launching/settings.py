"""Settings of a target: the type of each, and what the command line gives, as values of that type.

A setting has the type of its default, and `str` if the default is `???` or null. `types:` of the target's file names any other:

    str        the text as typed: 5, 0123 and 1e3 stay what they are
    int        0 or above
    bool       true or false
    list[str]  a,b or [a, b]: stripped, without empty and repeated items
    TYPE | null  null is allowed although the default is another value; it always is where null is the default
"""

from __future__ import annotations

import re
from typing import Any

from pretrain.config.read import Origin, Tree, apply_override
from pretrain.errors import LaunchError, clipped

REQUIRED = "???"
OR_NULL = " | null"
KINDS = {
    "str": "a str",
    "int": "an int of 0 or above",
    "bool": "a bool: true or false",
    "list[str]": "a list[str]: a,b",
}


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """`name=value` of the command line. The values are YAML whose scalars stay the text that was typed. Raises ConfigError."""
    tree = Tree()
    for text in texts:
        apply_override(tree, text)
    return {name: _as_typed(value, name, tree.origins) for name, value in tree.values.items()}


def _as_typed(value: Any, path: str, origins: dict[str, Origin]) -> Any:
    if isinstance(value, dict):
        return {key: _as_typed(item, f"{path}.{key}", origins) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_typed(item, f"{path}.{i}", origins) for i, item in enumerate(value)]
    return value if value is None or isinstance(value, str) else origins[path].text


def setting_types(defaults: dict[str, Any], declared: dict[str, str], target: str) -> dict[str, str]:
    """The type of each setting, such as `int` or `str | null`. Raises LaunchError for a type that there is not."""
    file = f"launch/targets/{target}.yaml"
    if unknown := sorted(declared.keys() - defaults.keys()):
        raise LaunchError(f"{file}: types names {unknown[0]}, which is no setting; there are {', '.join(defaults)}")
    found = {}
    for name, default in defaults.items():
        derived = "str" if default is None else type(default).__name__
        kind = declared.get(name, derived)
        if str(kind).removesuffix(OR_NULL) not in KINDS:
            raise LaunchError(
                f"{file}: {name} has the type {kind}; there are {', '.join(KINDS)}, each with or without{OR_NULL}"
            )
        found[name] = kind if default is not None or kind.endswith(OR_NULL) else kind + OR_NULL
    return found


def typed(name: str, value: Any, kind: str, target: str) -> Any:
    """A value as its type has it. Raises LaunchError, in one line, if it is of another type."""
    base = kind.removesuffix(OR_NULL)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        if kind.endswith(OR_NULL):
            return None
        raise LaunchError(f"--set {name}: {target} needs {KINDS[base]}, and got nothing; give a value")
    if base == "list[str]":
        items = value.split(",") if isinstance(value, str) else value
        if isinstance(items, list) and all(item is None or isinstance(item, str) for item in items):
            return _items(name, items, target)
    elif base == "str" and isinstance(value, str):
        return value
    elif base == "int" and (isinstance(value, (int, str)) and re.fullmatch(r"0|[1-9][0-9]{0,17}", str(value))):
        return int(value)
    elif base == "bool" and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    got = {dict: "a mapping", list: "a list"}.get(type(value)) or clipped(str(value))
    hint = "; quote a str with brackets" if base == "str" else ""
    raise LaunchError(f"--set {name}: {target} takes {KINDS[base]}, got {got}{hint}")


def _items(name: str, given: list[str | None], target: str) -> list[str]:
    items = [(item or "").strip() for item in given]
    if not all(items):
        written = ",".join(items)
        raise LaunchError(f"--set {name}: {target} got an empty item in '{written}'; remove it")
    if repeated := [item for i, item in enumerate(items) if item in items[:i]]:
        raise LaunchError(f"--set {name}: {target} got {repeated[0]} twice; name each once")
    return items
