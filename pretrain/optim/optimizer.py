"""Clipping, and the optimizers of a run: a rule per parameter, one set of verbs for all, and state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import record_function

from pretrain.config.optim_schema import Optim
from pretrain.distributed.shards import local
from pretrain.errors import ConfigError
from pretrain.optim.adafactor import Adafactor
from pretrain.optim.adamw import AdamW, FusedAdamW
from pretrain.optim.guarded import Formats, GuardedOptimizer, in_one_kernel, widened, widest
from pretrain.optim.lion import Lion
from pretrain.optim.muon import Muon
from pretrain.optim.rules import Rule, model_is_mean, registered, rules
from pretrain.optim.schedule_free import ScheduleFreeAdamW

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What an optimizer is made for, beside its parameters."""

    config: Optim
    compute: torch.dtype
    replicas: DeviceMesh | None
    formats: Formats


def _adamw(groups: Groups, given: Setting) -> AdamW:
    config, parameters = given.config, [p for group in groups for p in group["params"]]
    # torch's fused one wants all of a parameter's numbers in one format.
    is_mixed = given.formats.moments != torch.float32 or any(torch.bfloat16 in (p.dtype, p.grad_dtype) for p in parameters)
    return (AdamW if is_mixed else FusedAdamW)(groups, config.lr, tuple(config.betas), config.eps, given.formats)


_OPTIMIZERS: dict[str, Callable[[Groups, Setting], GuardedOptimizer]] = {
    "adafactor": lambda groups, given: Adafactor(groups, given.config.lr, given.config.adafactor, given.formats),
    "adamw": _adamw,
    "lion": lambda groups, given: Lion(groups, given.config.lr, tuple(given.config.betas), given.formats),
    "muon": lambda groups, given: Muon(
        groups, given.config.lr, given.config.muon, given.compute, given.formats, given.replicas
    ),
    "schedule_free_adamw": lambda groups, given: ScheduleFreeAdamW(
        groups, given.config.lr, tuple(given.config.betas), given.config.eps, given.formats
    ),
}
"""By a rule's `optimizer`: a function from groups of parameters to an optimizer. Each state that it keeps must be a tensor. Where the optimizer's
`found_inf` is 1, its step must change nothing."""


class OptimizerSet:
    """The optimizers of a network behind one set of verbs. Make it after the network is placed, because sharding replaces parameters.

    `network`: what this rank has of it, under the names of the whole. Other ranks may have other parameters: `counts` says of
    a name whether this rank's gradient belongs to the norm of all, and `sum_over_layers` adds up the squares. `compute`: the format of
    matrix products; `moments`: that in which running means of matrices are stored. `replicas`: the ranks that have the same plain tensors, if
    they share the work of an update.
    """

    def __init__(
        self,
        network: nn.Module,
        config: Optim,
        counts: Callable[[str], bool] = lambda name: True,
        sum_over_layers: Callable[[Tensor], Tensor] = lambda value: value,
        compute: torch.dtype = torch.float32,
        replicas: DeviceMesh | None = None,
        moments: torch.dtype = torch.float32,
    ) -> None:
        self.counts, self.sum_over_layers = counts, sum_over_layers
        self.ema_decay, self.model_is_mean = config.ema_decay, model_is_mean(config)
        self.means: dict[str, Tensor] = {}
        """The running mean of each parameter. It begins as the parameter was before the first step, or at `begin_means`."""
        groups: dict[str, dict[Rule, list[nn.Parameter]]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        by_name = rules(network, config)
        for name, parameter in network.named_parameters():
            if name in by_name:
                self.parameters[name] = parameter
                groups.setdefault(by_name[name].optimizer, {}).setdefault(by_name[name], []).append(parameter)
        formats = Formats(moments, {parameter: name for name, parameter in self.parameters.items()})
        self.optimizers = [
            registered(_OPTIMIZERS, name, "_OPTIMIZERS of pretrain/optim/optimizer.py")(
                [
                    {
                        "params": members,
                        "weight_decay": rule.weight_decay,
                        "rate_scale": rule.rate_scale,
                        "fused_rows": rule.fused_rows,
                    }
                    for rule, members in own.items()
                ],
                Setting(config, compute, replicas, formats),
            )
            for name, own in groups.items()
        ]

    def step(self, rate: float, taken: Tensor | None = None, number: int = 0) -> None:
        """Update every parameter by its gradient; `rate` is the schedule's learning rate of this step.

        `taken`: a truth value on the device; where it is false, weights and state stay as they are to the last bit. `number`: the step's, for
        random rounding.
        """
        self._create_means()
        is_first = not self.has_state
        found_inf = None if taken is None else (~taken).float()
        if found_inf is not None and found_inf.is_cuda and any(local(p).device.type == "cpu" for p in self.parameters.values()):
            # `parallel.offload`: torch's fused AdamW would read its own copy before that has arrived.
            found_inf = found_inf.cpu()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate_scale"]
            optimizer.found_inf = found_inf
            optimizer.step_number = number
            optimizer.step()
        if is_first:
            self._refuse_what_is_no_tensor()
        self._average(taken)

    def _refuse_what_is_no_tensor(self) -> None:
        """At the first step already: a checkpoint would be refused after all the steps before it."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                if odd := next((key for key, value in state.items() if not isinstance(value, Tensor)), None):
                    raise ConfigError(
                        f"the optimizer {type(optimizer).__name__} keeps its state {odd} as {type(state[odd]).__name__}, and checkpoints hold "
                        "tensors only; make it a tensor (AGENTS.md)"
                    )

    @torch.no_grad()
    def _create_means(self) -> None:
        if self.ema_decay is not None and not self.means:
            self.means = {name: p.detach().to(widest(p), copy=True) for name, p in self.parameters.items()}

    @torch.no_grad()
    def begin_means(self) -> None:
        """Let the running mean begin with the weights as they are now."""
        for name, mean in self.means.items():
            local(mean).copy_(local(self.parameters[name]))

    @torch.no_grad()
    def _average(self, taken: Tensor | None) -> None:
        if not self.means:
            return
        with record_function("Optimizer.step#mean of weights"):  # a profile counts it as the optimizer's
            # A step that is left out has a share of 0. That keeps every value but the sign of a zero, and a mean whose distance overflows.
            # torch.where would keep them too, and took eight times as long on a CPU.
            share, shares = 1 - self.ema_decay, {}
            for name, mean in self.means.items():
                own = local(mean)
                kind = own.device, own.dtype
                if kind not in shares:
                    shares[kind] = share if taken is None else (share * taken).to(own)
                own.lerp_(widened(local(self.parameters[name])), shares[kind])

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """Parameters and their running means change places inside. What a strategy has gathered of the weights is not changed.

        A mean would not survive in a weight's place if that is in bf16. The mean is lent then, and the weights are kept in their own format.
        """
        means = self.means
        if self.model_is_mean:
            self.create_state()
            means = {name: self.optimizers[0].state_of(p)[0] for name, p in self.parameters.items()}
        pairs = [(local(self.parameters[name]), local(mean)) for name, mean in means.items()]
        alike = [(weight, mean) for weight, mean in pairs if weight.dtype == mean.dtype]
        kept = [(weight, weight.clone()) for weight, mean in pairs if weight.dtype != mean.dtype]
        for weight, mean in pairs:
            if weight.dtype != mean.dtype:
                weight.copy_(mean)
        _change_places(alike)
        try:
            yield
        finally:
            _change_places(alike)
            for weight, own in kept:
                weight.copy_(own)

    def model(self) -> AbstractContextManager[None]:
        """Inside, parameters are the model, and with the state they are what a checkpoint has. Outside, they are what is trained: the same, unless
        `model_is_mean`.
        """
        return self.averaged() if self.model_is_mean else nullcontext()

    def zero_grad(self) -> None:
        """Forget the gradients, and what they are clipped by."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for optimizer in self._scaling:
            optimizer.gradient_factor = None

    def clip(self, max_norm: float) -> Tensor:
        """`clip_gradients`, once before `zero_grad`. An optimizer that `scales_gradients` does so in its step: its gradients stay as they are."""
        if any(optimizer.gradient_factor is not None for optimizer in self._scaling):
            raise RuntimeError("these gradients are clipped already")
        copies = [p for name, p in self.parameters.items() if not self.counts(name)]
        with record_function("Optimizer.step#clip"):  # a profile counts it as the optimizer's
            return clip_gradients(self.parameters.values(), max_norm, copies, self.sum_over_layers, self._scale_gradients)

    def _scale_gradients(self, factor: Tensor) -> None:
        for optimizer in self.optimizers:
            if optimizer in self._scaling:
                optimizer.gradient_factor = factor
            else:
                scale_gradients((p for group in optimizer.param_groups for p in group["params"]), factor)

    @property
    def _scaling(self) -> list[GuardedOptimizer]:
        """Those that multiply gradients themselves."""
        return [optimizer for optimizer in self.optimizers if optimizer.scales_gradients]

    @property
    def has_state(self) -> bool:
        """Whether state exists: after the first step or `create_state`."""
        return any(optimizer.state for optimizer in self.optimizers)

    def create_state(self) -> None:
        """Create the state that the first step would create, unless it exists."""
        self._create_means()
        if self.has_state:
            return
        for optimizer in self.optimizers:
            optimizer.create_state()
        self._refuse_what_is_no_tensor()

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<state>.<parameter>`, e.g. `exp_avg.layers.0.mlp.up.weight`; it shares memory. Creates it if need be. The state `ema` is
        the running mean of the weights.
        """
        self.create_state()
        tensors = {f"ema.{name}": mean for name, mean in self.means.items()}
        for name, parameter in self.parameters.items():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{key}.{name}"] = value
        return tensors


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    copies: Iterable[Tensor] = (),
    sum_over_layers: Callable[[Tensor], Tensor] = lambda value: value,
    scale: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Scale gradients so that their global 2-norm is at most `max_norm` (0: leave them); return the norm before.

    Squares are added in fp64; on a CPU, the squares within a row are added in fp32. An fp32 sum over half a million elements would be off by some
    1e-6, and by another amount where the tensor is sharded. The result is a plain fp64 scalar on the gradients' device, equal on all ranks (Pascanu et al., arXiv 1211.5063; the
    factor is that of torch.nn.utils.clip_grad_norm_). `copies`: those of the parameters that another rank counts; one that is not finite makes the
    norm NaN all the same. `sum_over_layers`: adds a value over the ranks that have other parameters. `scale`: what is done with the factor, in
    place of `scale_gradients`. Raises RuntimeError for a placement whose norm does not follow from the norms of its parts.
    """
    with_gradients = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradients]
    uncounted = {id(p.grad) for p in copies}
    parts = [local(gradient) for gradient in gradients]
    groups: dict[tuple, list[Tensor]] = {}
    total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    for gradient, norm in zip(gradients, norms(parts)):
        alike = sharding_of(gradient), norm.device
        if alike not in groups:
            groups[alike] = [norm.new_zeros(())]
        if id(gradient) not in uncounted:
            groups[alike].append(norm)
        else:
            # It adds nothing, unless this copy alone is not finite: then the step must not be taken.
            total += 0 * norm.to(total.device)
    for (sharding, _), values in groups.items():
        total += added_over_shards(torch.stack(values).square_().sum(), sharding).to(total.device)
    total = sum_over_layers(total).sqrt()
    if max_norm > 0:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        scale(factor) if scale is not None else scale_gradients(with_gradients, factor)
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a number in place."""
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    for device in {part.device for part in parts}:  # with `parallel.offload` there are two
        _scale([part for part in parts if part.device == device], factor.to(device, widest(parts[0])))


def _scale(parts: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a number in place. A GPU multiplies bf16 by a number of fp32 four times as slowly as it reads, and rounds that number first."""
    narrow = [part for part in parts if part.is_cuda and part.dtype != factor.dtype]
    for part in narrow:
        in_one_kernel(_scale_widened, part)(part, factor)
    if others := [part for part in parts if not part.is_cuda or part.dtype == factor.dtype]:
        torch._foreach_mul_(others, factor)


def _scale_widened(part: Tensor, factor: Tensor) -> None:
    part.copy_(part.to(factor.dtype) * factor)


def norms(parts: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, fp64. On a CPU torch would copy every tensor to fp64, in seven times the time of the rows' way.

    In matrices on a CPU, numbers below 1e-19 count as zeros, and above 1e19 as infinite, because of their squares in fp32.
    """
    found: dict[int, Tensor] = {}
    # Of several formats at once, torch would copy each tensor to fp64.
    for dtype in {part.dtype for part in parts if part.is_cuda}:
        places = [place for place, part in enumerate(parts) if part.is_cuda and part.dtype == dtype]
        found |= zip(places, torch._foreach_norm([parts[place] for place in places], 2, dtype=torch.float64))
    return [found[place] if part.is_cuda else _norm_by_rows(part) for place, part in enumerate(parts)]


def _norm_by_rows(part: Tensor) -> Tensor:
    if part.dim() > 1 and part.numel():
        part = torch.linalg.vector_norm(part, dim=-1, dtype=widest(part))
    return torch.linalg.vector_norm(part, dtype=torch.float64)


def _change_places(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Exchange the values of two tensors, pair by pair: there is never more than one tensor beside them."""
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def sharding_of(tensor: Tensor) -> tuple | None:
    """The mesh and its axes that a tensor is sharded over; None if every rank has all of it. For `added_over_shards`."""
    if not isinstance(tensor, DTensor):
        return None
    for placement in tensor.placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise RuntimeError(f"a tensor is placed as {tensor.placements}: its norm does not follow from those of its parts")
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return tensor.device_mesh, axes


def added_over_shards(squares: Tensor, sharding: tuple | None) -> Tensor:
    """The sum of what ranks have of tensors that are sharded alike, in place."""
    if sharding is not None:
        mesh, axes = sharding
        for axis in axes:
            dist.all_reduce(squares, group=mesh.get_group(axis))
    return squares
