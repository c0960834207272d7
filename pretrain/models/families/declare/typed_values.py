"""Values of config.json in the types and ranges of our keys. It is a file like any other, and may hold anything."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any

from pretrain.config.load import check_range
from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown


@functools.cache
def keys_of_model() -> dict[str, tuple[Any, Any]]:
    """Type and limits of every key of the model, by its dotted name."""

    def keys(kind: type, prefix: str) -> dict[str, tuple[Any, Any]]:
        hints, found = typing.get_type_hints(kind), {}
        for key in dataclasses.fields(kind):
            name, hint = f"{prefix}{key.name}", hints[key.name]
            found |= keys(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: (hint, key.metadata)}
        return found

    return keys(Model, "")


def typed(ours: str, theirs: str, value: Any, config: dict[str, Any]) -> Any:
    """A value of our key `ours` that was read from the field `theirs`. Raises ConfigError, naming the field, for another type or range."""
    hint, limits = keys_of_model()[ours]
    where, kinds = f"config.json: {theirs}={shown(config.get(theirs))}", _kinds(hint)
    if value is None and kinds != [hint]:
        return None
    kind = next((kind for kind in kinds if _is_of(kind, value)), None)
    if kind is None:
        raise missing(ours, theirs) if kinds == [int] else ConfigError(f"{where} is not supported")
    value = float(value) if kind is float else value
    check_range(limits, value, where)
    return value


def missing(ours: str, theirs: str) -> ConfigError:
    """What to raise where the field of a key is absent or null."""
    whole = _kinds(keys_of_model()[ours][0]) == [int]
    return ConfigError(f"config.json: {theirs} is missing" + (" or no whole number" if whole else ""))


def _kinds(hint: Any) -> list[Any]:
    """The types of a key, without None."""
    several = typing.get_origin(hint) in (types.UnionType, typing.Union)  # the latter of Literals
    return [kind for kind in typing.get_args(hint) if kind is not type(None)] if several else [hint]


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value of JSON is of a key's type, and a number that can be computed with."""
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
        return whole or (kind is float and isinstance(value, float) and math.isfinite(value))
    if kind is bool:
        return isinstance(value, bool)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(typing.get_args(kind)[0], item) for item in value)
    return typing.get_origin(kind) is typing.Literal and isinstance(value, str) and value in typing.get_args(kind)
