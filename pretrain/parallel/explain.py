"""What a person reads about a layout: why it is this one, and which rank holds what."""

from __future__ import annotations

import math

from pretrain.config.schema import Config
from pretrain.distributed.launcher import ranks_of_a_sample
from pretrain.distributed.mesh import AXES, coordinates_of, expert_place
from pretrain.distributed.shards import own_part, own_stretches, stretch_length
from pretrain.models import network_without_values
from pretrain.parallel.blocks import DTYPES
from pretrain.parallel.layout import DDP_MEMORY_SHARE, FORMAT_BYTES, Layout, state_bytes
from pretrain.parallel.pipeline_order import cut, stage_ranks, stages_of
from pretrain.parallel.weight_copies import WeightCopies, keeps_casts


def explain_strategy(config: Config, layout: Layout) -> str | None:
    """Why the layout has this strategy, and what makes its replicas. None if the configuration names the strategy and there is one replica."""
    if layout.strategy == "single" or (config.parallel.strategy != "auto" and layout.replicate == 1):
        return None
    split = [f"{axis} {size}" for axis, size in layout.axes.items() if size > 1 and axis != "replicate"]
    if layout.strategy == "ddp":
        makes = f"DDP makes {layout.replicate} replicas, each with the whole state"
        why = f"it takes {state_bytes(config)} bytes per parameter, which on GPUs fit in {DDP_MEMORY_SHARE:.0%} of their memory; on CPUs that is not asked"
    elif layout.replicate > 1:
        makes = f"FSDP2 makes {layout.replicate} replicas (HSDP)"
        why = (
            f"the weights of one are spread ({', '.join(split)}), and DDP takes whole models only"
            if split
            else "DDP needs strategy ddp"
        )
    else:
        makes = "FSDP2 shards the state"
        asked = config.parallel.shard or config.parallel.expert > 1 or ranks_of_a_sample(config) > 1
        over = f"{state_bytes(config)} bytes per parameter take more than {DDP_MEMORY_SHARE:.0%} of a GPU's memory"
        why = f"the configuration spreads weights ({', '.join(split)})" if asked else over
    chosen = "" if config.parallel.strategy != "auto" else "; chosen by auto"
    return f"{makes}: {why}{chosen}" if chosen or layout.strategy == "fsdp" else makes


def kept_bytes(config: Config, layout: Layout) -> int:
    """Bytes per rank of weights in the compute format beside the stored ones: copies, or what FSDP2 keeps gathered from forward to backward.

    Each rank of a pipeline has those of its own layers.
    """
    has_copies = keeps_casts(config, layout.strategy, layout.data_size)
    if not has_copies and layout.strategy != "fsdp":
        return 0
    network = network_without_values(config)
    if has_copies:
        return WeightCopies(network, DTYPES[config.precision.compute]).bytes
    from pretrain.parallel.fsdp_gathers import keeps_weights, kept_parameters

    for_later = keeps_weights(config) and layout.micro_steps != 1
    kept = kept_parameters(network, config.parallel.reshard_after_forward, layout.expert, for_later)
    stages = 1 if config.parallel.reshard_after_forward == "last_block_kept" else layout.pipeline
    return kept * FORMAT_BYTES[config.precision.compute] // (layout.tensor * stages)


def explain_ranks(layout: Layout, config: Config, costs: list[int]) -> list[str]:
    """A table with what each rank has: its place on every axis, samples of a step, layers, positions, heads, experts, and its share of the weights.

    `costs`: of each layer (`strategy.layer_costs`).
    """
    sizes, spans = {axis: layout.axes[axis] for axis in AXES}, cut(costs, stages_of(config.parallel))
    axes = [axis for axis in AXES if sizes[axis] > 1]
    stages = list(zip(spans, stage_ranks(config.parallel.pipeline_schedule, layout.pipeline, len(spans))))
    linear = ["heads of linear attention"] if any(config.model.linear_attention.pattern or ()) else []
    shared = ["experts"] if layout.expert > 1 else []
    rows = [["rank", *axes, "samples of a step", "layers", "positions", "query heads", *linear, *shared, "weights"]]
    for rank in range(math.prod(sizes.values())):
        place = coordinates_of(rank, sizes)
        data_rank = place["replicate"] * sizes["shard"] + place["shard"]
        share = config.batch.sequences // layout.data_size
        samples = "by length" if config.batch.tokens else _span(data_rank * share, (data_rank + 1) * share)
        own = [_part(config.model.heads, place["tensor"], sizes["tensor"])]
        if linear:  # context ranks share them as well, and go through all positions
            number, ranks = place["tensor"] * sizes["context"] + place["context"], sizes["tensor"] * sizes["context"]
            own.append(_part(config.model.linear_attention.value_heads, number, ranks))
        weights = "all" if layout.state_parts == 1 else f"1/{layout.state_parts}"
        where = [str(place[axis]) for axis in axes]
        layers = ", ".join(_span(span.start, span.stop) for span, holder in stages if holder == place["pipeline"])
        experts = [_part(config.model.experts.count, expert_place(place, layout.axes), layout.expert)] if shared else []
        positions = _positions(config.data.sequence_length, place, sizes)
        rows.append([str(rank), *where, samples, layers, positions, *own, *experts, weights])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _part(count: int, place: int, ranks: int) -> str:
    own = own_part(count, place, ranks)
    return _span(own.start, own.stop)


def _positions(length: int, place: dict[str, int], sizes: dict[str, int]) -> str:
    """The stretches of a sequence of which a rank has the hidden states, see parallel/context.py."""
    if sizes["context"] == 1:
        return _span(0, length)
    count = stretch_length(length, sizes["context"])
    starts = [i * count for i in own_stretches(place["context"], sizes["context"])]
    return ", ".join(_span(start, min(length, start + count)) for start in starts if start < length)


def _span(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)
