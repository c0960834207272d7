"""The lines that say what a run is, at its start and by `--check`: data, model, layout, formats, memory."""

from __future__ import annotations

import os

import torch

from pretrain.distributed.cores import cores_of_host
from pretrain.distributed.launcher import ranks_of_host
from pretrain.distributed.ranks import Ranks
from pretrain.models import network_without_values
from pretrain.models.families import family_of
from pretrain.parallel.explain import explain_strategy, kept_bytes
from pretrain.parallel.layout import DDP_MEMORY_SHARE, FORMAT_BYTES, gradient_bytes, state_bytes
from pretrain.parallel.pipeline_order import describe_stages
from pretrain.parallel.strategy import layer_costs
from pretrain.train.plan import Plan
from pretrain.train.run_directory import directory_of
from pretrain.train.starting_point import StartingPoint


def describe(plan: Plan, world_size: int, starting_point: StartingPoint) -> list[str]:
    """The run in a few lines. Earlier starts may have read their samples in steps of another size."""
    config, layout = plan.config, plan.layout
    model, batch, precision = config.model, config.batch, config.precision
    sizes = f" of {batch.tokens or batch.sequences * config.data.sequence_length} tokens"
    samples = plan.data.samples_after(starting_point.samples, config.run.steps - starting_point.step)
    ramp = "".join(f"{stage.sequences} sequences until {stage.until_tokens:,} tokens, then " for stage in batch.ramp)
    if batch.ramp:
        sizes = f", {samples * config.data.sequence_length:,} tokens"
    shorter = "".join(f", in rows of {stage.length} until {stage.until_tokens:,} tokens" for stage in batch.lengths)
    data_ranks = f"{layout.data_size} rank{'s' if layout.data_size > 1 else ''}"
    micro_steps = f"{layout.micro_steps} micro-step{'s' if layout.micro_steps > 1 else ''}"
    shares = f"{ramp}{batch.sequences} sequences = {data_ranks} x {micro_steps} x {batch.micro_sequences}"
    if batch.tokens:
        shares = f"{batch.tokens} tokens over {layout.data_size} ranks, each in micro-steps of at most {batch.micro_tokens or 'its share'}"
    blocks = f"{model.encoder.layers} + {model.layers}" if model.encoder.layers else model.layers
    return [
        f"run      {directory_of(config.run)}: {config.run.steps} step{'s' if config.run.steps > 1 else ''}{sizes}{shorter}",
        f"model    {model.family}, {plan.parameters:,} parameters: {blocks} layers of {model.dim}, {model.heads} heads, "
        f"vocabulary {model.vocab_size}; {plan.flops_per_token(samples):.3g} FLOPs per token",
        *family_of(model.family).describe(model),
        *plan.data.describe(samples),
        *_describe_validation(plan),
        f"layout   {layout.name} on {world_size} process{'es' if world_size > 1 else ''}: {shares}",
        *([f"strategy {strategy}"] if (strategy := explain_strategy(config, layout)) else []),
        *_describe_stages(plan),
        f"numbers  parameters {precision.master}, compute {precision.compute}, gradients {precision.gradients or precision.master}, "
        f"their reduction {precision.reduce}, moments {precision.moments}",
        *plan.optimizers,
        *_describe_memory(plan),
        *(f"note     {note}" for note in plan.notes),
    ]


def _describe_validation(plan: Plan) -> list[str]:
    most = plan.config.validation.sequences
    counts = [(source.name, len(source), min(most, len(source)) if most else len(source)) for source in plan.data.validation]
    return [f"validate {name}: {used:,} of {available:,} samples" for name, available, used in counts]


def _describe_stages(plan: Plan) -> list[str]:
    if plan.layout.pipeline == 1:
        return []
    return [f"stages   {describe_stages(plan.config.parallel, costs_of_layers(plan), plan.layout.bubble)}"]


def _describe_memory(plan: Plan) -> list[str]:
    """The memory of the state, computed and not measured. Activations depend on the micro-batch and are not included."""
    config, layout, parameters = plan.config, plan.layout, plan.parameters
    precision, means = config.precision, parameters if config.optim.ema_decay is not None else 0
    of_weights, of_moments = FORMAT_BYTES[precision.master], FORMAT_BYTES[precision.moments]
    saved = of_weights * parameters + of_moments * (plan.moments - means) + 4 * means
    of_gradients = gradient_bytes(precision, layout.strategy)
    held = f"{saved / parameters + of_gradients:.3g} bytes per parameter"
    if layout.state_parts > 1:
        held += f" over {layout.state_parts} ranks"
    offloaded = config.parallel.offload and layout.strategy == "fsdp"
    place = " of host memory" if offloaded else ""
    kept, state = kept_bytes(config, layout), -(-(saved + of_gradients * parameters) // layout.state_parts)
    per = "per rank on average" if layout.pipeline > 1 else "per rank"
    if kept:
        what = "gathered weights" if layout.strategy == "fsdp" else "weights cast once per step"
        held += f", and {bytes_of(kept)} of {what} in {config.precision.compute}"
        held += " on the device" if offloaded else ""
    return [
        f"memory   {bytes_of(state if offloaded else state + kept)}{place} {per} for weights, gradients and moments ({held}), computed; "
        "activations come on top (tools/estimate_memory.py)",
        f"saves    {bytes_of(saved)} each ({saved / parameters:.3g} bytes per parameter){_describe_held(plan, saved)}",
    ]


def _describe_held(plan: Plan, saved: int) -> str:
    """The host's memory that checkpoints in the background take. Each replica writes a share."""
    if not plan.config.checkpoint.asynchronous:
        return ""
    ranks = plan.layout.state_parts * plan.layout.replicate
    return f", written beside training from copies of {bytes_of(saved // ranks)} in each rank's host memory"


def describe_threads(ranks: Ranks, affinity: str) -> list[str]:
    """The threads of a process on a CPU, and whether there are fewer or more than cores."""
    if ranks.device.type != "cpu":
        return []
    threads, cores, here = torch.get_num_threads(), cores_of_host(), ranks_of_host(ranks.world_size)
    best = max(1, cores // here)
    advice = f", {cores - threads * here} idle; run.threads={best} uses more" if threads < best else ""
    if threads * here > max(cores, here):
        advice = f", more than there are cores; run.threads={best} gives each its own"
    kept = f", kept on {len(os.sched_getaffinity(0))} of them" if affinity != "none" else ""
    processes = f"each of {here} processes" if here > 1 else "1 process"
    return [f"threads  {threads} in {processes} on {cores} core{'s' if cores > 1 else ''}{kept}{advice}"]


def describe_other_devices(plan: Plan, device: torch.device) -> list[str]:
    """The choice of `auto` on GPUs, for a check on a machine without one."""
    if plan.config.parallel.strategy != "auto" or device.type != "cpu" or plan.layout.strategy != "ddp":
        return []
    fitting = plan.parameters * state_bytes(plan.config) / DDP_MEMORY_SHARE
    return [f"note     on CPU parallel.strategy=auto takes ddp; on GPUs of less than {bytes_of(round(fitting))} it takes fsdp"]


def costs_of_layers(plan: Plan) -> list[int]:
    """What each layer costs, in units that only compare layers: a pipeline is cut into stages by it, and others have equal layers."""
    model = plan.config.model
    if plan.layout.pipeline == 1:
        return [1] * (model.encoder.layers or 0) + [1] * model.layers
    return layer_costs(network_without_values(plan.config), plan.config)


def bytes_of(number: int) -> str:
    """A number of bytes as a person writes it, in powers of 1,000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= 0.9995 * size:  # or three digits would show 1,000 of the smaller unit
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
