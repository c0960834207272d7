"""Lion: the sign of a running mean of gradients (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.distributed.shards import local
from pretrain.optim.guarded import Formats, GuardedOptimizer, Number, in_one_kernel, rows_in_cache, store, widened
from pretrain.optim.rounding import StackedHashes


class Lion(GuardedOptimizer):
    """One moment per parameter, updates of equal size everywhere: rates are 3 to 10 times lower than AdamW's, weight decay as much higher."""

    moments = ("exp_avg",)

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], formats: Formats) -> None:
        super().__init__(groups, lr, formats)
        self.betas = betas

    @torch.no_grad()
    def step(self) -> None:
        for group, device, parameters in self.by_device():
            rate, left_out = group["lr"], self.left_out(parameters[0])
            numbers = [*(1 - beta for beta in self.betas), rate, 1 - rate * group["weight_decay"]]
            if device.type == "cuda":  # compiled for numbers, the update would be compiled anew for each other one
                numbers = [torch.full((), number, dtype=torch.float32, device=device) for number in numbers]
            for parameter in parameters:
                tensors = [local(tensor).data for tensor in (parameter.grad, parameter, *self.state_of(parameter))]
                hashes = self.hashes([parameter], tensors[1:])
                for part, of_part in rows_in_cache(tensors, hashes):
                    in_one_kernel(_update_one, part[0])(*part, *numbers, left_out, of_part)


def _update_one(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    sign_share: Number,
    mean_share: Number,
    rate: Number,
    kept: Number,
    left_out: Tensor | None,
    hashes: StackedHashes | None,
) -> None:
    """Store a weight and its running mean after a step. `sign_share`, `mean_share`: those of the gradient. `kept`: what weight decay leaves."""
    wide, g = widened(mean), widened(gradient)
    updated = widened(weight) * kept - wide.lerp(g, sign_share).sign_() * rate
    for number, (tensor, value) in enumerate(((weight, updated), (mean, wide.lerp(g, mean_share)))):
        store(tensor, value, left_out, None if hashes is None else (hashes[0][number], hashes[1][number]))
