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

from pretrain.config.schema import Config
from pretrain.models.experts import Experts
from pretrain.models.layers import Embedding
from pretrain.models.network import Network, Unit


def resharding(units: list[Unit], mode: str | int) -> list[bool | int]:
    """torch's `reshard_after_forward` of each unit, for a value of `parallel.reshard_after_forward`."""
    last_block = next((unit for unit in reversed(units) if unit.role == "block"), None)

    def of_unit(unit: Unit) -> bool | int:
        is_table = isinstance(unit.modules[0], Embedding)
        if is_table and unit.lends_to is None:
            return True  # its backward needs no table
        if not unit.reshard or mode == "never" or (mode == "last_block_kept" and unit is last_block):
            return False
        return True if is_table or isinstance(mode, str) else mode

    return [of_unit(unit) for unit in units]


def keeps_weights(config: Config) -> bool:
    """Whether what forward leaves gathered stays so until the last micro-step of a step. Weights do not change before."""
    return config.parallel.reshard_after_forward == "never" and config.parallel.pipeline == 1


def kept_parameters(network: Network, mode: str | int, expert_ranks: int, for_later: bool = False) -> int:
    """Parameters of the gathered matrices that a rank keeps while other blocks compute, of a whole network.

    A rank gathers those experts that belong to its place among `expert_ranks`. `for_later`: weights are kept for
    micro-steps that follow (`keeps_weights`), and so is what comes last.
    """
    units = [unit for unit in network.units() if unit.apart]
    shares: dict[nn.Module, float] = {}  # of the modules that are not the root's, which keeps its own
    for unit, reshard in zip(units, resharding(units, mode)):
        freed = reshard is True or not (unit.reshard or for_later)  # what comes last is needed for backward at once
        share = 0.0 if freed else 1 / max(reshard, 1)
        shares |= {module: share for top in unit.modules for module in top.modules()}
    kept: dict[nn.Parameter, float] = {}
    for module in network.modules():
        share = shares.get(module, 1.0) / (expert_ranks if isinstance(module, Experts) else 1)
        matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1 and p.requires_grad]
        kept |= {matrix: share * matrix.numel() for matrix in matrices}
    return round(sum(kept.values()))


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
    if any(group._all_gather_result is not None for group in groups_of(module)):
        module.unshard()


def groups_of(module: FSDPModule) -> list[Any]:
    """What torch keeps of a unit's parameters, for which it has no public name."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one or none
    return [group for group in groups if group is not None]
