"""Any causal language model that transformers builds from a configuration, as a network (`models/network.py`).

Its modules become those of this class, so that parameters keep the names transformers has for them. This class adds what the
rest of the program relies on. A tied parameter has one name. A persistent buffer, which transformers saves beside the weights, becomes
a parameter without gradient. Other buffers survive `to_empty`, and weights are cast where they are used. Dropout is never applied,
because its masks would depend on the layout.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.errors import ConfigError
from pretrain.models.hf.hf_config import config_of, import_transformers
from pretrain.models.hf.initial_rules import InitialRules
from pretrain.models.layers import at_hand
from pretrain.models.loss import CROSS_ENTROPY, Losses, LossOptions, sequence_losses_and_entropy
from pretrain.models.network import Initial, Unit


class HfModel(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out. Parameters are on the meta device when it is made."""

    def __init__(self, config: Model, loss: Loss | None = None) -> None:
        super().__init__()
        self.config = config
        self.loss = LossOptions.of(loss)
        self.compute_dtype = torch.float32
        model = _built(config)
        if own := [*model._parameters, *model._buffers]:
            raise ConfigError(
                f"model.hf_config: {type(model).__name__} holds {own[0]} itself, in none of its modules; not supported"
            )
        # Not as a module of this one, which would put a word before every name; its children are.
        self.__dict__["_transformers"] = model
        for name, child in model.named_children():
            self.add_module(name, child)
        self.eval()
        self._saved_buffers, self._exact = _without_gradient(self, model)
        self.tied = _name_once(self)
        self._blocks = _find_blocks(model)
        self._holds = self._cut()
        for module in self.modules():  # see `at_hand` (models/layers.py)
            matrices = (n for n, p in module._parameters.items() if p is not None and p.dim() > 1 and p.is_floating_point())
            module.casts = tuple(name for name in matrices if (module, name) not in self._exact)
        for unit in self.units():
            (module,) = unit.modules
            run = self._head if unit.role == "last" else self._run
            module.forward = functools.partial(run, module, module.forward)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        with_cross_entropy: bool = False,
    ) -> Tensor | Losses:
        """Logits [B, T, V]; with targets, the summed token losses of each sequence [B], fp32, and if asked for the cross-entropy alone
        beside them. Documents cannot be kept apart.
        """
        if documents_BT is not None:
            raise ValueError("a model of transformers' gets no documents: data.document_mask is refused with model.family=hf")
        self._bring_buffers(tokens_BT.device)
        with self._cast(self._holds[self]):
            logits_BTV = self._transformers(input_ids=tokens_BT, use_cache=False, return_dict=True).logits
        if targets_BT is None:
            return logits_BTV
        options = self.loss if torch.is_grad_enabled() else CROSS_ENTROPY
        losses = sequence_losses_and_entropy(logits_BTV, targets_BT, options)
        return losses if with_cross_entropy else losses.objective_B

    def units(self) -> list[Unit]:
        """See `models/network.py`. A table that is used at both ends is in no unit; blocks that share weights are not apart."""
        embedding, output = self._transformers.get_input_embeddings(), self._transformers.get_output_embeddings()
        apart = not self._shares_between_blocks()
        blocks = [Unit([block], "block", apart=apart) for block in self._blocks]
        if self.tied or embedding is None or output is None:
            return blocks
        return [Unit([embedding], "first"), *blocks, Unit([output], "last", reshard=False)]

    def initial(self, name: str) -> Initial:
        """A parameter's initial values: what transformers' own rules say. They are asked when this is called first."""
        if name in self._saved_buffers:
            value = self._saved_buffers[name]
            return lambda seed: value
        return self._rules.initial(name)

    @functools.cached_property
    def _rules(self) -> InitialRules:
        # Of a model of its own: this one may be sharded, and its parameters others than were constructed.
        order: dict[int, int] = {}
        model = _built(self.config, lambda number, value, parameter: order.update({id(parameter): number}))
        return InitialRules(model, order, lambda kept: _built(self.config, lambda number, value, _: kept(number, value)))

    def unmoved(self) -> list[str]:
        """Parameters that get no gradient, by name: transformers has them as buffers mostly. Nothing moves them in training."""
        return [name for name, parameter in self.named_parameters() if not parameter.requires_grad]

    @property
    def transformers(self) -> Any:
        """The model as transformers built it. Its modules are this network's."""
        return self._transformers

    def tied_names(self) -> dict[str, str]:
        """Names that transformers has for a parameter beside the one it has here: {other name: name}."""
        names = {module: f"{name}." if name else "" for name, module in self.named_modules()}
        return {
            names[module] + own: names[owner] + name
            for module, borrowed in self.tied.items()
            for own, (owner, name) in borrowed.items()
        }

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> HfModel:
        """Parameters without values, on a device. Buffers (rotary frequencies, masks) follow from the configuration and keep theirs."""
        kept = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        super().to_empty(device=device, recurse=recurse)
        for name, buffer in self.named_buffers():
            buffer.copy_(kept[name])
        return self

    def _bring_buffers(self, device: torch.device) -> None:
        # With parallel.offload the model is filled on the host; FSDP2 brings the weights to the device, and nothing else.
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with; of experts, which are one tensor each, those of the active ones."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        active = getattr(self._transformers.config.get_text_config(), "num_experts_per_tok", None)
        heads = (owner._parameters[name] for names in self.tied.values() for owner, name in names.values())
        total = sum(head.numel() for head in heads if id(head) in tables)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or id(parameter) in tables or name.endswith("bias") or not parameter.requires_grad:
                continue
            routed = parameter.dim() == 3 and "expert" in name and active
            total += parameter.numel() * active // parameter.shape[0] if routed else parameter.numel()
        return total

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of one forward and backward pass per token. Windows, where the model has any, are not known here."""
        config = self.config
        return 6 * self.matmul_parameters() + 12 * config.layers * config.heads * config.head_dim * sequence_length

    def _shares_between_blocks(self) -> bool:
        """Whether a parameter is used in several blocks, or in one and outside."""
        home: dict[nn.Module, int] = {}
        for number, block in enumerate(self._blocks):
            for module in block.modules():
                if home.setdefault(module, number) != number:
                    return True
        return any(home.get(module) != home.get(owner) for module, names in self.tied.items() for owner, _ in names.values())

    def _cut(self) -> dict[nn.Module, list[nn.Module]]:
        """Modules with weights, by what runs them: a block, or an embedding or head by itself (`units`). This network runs all that is in no unit
        of FSDP2.
        """
        units = [(unit.modules[0], unit.apart) for unit in self.units()]
        cut = {module: list(module.modules()) for module, _ in units}
        apart = {inner for module, own in units if own for inner in cut[module]}
        cut[self] = [module for module in self.modules() if module not in apart]
        return {unit: [m for m in modules if m._parameters or m in self.tied] for unit, modules in cut.items()}

    def _run(self, unit: nn.Module, forward: Any, *args: Any, **options: Any) -> Any:
        with self._cast(self._holds[unit]):
            return forward(*args, **options)

    def _head(self, unit: nn.Module, forward: Any, x: Tensor) -> Tensor:
        # Some ask their head's weight for its format from outside, where it is not cast yet (Mamba's residual stream is fp32).
        return self._run(unit, forward, x.to(self.compute_dtype))

    def _in_format(self, module: nn.Module, name: str) -> Tensor:
        return at_hand(module, name).to(self.compute_dtype)

    @contextmanager
    def _cast(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Weights in the compute format while something runs, as in `models/layers.py`: FSDP2 hands them over already cast.

        All that a unit holds, not module by module: some take the weights of others (a convolution's, say). A parameter that is used
        in several places is cast once, so that gradients meet in the compute format, as they do where FSDP2 gathers it once.
        """
        given: list[tuple[nn.Module, str]] = []

        def give(module: nn.Module, name: str, value: Tensor) -> None:
            module.__dict__[name] = value
            given.append((module, name))

        try:
            for module in modules:
                for name, parameter in module._parameters.items():
                    if name not in module.__dict__ and parameter is not None and parameter.is_floating_point():
                        give(module, name, parameter if (module, name) in self._exact else self._in_format(module, name))
            for module in modules:
                for name, (owner, own) in self.tied.get(module, {}).items():
                    if name not in module.__dict__:
                        cast = owner.__dict__.get(own)
                        give(module, name, self._in_format(owner, own) if cast is None else cast)
            yield
        finally:
            for module, name in given:
                del module.__dict__[name]


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def describe_hf(model: Model) -> list[str]:
    """What to say of a run of `model.family: hf`, line by line: the class, and what training here leaves as it is."""
    with torch.device("meta"):
        network = HfModel(model)
    kind, config = type(network.transformers).__name__, network.transformers.config.get_text_config()
    lines = [f"         {kind} of transformers; its dropout is not applied"]
    if any(isinstance(n := getattr(config, name, None), int) and n > 1 for name in _EXPERTS):
        lines.append(
            "caution  nothing keeps the loads of its experts even: transformers' auxiliary losses depend on the micro-batch and are not added "
            "(docs/family_hf.md); use a family of this program where there is one"
        )
    if still := network.unmoved():
        lines.append(
            f"caution  {len(still)} tensor{'s' if len(still) > 1 else ''} beside the weights stay as they are in training, as "
            f"transformers leaves them: {', '.join(still[:2])}{', ...' if len(still) > 2 else ''}"
        )
    return lines


Made = Callable[[int, Tensor, nn.Parameter], object]
"""Told of a parameter that a constructor makes: which one it is, in order, its value, and what takes its place on the meta device."""


def _built(config: Model, made: Made | None = None) -> Any:
    """transformers' model: parameters on the meta device one by one as they are made, buffers with their values on the CPU."""
    transformers = import_transformers()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), _parameters_on_meta(made):
        if made is None:
            torch.manual_seed(0)  # buffers must not depend on a rank's generator
        try:
            return transformers.AutoModelForCausalLM.from_config(
                config_of(config.hf_config), dtype=torch.get_default_dtype(), trust_remote_code=False
            )
        except ConfigError:
            raise
        except Exception as error:  # a constructor can raise anything for a configuration that nobody thought of
            kind = json.loads(config.hf_config)["model_type"]
            text = " ".join(str(error).split())[:300]  # torch adds its C++ stack
            raise ConfigError(f"model.hf_config: transformers cannot build {kind}: {type(error).__name__}: {text}") from error


@contextmanager
def _parameters_on_meta(made: Made | None) -> Iterator[None]:
    register, numbers = nn.Module.register_parameter, itertools.count()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            moved = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            if made is not None:
                made(next(numbers), parameter, moved)
            module._parameters[name] = moved

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def _without_gradient(network: nn.Module, model: Any) -> tuple[dict[str, Tensor], set[tuple[nn.Module, str]]]:
    """Make parameters without gradient of the buffers that transformers saves, so that all that is saved is a parameter: their values
    by name. And of all that gets no gradient, what transformers keeps in fp32 in whatever format it computes in.
    """
    exact = [word for part in model.modules() for word in getattr(part, "_keep_in_fp32_modules_strict", None) or ()]
    values, kept = {}, set()
    for path, module in network.named_modules():
        for own, buffer in list(module._buffers.items()):
            if buffer is not None and own not in module._non_persistent_buffers_set:
                values[f"{path}.{own}"] = module._buffers.pop(own)
                module._parameters[own] = nn.Parameter(buffer.to("meta"), requires_grad=False)
        for own, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad and any(word in f"{path}.{own}" for word in exact):
                kept.add((module, own))
    return values, kept


def _name_once(network: nn.Module) -> dict[nn.Module, dict[str, tuple[nn.Module, str]]]:
    """Leave every parameter with the first module that has it. Others borrow it during their forward: {name: (owner, its name)}."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    borrowed: dict[nn.Module, dict[str, tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in owners:
                borrowed.setdefault(module, {})[name] = owners[id(parameter)]
                del module._parameters[name]
            else:
                owners[id(parameter)] = (module, name)
    return borrowed


def _find_blocks(model: Any) -> list[nn.Module]:
    """The longest list of modules that transformers says are not to be split; else the longest of one class, outermost first."""
    lists = [
        (name, list(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    named = set(getattr(model, "_no_split_modules", None) or ())
    whole = [members for _, members in lists if {type(m).__name__ for m in members} <= named]
    if whole:
        return max(whole, key=len)
    alike = [(name.count("."), -len(members), members) for name, members in lists if len({type(m) for m in members}) == 1]
    if not alike:
        raise ConfigError(f"model.hf_config: no list of blocks was found in {type(model).__name__}")
    return min(alike, key=lambda item: item[:2])[2]
