"""Muon: momentum whose matrices are made orthogonal (Jordan, kellerjordan.github.io/posts/muon; scaled as in arXiv 2502.16982).

    momentum      by element, on each rank's own parts
    gathering     matrices of one shape are stacked and dealt out: each rank gets whole ones, and each is computed once
    polynomial    x <- a x + b (x x') x + c (x x')^2 x, a few times: singular values go to 1, and no decomposition is needed
    scattering    back to the parts that the ranks hold

A sharded batch of matrices is a tensor [K, M, N] that is sharded over M or N. Sharded over K, it has whole matrices: an exchange of one kind
of sharding for the other is all that gathering and scattering are, under every layout.

    exchange      batch 2 gathered | batch 3 gathered | batch 4 ...
    products                       | batch 2          | batch 3 ...
    exchange                       |                  | batch 2 scattered

The exchanges are asynchronous, so that they travel while the matrices of another batch are multiplied.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pretrain.config.optim_schema import MuonOptions
from pretrain.distributed.shards import local
from pretrain.optim.exchange import begin_exchange
from pretrain.optim.guarded import Formats, GuardedOptimizer, widened

BATCH, CHUNK = 8, 1 << 26
"""Matrices, and numbers in them, that a rank computes at once, at most. They bound the memory of a step, and three batches are under way."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients. After five iterations, singular values above a thousandth of the norm lie between 0.47 and 1.21."""
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The best polynomials for singular values of at least a thousandth of the norm (Amsel et al., arXiv 2505.16932)."""
SAFETY = 1.01
"""By how much each of them but the last one is stretched, for products in bf16 (same paper)."""


def coefficients(options: MuonOptions) -> list[tuple[float, float, float]]:
    """(a, b, c) of each iteration."""
    if options.polynomial == "quintic":
        return [QUINTIC] * options.iterations
    stretched = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]]
    return [*stretched, *[POLAR_EXPRESS[-1]] * options.iterations][: options.iterations]


def orthogonalize(x_KMN: Tensor, polynomials: list[tuple[float, float, float]], dtype: torch.dtype) -> Tensor:
    """Matrices with the singular vectors of these, and singular values near 1; those of zeros are zero. Products are made in `dtype`."""
    if len(x_KMN) > (most := _at_once(x_KMN.shape)):  # an expert layer's
        return torch.cat([orthogonalize(part, polynomials, dtype) for part in x_KMN.split(most)])
    norm_K = torch.linalg.vector_norm(x_KMN, dim=(1, 2), keepdim=True)
    is_tall = x_KMN.shape[1] > x_KMN.shape[2]
    x = (x_KMN / norm_K.clamp(min=1e-7)).to(dtype)
    x = x.mT if is_tall else x
    for a, b, c in polynomials:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(x_KMN.dtype)


def updates(x_KMN: Tensor, rows: tuple[int, ...], polynomials: list[tuple[float, float, float]], dtype: torch.dtype) -> Tensor:
    """What a step at rate 1 takes from matrices. Each projection in them is orthogonalized apart, and scaled by its own shape to the size
    of AdamW's update, 0.2 per element. `rows`: `fused_rows` of `Linear`; a projection has the rows of all heads.
    """
    if not rows:
        return orthogonalize(x_KMN, polynomials, dtype).mul_(0.2 * max(x_KMN.shape[1:]) ** 0.5)
    parts_KHRN = x_KMN.unflatten(1, (-1, sum(rows))).split(rows, dim=2)
    made = [updates(part.flatten(1, 2), (), polynomials, dtype).view_as(part) for part in parts_KHRN]
    return torch.cat(made, dim=2).flatten(1, 2)


def _at_once(shape: torch.Size) -> int:
    """How many matrices of a shape a rank computes at once."""
    return max(1, min(BATCH, CHUNK // max(1, shape[-2] * shape[-1])))


class Muon(GuardedOptimizer):
    """Updates matrices [M, N], and stacked ones of experts [E, M, N], each for itself. A group may have `fused_rows`, of each of its matrices.

    An update has the size of AdamW's, 0.2 per element, so that both take the same rate and decay. `replicas`: the ranks that hold equal
    copies of plain tensors; each makes a part of the matrices. `dtype`: of the products.
    """

    moments = ("momentum",)

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        options: MuonOptions,
        dtype: torch.dtype,
        formats: Formats,
        replicas: DeviceMesh | None = None,
    ) -> None:
        super().__init__(groups, lr, formats)
        self.momentum, self.dtype, self.replicas = options.momentum, dtype, replicas
        self.polynomials = coefficients(options)

    @torch.no_grad()
    def step(self) -> None:
        behind: list[Iterator[None]] = []
        for update in chain(self._updates(), (iter(()), iter(()))):
            next(update, None)  # what it gathers travels while the one before it is multiplied
            for earlier in behind:
                next(earlier, None)
            behind = [update, *behind[:1]]

    def _updates(self) -> Iterator[Iterator[None]]:
        """The updates of a step, batch by batch. Each stops twice: where its matrices travel to whole ones, and on their way back."""
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape, self._spread(parameter)].append(parameter)
            for (shape, (mesh, _)), members in alike.items():
                most = 1 if len(shape) == 3 else _at_once(shape) * (1 if mesh is None else mesh.size())
                remaining = iter(members)
                while batch := list(islice(remaining, most)):
                    yield self._update(batch, group["lr"], group["weight_decay"], group.get("fused_rows", ()))

    def _spread(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[Placement, ...]]:
        """Over which ranks a parameter lies, and how."""
        if isinstance(parameter, DTensor):
            return parameter.device_mesh, parameter.placements
        return self.replicas, (Replicate(),) if self.replicas else ()

    def _update(self, parameters: list[Tensor], rate: float, decay: float, rows: tuple[int, ...]) -> Iterator[None]:
        """Update parameters of one shape that are spread alike."""
        stored = [(local(p), local(self.state_of(p)[0])) for p in parameters]
        following = [widened(mean).lerp(widened(local(p.grad)), 1 - self.momentum) for p, (_, mean) in zip(parameters, stored)]
        nesterov = [widened(local(p.grad)).lerp(mean, self.momentum) for p, mean in zip(parameters, following)]
        directions = yield from self._directions(nesterov, parameters[0], rows)
        for parameter, tensors, direction, mean in zip(parameters, stored, directions, following):
            updated = (widened(tensors[0]) * (1 - rate * decay)).add_(direction, alpha=-rate)
            self.write(parameter, tensors, (updated, mean))

    def _directions(self, parts: list[Tensor], like: Tensor, rows: tuple[int, ...]) -> Generator[None, None, list[Tensor]]:
        """This rank's parts of the matrices' `updates`. `parts`: of the matrices, which are spread as `like` is; they are used up."""
        (mesh, placements), stacked = self._spread(like), like.dim() == 3
        device, batch = parts[0].device, parts[0] if stacked else torch.stack(parts)
        shape = like.shape if stacked else torch.Size((len(parts), *like.shape))
        parts.clear()  # nothing is held twice while it travels
        if mesh is not None:
            batch = batch.to(mesh.device_type)  # with offload, the parts are on the host
            if not stacked:
                placements = tuple(_beside_a_batch(placement) for placement in placements)
            batch = yield from self._whole_ones(batch, shape, mesh, placements, rows)
        else:
            batch = updates(batch, rows, self.polynomials, self.dtype)
        batch = batch.to(device)
        return [batch] if stacked else list(batch.unbind())

    def _whole_ones(
        self, part: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rows: tuple[int, ...]
    ) -> Generator[None, None, Tensor]:
        """`updates` of a batch that ranks share; its part of the result on this rank."""
        # Ranks that hold other matrices of the batch have nothing to give each other. A strided shard is no `Shard` for torch's `is_shard`.
        axes = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) != 0]
        copies = [axis for axis in axes if isinstance(placements[axis], Replicate)]
        # Dealt out, they are padded to as many for every rank. Of a few, 1,024 ranks with copies would hold 10 GB of zeros each.
        are_few = bool(copies) and 2 * len(part) <= math.prod(mesh.size(axis) for axis in axes)
        if are_few:
            axes = [axis for axis in axes if axis not in copies]
        count = len(part)
        if axes:
            inner, placements = _on_axes(mesh, placements, axes)
            # With as many for every rank, torch's exchange is right on several axes at once as well.
            missing, dealt = -count % inner.size(), [Shard(0)] * inner.ndim
            shape = torch.Size((count + missing, *shape[1:]))
            arrival = begin_exchange(torch.nn.functional.pad(part, (0, 0, 0, 0, 0, missing)), inner, shape, placements, dealt)
            yield
            part = arrival()
        if are_few:
            part = yield from self._among_copies(part, mesh, copies, rows)
        else:
            part = updates(part, rows, self.polynomials, self.dtype)
        if axes:
            arrival = begin_exchange(part, inner, shape, dealt, placements)
            if not are_few:  # else it has stopped twice
                yield
            part = arrival()
        return part[:count]

    def _among_copies(
        self, whole: Tensor, mesh: DeviceMesh, axes: list[int], rows: tuple[int, ...]
    ) -> Generator[None, None, Tensor]:
        """`updates` of matrices that the ranks of these axes all have. Each makes some of them, and they add up the parts."""
        place, places = 0, 1
        for axis in axes:
            place, places = place * mesh.size(axis) + mesh.get_local_rank(axis), places * mesh.size(axis)
        made, mine = torch.zeros_like(whole), slice(place, None, places)
        if len(whole[mine]):
            made[mine] = updates(whole[mine], rows, self.polynomials, self.dtype)
        first, *others = (mesh.get_group(axis) for axis in axes)
        work = dist.all_reduce(made, group=first, async_op=True)
        yield
        work.wait()
        for group in others:
            dist.all_reduce(made, group=group)
        return made


def _on_axes(mesh: DeviceMesh, placements: tuple[Placement, ...], axes: list[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    if len(axes) == mesh.ndim:
        return mesh, placements
    return mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)], tuple(placements[axis] for axis in axes)


def _beside_a_batch(placement: Placement) -> Placement:
    """The placement of a matrix [M, N], for a batch of them [K, M, N]."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement
