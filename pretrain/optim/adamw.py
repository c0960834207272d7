"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): torch's fused one, and ours for weights or moments in bf16 or 8 bits, which are rounded at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretrain.distributed.shards import local
from pretrain.optim.eight_bits import decode_means, encode_means
from pretrain.optim.guarded import (
    Formats,
    GuardedOptimizer,
    Number,
    are_few,
    bias_corrections,
    in_one_kernel,
    rows_in_cache,
    store,
    widened,
    widest,
)
from pretrain.optim.rounding import Hashes, StackedHashes, random_bits

AT_ONCE = 4
"""Tensors of a shape that a GPU updates by one call, because a call takes the host about as long as a small tensor takes the GPU."""


class AdamW(GuardedOptimizer):
    """torch's AdamW, computed in fp32 from what is stored, and with the names of its state."""

    moments = ("exp_avg", "exp_avg_sq")
    scales_gradients = True

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
        for group, device, parameters in self.by_device():
            self._update(parameters, group["lr"], group["weight_decay"], device)

    def _update(self, parameters: list[Tensor], rate: float, decay: float, device: torch.device) -> None:
        """What is the same for many parameters is computed for all at once: a GPU would wait for kernels of single numbers."""
        states, on_gpu = [self.state_of(parameter) for parameter in parameters], device.type == "cuda"
        steps, left_out = [self.state[parameter]["step"] for parameter in parameters], self.left_out(parameters[0])
        if left_out is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [1 - left_out.to(steps[0])] * len(steps))  # not the tensor itself: the host would wait
        values = [*(1 - beta for beta in self.betas), self.eps, rate, 1 - rate * decay]
        of_kind: dict[torch.dtype, list[Number | None]] = {}
        for kind in set(map(widest, parameters)):
            numbers = [torch.full((), n, dtype=kind, device=device) for n in values] if on_gpu else values
            of_kind[kind] = [*numbers, None if self.gradient_factor is None else self.gradient_factor.to(device, kind)]
        corrections = list(zip(*(bias_corrections(beta, steps) for beta in self.betas)))
        for places in self.alike(parameters):
            gradient, numbers = local(parameters[places[0]].grad), of_kind[widest(parameters[places[0]])]
            if not gradient.numel():
                continue
            for together in _together(places, gradient) if on_gpu else [places]:
                updates = [
                    (*(local(x).data for x in (parameters[n].grad, parameters[n], *states[n])), *corrections[n])
                    for n in together
                ]
                hashes = self.hashes([parameters[n] for n in together], updates[0][1:4])
                if on_gpu:
                    update = in_one_kernel(_update_alike, gradient, by_shape=len(together))
                    update(updates, hashes, [_under_new_names(numbers) for _ in together], left_out)
                    continue
                for n, (*tensors, mean_correction, square_correction) in enumerate(updates):
                    own = None if hashes is None else tuple(of_all[3 * n : 3 * n + 3] for of_all in hashes)
                    for part, of_part in rows_in_cache(tensors, own):
                        _update_alike([(*part, mean_correction, square_correction)], of_part, [numbers], left_out)


Update = tuple
"""This rank's parts of a gradient, a weight and its two moments, and their corrections."""


class FusedAdamW(AdamW):
    """torch's fused AdamW on this rank's parts. Sharded parameters themselves keep the host busy for nearly twice as long."""

    scales_gradients = False

    @torch.no_grad()
    def step(self) -> None:
        for group, _, parameters in self.by_device():
            means, squares = zip(*(self.state_of(parameter) for parameter in parameters))
            steps = [self.state[parameter]["step"] for parameter in parameters]
            updated = (parameters, [parameter.grad for parameter in parameters], means, squares, (), steps)
            adamw(
                *([local(tensor) for tensor in tensors] for tensors in updated),
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )


def _together(places: list[int], gradient: Tensor) -> list[list[int]]:
    """Which tensors of a shape a GPU updates by one call."""
    whole = len(places) // AT_ONCE * AT_ONCE
    if whole and not are_few(_update_alike, gradient, AT_ONCE):
        whole = 0
    return [*(places[n : n + AT_ONCE] for n in range(0, whole, AT_ONCE)), *([place] for place in places[whole:])]


def _under_new_names(numbers: list[Tensor | None]) -> list[Tensor | None]:
    """For a compiler other numbers. Where several updates read the same ones, Inductor makes one kernel of them, with few threads for its many registers."""
    return [None if number is None else number.view(()) for number in numbers]


def _update_alike(
    updates: list[Update], hashes: StackedHashes | None, numbers: list[list[Number | None]], left_out: Tensor | None
) -> None:
    """`_update_one` for tensors of one shape. Their hashes are two whole tensors: where views begin is something that a compiler makes new versions for."""
    for n, (update, own) in enumerate(zip(updates, numbers)):
        places = range(3 * n, 3 * n + 3)  # of a weight and its moments
        of_update = [None] * 3 if hashes is None else [(hashes[0][place], hashes[1][place]) for place in places]
        _update_one(*update, of_update, *own, left_out)


def _update_one(
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
    factor: Tensor | None,
    left_out: Tensor | None,
) -> None:
    """Store what weights and moments are after a step. `kept`: what weight decay leaves of a weight. `factor`: of the gradient, which is not rounded
    after it. The others as in the paper, and `store`.
    """
    stored, is_coded, g = (weight, mean, square), mean.dtype == torch.uint8, widened(gradient)
    if factor is not None:
        g = g * factor
    means = decode_means(mean, square) if is_coded else (widened(mean), widened(square))
    new_mean, new_square = means[0].lerp(g, mean_share), means[1].lerp(g.square(), square_share)
    divisor = (new_square / square_correction).sqrt_().add_(eps)
    updated = (widened(weight) * kept).sub_((new_mean / divisor).mul_(rate / mean_correction))
    if is_coded:
        new_mean, new_square = encode_means(new_mean, new_square, (random_bits(hashes[1]), random_bits(hashes[2])))
    for tensor, value, of_places in zip(stored, (updated, new_mean, new_square), hashes):
        store(tensor, value, left_out, of_places)
