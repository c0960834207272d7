"""How transformers would fill each parameter of a model: asked of its own initialisation, on a model without values.

Every architecture has its own rules (`_init_weights`: normals of a width, ones, zeros, scaled projections, the logarithms of a
state space model). They call a dozen functions, which are replaced while the rules run by ones that write down what was asked for:

    one normal distribution or a constant     mean and deviation: the values are drawn by name, row by row (parallel/initialise.py)
    anything else (A_log, inverse softplus)   the rule itself is run once on the CPU, for this parameter alone, from a seed
    no rule at all                            what the constructor gives, which is run again from a seed

All three are the same under every strategy. Nothing is asked before the first value is wanted: imported weights need no rule.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pretrain.errors import ConfigError
from pretrain.models.network import Initial

Normal = tuple[float, float]
_OWN = "a rule of its own"


class InitialRules:
    """The initial values of a transformers model by the name of the parameter; `model` is on the meta device, and is kept.

    `construct(kept)` makes the model anew and calls `kept(n, value)` with every value that a parameter is constructed with, the n-th
    of them, before it is given up. `model` was constructed by the same, so that its parameters have the same numbers in `order`.
    """

    def __init__(self, model: Any, order: dict[int, int], construct: Callable[[Callable[[int, Tensor], None]], object]) -> None:
        self.model, self.construct = model, construct
        self.kind = type(model).__name__
        record = _Record(model)
        record.run()
        self.asked, self.writers = record.asked, record.writers
        self.owners = {
            id(p): (module, name) for module in model.modules() for name, p in module._parameters.items() if p is not None
        }
        self.parameters = dict(model.named_parameters())
        self.without = {order[id(p)]: name for name, p in self.parameters.items() if id(p) not in self.asked and id(p) in order}
        self.constructed = functools.lru_cache(maxsize=1)(self._constructed)

    def initial(self, name: str) -> Initial:
        """As `Network.initial` says."""
        asked = self.asked.get(id(self.parameters[name]), _OWN)
        return asked if isinstance(asked, tuple) else functools.partial(self._whole, name)

    def _whole(self, name: str, seed: int) -> Tensor:
        parameter = self.parameters[name]
        if id(parameter) in self.asked:
            value = self._by_rule(name, parameter, seed)
        else:
            value = self.constructed(seed).get(name)
        if value is None or value.shape != parameter.shape or not torch.isfinite(value).all():
            raise ConfigError(
                f"model.hf_config: transformers gives {name} of {self.kind} no finite initial value, so it cannot be trained from its "
                "configuration; start from its weights with run.init_from"
            )
        return value

    def _by_rule(self, name: str, parameter: nn.Parameter, seed: int) -> Tensor:
        """Run the rules that wrote a parameter again, on memory in place of the meta device, and let them fill this one alone."""
        from transformers import initialization

        (module, own), writers = self.owners[id(parameter)], self.writers[id(parameter)]
        value = nn.Parameter(torch.full(parameter.shape, torch.nan), requires_grad=False)
        # A rule may ask where the parameters beside it lie.
        held = {part: dict(part._parameters) for part in (*(written for _, written in writers), module)}
        try:
            for part, others in held.items():
                part._parameters.update({n: nn.Parameter(torch.empty(p.shape)) for n, p in others.items() if p is not None})
            module._parameters[own] = value
            with (
                _seeded(f"{seed}/{name}/{list(parameter.shape)}"),
                _replaced(initialization, lambda _, tensor, *rest: tensor is value),
            ):
                for owner, written in writers:
                    owner._init_weights(written)
        finally:
            for part, others in held.items():
                part._parameters.update(others)
        return value.detach()

    def _constructed(self, seed: int) -> dict[str, Tensor]:
        """What the constructors fill that no rule does, all from one seed."""
        values: dict[str, Tensor] = {}

        def keep(number: int, value: Tensor) -> None:
            if number in self.without:
                values[self.without[number]] = value.detach().clone().float()

        with _seeded(f"{seed}/constructors"), _marked_memory():
            self.construct(keep)
        return values


class _Record:
    """What the rules of a model ask for: by the id of a parameter its description, and whose rules wrote it, in order."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked: dict[int, Normal | str] = {}
        self.writers: dict[int, list[tuple[Any, nn.Module]]] = {}
        self.now: tuple[Any, nn.Module] | None = None

    def run(self) -> None:
        import transformers
        from transformers import initialization

        for holder in (*self.model.modules(), *self.model.parameters()):
            holder.__dict__.pop("_is_hf_initialized", None)
        follow = patch.object(transformers.PreTrainedModel, "_initialize_weights", self._follow())
        with torch.device("cpu"), _replaced(initialization, self._asked), _Changes(self._write), follow:
            self.model.initialize_weights()

    def _follow(self) -> Callable[..., None]:
        from transformers import PreTrainedModel

        original = PreTrainedModel._initialize_weights

        def followed(owner: Any, module: nn.Module, *rest: Any) -> None:
            self.now = owner, module
            original(owner, module, *rest)

        return followed

    def _asked(self, function: str, tensor: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Write down what a function is to do to a parameter; whether it is done, which it is to buffers."""
        if isinstance(tensor, nn.Parameter):
            self._write(tensor, _described(function, tensor, *arguments, **options))
            return False
        # Buffers get their values; a row of a table that is for padding is drawn like the others.
        return not tensor.is_meta

    def _write(self, tensor: Tensor, description: Normal | str = _OWN) -> None:
        self.asked[id(tensor)] = description
        writers = self.writers.setdefault(id(tensor), [])
        if self.now not in writers:
            writers.append(self.now)


@contextmanager
def _replaced(initialization: Any, decide: Callable[..., bool]) -> Iterator[None]:
    """transformers' functions that fill a tensor, each done only where `decide(its name, tensor, arguments, options)` says so."""
    originals = {name: getattr(initialization, name) for name in (*initialization.TORCH_INIT_FUNCTIONS, "copy_")}

    def replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def decided(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            return original(tensor, *arguments, **options) if decide(name, tensor, arguments, options) else tensor

        return decided

    with torch.no_grad(), patch.multiple(initialization, **{n: replacement(n, f) for n, f in originals.items()}):
        yield


class _Changes(TorchFunctionMode):
    """Tells of parameters that are changed in place by anything else: `weight /= sqrt(layers)`."""

    def __init__(self, changed: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.changed = changed

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        if in_place and name != "requires_grad_" and arguments and isinstance(arguments[0], nn.Parameter):
            self.changed(arguments[0])
        return function(*arguments, **(options or {}))


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__", "__setitem__"}


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Memory that nothing was written to holds NaN, so that a value which the constructor leaves open is not taken for one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _described(name: str, tensor: Tensor, *arguments: Any, **options: Any) -> Normal | str:
    """Mean and standard deviation of what torch.nn.init's function of this name draws. Returns the name if they do not describe it.

    Uniform and truncated distributions become normal ones of the same mean and deviation.
    """
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
