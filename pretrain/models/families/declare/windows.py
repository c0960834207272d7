"""Sliding windows in config.json: `sliding_window` says how wide they are, `layer_types` which layers have one.

`layer_types` is younger than most files; where it is absent every family has a rule of its own, which transformers knows by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError, shown
from pretrain.models.families.declare.family import Field
from pretrain.models.layer_specs import has_windows, layer_specs


def layer_types(model: Model) -> list[str]:
    """`layer_types` of config.json: which layers have linear attention, and which a sliding window."""
    local = {True: "sliding_attention", False: "full_attention"}
    return ["linear_attention" if spec.linear else local[spec.window > 0] for spec in layer_specs(model)]


def pattern_of(types: Any, config: dict[str, Any], kinds: dict[str, bool]) -> list[bool]:
    """What `layer_types` says of each layer, by its `kinds`. Raises ConfigError for other names."""
    layers = config["num_hidden_layers"]
    known = isinstance(types, list) and all(isinstance(kind, str) and kind in kinds for kind in types)
    if not known or len(types) != layers:
        raise ConfigError(
            f"config.json: layer_types={shown(types)} is not supported: expected {' or '.join(kinds)} for each of {layers} layers"
        )
    return [kinds[kind] for kind in types]


def number(config: dict[str, Any], name: str, default: int, least: int = 1) -> int:
    """An int of config.json. Raises ConfigError for anything else, or below `least`."""
    value = config.get(name, default)
    if type(value) is not int or value < least:
        raise ConfigError(f"config.json: {name}={shown(value)} is not supported: expected an int of {least} or above")
    return value


def width_of(value: Any, config: dict[str, Any]) -> Any:
    """`back` of `sliding_window`: null is no window. transformers takes 0 for one in which a token sees nothing, not even itself."""
    types = config.get("layer_types")
    has_none = isinstance(types, list) and "sliding_attention" not in types
    if value == 0 and not isinstance(value, bool) and not has_none:
        raise ConfigError(
            "config.json: sliding_window=0 lets no token see another one, nor itself, in transformers; write null for no window"
        )
    return 0 if value is None else value


def windows(
    width: int | None,
    has: Callable[[int, dict[str, Any]], bool] = lambda layer, config: True,
    switched: bool = False,
    needed: bool = False,
) -> tuple[Field, Field]:
    """The sliding window (`width` where the file names none) and the layers that have it, by `layer_types`.

    `has(layer, config)`: what an absent `layer_types` means; `switched`: there is no window unless `use_sliding_window` says so;
    `needed`: transformers demands a width even where no layer has a window.
    """

    def used(value: Any, config: dict[str, Any]) -> Any:
        flag = config.get("use_sliding_window", False) if switched else True
        if not isinstance(flag, bool):
            raise ConfigError(f"config.json: use_sliding_window={shown(flag)} is not supported: expected true or false")
        return width_of(value, config) if flag else 0

    def write(window: int, model: Model) -> int | None:
        return window or (model.max_sequence_length if needed else None)

    def pattern(types: Any, config: dict[str, Any]) -> list[bool]:
        if types is None:
            return [has(layer, config) for layer in range(config["num_hidden_layers"])]
        flags = pattern_of(types, config, {"sliding_attention": True, "full_attention": False})
        if any(flags) and not used(config.get("sliding_window", width), config):
            raise ConfigError(
                "config.json: layer_types has sliding_attention, but sliding_window is off; set it, or change them"
            )
        return flags

    return (
        Field("attention.window", "sliding_window", width, write, used),
        Field("attention.window_pattern", "layer_types", None, lambda flags, model: layer_types(model), pattern),
    )


def suffix_windows(width: int) -> tuple[Field, Field]:
    """As Qwen has it: no window unless `use_sliding_window`, and none in the first `max_window_layers` layers."""
    return windows(width, lambda layer, config: layer >= number(config, "max_window_layers", 28, 0), switched=True)


def first_window(model: Model) -> int | None:
    """`max_window_layers`; None where the layers with a window are not the last ones."""
    flags = has_windows(model)
    first = flags.index(True) if any(flags) else model.layers
    return first if all(flags[first:]) else None


SUFFIX_WINDOWS = {"use_sliding_window": lambda model: model.attention.window > 0, "max_window_layers": first_window}


def mixed_windows(model: Model) -> list[str]:
    """What vLLM makes of Qwen's windows in some layers (`Family.elsewhere`)."""
    if len(set(has_windows(model))) == 1:
        return []
    return [
        "vLLM 0.33 refuses a sliding window in some layers only, or gives it to all: set model.attention.window_pattern to [true]"
    ]
