"""What optimizers of our own have in common: a step that the device may leave out, and state beside each parameter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pretrain.distributed.shards import local, place_of
from pretrain.models.compiling import compile_strictly
from pretrain.optim.rounding import Hashes, StackedHashes, hash_places, random_bits, round_at_random, seed_of

T = TypeVar("T")
Number = float | Tensor
MOST_SHAPES = 24
"""Shapes and numbers of tensors that a function is compiled for, one by one, in a process. `MOST_VERSIONS` has room for them with clipping and without,
and for versions for any shape."""
IN_CACHE = 1 << 16
"""Numbers that a CPU updates at once per thread: what is between two operators stays in its cache."""
_shapes: dict[Callable, set[tuple]] = {}


@dataclass(frozen=True)
class Formats:
    """How optimizers store numbers. `moments`: dtype of matrices' moments (uint8: AdamW's 8-bit codes). A vector's moments have the vector's
    dtype. `names`: of the parameters, for rounding at random.
    """

    moments: torch.dtype
    names: dict[Tensor, str]


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing where `found_inf` is 1, as torch's fused ones do. The host never waits for that number.

    `moments`: the names of its state, tensors like the parameter. `step_number` is where random rounding begins. `scales_gradients`: whether a
    step multiplies gradients by `gradient_factor`, which spares a pass over all of them for clipping. `OptimizerSet` sets that factor and forgets
    it with the gradients; None: they are taken as they are.
    """

    moments: tuple[str, ...] = ()
    scales_gradients: bool = False
    gradient_factor: Tensor | None = None
    found_inf: Tensor | None = None
    step_number: int = 0

    def __init__(self, groups: list[dict[str, Any]], lr: float, formats: Formats) -> None:
        super().__init__(groups, {"lr": lr})
        self.formats = formats
        self._places: dict[Tensor, tuple[int, ...]] = {}

    def create_state(self) -> None:
        """Create the state that the first step would create."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter)

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """The parameter's moments, in the order of their names."""
        state = self.state[parameter]
        for name in self.moments:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=self._stored_in(parameter))
        return [state[name] for name in self.moments]

    def _stored_in(self, parameter: Tensor) -> torch.dtype:
        if parameter.dim() < 2:
            return parameter.dtype
        if self.formats.moments == torch.float32:
            return widest(parameter)
        return self.formats.moments

    def write(self, parameter: Tensor, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Give this rank's parts of a parameter and its state new values, unless the step is left out. Where bf16 is stored, fp32 is rounded at
        random.
        """
        hashes = self.hashes([parameter], tensors)
        for number, (tensor, value) in enumerate(zip(tensors, values)):
            of_tensor = None if hashes is None else (hashes[0][number], hashes[1][number])
            in_one_kernel(store, tensor)(tensor.data, value, self.left_out(tensor), of_tensor)

    def left_out(self, like: Tensor) -> Tensor | None:
        """`found_inf` where a tensor is."""
        return None if self.found_inf is None else self.found_inf.to(like.device)

    def hashes(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> StackedHashes | None:
        """For the random numbers of each parameter, which are `alike`, and its state, one tensor after the other. None where nothing is rounded.

        `tensors`: this rank's parts of the first parameter and its state.
        """
        if not any(tensor.dtype in (torch.bfloat16, torch.uint8) for tensor in tensors):
            return None
        names = (f"{self.formats.names[parameter]}.{number}" for parameter in parameters for number in range(len(tensors)))
        seeds = torch.tensor([seed_of(name, self.step_number) for name in names])
        if tensors[0].is_cuda:
            seeds = seeds.pin_memory().to(tensors[0].device, non_blocking=True)  # else the host would wait
        shape, starts = tuple(tensors[0].shape) or (1,), self._starts(parameters[0]) or (0,)  # a scalar has one place
        return in_one_kernel(hash_places, seeds)(shape, starts, seeds)

    def by_device(self) -> Iterator[tuple[dict[str, Any], torch.device, list[Tensor]]]:
        """The parameters of each group that have gradients, device by device: with `parallel.offload` there are two."""
        for group in self.param_groups:
            for device in {local(parameter).device for parameter in group["params"]}:
                parameters = [p for p in group["params"] if p.grad is not None and local(p).device == device]
                if parameters:
                    yield group, device, parameters

    def alike(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """The places in the list of parameters whose parts on this rank have one shape, format and place in the whole."""
        groups: dict[tuple, list[int]] = {}
        for number, parameter in enumerate(parameters):
            formats = parameter.dtype, parameter.grad.dtype, self._stored_in(parameter)
            groups.setdefault((local(parameter).shape, self._starts(parameter), *formats), []).append(number)
        return list(groups.values())

    def _starts(self, parameter: Tensor) -> tuple[int, ...]:
        """Where this rank's part begins in the whole, which stays so."""
        if parameter not in self._places:
            self._places[parameter] = tuple(part.start for part in place_of(parameter))
        return self._places[parameter]


def store(old: Tensor, value: Tensor, left_out: Tensor | None, hashes: Hashes | None) -> None:
    """Give a tensor new values unless `left_out` is 1. In bf16, fp32 is rounded at random."""
    if old.dtype == torch.bfloat16 and value.dtype == torch.float32:
        value = round_at_random(value, random_bits(hashes)).view_as(old)
    old.copy_(value if left_out is None else torch.where(left_out > 0, old, value))


def bias_corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """1 - beta^steps of each parameter: what divides a mean that began at zero. By expm1: in fp32 the difference from 1 would keep four digits."""
    powers = list(torch._foreach_mul(steps, math.log(beta or math.ulp(0.0))))
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return powers


def rows_in_cache(
    tensors: Sequence[Tensor], hashes: StackedHashes | None = None
) -> Iterator[tuple[Sequence[Tensor], StackedHashes | None]]:
    """Some rows at a time of tensors of one shape, and of the hashes of their places, cut along the first dimension. A GPU gets them whole."""
    if tensors[0].is_cuda:
        yield tensors, hashes
        return
    tensors = [torch.atleast_1d(tensor) for tensor in tensors]
    count = max(1, torch.get_num_threads() * IN_CACHE // max(1, tensors[0][:1].numel()))
    for first in range(0, len(tensors[0]), count):
        rows, own = slice(first, first + count), hashes
        if hashes is not None:  # the numbers of a vector count as columns
            own = (hashes[0], hashes[1][:, rows]) if tensors[0].dim() == 1 else (hashes[0][:, rows], hashes[1])
        yield [tensor[rows] for tensor in tensors], own


def in_one_kernel(function: Callable[..., T], like: Tensor, by_shape: int = 0) -> Callable[..., T]:
    """The function, compiled where the tensor is on a GPU. Operator by operator, rounding alone would be dozens of kernels, each of which moves whole
    tensors. Numbers that change from step to step have to be tensors, or int. The function takes `data` of a parameter, since torch.compile knows
    no gradient of another format.

    `by_shape`: how many tensors like this one the function takes. It is then compiled for each shape and number, as long as those are few. Such
    kernels need half the instructions. The function must take no int. 0: it is compiled for any shape.
    """
    return _compiled(function, by_shape > 0 and are_few(function, like, by_shape)) if like.is_cuda else function


def are_few(function: Callable, like: Tensor, count: int) -> bool:
    """Whether `in_one_kernel` compiles the function for so many tensors of this shape alone."""
    seen, shape = _shapes.setdefault(function, set()), (like.shape, like.dtype, count)
    if len(seen) < MOST_SHAPES:
        seen.add(shape)
    return shape in seen


@functools.cache
def _compiled(function: Callable[..., T], by_shape: bool) -> Callable[..., T]:
    return compile_strictly(
        function, "an optimizer on a GPU needs that compiler, and a C compiler", dynamic=not by_shape, fullgraph=True
    )


def widest(tensor: Tensor) -> torch.dtype:
    """The format to compute in: that of the tensor, and at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the format to compute in; the same one where it has it."""
    return tensor.to(widest(tensor))
