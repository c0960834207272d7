"""When FSDP2 gathers the weights of a unit ahead of its use, and how a tied head comes by the table of the embedding.

    embedding      gathered, rows looked up, freed
    blocks         gathered, computed, freed or kept as `parallel.reshard_after_forward` says
    tied head      the table gathered again while the last block computes; freed when the head's backward is done
    backward       blocks in reverse; the table's gradient, of both uses, is reduced at the end

The gradient of both uses is one, because FSDP2 hands out the same gathered parameter each time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pretrain.models.network import Unit


def lend(table: FSDPModule, reader: nn.Module, freed: bool) -> None:
    """Gather the table of an embedding for each call of a tied head, and give it as the argument in place of the sharded one.

    `freed`: free it when the backward of the head is done.
    """

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        table.unshard()
        states = inputs[0]
        if freed and states.requires_grad:
            states.register_hook(free)
        return tuple(table.weight if isinstance(value, nn.Parameter) else value for value in inputs)

    def free(gradient: Tensor) -> None:
        table.reshard()

    reader.register_forward_pre_hook(gather)


def gather_ahead(root: FSDPModule, units: list[Unit], count: int, pipeline: bool) -> None:
    """Let each unit gather the `count` next ones when its forward begins, and in backward those before it. 0: as torch does.

    The table of a tied head is gathered while the last block computes, whatever the count.
    """
    modules = [unit.modules[0] for unit in units]
    tables = [unit.modules[0] for unit in units if unit.lends_to is not None]
    for place, module in enumerate(modules):
        if following := [*modules, *tables][place + 1 : place + 1 + count]:
            module.set_modules_to_forward_prefetch(following)
        if before := modules[max(0, place - count) : place][::-1]:
            module.set_modules_to_backward_prefetch(before)
    if tables:
        modules[-1].set_modules_to_forward_prefetch(tables)
        if not pipeline:  # which runs backward stage by stage, each of them through the root
            root.set_modules_to_backward_prefetch(modules[-max(count, 1) :][::-1])


def wait_for_gather(module: FSDPModule) -> None:
    """Wait for a gather that was ahead of a forward pass which did not come, as validation leaves out blocks of multi-token prediction.

    Otherwise the next forward would take these weights for its own, though the optimizer has changed them since.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one or none
    if any(group is not None and group._all_gather_result is not None for group in groups):
        module.unshard()
