"""How transformers would fill each parameter of a model: asked of its own initialisation, on a model without values.

Every architecture has its own rules (`_init_weights`: normals of a width, ones, zeros, scaled projections). They call a dozen
functions, which are replaced while the rules run by ones that write down what was asked for. The values themselves are then drawn
by name (parallel/initialise.py), the same under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pretrain.errors import ConfigError

Initial = tuple[float, float]
"""Mean and standard deviation."""


def initial_values(model: Any) -> dict[int, Initial]:
    """By the id of each parameter of a transformers model on the meta device. Raises ConfigError naming what is no normal distribution.

    Uniform and truncated distributions become normal ones of the same mean and deviation.
    """
    from transformers import initialization

    for holder in (*model.modules(), *model.parameters()):
        holder.__dict__.pop("_is_hf_initialized", None)
    asked: dict[int, Initial | str] = {}
    with torch.device("cpu"), _recorded(initialization, asked):
        model.initialize_weights()
    for name, parameter in model.named_parameters():
        value = asked.get(id(parameter), "nothing that transformers says")
        if isinstance(value, str):
            raise ConfigError(
                f"model.hf_config: {type(model).__name__} fills {name} by {value}, and only normal distributions and constants are "
                "drawn here; this architecture cannot be trained from its configuration"
            )
    return asked


@contextmanager
def _recorded(module: Any, asked: dict[int, Initial | str]) -> Iterator[None]:
    originals: dict[str, Callable[..., Any]] = {
        name: getattr(module, name) for name in (*module.TORCH_INIT_FUNCTIONS, "copy_") if hasattr(module, name)
    }

    def recorder(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                asked[id(tensor)] = _described(name, tensor, *arguments, **options)
                return tensor
            # Buffers get their values; a row of a table that is for padding is drawn like the others.
            return tensor if tensor.is_meta else original(tensor, *arguments, **options)

        return record

    with patch.multiple(module, **{name: recorder(name, original) for name, original in originals.items()}):
        yield


def _described(name: str, tensor: Tensor, *arguments: Any, **options: Any) -> Initial | str:
    """Mean and standard deviation of what torch.nn.init's function of this name draws; the name itself where there are none."""
    match name:
        case "zeros_":
            return 0.0, 0.0
        case "ones_":
            return 1.0, 0.0
        case "constant_":
            return float(arguments[0] if arguments else options["val"]), 0.0
        case "normal_" | "trunc_normal_":
            mean, std = (*arguments, *[0.0, 1.0][len(arguments) :])[:2]
            return float(options.get("mean", mean)), float(options.get("std", std))
        case "uniform_":
            low, high = (*arguments, *[0.0, 1.0][len(arguments) :])[:2]
            low, high = float(options.get("a", low)), float(options.get("b", high))
            return (low + high) / 2, (high - low) / math.sqrt(12)
        case "xavier_uniform_" | "xavier_normal_":
            into, out = torch.nn.init._calculate_fan_in_and_fan_out(tensor)
            return 0.0, float(arguments[0] if arguments else options.get("gain", 1.0)) * math.sqrt(2 / (into + out))
        case "copy_" if _is_constant(arguments[0] if arguments else options["other"]):
            return float((arguments[0] if arguments else options["other"]).flatten()[0]), 0.0
    return name


def _is_constant(value: Tensor) -> bool:
    return not value.is_meta and value.numel() > 0 and bool((value == value.flatten()[0]).all())
