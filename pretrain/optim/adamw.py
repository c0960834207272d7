"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) for weights or moments in bf16 or 8 bits, which torch's fused one does not round at random."""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.distributed.shards import local
from pretrain.optim.eight_bits import decode_means, encode_means
from pretrain.optim.guarded import Formats, GuardedOptimizer, widened

CHUNK = 1 << 24
"""Numbers that are updated at once. It bounds the memory of a step."""


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
        is_coded = stored[1].dtype == torch.uint8
        gradient, steps = local(parameter.grad), self.state[parameter]["step"]
        steps += 1 if self.found_inf is None else 1 - self.found_inf.to(steps)
        corrections = [1 - beta**steps for beta in self.betas]
        rows = max(1, CHUNK // max(1, gradient[:1].numel()))
        for first in range(0, len(gradient), rows):
            chunk = slice(first, min(first + rows, len(gradient)))
            weight, g = widened(stored[0][chunk]), widened(gradient[chunk])
            mean, square = (
                decode_means(stored[1][chunk], stored[2][chunk]) if is_coded else (widened(x[chunk]) for x in stored[1:])
            )
            mean, square = mean.lerp(g, 1 - self.betas[0]), square.lerp(g.square(), 1 - self.betas[1])
            divisor = (square / corrections[1]).sqrt_().add_(self.eps)
            updated = (weight * (1 - rate * decay)).sub_((mean / divisor).mul_(rate / corrections[0]))
            if is_coded:
                bits = (self.random_bits(parameter, number, chunk, mean.device) for number in (1, 2))
                mean, square = encode_means(mean, square, tuple(bits))
            self.write(parameter, stored, (updated, mean, square), chunk)
