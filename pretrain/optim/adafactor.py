"""Adafactor: AdamW's mean of squares, kept by rows and columns (Shazeer and Stern, arXiv 1804.04235, algorithm 4).

    mean of g^2 by row       R  [..., M, 1]        of matrices [M, N], and of each of a stack of them
    mean of g^2 by column    C  [..., 1, N]
    the mean itself          V = R C / mean(R)     where it is needed; vectors keep V
    update                   g / sqrt(V), and less where its root mean square is above a threshold
    size of a step           rate x max(least scale, root mean square of the weights)

Ranks that share a matrix add up the parts of these sums. R and C are sharded as the matrix is, and whole where only the other dimension is cut.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from pretrain.config.optim_schema import AdafactorOptions
from pretrain.distributed.shards import local
from pretrain.optim.guarded import Formats, GuardedOptimizer, widened, widest

TOGETHER = 8
"""Parameters whose sums travel in one message, and whose updates are in memory at one time."""
LEAST_SQUARE = 1e-30
"""The paper's epsilon 1, which it adds to squares. Here it bounds their means from below."""
ROWS, COLUMNS = -2, -1


class Adafactor(GuardedOptimizer):
    """A step of it is that of torch.optim.Adafactor with two differences. The rate has no bound 1/sqrt(step), which is for schedules. Means of
    squares are at least 1e-30; torch squares its `eps1` for the bound of R C / mean(R), and 1e-60 is 0 in fp32.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: AdafactorOptions, formats: Formats) -> None:
        super().__init__(groups, lr, formats)
        self.options = options

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """The mean of squares by row and by column, or of a vector."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            if parameter.dim() > 1:
                state["row_var"], state["col_var"] = _one_along(parameter, COLUMNS), _one_along(parameter, ROWS)
            else:
                state["variance"] = torch.zeros_like(parameter, dtype=widest(parameter))
        return [value for name, value in state.items() if name != "step"]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    spread = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
                    alike[spread, parameter.dim()].append(parameter)
            for members in alike.values():
                for first in range(0, len(members), TOGETHER):
                    self._update(members[first : first + TOGETHER], group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], rate: float, decay: float) -> None:
        """Update parameters that are spread alike, and have as many dimensions."""
        options, like = self.options, parameters[0]
        weights, gradients = ([widened(local(x)) for x in tensors] for tensors in (parameters, [p.grad for p in parameters]))
        sizes = _summed([weight.square().sum() for weight in weights], like)
        kept = [[local(state) for state in self.state_of(parameter)] for parameter in parameters]
        states = self._next_states(parameters, gradients, kept)
        if like.dim() > 1:
            totals = _summed([rows.sum(dim=ROWS, keepdim=True) for rows, _ in states], like, ROWS)
            squares = [
                rows / (total / parameter.shape[ROWS]).clamp_(min=LEAST_SQUARE) * columns  # R C alone may be too small for fp32
                for parameter, (rows, columns), total in zip(parameters, states, totals)
            ]
        else:
            squares = [variance.clone() for (variance,) in states]
        updates = [square.clamp_(min=LEAST_SQUARE).rsqrt_().mul_(gradient) for square, gradient in zip(squares, gradients)]
        lengths = _summed([update.square().sum() for update in updates], like)
        for parameter, weight, update, size, length, old, new in zip(
            parameters, weights, updates, sizes, lengths, kept, states
        ):
            scale = (size / parameter.numel()).sqrt_().clamp_(min=options.least_scale)
            excess = ((length / parameter.numel()).sqrt_() / options.clip).clamp_(min=1.0)
            updated = (weight * (1 - rate * decay)).sub_(update.mul_(rate * scale / excess))
            self.write(parameter, [local(parameter), *old], (updated, *new))

    def _next_states(self, parameters: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]]) -> list[list[Tensor]]:
        """What this rank's parts of the `states` are after the step."""
        like, shares = parameters[0], []
        for parameter in parameters:
            steps = self.state[parameter]["step"]
            steps += 1 if self.found_inf is None else 1 - self.found_inf.to(steps)
            shares.append(steps.clamp(min=1.0) ** -self.options.decay)
        if like.dim() < 2:
            return [
                [state.lerp(gradient.square(), share.to(state))] for (state,), gradient, share in zip(states, gradients, shares)
            ]
        by_dim = []
        for dim in (COLUMNS, ROWS):
            sums = _summed([gradient.square().sum(dim=dim, keepdim=True) for gradient in gradients], like, dim)
            by_dim.append([total / parameter.shape[dim] for parameter, total in zip(parameters, sums)])
        return [
            [state.lerp(mean, share.to(state)) for state, mean in zip(both, means)]
            for both, share, *means in zip(states, shares, *by_dim)
        ]


def _one_along(parameter: Tensor, dim: int) -> Tensor:
    """Zeros like a parameter that has one element along a dimension, in the format to compute in."""

    def cut(shape: torch.Size) -> torch.Size:
        sizes = list(shape)
        sizes[dim] = 1
        return torch.Size(sizes)

    own = local(parameter)
    zeros = torch.zeros(cut(own.shape), dtype=widest(parameter), device=own.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = cut(parameter.shape)
    placements = [Replicate() if _cuts(placement, dim, parameter) else placement for placement in parameter.placements]
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=whole, stride=stride)


def _cuts(placement: Any, dim: int, parameter: Tensor) -> bool:
    """Whether ranks have different parts of a dimension of a parameter."""
    return getattr(placement, "dim", None) == dim % parameter.dim()


def _summed(parts: list[Tensor], like: Tensor, dim: int | None = None) -> list[Tensor]:
    """Sums over the ranks that share a parameter, or over those alone that share its dimension `dim`, in one message."""
    if not isinstance(like, DTensor):
        return parts
    mesh = like.device_mesh
    axes = [
        axis
        for axis, placement in enumerate(like.placements)
        if not placement.is_replicate() and (dim is None or _cuts(placement, dim, like))
    ]
    if not axes:
        return parts
    device = parts[0].device
    together = torch.cat([part.flatten() for part in parts]).to(mesh.device_type)  # with offload, they are on the host
    for axis in axes:
        dist.all_reduce(together, group=mesh.get_group(axis))
    summed = together.to(device).split([part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(summed, parts)]
