"""Statistics of each layer at every so many-th step: norms of weights, gradients and updates; sizes of activations; largest scores of attention.

Parameters belong to the layer that their name begins with (`layers.3`), or else to their module (`embedding`). Every number is of the whole model
and the whole step, whatever the layout. A GPU computes them while the host goes on, but the host waits for its copies of the weights
(`before_update`). A step without statistics does nothing of this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import local
from pretrain.models.attention import Scored
from pretrain.observe.metrics import FIRST_EXPONENT, LAST_EXPONENT
from pretrain.optim.optimizer import OptimizerSet, added_over_shards, norms, sharding_of

NORMS = ("gradient_norms", "weight_norms", "update_norms")
AT_ONCE = 1 << 22
"""Numbers that are sorted by size together. torch counts in fp32, which is exact up to 2^24."""


def layer_of(name: str) -> str:
    """The layer of a parameter or module of this name."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.partition(".")[0]


class LayerStatistics:
    """`names`: parameters of the whole network; this rank may have a part of them. All ranks call all methods together."""

    def __init__(self, names: Iterable[str], network: nn.Module, optimizer: OptimizerSet, mesh: Mesh, config: Config) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, names)))
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        self.network, self.optimizer, self.mesh = network, optimizer, mesh
        self.every, self.compiled = config.log.layers_every_steps, config.parallel.compile
        self._found: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Watch the forward passes inside, if statistics are due. Compiled code is left as it is: nothing in it is watched."""
        if not self.due(step) or self.compiled == "model":
            yield
            return
        size, device = len(self.layers), self.mesh.device
        self._sums = torch.zeros(size, 2, dtype=torch.float64, device=device)  # of squares, and numbers
        self._largest = torch.full((2, size), -torch.inf, dtype=torch.float64, device=device)  # activations, scores
        scored = {} if self.compiled != "none" else {n: m for n, m in self.network.named_modules() if isinstance(m, Scored)}
        if hasattr(self.network, "watch_layer"):
            self.network.watch_layer = self._see_activations
        for name, module in scored.items():
            module.watch_scores = partial(self._see_score, self._place[layer_of(name)])
        try:
            yield
        finally:
            if hasattr(self.network, "watch_layer"):
                self.network.watch_layer = None
            for module in scored.values():
                del module.watch_scores
        sums, largest = self.mesh.ranks.add(self._sums), self.mesh.ranks.most(self._largest)
        self._found = {
            "activations": (sums[:, 0] / sums[:, 1]).sqrt(),
            "largest_activations": largest[0],
            "attention_scores": largest[1],
        }

    @torch.no_grad()
    def _see_activations(self, layer: str, x_BTD: Tensor, real_1T1: Tensor) -> None:
        place, x_BTD = self._place[layer], x_BTD.detach() * real_1T1
        rows_BT = torch.linalg.vector_norm(x_BTD, dim=-1, dtype=torch.float32)
        self._sums[place, 0] += rows_BT.double().square().sum()
        self._sums[place, 1] += real_1T1.sum(dtype=torch.float64) * (x_BTD.numel() // real_1T1.numel())
        self._largest[0, place] = torch.maximum(self._largest[0, place], x_BTD.abs().amax().double())

    def _see_score(self, place: int, score: Tensor) -> None:
        self._largest[1, place] = torch.maximum(self._largest[1, place], score.double())

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """Take the norms of weights and of gradients, which must not be clipped yet, if statistics are due. Copies the weights, to the host from a GPU."""
        if not self.due(step):
            return
        parameters = self.optimizer.parameters
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._found |= {
            "gradient_norms": self._norms(gradients),
            "weight_norms": self._norms(parameters),
            "gradient_sizes": self._summed(gradients, LAST_EXPONENT - FIRST_EXPONENT, _sizes),
        }
        self._before = {name: local(p).detach().to("cpu", copy=True) for name, p in parameters.items()}

    @torch.no_grad()
    def after_update(self, step: int) -> dict[str, Tensor]:
        """The statistics of the step, if they are due, as tensors on the device."""
        if not self.due(step):
            return {}

        def change(name: str, parameter: Tensor) -> Tensor:
            now = local(parameter).detach()
            before = self._before.pop(name).to(now.device, non_blocking=True)
            return _square(now.float() - before.float())

        found, self._found = self._found, {}
        return found | {"update_norms": self._summed(self.optimizer.parameters, 1, change)[:, 0].sqrt()}

    def _norms(self, tensors: dict[str, Tensor]) -> Tensor:
        return self._summed(tensors, 1, lambda name, tensor: _square(local(tensor).detach()))[:, 0].sqrt()

    def _summed(self, tensors: dict[str, Tensor], width: int, measure: Callable[[str, Tensor], Tensor]) -> Tensor:
        """By layer [layers, width], the sum of what `measure` finds in this rank's part of each tensor, over all parts."""
        by_sharding: dict[Any, Tensor] = {}
        optimizer = self.optimizer
        for name, tensor in tensors.items():
            sharding = sharding_of(optimizer.parameters[name])
            if sharding not in by_sharding:
                by_sharding[sharding] = torch.zeros(len(self.layers), width, dtype=torch.float64, device=local(tensor).device)
            if optimizer.counts(name):
                by_sharding[sharding][self._place[layer_of(name)]] += measure(name, tensor)
        total = torch.zeros(len(self.layers), width, dtype=torch.float64, device=self.mesh.device)
        for sharding, found in by_sharding.items():
            total += added_over_shards(found, sharding).to(total.device)
        return optimizer.sum_over_layers(total)

    def settle(self, figures: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The fields of the step's record, once the figures are on the host. A layer where nothing was watched is left out."""
        fields = {}
        for name in (*NORMS, "activations", "largest_activations", "attention_scores"):
            if name in figures:
                known = zip(self.layers, figures[name].tolist())
                if name not in NORMS:  # NaN: no layer of hidden states; -inf: no attention
                    known = ((layer, value) for layer, value in known if value == value and value != -torch.inf)
                fields[name] = dict(known) or None
        if "gradient_sizes" in figures:
            fields["gradient_sizes"] = {
                layer: [int(n) for n in row] for layer, row in zip(self.layers, figures["gradient_sizes"].tolist())
            }
        return fields


def _square(part: Tensor) -> Tensor:
    """The sum of squares, [1], of fp64."""
    return norms([part])[0].square()[None]


def _sizes(name: str, gradient: Tensor) -> Tensor:
    """How many numbers have each size, by exponent: in the first place those below 2^(FIRST_EXPONENT + 1), in the last those from 2^(LAST_EXPONENT - 1)
    on. Zeros have no size.
    """
    counts = torch.zeros(LAST_EXPONENT - FIRST_EXPONENT, dtype=torch.float64, device=local(gradient).device)
    for part in local(gradient).detach().flatten().split(AT_ONCE):
        exponents = (torch.frexp(part.float()).exponent - 1).clamp(FIRST_EXPONENT, LAST_EXPONENT - 1).float()
        exponents = exponents.masked_fill(part == 0, LAST_EXPONENT + 1)  # outside of what is counted
        counts += _histogram(exponents)
    return counts


def _histogram(exponents: Tensor) -> Tensor:
    """How many are each of the numbers from FIRST_EXPONENT to LAST_EXPONENT - 1."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.histc(exponents, LAST_EXPONENT - FIRST_EXPONENT, FIRST_EXPONENT, LAST_EXPONENT)
    # `run.deterministic`: on a GPU, histc of floating-point numbers is an error then.
    edges = torch.arange(FIRST_EXPONENT, LAST_EXPONENT + 1, dtype=exponents.dtype, device=exponents.device)
    return torch.searchsorted(exponents.sort().values, edges).diff()
