"""Expert parallelism: each rank holds some of the experts, and tokens travel to them (GShard, arXiv 2006.16668).

    rows (token, choice) of this rank's tokens, sorted by expert
        | exchange          each row goes to the rank that holds its expert
    rows of the group's tokens for this rank's experts; sorted by expert, each expert computes its own
        | exchange back
    rows in their first order, as one process has them: the same sum over a token's choices follows

The ranks of a group are neighbours among those that share weights (`shard` x `context`). They keep their own samples and positions, and the
rest of the network is spread as without experts. No expert has a capacity: a rank takes as many rows as are sent to it, which may be none.

The gradient of an expert holds the rows of its whole group, because backward sends their gradients to it. FSDP2 adds those of the other groups.
Tensor-parallel ranks route alike, so each exchanges rows with those of its own columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import own_part
from pretrain.errors import ConfigError
from pretrain.models.compiling import never_compiled
from pretrain.models.experts import Experts, even_loads, inverse_of, permute
from pretrain.parallel.collectives import extend


class ExpertAxis:
    """Splits the experts of a network that is on the meta device over the ranks of the mesh's expert groups."""

    def __init__(self, mesh: Mesh) -> None:
        self.whole_mesh = mesh
        self.group = mesh.expert_mesh("expert").get_group()
        self.size, self.rank = mesh.sizes["expert"], mesh.expert_rank

    def split(self, network: nn.Module) -> None:
        """Give each rank its experts, and set what they compute with. What tensor-parallel ranks set is set before."""
        for module in network.modules():
            if isinstance(module, Experts):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    self._split_parameter(module, name, parameter)
                module.product = partial(self._own_product, module.product)
                extend(module, OwnExperts, ranks=self)

    def _split_parameter(self, module: Experts, name: str, whole: nn.Parameter) -> None:
        """Split a stacked parameter [E, ...] by experts, beside the split that tensor-parallel ranks made."""
        inner = list(whole.placements) if isinstance(whole, DTensor) else []
        mesh = self.whole_mesh.expert_mesh("expert", "tensor") if inner else self.whole_mesh.expert_mesh("expert")
        values = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        part = distribute_tensor(values, mesh, [Shard(0), *inner], src_data_rank=None)  # it communicates nothing
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    def own(self, count: int) -> slice:
        """The experts of this rank, of so many."""
        return own_part(count, self.rank, self.size)

    def _own_product(
        self,
        product: Callable[..., Tensor],
        x_RI: Tensor,
        weight_EOI: DTensor,
        bias_EO: DTensor | None,
        experts_R: Tensor,
        ends_E: Tensor,
    ) -> Tensor:
        """`project_rows` with this rank's experts; all rows are for them."""
        own = self.own(len(ends_E))
        if weight_EOI.device_mesh.ndim == 1:  # else tensor-parallel ranks take their part themselves
            weight_EOI = weight_EOI.to_local()
        bias_EO = None if bias_EO is None else bias_EO.to_local()
        return product(x_RI, weight_EOI, bias_EO, experts_R - own.start, ends_E[own])


def check_torch(ranks: int) -> None:
    """Raise ConfigError if torch's `fully_shard` cannot shard experts over other ranks than the rest."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        raise ConfigError(
            f"parallel.expert={ranks}: fully_shard of torch {torch.__version__} shards all parameters over the same ranks; install torch 2.13, "
            "or set parallel.expert=1"
        )


def placements_of_experts(mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """What FSDP2 asks for each parameter: how an expert's is sharded over the ranks that hold it. None for all others.

    They are sharded by the first dimension that divides evenly, else by experts: there may be fewer experts than ranks that hold them.
    """
    # Described in the documentation of `fully_shard`, and not exported.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    if mesh.sizes["replicate"] > 1:
        ranks = HSDPMeshInfo(mesh.expert_mesh("replicate", "expert_shard"), shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        ranks = FSDPMeshInfo(mesh.expert_mesh("expert_shard"), shard_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if not isinstance(parameter, DTensor) or "expert" not in parameter.device_mesh.mesh_dim_names:
            return None
        even = [dim for dim, size in enumerate(parameter.to_local().shape) if size % ranks.shard_mesh_size == 0]
        return ShardPlacementResult(Shard(even[0] if even else 0), ranks)

    return placement


class OwnExperts:
    """Experts of which some are at hand: rows are sent to the ranks that hold theirs, and their results come back."""

    ranks: ExpertAxis

    @never_compiled  # sizes that change in every step
    def forward(self, x_RD: Tensor, experts_R: Tensor) -> Tensor:
        """Each row through its expert; `experts_R` says which, and is sorted."""
        group, own = self.ranks.group, self.ranks.own(len(self.up))
        sent_NE, got_NE = _exchanged_counts(experts_R, len(self.up), self.ranks.size, group)
        sent, got = _exchanged_rows(sent_NE, got_NE, len(x_RD))
        arrived_R = torch.arange(own.start, own.stop, device=x_RD.device).repeat(len(got_NE))
        arrived_R = arrived_R.repeat_interleave(got_NE.flatten(), output_size=sum(got))
        here_R, order_R = arrived_R.sort(stable=True)
        place_R = inverse_of(order_R)
        y_RD = super().forward(permute(_Exchange.apply(x_RD, sent, got, group), order_R, place_R), here_R)
        return _Exchange.apply(permute(y_RD, place_R, order_R), got, sent, group)


def _exchanged_counts(experts_R: Tensor, count: int, ranks: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """How many rows this rank sends to each expert of each rank, and how many each rank sends to this rank's experts: [ranks, count / ranks]."""
    ends_E = torch.searchsorted(experts_R, torch.arange(count, device=experts_R.device), right=True)
    sent_NE = ends_E.diff(prepend=ends_E.new_zeros(1)).unflatten(0, (ranks, -1))
    got_NE = torch.empty_like(sent_NE)
    dist.all_to_all_single(got_NE, sent_NE, group=group)
    return sent_NE, got_NE


def _exchanged_rows(sent_NE: Tensor, got_NE: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to each rank, and gets from it; brought to the host, as the sizes of what is exchanged."""
    if sent_NE.is_meta:
        return even_loads(rows, len(sent_NE)), even_loads(rows, len(sent_NE))
    return tuple(torch.stack((sent_NE, got_NE)).sum(-1).tolist())


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group: the first `sent[0]` to the first rank, and so on. `got` come from each. Gradients go the other way."""

    @staticmethod
    def forward(ctx, x_RD: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _exchange(x_RD, sent, got, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(g_RD, ctx.got, ctx.sent, ctx.group), None, None, None


def _exchange(x_RD: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived_RD = x_RD.new_empty(sum(got), *x_RD.shape[1:])
    dist.all_to_all_single(arrived_RD, x_RD.contiguous(), got, sent, group=group)
    return arrived_RD
