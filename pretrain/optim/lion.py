"""Lion: the sign of a running mean of gradients (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

import torch

from pretrain.distributed.shards import local
from pretrain.optim.guarded import Formats, GuardedOptimizer, widened


class Lion(GuardedOptimizer):
    """One moment per parameter, updates of equal size everywhere: rates are 3 to 10 times lower than AdamW's, weight decay as much higher."""

    moments = ("exp_avg",)

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], formats: Formats) -> None:
        super().__init__(groups, lr, formats)
        self.betas = betas

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                stored = local(parameter), local(self.state_of(parameter)[0])
                weight, mean, gradient = (widened(tensor) for tensor in (*stored, local(parameter.grad)))
                direction = mean.lerp(gradient, 1 - self.betas[0]).sign_()
                updated = (weight * (1 - group["lr"] * group["weight_decay"])).add_(direction, alpha=-group["lr"])
                self.write(parameter, stored, (updated, mean.lerp(gradient, 1 - self.betas[1])))
