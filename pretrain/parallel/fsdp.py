"""FSDP2: parameters, gradients and optimizer state are sharded; HSDP when there is a replicating axis as well.

Units of gathering are the network's parts: the embedding, each block, [final norm, output head]. With tied embeddings the shared table stays in the
root's unit, together with the norm, because it is used at both ends of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pretrain.config.schema import Config
from pretrain.distributed.ranks import Ranks
from pretrain.parallel.layout import Layout
from pretrain.parallel.strategy import DTYPES


class FullyShard:
    """`fully_shard` per unit, reductions that sum."""

    gradient_scale = 1.0

    def __init__(self, config: Config, layout: Layout, ranks: Ranks) -> None:
        self.config = config
        self.device = ranks.device
        self.data_rank = ranks.rank
        self.hybrid = layout.replicate > 1
        if self.hybrid:
            shape, names = (layout.replicate, layout.shard), ("replicate", "shard")
        else:
            shape, names = (layout.shard,), ("shard",)
        self.mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
        self.root: FSDPModule | None = None

    def place(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        options = {
            "mesh": self.mesh,
            # Inputs are left alone: rotary tables stay fp32, as they do under every other strategy.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[self.config.precision.compute],
                reduce_dtype=DTYPES[self.config.precision.reduce],
                cast_forward_inputs=False,
            ),
            "offload_policy": self._offload_policy(),
            # What gets no gradient (the balancing biases of routers) stays whole and in fp32 on every rank.
            "ignored_params": {parameter for parameter in model.parameters() if not parameter.requires_grad},
        }
        reshard, parts = self.config.parallel.reshard_after_forward, model.parts()
        for unit in (*parts.embedding, *parts.blocks):
            fully_shard(unit, reshard_after_forward=reshard, **options)
        if parts.head:
            # Used last in forward and first in backward: freeing it in between would only gather it again.
            fully_shard(parts.head, reshard_after_forward=False, **options)
        fully_shard(model, reshard_after_forward=False, **options)
        self.root = model
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sum, never average. gloo has no pre-multiplied sum, which a divide factor would otherwise use.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        model.to_empty(device="cpu" if self.config.parallel.offload else self.device)
        fill(model)
        return model

    def _offload_policy(self) -> OffloadPolicy:
        if not self.config.parallel.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def release(self) -> None:
        # Units that are kept for backward stay gathered when no backward comes, and `model.parameters()` are then the gathered
        # ones, in the compute format and unknown to the optimizer.
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def micro_step(self, last: bool) -> AbstractContextManager:
        mode = self.config.parallel.grad_sync
        if mode == "last":
            self.root.set_requires_gradient_sync(last)
        elif mode == "auto" and self.hybrid:
            self.root.set_requires_all_reduce(last)
        return nullcontext()
