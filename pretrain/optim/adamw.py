"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) for weights or moments in bf16 or 8 bits, which torch's fused one does not round at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.distributed.shards import local
from pretrain.optim.eight_bits import decode_means, encode_means
from pretrain.optim.guarded import Formats, GuardedOptimizer, in_one_kernel, store, widened, widest
from pretrain.optim.rounding import random_bits

CHUNK = 1 << 24
"""Numbers that are updated at once where each operator has a result of its own. It bounds the memory of a step."""

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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, rate: float, decay: float) -> None:
        stored = [local(parameter), *(local(moment) for moment in self.state_of(parameter))]
        gradient, steps = local(parameter.grad), self.state[parameter]["step"]
        steps += 1 if self.found_inf is None else 1 - self.found_inf.to(steps)
        corrections = [1 - beta**steps for beta in self.betas]
        numbers: list[Number] = [*(1 - beta for beta in self.betas), self.eps, rate, 1 - rate * decay]
        size = max(1, gradient[:1].numel())
        rows = max(1, CHUNK // size)
        if gradient.is_cuda:
            rows, kind = max(1, len(gradient)), widest(gradient)
            numbers = [torch.full((), number, dtype=kind, device=gradient.device) for number in numbers]
        update, left_out, seeds = in_one_kernel(_update_part, gradient), self.left_out(gradient), self.seeds(parameter, 3)
        for first in range(0, len(gradient), rows):
            parts = [tensor.data[first : first + rows] for tensor in (gradient, *stored)]
            update(*parts, *corrections, *numbers, left_out, self.starts(parameter, first), seeds)


def _update_part(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    mean_correction: Tensor,
    square_correction: Tensor,
    mean_share: Number,
    square_share: Number,
    eps: Number,
    rate: Number,
    kept: Number,
    left_out: Tensor | None,
    starts: Sequence[int],
    seeds: Sequence[int],
) -> None:
    """Store what weights and moments are after a step. `kept`: what weight decay leaves of a weight; the others as in the paper, and `store`."""
    stored, is_coded, g = (weight, mean, square), mean.dtype == torch.uint8, widened(gradient)
    means = decode_means(mean, square) if is_coded else (widened(mean), widened(square))
    new_mean, new_square = means[0].lerp(g, mean_share), means[1].lerp(g.square(), square_share)
    divisor = (new_square / square_correction).sqrt_().add_(eps)
    updated = (widened(weight) * kept).sub_((new_mean / divisor).mul_(rate / mean_correction))
    if is_coded:
        bits = tuple(random_bits(g.shape, starts, seed, g.device) for seed in seeds[1:])
        new_mean, new_square = encode_means(new_mean, new_square, bits)
    for tensor, value, seed in zip(stored, (updated, new_mean, new_square), seeds):
        store(tensor, value, left_out, starts, seed)
