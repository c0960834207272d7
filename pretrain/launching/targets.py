"""One description of a launch for many places: the command, or the manifest, that starts a run there.

A place is a file in launch/targets/: plain YAML, never code.

    about      one line for --help
    settings   what the place has to be told, with defaults; ??? must be given, null leaves out all that mentions it
    types      of the settings whose type their default does not say
    needs      by a setting or a fact of the launch that is neither null nor false: the settings that must be given then
    at_least   by a setting: the setting that it must not be below
    forms      by a setting: a regular expression for its whole text, and the words for it
    manifest   what the place is given as a file: a YAML document per item, or with `format: json` one JSON object
    submit     the command that takes that ${file}
    command    without a manifest: the command itself
    nodes      the only number of nodes that works there
    elastic    true: a range of nodes works there too

A setting has the type of its default, and `str` if the default is `???` or null. The others:

    str        the text as typed: 5, 0123 and 1e3 stay what they are
    int        0 or above
    bool       true or false
    list[str]  a,b or [a, b]: stripped, without empty and repeated items
    TYPE | null  null is allowed although the default is another value; it always is where null is the default

`${name}` stands for a setting or for a fact of the launch (`Launch.facts`). The default of a setting mentions facts only. A value that is nothing but
`${name}` keeps its type. In a list, a list that stands so is spliced in. A mapping with `$if` is left out if that value is null or false.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.load import load_config
from pretrain.config.read import Origin, Tree, apply_override, read_file
from pretrain.errors import LaunchError, clipped

TARGETS = Path(__file__).resolve().parents[2] / "launch" / "targets"
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
LONGEST_LABEL = 40
"""Characters of a run's name in names of pods, jobs and hosts: 63 are the limit of DNS (RFC 1123), and places append to it."""

REQUIRED = "???"
OR_NULL = " | null"
KINDS = {
    "str": "a str",
    "int": "an int of 0 or above",
    "bool": "a bool: true or false",
    "list[str]": "a list[str]: a,b",
}


@dataclass(frozen=True)
class Launch:
    """What shall run: a configuration on some nodes.

    `gpus`: processes per node; `on_cpu`: they get no device. `fewest`: the run starts with as many nodes, and goes on with them; `nodes` by default.
    """

    config: str
    nodes: int
    gpus: int
    overrides: list[str] = field(default_factory=list)
    on_cpu: bool = False
    fewest: int | None = None

    @property
    def fewest_nodes(self) -> int:
        """The number of nodes without which there is no run."""
        return self.nodes if self.fewest is None else self.fewest

    @property
    def node_range(self) -> str:
        """The nodes as launch/torchrun_multinode.sh is told: 4, or 2:4."""
        return str(self.nodes) if self.fewest_nodes == self.nodes else f"{self.fewest_nodes}:{self.nodes}"

    def facts(self) -> dict[str, Any]:
        """The values that a place may mention. Raises ConfigError if the configuration cannot be read."""
        name = load_config(self.config, self.overrides)[0].run.name
        label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_LABEL].rstrip("-")
        arguments = ["--config", self.config, *self.overrides]
        return {
            "name": name.replace("/", "-"),  # places name files after it
            "label": label if label[:1].isalpha() else f"run-{label}".rstrip("-"),  # names of Services begin with a letter
            "nodes": self.nodes,
            "gpus": self.gpus,
            "devices": None if self.on_cpu else self.gpus,
            "fewest_nodes": self.fewest_nodes,
            "several_nodes": self.nodes > 1,
            "node_range": self.node_range,
            "is_elastic": self.fewest_nodes < self.nodes,
            "text_gpus": str(self.gpus),
            "arguments": arguments,
            "pod_arguments": [word.replace("$", "$$") for word in arguments],  # Kubernetes reads $(NAME) and $$ in `args`
            "typed_arguments": shlex.join(arguments),
            "python": sys.executable,
        }


@dataclass(frozen=True)
class Target:
    """A place, read from its file."""

    name: str
    about: str
    settings: dict[str, Any]
    manifest: Any = None
    submit: list[str] | None = None
    command: list[str] | None = None
    format: str = "yaml"
    nodes: int | None = None
    elastic: bool = False
    types: dict[str, str] = field(default_factory=dict)
    needs: dict[str, list[str]] = field(default_factory=dict)
    at_least: dict[str, str] = field(default_factory=dict)
    forms: dict[str, tuple[str, str]] = field(default_factory=dict)

    def chosen(self, launch: Launch, given: dict[str, Any]) -> dict[str, Any]:
        """All settings, those given among them. Raises LaunchError for one that is unknown, missing or of another type."""
        if launch.fewest_nodes < launch.nodes and not self.elastic:
            places = ", ".join(name for name in target_names() if read_target(name).elastic)
            raise LaunchError(
                f"--nodes {launch.node_range}: {self.name} takes no range; name one number, or use --target {places}"
            )
        if unknown := sorted(given.keys() - self.settings.keys()):
            raise LaunchError(
                f"--set {unknown[0]}: {self.name} has no such setting; it has {', '.join(self.settings)} (launch/targets/{self.name}.yaml)"
            )
        facts = launch.facts()
        defaults = {name: filled(value, facts) for name, value in self.settings.items()}
        types = setting_types(self.settings, self.types, self.name)
        settings = {
            name: value if value == REQUIRED else typed(name, value, types[name], self.name)
            for name, value in {**defaults, **given}.items()
        }
        self._check_needs(settings, facts)
        for name, (pattern, words) in self.forms.items():
            if settings[name] is not None and not re.fullmatch(pattern, str(settings[name])):
                raise LaunchError(f"--set {name}={settings[name]}: {self.name} takes {words}")
        if self.nodes is not None and launch.nodes != self.nodes:
            raise LaunchError(f"--nodes {launch.nodes}: {self.name} has {self.nodes}; choose another --target")
        return settings

    def _check_needs(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        missing = {name: "" for name, value in settings.items() if value == REQUIRED}
        for cause, names in self.needs.items():
            if _is_given(_fact(cause, {**settings, **facts})):
                missing |= {name: cause for name in names if not _is_given(settings[name]) and name not in missing}
        if missing:
            causes = " and ".join(dict.fromkeys(cause.replace("several_", "several ") for cause in missing.values() if cause))
            wanted = ", ".join(f"--set {name}=..." for name in missing)
            raise LaunchError(f"{self.name}{f' with {causes}' if causes else ''} needs {wanted}")
        for name, bound in self.at_least.items():
            if settings[name] is not None and settings[bound] is not None and settings[name] < settings[bound]:
                raise LaunchError(
                    f"--set {name}={settings[name]}: {self.name} needs at least {bound}, which is {settings[bound]}; raise it"
                )

    def rendered(self, launch: Launch, given: dict[str, Any], file: str) -> tuple[str | None, list[str]]:
        """The text of the manifest, if the place has one, and the command to start. `file`: where the manifest will lie."""
        facts = {**self.chosen(launch, given), **launch.facts(), "file": file}
        manifest, command = self._filled(facts)
        for name in given:
            default = filled(self.settings[name], facts)
            if facts[name] != default and self._filled({**facts, name: default}) == (manifest, command):
                raise LaunchError(
                    f"--set {name}: {self.name} has no use for it in this launch; leave it out, or look at what goes with it in "
                    f"launch/targets/{self.name}.yaml"
                )
        if manifest is None:
            return None, [str(word) for word in command]
        if self.format == "json":
            return json.dumps(manifest, indent=2) + "\n", command
        return yaml.dump_all(manifest, Dumper=_TextDumper, sort_keys=False, width=200), command

    def _filled(self, facts: dict[str, Any]) -> tuple[Any, Any]:
        """The manifest, or None, and the command."""
        if self.manifest is None:
            return None, filled(self.command, facts)
        return filled(self.manifest, facts), filled(self.submit, facts)


class _TextDumper(yaml.SafeDumper):
    """Quotes a text that a reader of other YAML than PyYAML's takes for a number (1e3) or for true and false (y)."""


_TextDumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_TextDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:0[xob][0-9a-fA-F_]+|\.?[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?)$"),
    list("-+.0123456789"),
)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def target_names() -> list[str]:
    """The places there are."""
    return sorted(path.stem for path in TARGETS.glob("*.yaml"))


def read_target(name: str) -> Target:
    """A place of `target_names`."""
    values = read_file(TARGETS / f"{name}.yaml").values
    known = {item.name for item in dataclasses.fields(Target)}
    if unknown := values.keys() - known:
        raise LaunchError(f"launch/targets/{name}.yaml: unknown key {sorted(unknown)[0]}; there are {', '.join(sorted(known))}")
    return Target(name=name, **values)


def filled(template: Any, facts: dict[str, Any]) -> Any:
    """A template with its placeholders replaced. What mentions a null is left out, and a list of which nothing is left."""
    if isinstance(template, dict):
        if "$if" in template and not filled(template["$if"], facts):
            return None
        pairs = ((filled(key, facts), filled(value, facts)) for key, value in template.items() if key != "$if")
        return {key: value for key, value in pairs if key is not None and value is not None}
    if isinstance(template, list):
        items: list[Any] = []
        for entry in template:
            value = filled(entry, facts)
            is_spliced = isinstance(value, list) and isinstance(entry, str)
            items += value if is_spliced else [] if value is None else [value]
        return items or None
    if not isinstance(template, str):
        return template
    if whole := PLACEHOLDER.fullmatch(template):
        return _fact(whole[1], facts)
    mentioned = {name: _fact(name, facts) for name in PLACEHOLDER.findall(template)}
    if None in mentioned.values():
        return None
    return PLACEHOLDER.sub(lambda match: str(mentioned[match[1]]), template)


def _fact(name: str, facts: dict[str, Any]) -> Any:
    if name not in facts:
        raise LaunchError(f"${{{name}}} is no setting and no fact of a launch; there are {', '.join(sorted(facts))}")
    return facts[name]


# ---- settings ----------------------------------------------------------------------------------------------------------


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
