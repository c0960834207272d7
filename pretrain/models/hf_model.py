"""Any causal language model that transformers builds from a configuration, as a network (`models/network.py`).

Its modules become those of this class, so that parameters keep the names transformers has for them. What the rest of the program
counts on is made so here: one name for a tied parameter, buffers that survive `to_empty`, weights that are cast where they are
used. Dropout is not applied, under any strategy: it would be another one on every layout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.errors import ConfigError
from pretrain.models.hf_config import config_of, import_transformers
from pretrain.models.hf_initial import initial_values
from pretrain.models.loss import CROSS_ENTROPY, Losses, LossOptions, sequence_losses_and_entropy
from pretrain.models.network import Parts


class HfModel(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out. Parameters are on the meta device when it is made."""

    def __init__(self, config: Model, loss: Loss | None = None) -> None:
        super().__init__()
        self.config = config
        self.loss = LossOptions.of(loss)
        self.recompute_blocks = False
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
        values = initial_values(model)
        self._initial = {name: values[id(parameter)] for name, parameter in self.named_parameters()}
        self.tied = _name_once(self)
        # Of parameters that are used in several places, the cast ones of this forward: gradients meet in the compute format, as
        # they do where FSDP2 gathers a weight once.
        self._shared = {owner for names in self.tied.values() for owner in names.values()}
        self._cast_once: dict[tuple[nn.Module, str], Tensor] = {}
        self._blocks = _find_blocks(model)
        for block in self._blocks:
            block.forward = functools.partial(self._block, block.forward)
        for module in self.modules():
            if module._parameters or module in self.tied:
                module.register_forward_pre_hook(self._cast)
                module.register_forward_hook(self._uncast, always_call=True)

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
        try:
            logits_BTV = self._transformers(input_ids=tokens_BT, use_cache=False, return_dict=True).logits
        finally:
            self._cast_once.clear()
        if targets_BT is None:
            return logits_BTV
        options = self.loss if torch.is_grad_enabled() else CROSS_ENTROPY
        losses = sequence_losses_and_entropy(logits_BTV, targets_BT, options)
        return losses if with_cross_entropy else losses.objective_B

    def parts(self) -> Parts:
        """See `models/network.py`. A table that is used at both ends belongs to neither."""
        embedding, output = self._transformers.get_input_embeddings(), self._transformers.get_output_embeddings()
        if self.tied or embedding is None or output is None:
            return Parts([], self._blocks, [])
        return Parts([embedding], self._blocks, [output])

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's initial values: what transformers' own rules say."""
        return self._initial[name]

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
            if parameter.dim() < 2 or id(parameter) in tables or name.endswith("bias"):
                continue
            routed = parameter.dim() == 3 and "expert" in name and active
            total += parameter.numel() * active // parameter.shape[0] if routed else parameter.numel()
        return total

    def _block(self, forward: Any, *args: Any, **options: Any) -> Any:
        if self.recompute_blocks and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **options)
        return forward(*args, **options)

    def _cast(self, module: nn.Module, args: Any) -> None:
        """Weights in the compute format where they are used, as in `models/layers.py`: FSDP2 hands them over already cast."""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module.__dict__[name] = parameter.to(self.compute_dtype)
                if (module, name) in self._shared:
                    self._cast_once[module, name] = module.__dict__[name]
        for name, owner in self.tied.get(module, {}).items():
            module.__dict__[name] = self._cast_once[owner]

    def _uncast(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in (*module._parameters, *self.tied.get(module, ())):
            module.__dict__.pop(name, None)


def _built(config: Model) -> Any:
    """transformers' model: parameters on the meta device one by one as they are made, buffers with their values on the CPU."""
    transformers = import_transformers()
    # Buffers must not depend on a rank's generator.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), _parameters_on_meta():
        torch.manual_seed(0)
        try:
            return transformers.AutoModelForCausalLM.from_config(
                config_of(config.hf_config), dtype=torch.float32, trust_remote_code=False
            )
        except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError) as error:
            kind = json.loads(config.hf_config)["model_type"]
            text = " ".join(str(error).split())[:300]  # torch adds its C++ stack
            raise ConfigError(f"model.hf_config: transformers cannot build {kind}: {type(error).__name__}: {text}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


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
