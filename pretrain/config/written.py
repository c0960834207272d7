"""A configuration as this program writes it: YAML that loads back, and JSON, which is read here. `load.py` reads what people write."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from pretrain.config.keys import leaves
from pretrain.config.model_schema import Model
from pretrain.config.read import Origin, dump, origin_of
from pretrain.config.schema import Config
from pretrain.errors import ConfigError

NO_IDENTITY = {leaf.path for leaf in leaves(Model, None, resume="never") if leaf.resume != "never"}
"""Keys of the model that change no tensor of a run (see `model_identity`)."""


def to_yaml(config: Config, origins: dict[str, Origin] | None = None) -> str:
    """The configuration as YAML that loads back; with `origins`, each value's origin as a comment."""
    values = _plain(dataclasses.asdict(config))
    if origins is None:
        return dump(values) + "\n"
    return "\n".join(_lines(values, "", origins, "")) + "\n"


def _plain(value: Any) -> Any:
    """A value in the types that YAML has."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _lines(values: dict[str, Any], path: str, origins: dict[str, Origin], indent: str) -> list[str]:
    lines = []
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        key = dump(name, flow=True)  # a source's name may be any text
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_lines(value, full, origins, indent + "  ")]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines.append(f"{indent}{key}:")
            for i, item in enumerate(value):
                first, *rest = _lines(item, f"{full}.{i}", origins, indent + "    ")
                lines += [f"{indent}  - {first.lstrip()}", *rest]
        else:
            text = f"{indent}{key}: {dump(value, flow=True)}"
            lines.append(f"{text:<48} # {origin_of(full, origins)}")
    return lines


def from_recorded(values: Any, place: str) -> Config:
    """The inverse of `dataclasses.asdict(config)`, without OmegaConf. `place`: file and line, for the error.

    Keys that it lacks have their defaults. Raises ConfigError for values of which this program's `Config` does not consist.
    """
    try:
        return build_section(Config, values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{place}: not a configuration of this version of the program ({error}); take the version that wrote it"
        ) from error


def model_identity(model: dict[str, Any]) -> dict[str, Any]:
    """The values of a model section that decide its tensors, flat. The longest sequence belongs to them if each position has a vector."""
    if model.get("hf_config") is not None:  # it decides all the rest
        return {
            "model.family": model["family"],
            **{f"model.hf_config.{k}": v for k, v in flatten(json.loads(model["hf_config"])).items()},
        }
    free = NO_IDENTITY - {"max_sequence_length"} if model["positions"] == "learned" else NO_IDENTITY
    return {f"model.{name}": value for name, value in flatten(model).items() if name not in free}


def build_section(kind: Any, values: Any) -> Any:
    """A dataclass from what `dataclasses.asdict` made of it. Raises TypeError, KeyError or AttributeError where it is not that."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: build_section(hints[name], value) for name, value in values.items()})
    if typing.get_origin(kind) is list and dataclasses.is_dataclass(typing.get_args(kind)[0]):
        return [build_section(typing.get_args(kind)[0], value) for value in values]
    return tuple(values) if typing.get_origin(kind) is tuple else values


def flatten(values: Any, path: str = "", complete: bool = False) -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted paths.

    `complete`: as JSON would have them, so that nothing is left out: an empty mapping or list is a value, and a tuple is a list.
    """
    if complete and isinstance(values, tuple):
        values = list(values)
    if isinstance(values, (dict, list)) and (values or not complete):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        flat: dict[str, Any] = {}
        for name, value in items:
            flat |= flatten(value, f"{path}.{name}" if path else str(name), complete)
        return flat
    return {path: values}
