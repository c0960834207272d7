"""The grid of a run's ranks, with one axis for each kind of parallelism.

    pipeline     stages: other layers, the same samples
    replicate    copies of the weights, other samples
    shard        parts of the weights, other samples
    context      other positions of the same samples
    tensor       other columns of the same matrices, the same samples

The axis `expert` holds other experts of the same layers. It has neither ranks nor samples of its own: its ranks are those of `shard` x
`context`, which share weights. So it is another view of the same grid, with the axes replicate, expert_shard, expert and tensor.

Ranks are numbered with `tensor` running fastest, so that the ranks that talk most are neighbours. Only this file makes device meshes,
and says which ranks count in a sum. Losses and gradients are summed over ranks, and never averaged.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, new_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretrain.distributed.ranks import Ranks

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


def coordinates_of(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's place on each axis of a grid of these sizes."""
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, sizes[axis])
    return coordinates


def expert_place(coordinates: dict[str, int], sizes: dict[str, int]) -> int:
    """A rank's place in its expert group, whose ranks are neighbours among those that share weights."""
    return (coordinates["shard"] * sizes["context"] + coordinates["context"]) % sizes["expert"]


class Mesh:
    """This rank's place in the grid, and sums over parts of it. `sizes` are by axis; an axis that is not named has size 1.

    `loss_rank`: the place on the axis `pipeline` of the ranks that compute the losses, by default the last one.
    """

    def __init__(self, sizes: dict[str, int], ranks: Ranks, loss_rank: int = -1) -> None:
        if unknown := set(sizes) - {*AXES, "expert"}:
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}, but not {', '.join(sorted(unknown))}")
        self.sizes = {axis: sizes.get(axis, 1) for axis in (*AXES, "expert")}
        if math.prod(self.sizes[axis] for axis in AXES) != ranks.world_size:
            raise ValueError(f"a mesh of {self.sizes} has another number of ranks than the {ranks.world_size} of the run")
        self.ranks, self.device = ranks, ranks.device
        self.coordinates = coordinates_of(ranks.rank, self.sizes)
        self._loss_rank = loss_rank % self.sizes["pipeline"]
        self._pipeline_groups: dict[str, ProcessGroup] = {}

    @property
    def data_size(self) -> int:
        """The number of groups of ranks that see different samples."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def data_rank(self) -> int:
        """This rank's group among these."""
        return self.coordinates["replicate"] * self.sizes["shard"] + self.coordinates["shard"]

    @property
    def expert_rank(self) -> int:
        """This rank's place in its expert group."""
        return expert_place(self.coordinates, self.sizes)

    def is_source(self, *axes: str) -> bool:
        """Whether this rank is the first one on each of these axes."""
        return all(self.coordinates[axis] == 0 for axis in axes)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples. Exactly one of the ranks that see the same samples counts them."""
        return self.is_source("pipeline", "context", "tensor")

    @property
    def counts_losses(self) -> bool:
        """Whether this rank counts its target tokens. Exactly one of the ranks that compute the loss of the same tokens counts them."""
        return self.coordinates["pipeline"] == self._loss_rank and self.is_source("tensor")

    def sum_over_data(self, name: str, values: Tensor) -> Tensor:
        """The sum over ranks with different samples, on the CPU, equal on every rank. `name` says what the ranks are doing."""
        return self.ranks.sum(name, values if self.counts_samples else values.new_zeros(values.shape))

    def add_over_loss(self, values: Tensor, of_all_ranks: Tensor | None = None) -> Tensor:
        """The sum over ranks with different target tokens, equal on every rank and on the device of the values (`Ranks.add`).

        `of_all_ranks`: a number that every rank counts. Its sum follows the others.
        """
        values = values if self.counts_losses else values.new_zeros(values.shape)
        return self.ranks.add(values if of_all_ranks is None else torch.cat([values, of_all_ranks.view(1)]))

    def add_over_layers(self, values: Tensor) -> Tensor:
        """The sum over ranks with different tokens or different layers, likewise."""
        return self.ranks.add(values if self.is_source("tensor") else values.new_zeros(values.shape))

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """torch's mesh of this rank's groups along these axes, where `shard` has the context ranks too. All ranks call it together the
        first time.
        """
        return self._device_mesh if axes == self._device_mesh.mesh_dim_names else self._device_mesh[axes]

    def expert_mesh(self, *axes: str) -> DeviceMesh:
        """torch's mesh of this rank's groups along these axes of the expert view. All ranks call it together the first time."""
        return self._expert_mesh[axes]

    @property
    def replicas(self) -> DeviceMesh | None:
        """The ranks that have copies of the same weights; None if this rank's weights have no copy. All ranks call it together the first time."""
        return self.device_mesh("replicate") if self.sizes["replicate"] > 1 else None

    @functools.cached_property
    def context_group(self) -> ProcessGroup:
        """The ranks that have other positions of the same samples. All ranks call it together the first time."""
        shape = (
            self.ranks.world_size // self.sizes["context"] // self.sizes["tensor"],
            self.sizes["context"],
            self.sizes["tensor"],
        )
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("rest", "context", "tensor")).get_group("context")

    def pipeline_group(self, purpose: str) -> ProcessGroup:
        """The ranks that have other layers and the same samples: a group for each purpose. All ranks call it together the first time."""
        if purpose not in self._pipeline_groups:
            # A device mesh would give the default group for every purpose where the pipeline has all ranks.
            apart = self.ranks.world_size // self.sizes["pipeline"]
            members = list(range(self.ranks.rank % apart, self.ranks.world_size, apart))
            self._pipeline_groups[purpose] = new_group(members, use_local_synchronization=True, group_desc=purpose)
        return self._pipeline_groups[purpose]

    def gradient_group(self) -> ProcessGroup | None:
        """The ranks whose gradients of the same parameters add up: those with other samples or positions. None: all ranks."""
        if self.data_size * self.sizes["context"] == self.ranks.world_size:
            return None
        if self.sizes["replicate"] == 1:
            return self.device_mesh("shard").get_group()
        return self.device_mesh("replicate", "shard")._flatten("data").get_group()

    @functools.cached_property
    def _device_mesh(self) -> DeviceMesh:
        # Weights are sharded over the context ranks as well, which are neighbours on the axis `shard`.
        sizes = self.sizes | {"shard": self.sizes["shard"] * self.sizes["context"], "context": 1}
        # An axis of size 1 would need one group per rank, and all ranks would make every group. FSDP2 needs its axis
        # even so.
        axes = [axis for axis in AXES if sizes[axis] > 1 or axis == "shard"]
        shape = tuple(sizes[axis] for axis in axes)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=tuple(axes))

    @functools.cached_property
    def _expert_mesh(self) -> DeviceMesh:
        sizes = self.sizes | {"expert_shard": self.sizes["shard"] * self.sizes["context"] // self.sizes["expert"]}
        kept = ("expert_shard", "expert")  # FSDP2 needs the first one even if its size is 1
        axes = [axis for axis in ("pipeline", "replicate", *kept, "tensor") if sizes[axis] > 1 or axis in kept]
        return init_device_mesh(self.device.type, tuple(sizes[axis] for axis in axes), mesh_dim_names=tuple(axes))
