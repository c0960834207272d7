"""FSDP2: parameters, gradients and optimizer state are sharded. With a replicating axis as well, this is HSDP.

    matrices      sharded; gathered in the compute format, unit by unit: the embedding, each block, the output head
    vectors       whole and in fp32 on every rank (norms, biases, sinks); their gradients are summed once per step

Where ranks hold different experts, each expert is sharded over the ranks that hold it (parallel/expert.py).

Vectors are whole so that norms and sinks compute with the fp32 values that one process has. Gathered with the matrices, they would be rounded
to bf16 first. They are a few of ten thousand parameters, and one small all-reduce per step is less traffic than gathering them with every unit.
When weights are gathered, and how long they are kept, is arranged in `fsdp_gathers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import local
from pretrain.models.layers import Embedding
from pretrain.models.output_head import OutputHead
from pretrain.parallel.blocks import DTYPES
from pretrain.parallel.collectives import add_in_place
from pretrain.parallel.fsdp_gathers import gather_ahead, groups_of, keeps_weights, lend, resharding, wait_for_gather
from pretrain.parallel.pipeline_order import DEFERRING


class FullyShard:
    """`fully_shard` per unit, reductions that sum."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.device = mesh.device
        self.hybrid = mesh.sizes["replicate"] > 1
        self.device_mesh = mesh.device_mesh("replicate", "shard") if self.hybrid else mesh.device_mesh("shard")
        self.placements_of_experts = None
        if mesh.sizes["expert"] > 1:
            from pretrain.parallel.expert import placements_of_experts

            self.placements_of_experts = placements_of_experts(mesh)
        self.group = mesh.gradient_group()
        self.alone = mesh.data_size * mesh.sizes["context"] == 1
        self.reduce_dtype = DTYPES[config.precision.reduce]
        self.gradient_dtype = DTYPES.get(config.precision.gradients)
        self.deferring = config.parallel.pipeline > 1 and config.parallel.pipeline_schedule in DEFERRING
        self.root: FSDPModule | None = None
        self.vectors: list[nn.Parameter] = []

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        self._shard(network)
        if self.device.type != "meta":  # FSDP2 would not notice that the parameters are others
            network.to_empty(device="cpu" if self.config.parallel.offload else self.device)
        _bring_vectors(network, self.device)  # with offload, FSDP2 moves only the matrices to the device
        self.vectors = [p for p in network.parameters() if _is_whole(p) and p.requires_grad]
        fill(network)
        if self.gradient_dtype not in (None, DTYPES[self.config.precision.master]):
            for group in _groups(network):
                _store_gradients_in(self.gradient_dtype, group)
        return network

    def _shard(self, network: nn.Module) -> None:
        options = {
            "mesh": self.device_mesh,
            # Inputs are not cast: rotary tables stay fp32, as under every other strategy.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[self.config.precision.compute], reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
            ),
            "offload_policy": self._offload_policy(),
            "shard_placement_fn": self._placement,
            "ignored_params": {parameter for parameter in network.parameters() if _is_whole(parameter)},
        }
        units = [unit for unit in network.units() if unit.apart]
        for unit, reshard in zip(units, resharding(units, self.config.parallel.reshard_after_forward)):
            modules = unit.modules if len(unit.modules) > 1 else unit.modules[0]
            fully_shard(modules, reshard_after_forward=reshard, **options)
        fully_shard(network, reshard_after_forward=False, **options)
        self.root = network
        for unit in units:
            if unit.lends_to is not None:
                lend(unit.modules[0], unit.lends_to, self.config.parallel.reshard_after_forward != "never")
        gather_ahead(network, units, self.config.parallel.prefetch, self.config.parallel.pipeline > 1)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                # Sum, never average. gloo has no pre-multiplied sum, which a divide factor would otherwise use.
                module.set_force_sum_reduction_for_comms(True)
                for group in groups_of(module):
                    if group.mesh_info.mesh.size() > 1:  # one rank would divide by 1.0, with a copy of all gradients
                        group.gradient_divide_factor = 1.0
                module.set_unshard_in_backward(not isinstance(module, Embedding))  # the gradient of a table needs no table
            if isinstance(module, (Embedding, OutputHead)) and self.reduce_dtype == torch.float32:
                module.register_forward_pre_hook(_keep_gradient_in_fp32)

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Where to shard a parameter, as torch's `shard_placement_fn` says; None: by rows.

        torch 2.13 finds the wrong place for shards of rows that tensor-parallel ranks have in unequal numbers. Such tables are sharded by columns.
        """
        if self.placements_of_experts is not None and (found := self.placements_of_experts(parameter)):
            return found
        uneven = (
            isinstance(parameter, DTensor)
            and parameter.placements[0] == Shard(0)
            and len(parameter) % parameter.device_mesh.size()
        )
        return Shard(1) if uneven and parameter.shape[1] % self.device_mesh.size(-1) == 0 else None

    def _offload_policy(self) -> OffloadPolicy:
        if not self.config.parallel.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def release(self) -> None:
        # If no backward follows, the units that are kept for it stay gathered. `model.parameters()` are then the gathered ones,
        # in the compute format, which the optimizer does not know.
        for module in _units(self.root):
            wait_for_gather(module)
            module.reshard()

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        mode = self.config.parallel.grad_sync
        if keeps_weights(self.config):
            self.root.set_reshard_after_backward(last)
        if self.deferring:
            self.root.set_requires_gradient_sync(False)
        elif mode == "last":
            self.root.set_requires_gradient_sync(last)
        elif mode == "auto" and self.hybrid:
            self.root.set_requires_all_reduce(last)
        yield
        if self.deferring:
            self._keep_gradients()

    def _keep_gradients(self) -> None:
        """Add gradients that FSDP2 did not see come to those of earlier micro-steps, in the format that they are reduced in."""
        for parameter in (parameter for group in _groups(self.root) for parameter in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def partial_gradients(self) -> Iterator[torch.Tensor]:
        # Whole sums, or shards that replicas have still to add.
        for group in _groups(self.root):
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)  # which is made by the first gather
                kept = parameter.unsharded_accumulated_grad, None if whole is None else whole.grad
                yield from (local(gradient) for gradient in kept if gradient is not None)

    def _reduce(self) -> None:
        """Reduce what all micro-steps left. torch's pipelines do it so too."""
        self.root.set_requires_gradient_sync(True)
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def finish_step(self) -> None:
        if self.deferring:
            self._reduce()
        self.release()  # nothing is left to free, unless a gather was ahead of a pass that did not come
        gradients = [parameter.grad for parameter in self.vectors if parameter.grad is not None]
        if gradients and not self.alone:
            add_in_place(gradients, self.group, self.reduce_dtype)


def _units(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def _groups(root: nn.Module) -> Iterator[Any]:
    return (group for module in _units(root) for group in groups_of(module))


def _store_gradients_in(dtype: torch.dtype, group: Any) -> None:
    """Let a unit keep sharded gradients in another format than weights. FSDP2 casts what it has reduced to `_orig_dtype`, which it finds out anew
    whenever it gathers. torch has no public option for it.
    """
    find_out = group._init_mp_dtypes

    def set_dtypes() -> None:
        find_out()
        group._orig_dtype = dtype

    group._init_mp_dtypes = set_dtypes
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad_dtype = dtype


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter is whole on every rank: a vector, or one that gets no gradient (integer tables, for example)."""
    return parameter.dim() < 2 or not parameter.requires_grad


def _bring_vectors(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_whole(parameter) and parameter.device != device:
                moved = torch.empty_like(parameter, device=device)
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)


def _keep_gradient_in_fp32(module: nn.Module, inputs: tuple) -> None:
    """Keep a table's gradient in fp32. Else it would be rounded to bf16, and the two uses of a tied table added in bf16.

    An output head without a weight is given that of the embedding, which the last stage of a pipeline does not call.
    """
    table = inputs[2] if module.weight is None else module.weight
    table.grad_dtype = torch.float32
