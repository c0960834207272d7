"""YAML files and `key=value` overrides as trees of values in which the place of every value is known.

YAML here is YAML 1.2's core: `1e-4` is a number, `yes` is a word, and `010` stays a text, so that `load.py` can refuse it in
a number's place (it is 8 to one reader and 10 to the other).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import ConfigError

INCLUDE = "include"


@dataclass(frozen=True)
class Origin:
    """Where a value was written: `file:line` or `command line`. `section`: the value is a mapping whose keys have their own."""

    place: str
    section: bool = False

    def __str__(self) -> str:
        return self.place


COMMAND_LINE = Origin("command line")


@dataclass
class Tree:
    """Values as written, and the origin of every dotted path in them."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2's core schema does."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else."""


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
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False if flow is None else flow, width=100)
    return text.removesuffix("\n").removesuffix("\n...")


def origin_of(path: str, origins: dict[str, Origin]) -> str:
    """Where the value at a dotted path was written, or `default`. An item of a list has its list's origin."""
    if path in origins:
        return str(origins[path])
    while "." in path:
        path = path.rpartition(".")[0]
        if path in origins:
            return "default" if origins[path].section else str(origins[path])
    return "default"


def read_file(path: Path, including: tuple[Path, ...] = ()) -> Tree:
    """The values of a YAML file over those of the files that its `include:` names (relative to it, later ones win)."""
    if path.resolve() in including:
        chain = " -> ".join(str(p.name) for p in (*including, path))
        raise ConfigError(f"{path}: include goes in a circle: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot read this configuration file: {getattr(error, 'strerror', None) or error}"
        ) from error
    own = _parse(text, str(path))
    includes = own.values.pop(INCLUDE, [])
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(f"{own.origins[INCLUDE]}: include must be a file name or a list of them, got {includes!r}")
    tree = Tree()
    for name in includes:
        target = path.parent / name
        if not target.is_file():
            raise ConfigError(f"{own.origins[INCLUDE]}: include={name}: there is no file {target}")
        _merge(tree, read_file(target, (*including, path.resolve())))
    _merge(tree, own)
    tree.origins = {k: v for k, v in tree.origins.items() if k.split(".")[0] != INCLUDE}
    return tree


def _parse(text: str, place: str) -> Tree:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        tree = Tree()
        if node is None:
            return tree
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{place}:{node.start_mark.line + 1}: a configuration is a mapping of sections, got {_kind(node)}"
            )
        tree.values = _construct(loader, node, "", place, tree.origins)
        return tree
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{place}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    finally:
        loader.dispose()


def _kind(node: yaml.Node) -> str:
    return {"scalar": "a single value", "sequence": "a list", "mapping": "a mapping"}[node.id]


def _construct(loader: _Loader, node: yaml.Node, path: str, place: str, origins: dict[str, Origin]) -> Any:
    is_section = isinstance(node, yaml.MappingNode)
    if path:
        origins[path] = _origin(node, place, is_section)
    if is_section:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value)
            full = f"{path}.{name}" if path else name
            if name in values:
                raise ConfigError(f"{place}:{key_node.start_mark.line + 1}: {full} is written twice")
            values[name] = _construct(loader, value_node, full, place, origins)
            origins[full] = _origin(key_node, place, isinstance(value_node, yaml.MappingNode))
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{path}.{i}", place, origins) for i, item in enumerate(node.value)]
    return loader.construct_object(node)


def _origin(node: yaml.Node, place: str, section: bool) -> Origin:
    return Origin(f"{place}:{node.start_mark.line + 1}" if place else COMMAND_LINE.place, section)


def _merge(tree: Tree, over: Tree) -> None:
    _merge_values(tree.values, over.values, "", tree.origins)
    tree.origins.update(over.origins)


def _merge_values(below: dict, above: dict, path: str, origins: dict[str, Origin]) -> None:
    for name, value in above.items():
        full = f"{path}.{name}" if path else name
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge_values(below[name], value, full, origins)
        else:
            below[name] = value
            for stale in [k for k in origins if k.startswith(full + ".")]:
                del origins[stale]


def apply_override(tree: Tree, override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w]*(\.\w+)*", path):
        raise ConfigError(f"command line: {override!r} is not of the form key=value, e.g. optim.lr=1e-3")
    parsed = _parse("value: " + (text if text.strip() else "null"), "")
    *parents, last = path.split(".")
    target: Any = tree.values
    for depth, name in enumerate(parents):
        if isinstance(target, list):
            target = _list_item(target, name, override, ".".join(parents[:depth]))
        else:
            if not isinstance(target.get(name), (dict, list)):
                target[name] = {}
            target = target[name]
    if isinstance(target, list):
        _list_item(target, last, override, ".".join(parents))
        target[int(last)] = parsed.values["value"]
    elif isinstance(target, dict):
        target[last] = parsed.values["value"]
    else:
        raise ConfigError(f"command line: {override}: {'.'.join(parents)} is a single value and has no {last}")
    for stale in [k for k in tree.origins if k == path or k.startswith(path + ".")]:
        del tree.origins[stale]
    tree.origins[path] = COMMAND_LINE


def _list_item(items: list, name: str, override: str, path: str) -> Any:
    if not name.isdigit() or int(name) >= len(items):
        raise ConfigError(
            f"command line: {override}: {path} has {len(items)} items, so the index is 0 to {len(items) - 1}, not {name}"
        )
    return items[int(name)]
