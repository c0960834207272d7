"""YAML files and `key=value` overrides as trees of values in which the place of every value is known.

YAML here is YAML 1.2's core: `1e-4` is a number and `yes` is a word. `010` is 8 to some readers and 10 to others; it stays a text,
so that `load.py` can refuse it where a number is expected.
"""

from __future__ import annotations

import math
import os
import re
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import ConfigError, clipped

INCLUDE = "include"


@dataclass(frozen=True)
class Origin:
    """Where a value was written: `file:line` or `command line`.

    `section`: the value is a mapping whose keys have their own. `text`: a single value as written, before YAML made a number of it.
    """

    place: str
    section: bool = False
    text: str | None = None

    def __str__(self) -> str:
        return self.place


COMMAND_LINE = "command line"


@dataclass
class Tree:
    """Values as written, and the origin of every dotted path in them."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)


_MOST_VALUES = 200_000
"""Values of one file. A few lines of aliases of aliases make billions."""


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2's core schema does. `values`: how many have been made."""

    values = 0


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else, and keeps every text on one line."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    several_lines = any(end in text for end in "\n\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if several_lines else None)


_Dumper.add_representer(str, _represent_text)


def _resolve_as_yaml_1_2() -> None:
    number = r"(?:0|[1-9][0-9_]*)"
    _Loader.yaml_implicit_resolvers = {}
    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("int", rf"[-+]?{number}", "-+0123456789"),
        ("float", rf"[-+]?(?:{number}(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
        ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ):
        for kind in (_Loader, _Dumper):
            kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))


_resolve_as_yaml_1_2()


def dump(value: Any, flow: bool | None = None) -> str:
    """A value as YAML that `read_file` reads back as the same value, without a final newline."""
    style = {"sort_keys": False, "default_flow_style": bool(flow), "width": math.inf, "allow_unicode": True}
    text = yaml.dump(value, Dumper=_Dumper, **style)
    return text.removesuffix("\n").removesuffix("\n...")


def origin_of(path: str, origins: dict[str, Origin]) -> str:
    """Where the value at a dotted path was written, or `default`. An item of a list has its list's origin, and a section that
    only has keys written one by one that of the first of them."""
    if path in origins:
        return str(origins[path])
    within = next((origin for name, origin in origins.items() if path and name.startswith(path + ".")), None)
    if within is not None:
        return str(within)
    while "." in path:
        path = path.rpartition(".")[0]
        if path in origins:
            return "default" if origins[path].section else str(origins[path])
    return "default"


def read_file(path: Path, including: tuple[str, ...] = ()) -> Tree:
    """The values of a YAML file over those of the files that its `include:` names (relative to it, later ones win)."""
    if os.path.realpath(path) in including:
        chain = " -> ".join(os.path.basename(p) for p in (*including, path))
        raise ConfigError(f"{path}: include goes in a circle: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot read this configuration file: {getattr(error, 'strerror', None) or error}"
        ) from error
    own = parse(text, str(path))
    includes = own.values.pop(INCLUDE, [])
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(f"{own.origins[INCLUDE]}: include must be a file name or a list of them, got {includes!r}")
    tree = Tree()
    for name in includes:
        target = path.parent / name
        if not os.path.isfile(target):
            raise ConfigError(f"{own.origins[INCLUDE]}: include={name}: there is no file {target}")
        _merge(tree, read_file(target, (*including, os.path.realpath(path))))
    _merge(tree, own)
    tree.origins = {k: v for k, v in tree.origins.items() if k.split(".")[0] != INCLUDE}
    return tree


def parse(text: str, place: str) -> Tree:
    """The values of a YAML text. `place` of a file is its name; anything else is the command line. Raises ConfigError."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        tree = Tree()
        if node is None:
            return tree
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{_at(node.start_mark, place)}: a configuration is a mapping of sections, got {_kind(node)}")
        tree.values = _construct(loader, node, "", place, tree.origins)
        return tree
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        problem += next((f"; {advice}" for part, advice in _YAML_ADVICE.items() if part in problem), "")
        raise ConfigError(f"{_at(getattr(error, 'problem_mark', None), place)}: not valid YAML: {problem}") from error
    except OverflowError as error:
        raise ConfigError(f"{place}: a character in it (\\U...) does not exist") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: brackets or sections are nested too deeply; write fewer inside each other") from error
    finally:
        if loader:
            loader.dispose()


_YAML_ADVICE = {
    "'\\t' that cannot start": "indent with spaces, not with tabs",
    "found another document": "a configuration is one document: remove the line `---` in it",
    "could not determine a constructor": "values have no tags (!...) here",
    "mapping values are not allowed here": "lines of a section begin in one column, and a text with ': ' is quoted",
}


def _at(mark: yaml.Mark | None, place: str) -> str:
    return place if mark is None or place.startswith(COMMAND_LINE) else f"{place}:{mark.line + 1}"


def _kind(node: yaml.Node) -> str:
    return {"scalar": "a single value", "sequence": "a list", "mapping": "a mapping"}[node.id]


def _construct(
    loader: _Loader, node: yaml.Node, path: str, place: str, origins: dict[str, Origin], inside: tuple[yaml.Node, ...] = ()
) -> Any:
    """The values of a node. `inside`: the nodes that hold it."""
    if any(node is other for other in inside):
        raise ConfigError(f"{_at(node.start_mark, place)}: {path} is an alias of what it is in; write its own value")
    if path:
        origins[path] = _origin(node, node, place)
    inside = *inside, node
    loader.values += 1
    if loader.values > _MOST_VALUES:
        raise ConfigError(
            f"{_at(node.start_mark, place)}: more than {_MOST_VALUES:,} values, those of aliases counted each time; write fewer"
        )
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                inside_of = f" in {path}" if path else ""
                raise ConfigError(f"{_at(key_node.start_mark, place)}: a key{inside_of} is a name, got {_kind(key_node)}")
            name = str(key_node.value)
            full = f"{path}.{name}" if path else name
            if name in values:
                raise ConfigError(f"{_at(key_node.start_mark, place)}: {full} is written twice")
            values[name] = _construct(loader, value_node, full, place, origins, inside)
            origins[full] = _origin(key_node, value_node, place)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{path}.{i}", place, origins, inside) for i, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError) as error:  # of yaml and Python, for thousands of digits or `!!int abc`
        kind = node.tag.rpartition(":")[2]
        raise ConfigError(
            f"{_at(node.start_mark, place)}: {path}: {clipped(str(node.value), 40)} cannot be read as {kind}"
        ) from error


def _origin(at: yaml.Node, value: yaml.Node, place: str) -> Origin:
    text = value.value if isinstance(value, yaml.ScalarNode) else None
    return Origin(_at(at.start_mark, place), isinstance(value, yaml.MappingNode), text)


def _merge(tree: Tree, over: Tree) -> None:
    for name, value in over.values.items():
        _put(tree.values, name, value, name, tree.origins)
    tree.origins.update(over.origins)


def _put(target: Any, name: Any, value: Any, path: str, origins: dict[str, Origin]) -> None:
    """Sections are merged; anything else is replaced, and the origins of what was in it forgotten."""
    if isinstance(target, dict):
        target.setdefault(name, None)
    if isinstance(value, dict) and isinstance(target[name], dict):
        for below, item in value.items():
            _put(target[name], below, item, f"{path}.{below}", origins)
        return
    target[name] = value
    for stale in [k for k in origins if k.startswith(path + ".")]:
        del origins[stale]


def apply_override(tree: Tree, override: str) -> None:
    """Put one `key=value` of the command line into the tree. Raises ConfigError for one that has no place in it."""
    path, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", path):
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is not of the form key=value, e.g. optim.lr=1e-3")
    if _has_comment(text):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r}: YAML takes what follows ' #' for a comment; quote the value: {path}='\"...\"'"
        )
    parsed = parse(f"{path}: {text if text.strip(string.whitespace) else 'null'}", f"{COMMAND_LINE}: {clipped(override, 200)}")
    if list(parsed.values) != [path]:
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is more than one value; give each key=value by itself")
    target, name = _target(tree.values, path, override)
    _put(target, name, parsed.values[path], path, tree.origins)
    tree.origins |= {full: Origin(COMMAND_LINE, origin.section, origin.text) for full, origin in parsed.origins.items()}


def _has_comment(text: str) -> bool:
    """Whether YAML would leave out the end of a value as a comment."""
    try:
        mapping = yaml.compose(f"x: {text}", _Loader)
    except (yaml.YAMLError, RecursionError, OverflowError):
        return False  # `parse` says what is wrong
    end = mapping.value[0][1].end_mark.index - len("x: ")
    return "#" in text[max(end, 0) :]


def _target(values: dict[str, Any], path: str, override: str) -> tuple[Any, Any]:
    """The section or list that holds a dotted path, and the key or index in it; sections on the way are created."""
    target: Any = values
    *parents, last = path.split(".")
    for depth, name in enumerate(parents):
        key = _key(target, name, override, ".".join(parents[:depth]))
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[key]
    return target, _key(target, last, override, ".".join(parents))


def _key(target: Any, name: str, override: str, path: str) -> Any:
    if isinstance(target, dict):
        return name
    if not isinstance(target, list):
        raise ConfigError(f"{COMMAND_LINE}: {override}: {path} is a single value and has no {name}")
    if not name.isdecimal() or int(name) >= len(target):
        items = f"items 0 to {len(target) - 1}" if target else "no items"
        raise ConfigError(f"{COMMAND_LINE}: {override}: {path} has {items}, and no {name}")
    return int(name)
