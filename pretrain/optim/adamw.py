"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) for weights or moments in bf16 or 8 bits, which torch's fused one does not round at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pretrain.distributed.shards import local
from pretrain.optim.eight_bits import decode_means, encode_means
from pretrain.optim.guarded import Formats, GuardedOptimizer, are_few, in_one_kernel, store, widened, widest
from pretrain.optim.rounding import Hashes, random_bits

CHUNK = 1 << 24
"""Numbers that are updated at once where each operator has a result of its own. With `HASHES` it bounds the memory of a step."""
AT_ONCE = 4
"""Tensors of a shape that a GPU updates by one call, because a call takes the host about as long as a small tensor takes the GPU."""

Number = float | Tensor


class AdamW(GuardedOptimizer):
    """torch's AdamW, computed in fp32 from what is stored, and with the names of its state."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, formats: Formats) -> None:
        super().__init__(groups, lr, formats)
        self.betas, self.eps = betas, eps

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        return super().state_of(parameter)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for device in {local(parameter).device for parameter in group["params"]}:
                parameters = [p for p in group["params"] if p.grad is not None and local(p).device == device]
                if parameters:
                    self._update(parameters, group["lr"], group["weight_decay"], device)

    def _update(self, parameters: list[Tensor], rate: float, decay: float, device: torch.device) -> None:
        """What is the same for many parameters is computed for all at once: a GPU would wait for kernels of single numbers."""
        states = [self.state_of(parameter) for parameter in parameters]
        steps, left_out = [self.state[parameter]["step"] for parameter in parameters], self.left_out(parameters[0])
        if left_out is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [1 - left_out.to(steps[0])] * len(steps))  # not the tensor itself: the host would wait
        values = [*(1 - beta for beta in self.betas), self.eps, rate, 1 - rate * decay]
        of_kind: dict[torch.dtype, list[Number]] = {kind: values for kind in map(widest, parameters)}
        if device.type == "cuda":
            of_kind = {kind: [torch.full((), n, dtype=kind, device=device) for n in values] for kind in of_kind}
        corrections = list(zip(*(_corrections(beta, steps) for beta in self.betas)))
        for places in self.alike(parameters):
            stored = [[tensor.data for tensor in map(local, (parameters[n].grad, parameters[n], *states[n]))] for n in places]
            if not stored[0][0].numel():
                continue
            hashes = self.hashes([parameters[n] for n in places], stored[0][1:])
            updates = [(*tensors, *corrections[n], of) for n, tensors, of in zip(places, stored, hashes)]
            numbers = of_kind[widest(parameters[places[0]])]
            for part in _in_parts(updates):
                if len(part) > 1:
                    update = in_one_kernel(_update_parts, part[0][0], by_shape=True)
                    update(part, [_under_new_names(numbers) for _ in part], left_out)
                else:
                    in_one_kernel(_update_part, part[0][0], by_shape=True)(*part[0], *numbers, left_out)


Update = tuple
"""This rank's parts of a gradient, a weight and its two moments; their corrections; and hashes of the last three."""


def _in_parts(updates: list[Update]) -> Iterator[list[Update]]:
    """What is updated by one call: on a GPU so many tensors, on a CPU some rows of one."""
    gradient = updates[0][0]
    if gradient.is_cuda:
        whole = len(updates) // AT_ONCE * AT_ONCE if are_few(_update_parts, gradient) else 0
        yield from (updates[n : n + AT_ONCE] for n in range(0, whole, AT_ONCE))
        yield from ([update] for update in updates[whole:])
        return
    count = max(1, CHUNK // max(1, gradient[:1].numel()))
    for *tensors, mean_correction, square_correction, hashes in updates:
        for first in range(0, len(gradient), count):
            rows = slice(first, first + count)
            parts, of_rows = (x[rows] for x in tensors), [_of_rows(of, gradient, rows) for of in hashes]
            yield [(*parts, mean_correction, square_correction, of_rows)]


def _of_rows(hashes: Hashes | None, tensor: Tensor, rows: slice) -> Hashes | None:
    """The hashes of some rows of a tensor; of a vector, whose numbers are columns, of some numbers."""
    if hashes is None:
        return None
    return (hashes[0], hashes[1][rows]) if tensor.dim() == 1 else (hashes[0][rows], hashes[1])


def _corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """1 - beta^steps of each parameter: what divides a mean that began at zero."""
    powers = list(torch._foreach_pow(beta, steps))
    torch._foreach_neg_(powers)
    torch._foreach_add_(powers, 1.0)
    return powers


def _under_new_names(numbers: list[Tensor]) -> list[Tensor]:
    """For a compiler other numbers. Where several updates read the same ones, Inductor makes one kernel of them, with few threads for its many registers."""
    return [number.view(()) for number in numbers]


def _update_parts(updates: list[Update], numbers: list[list[Tensor]], left_out: Tensor | None) -> None:
    for update, own in zip(updates, numbers):
        _update_part(*update, *own, left_out)


def _update_part(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    mean_correction: Tensor,
    square_correction: Tensor,
    hashes: Sequence[Hashes | None],
    mean_share: Number,
    square_share: Number,
    eps: Number,
    rate: Number,
    kept: Number,
    left_out: Tensor | None,
) -> None:
    """Store what weights and moments are after a step. `kept`: what weight decay leaves of a weight; the others as in the paper, and `store`."""
    stored, is_coded, g = (weight, mean, square), mean.dtype == torch.uint8, widened(gradient)
    means = decode_means(mean, square) if is_coded else (widened(mean), widened(square))
    new_mean, new_square = means[0].lerp(g, mean_share), means[1].lerp(g.square(), square_share)
    divisor = (new_square / square_correction).sqrt_().add_(eps)
    updated = (widened(weight) * kept).sub_((new_mean / divisor).mul_(rate / mean_correction))
    if is_coded:
        new_mean, new_square = encode_means(new_mean, new_square, (random_bits(hashes[1]), random_bits(hashes[2])))
    for tensor, value, of_places in zip(stored, (updated, new_mean, new_square), hashes):
        store(tensor, value, left_out, of_places)
