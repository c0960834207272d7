"""Schedule-free AdamW: a running mean of the weights in place of a falling learning rate (Defazio et al., arXiv 2405.15682).

    z    what AdamW's steps move, without a running mean of gradients
    x    the mean of z over all steps: the model
    y    (1 - beta1) z + beta1 x: what is trained, where gradients are computed

Only x and y are stored; z - x = (y - x) / (1 - beta1). With c, the share of the newest z in x, a step is

    z - x    less  rate x (gradient / (sqrt(mean of squares) + eps) + weight decay x y)
    x        plus  c (z - x)
    y        =     x + (1 - beta1) (1 - c) (z - x)

Each z counts in the mean as the square of its step's share of the peak learning rate, so those of a warmup count little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.distributed.shards import local
from pretrain.optim.guarded import (
    Formats,
    GuardedOptimizer,
    Number,
    bias_corrections,
    in_one_kernel,
    rows_in_cache,
    store,
    widened,
)


class ScheduleFreeAdamW(GuardedOptimizer):
    """Between steps, parameters are y, and the state `trained` is x. `OptimizerSet.averaged` exchanges them: a checkpoint has x as the model."""

    moments = ("trained", "exp_avg_sq")
    scales_gradients = True

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, formats: Formats) -> None:
        super().__init__(groups, lr, formats)
        self.peak, self.betas, self.eps = lr, betas, eps

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        state = self.state[parameter]
        if not state:
            state["trained"] = parameter.detach().clone()
            # Steps, what they count in the mean, and 1 - beta1 of the last one, by which z follows from y also where betas have changed.
            for name, first in (("step", 0.0), ("shares", 0.0), ("nearness", 1 - self.betas[0])):
                state[name] = torch.full((), first, dtype=torch.float32, device=local(parameter).device)
        return super().state_of(parameter)

    @torch.no_grad()
    def step(self) -> None:
        for group, device, parameters in self.by_device():
            self._update(parameters, group, device)

    def _update(self, parameters: list[Tensor], group: dict, device: torch.device) -> None:
        """What is the same for many parameters is computed for all at once: a GPU would wait for kernels of single numbers."""
        states = [(*self.state_of(p), *(self.state[p][name] for name in ("step", "shares", "nearness"))) for p in parameters]
        means, squares, steps, shares, before = map(list, zip(*states))
        left_out, rate, count = self.left_out(parameters[0]), group["lr"], len(parameters)
        share = (rate / (self.peak * group["rate_scale"])) ** 2 if group["rate_scale"] else 0.0
        taken = torch.ones_like(steps[0]) if left_out is None else 1 - left_out.to(steps[0])
        torch._foreach_add_(steps, [taken] * count)
        torch._foreach_add_(shares, [taken * share] * count)
        newest = torch._foreach_div([torch.full_like(taken, share)] * count, torch._foreach_clamp_min(shares, 1e-30))
        numbers = [1 - self.betas[0], 1 - self.betas[1], self.eps, rate, group["weight_decay"]]
        if device.type == "cuda":  # compiled for numbers, the update would be compiled anew for each other one
            numbers = [torch.full((), number, dtype=torch.float32, device=device) for number in numbers]
        factor = None if self.gradient_factor is None else self.gradient_factor.to(steps[0])
        of_each = zip(parameters, means, squares, bias_corrections(self.betas[1], steps), newest, before)
        for p, mean, square, *own in of_each:
            tensors = [local(tensor).data for tensor in (p.grad, p, mean, square)]
            for part, _ in rows_in_cache(tensors):
                in_one_kernel(_update_one, part[0])(*part, *own, *numbers, factor, left_out)
        torch._foreach_lerp_(before, [torch.full_like(taken, 1 - self.betas[0])] * count, [taken] * count)


def _update_one(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    correction: Tensor,
    newest: Tensor,
    before: Tensor,
    nearness: Number,
    square_share: Number,
    eps: Number,
    rate: Number,
    decay: Number,
    factor: Tensor | None,
    left_out: Tensor | None,
) -> None:
    """Store y, x and the mean of squares after a step. `newest`: c. `before`, `nearness`: 1 - beta1 of the last step and of this one. `correction`: of the mean of squares. `factor`: of the gradient."""
    g = widened(gradient)
    if factor is not None:
        g = g * factor
    new_square = square.lerp(g.square(), square_share)
    direction = (g / (new_square / correction).sqrt_().add_(eps)).add_(weight * decay)
    apart = (weight - mean).div_(before).sub_(direction.mul_(rate))  # z - x
    new_mean = mean + newest * apart
    updated = apart.mul_(nearness * (1 - newest)).add_(new_mean)
    for tensor, value in ((weight, updated), (mean, new_mean), (square, new_square)):
        store(tensor, value, left_out, None)
