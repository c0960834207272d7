"""The arithmetic of a layout: how many ranks on which axis, and how a global batch falls into micro-steps.

Pure functions of the configuration and the world size, so that every contradiction is found before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pretrain.config.model_schema import Model
from pretrain.config.schema import Config
from pretrain.data.stream import check_micro_steps
from pretrain.distributed.launcher import command_for
from pretrain.distributed.mesh import AXES, coordinates_of, expert_place
from pretrain.errors import ConfigError, LaunchError, nearest_multiples
from pretrain.parallel.pipeline_order import bubble, cut, order, stages_of

STATE_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments
DDP_MEMORY_SHARE = 0.4  # `auto` replicates a state up to this share of the device memory; the rest is for activations


@dataclass(frozen=True)
class StrategyKind:
    """What a value of `parallel.strategy` stands for."""

    made_by: str
    """`module.Class` in pretrain/parallel: the `DataAxes` that it makes."""

    axes: tuple[str, ...]
    """The data axes that it spreads over. All processes go to the last one where the configuration gives no sizes."""


STRATEGIES = {
    "single": StrategyKind("single.Single", ()),
    "ddp": StrategyKind("ddp.DataParallel", ("replicate",)),
    "fsdp": StrategyKind("fsdp.FullyShard", ("replicate", "shard")),
}


@dataclass(frozen=True)
class Layout:
    """The layout that the section `parallel` gives on a number of processes."""

    strategy: str
    replicate: int
    shard: int
    micro_steps: int
    """Micro-steps of a step of `batch.sequences`; a step of a ramp has another number. 0 for pairs, where each step has its own."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    bubble: float = 0.0
    """The share of a step in which ranks of the pipeline wait, by the schedule alone."""
    expert: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh (`distributed/mesh.py`)."""
        return {axis: getattr(self, axis) for axis in (*AXES, "expert")}

    @property
    def data_size(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def state_parts(self) -> int:
        """Ranks that share one copy of weights, gradients and moments."""
        return self.shard * self.context * self.tensor * self.pipeline

    @property
    def name(self) -> str:
        others = {"context": self.context, "tensor": self.tensor, "pipeline": self.pipeline}
        product = " x ".join([self._data_name, *(f"{axis} {size}" for axis, size in others.items() if size > 1)])
        return product + (f", expert {self.expert}" if self.expert > 1 else "")

    @property
    def _data_name(self) -> str:
        if self.strategy == "single":
            return "single"
        if self.strategy == "fsdp" and self.replicate > 1 and self.shard > 1:
            return f"hsdp {self.replicate}x{self.shard}"
        return f"{self.strategy} {self.data_size}" + (" (replicated)" if self.strategy == "fsdp" and self.replicate > 1 else "")


def expected_world_size(config: Config) -> int | None:
    """The fewest processes that the configuration asks for; None if any number will do."""
    parallel = config.parallel
    if parallel.strategy == "single":
        return 1
    shard = parallel.shard or parallel.expert // math.gcd(parallel.context, parallel.expert)
    least = (parallel.replicate or 1) * shard * ranks_of_a_sample(config)
    if parallel.replicate or parallel.shard or least > 1:
        return least
    return None if parallel.strategy == "auto" else 2  # at least; the launcher may start more


def ranks_of_a_sample(config: Config) -> int:
    """How many ranks see the same samples."""
    return config.parallel.tensor * config.parallel.context * config.parallel.pipeline


def plan_layout(config: Config, world_size: int, parameters: int, device_memory: int | None) -> Layout:
    """The layout of a run. `device_memory`: bytes of one device, None on CPU. Raises LaunchError or ConfigError."""
    check_options(config)
    strategy = config.parallel.strategy
    if strategy == "auto":
        strategy = _automatic(config, world_size, parameters, device_memory)
    replicate, shard = _axes(config, strategy, world_size)
    _check_tables(config.model, config.parallel.tensor, shard * config.parallel.context)
    _check_expert_groups(config, shard)
    if strategy == "fsdp":
        _check_kept_parts(config, shard)
    micro_steps = check_micro_steps(config, replicate * shard)
    parallel, bubble_share = config.parallel, 0.0
    if parallel.pipeline > 1 and micro_steps:
        _check_micro_batches(config, replicate * shard)
        bubble_share = bubble(order(parallel.pipeline_schedule, parallel.pipeline, stages_of(parallel), micro_steps))
    return Layout(
        strategy,
        replicate,
        shard,
        micro_steps,
        parallel.tensor,
        parallel.context,
        parallel.pipeline,
        bubble_share,
        parallel.expert,
    )


def _automatic(config: Config, world_size: int, parameters: int, device_memory: int | None) -> str:
    if (config.parallel.shard or 1) > 1 or ranks_of_a_sample(config) > 1 or config.parallel.expert > 1:
        return "fsdp"
    if world_size == 1 and (config.parallel.replicate or 1) == 1:
        return "single"
    fits = device_memory is None or parameters * STATE_BYTES_PER_PARAMETER <= DDP_MEMORY_SHARE * device_memory
    return "ddp" if fits else "fsdp"


def explain_strategy(config: Config, layout: Layout) -> str | None:
    """Why the layout has this strategy, and what makes its replicas; None where the configuration says it and there are none."""
    if layout.strategy == "single" or (config.parallel.strategy != "auto" and layout.replicate == 1):
        return None
    split = [f"{axis} {size}" for axis, size in layout.axes.items() if size > 1 and axis != "replicate"]
    if layout.strategy == "ddp":
        makes = f"DDP makes {layout.replicate} replicas, each with the whole state"
        why = f"it takes {STATE_BYTES_PER_PARAMETER} bytes per parameter, which fit in {DDP_MEMORY_SHARE:.0%} of a GPU's memory or in the host's"
    elif layout.replicate > 1:
        makes = f"FSDP2 makes {layout.replicate} replicas (HSDP)"
        why = f"the weights of one are spread ({', '.join(split)}), and DDP takes whole models only" if split else "DDP needs strategy ddp"
    else:
        makes = "FSDP2 shards the state"
        asked = config.parallel.shard or config.parallel.expert > 1 or ranks_of_a_sample(config) > 1
        over = f"{STATE_BYTES_PER_PARAMETER} bytes per parameter take more than {DDP_MEMORY_SHARE:.0%} of a GPU's memory"
        why = f"the configuration spreads weights ({', '.join(split)})" if asked else over
    chosen = "" if config.parallel.strategy != "auto" else "; chosen by auto"
    return f"{makes}: {why}{chosen}" if chosen or layout.strategy == "fsdp" else makes


def _axes(config: Config, strategy: str, world_size: int) -> tuple[int, int]:
    axes = STRATEGIES[strategy].axes
    for axis, able in (("shard", "fsdp"), ("replicate", "ddp")):
        size = getattr(config.parallel, axis) or 1
        if size > 1 and axis not in axes:
            raise ConfigError(
                f"parallel.strategy={strategy} cannot {axis}, but parallel.{axis}={size}; use parallel.strategy={able}"
            )
    replicate, shard, together = config.parallel.replicate, config.parallel.shard, ranks_of_a_sample(config)
    if world_size % together:
        raise LaunchError(
            f"{_of_a_sample(config)}: {world_size} processes do not divide by {together}; start "
            f"{nearest_multiples(world_size, together)}: {command_for(together)}"
        )
    data_size = world_size // together
    if not axes:
        if world_size > 1:
            raise LaunchError(
                f"parallel.strategy={strategy} runs in one process, but {world_size} were started; "
                "start one (python pretrain/run.py ...) or set parallel.strategy=ddp, fsdp or auto"
            )
        return 1, 1
    if axes == ("replicate",):
        replicate, shard = replicate or world_size, 1
    elif replicate is None and shard is None:
        replicate, shard = 1, data_size
    elif shard is None or replicate is None:
        given = replicate or shard
        other = data_size // given if data_size % given == 0 else 0
        replicate, shard = (given, other) if shard is None else (other, given)
    _check_world(config, strategy, replicate, shard, world_size)
    return replicate, shard


def _check_world(config: Config, strategy: str, replicate: int, shard: int, world_size: int) -> None:
    together = ranks_of_a_sample(config)
    wanted = replicate * shard * together
    replicate_key, shard_key = ("null" if axis is None else axis for axis in (config.parallel.replicate, config.parallel.shard))
    keys = f"{_chosen(config, strategy)}, parallel.replicate={replicate_key}, parallel.shard={shard_key}"
    keys += f", {_of_a_sample(config)}" if together > 1 else ""
    if wanted == 0:
        given = (config.parallel.replicate or config.parallel.shard) * together
        near = nearest_multiples(world_size, given)
        raise LaunchError(f"{keys}: {world_size} processes do not divide by {given}; start {near}: {command_for(given)}")
    if wanted != world_size:
        raise LaunchError(
            f"{keys} expects {wanted} processes, {world_size} started; start them with: {command_for(wanted)}"
            + (" (on a host without GPU, accelerate launch needs --multi_gpu to start several)" if world_size == 1 else "")
        )
    if world_size == 1 and config.parallel.replicate is None and config.parallel.shard is None:
        least = expected_world_size(config) or 2
        raise LaunchError(
            f"parallel.strategy={strategy} expects several processes, 1 started; start them with: {command_for(least)} "
            "(on a host without GPU, accelerate launch needs --multi_gpu to start several). For one process, set "
            f"parallel.strategy=single, or parallel.{STRATEGIES[strategy].axes[-1]}=1"
        )


def explain_ranks(layout: Layout, config: Config, costs: list[int]) -> list[str]:
    """A table with what each rank has: its place on every axis, samples of a step, layers, positions, heads, and its share of the weights.

    `costs`: of each layer (`strategy.layer_costs`).
    """
    sizes, spans = {axis: layout.axes[axis] for axis in AXES}, cut(costs, stages_of(config.parallel))
    axes = [axis for axis in AXES if sizes[axis] > 1]
    shared = ["experts"] if layout.expert > 1 else []
    rows = [["rank", *axes, "samples of a step", "layers", "positions", "query heads", *shared, "weights"]]
    for rank in range(math.prod(sizes.values())):
        place = coordinates_of(rank, sizes)
        data_rank = place["replicate"] * sizes["shard"] + place["shard"]
        share = config.batch.sequences // layout.data_size
        samples = "by length" if config.batch.tokens else _span(data_rank * share, (data_rank + 1) * share)
        heads = config.model.heads // sizes["tensor"]
        own = _span(place["tensor"] * heads, (place["tensor"] + 1) * heads)
        weights = "all" if layout.state_parts == 1 else f"1/{layout.state_parts}"
        where = [str(place[axis]) for axis in axes]
        layers = ", ".join(_span(span.start, span.stop) for span in spans[place["pipeline"] :: layout.pipeline])
        experts = [_experts(config.model.experts.count, expert_place(place, layout.axes), layout.expert)] if shared else []
        positions = _positions(config.data.sequence_length, place, sizes)
        rows.append([str(rank), *where, samples, layers, positions, own, *experts, weights])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _experts(count: int, place: int, ranks: int) -> str:
    return _span(place * count // ranks, (place + 1) * count // ranks)


def _positions(length: int, place: dict[str, int], sizes: dict[str, int]) -> str:
    """The stretches of a sequence of which a rank has the hidden states, see parallel/context.py."""
    if sizes["context"] == 1:
        return _span(0, length)
    count, last = -(-length // (2 * sizes["context"])), 2 * sizes["context"] - 1
    starts = (place["context"] * count, (last - place["context"]) * count)
    return ", ".join(_span(start, min(length, start + count)) for start in starts if start < length)


def _span(start: int, stop: int) -> str:
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)


def _of_a_sample(config: Config) -> str:
    sizes = {axis: getattr(config.parallel, axis) for axis in ("context", "tensor", "pipeline")}
    return ", ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)


def _chosen(config: Config, strategy: str) -> str:
    auto = " (the choice of auto)" if config.parallel.strategy == "auto" else ""
    return f"parallel.strategy={strategy}{auto}"


def check_context(config: Config) -> None:
    """Raise ConfigError for a complete configuration whose sequences context-parallel ranks cannot share."""
    model, ranks = config.model, config.parallel.context
    reasons = {
        f"pairs of sequences (model.family={model.family}) are not spread": bool(model.encoder.layers),
        f"model.predict_ahead={model.predict_ahead} shifts sequences, which parallel.tensor={config.parallel.tensor} cuts as well": bool(
            model.predict_ahead and config.parallel.tensor > 1
        ),
        "model.attention_backend=flex needs whole masks; use sdpa": model.attention_backend == "flex",
        f"2 x {ranks} stretches of data.sequence_length={config.data.sequence_length} tokens are empty": config.data.sequence_length
        < 2 * ranks,
    }
    for reason, holds in reasons.items():
        if ranks > 1 and holds:
            raise ConfigError(f"parallel.context={ranks}: {reason}; set parallel.context=1, or change the other key")


def check_pipeline(config: Config) -> None:
    """Raise ConfigError for a complete configuration whose layers the ranks of a pipeline cannot share."""
    model, parallel = config.model, config.parallel
    ranks, stages = parallel.pipeline, stages_of(parallel)
    if ranks == 1:
        return
    layers = model.layers + model.encoder.layers
    keys = f"parallel.pipeline={ranks}"
    if stages > ranks:
        keys += f", parallel.pipeline_chunks={parallel.pipeline_chunks}"
    if stages > layers:
        most = layers * ranks // stages
        remedy = f"use at most parallel.pipeline={most}" if most > 1 else "set parallel.pipeline=1"
        if stages > ranks and layers >= ranks:
            remedy = "use parallel.pipeline_schedule=1f1b"
            remedy += f" or parallel.pipeline_chunks={layers // ranks}" if layers >= 2 * ranks else ""
        raise ConfigError(f"{keys}: {stages} stages need as many layers, but the model has {layers}; {remedy}, or more layers")
    if parallel.pipeline_schedule == "interleaved" and (config.data.pairs is not None):
        raise ConfigError(
            f"{keys}: steps of pairs differ in their number of micro-batches, which parallel.pipeline_schedule=interleaved cannot take; use 1f1b"
        )


def _check_micro_batches(config: Config, data_size: int) -> None:
    """Raise ConfigError for steps that have too few micro-batches for the pipeline, or a number that its schedule cannot take."""
    ranks, schedule, unit = (
        config.parallel.pipeline,
        config.parallel.pipeline_schedule,
        config.batch.micro_sequences * data_size,
    )
    named = {f"batch.ramp.{i}.sequences": stage.sequences for i, stage in enumerate(config.batch.ramp)}
    for name, sequences in (named | {"batch.sequences": config.batch.sequences}).items():
        count = sequences // unit

        def takes(count: int) -> bool:
            return count >= ranks and not (schedule == "interleaved" and count % (count // ranks))

        if not takes(count):
            near = next(n for n in range(count, count + ranks + 1) if takes(n))
            reason = (
                f"the {ranks} stages need at least as many" if count < ranks else f"schedule {schedule} cannot deal them out"
            )
            raise ConfigError(
                f"parallel.pipeline={ranks}: {name}={sequences} has {count} micro-batches of {unit} samples, and {reason}; use "
                f"{name}={near * unit}, or change batch.micro_sequences={config.batch.micro_sequences}"
            )


def check_expert(model: Model, ranks: int) -> None:
    """Raise ConfigError for a complete network whose experts so many ranks cannot share. It names the nearest numbers that can."""
    count = model.experts.count
    if ranks > 1 and not count:
        raise ConfigError(f"parallel.expert={ranks}: the model has no experts; set parallel.expert=1, or model.experts.count")
    if ranks > 1 and count % ranks:
        near = _nearest_divisors(count, ranks)
        raise ConfigError(
            f"parallel.expert={ranks}: model.experts.count={count} does not divide by it; use {near}, or change that key"
        )


def _check_expert_groups(config: Config, shard: int) -> None:
    """Raise ConfigError unless the ranks that share weights fall into expert groups."""
    ranks, context = config.parallel.expert, config.parallel.context
    if shard * context % ranks:
        near = _nearest_divisors(math.gcd(shard * context, config.model.experts.count or 0), ranks)
        raise ConfigError(
            f"parallel.expert={ranks}: the {shard * context} ranks that share weights (parallel.shard={shard} x parallel.context={context}) "
            f"do not divide by it; use {near}, or another parallel.shard"
        )


def _nearest_divisors(count: int, number: int) -> str:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    near = [max(n for n in divisors if n < number), *[n for n in divisors if n > number][:1]]
    return " or ".join(map(str, near))


def _check_kept_parts(config: Config, shard: int) -> None:
    """Raise ConfigError for ranks among which weights cannot be kept after forward. torch 2.13 knows such groups of whole meshes only."""
    parallel = config.parallel
    number, ranks = parallel.reshard_after_forward, shard * parallel.context
    if not isinstance(number, int):
        return
    others = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("tensor", "pipeline", "expert") if getattr(parallel, axis) > 1]
    if others:
        raise ConfigError(
            f"parallel.reshard_after_forward={number} does not work with {' and '.join(others)}; use always, never or last_block_kept"
        )
    legal = [n for n in range(2, ranks) if ranks % n == 0]
    if number not in legal:
        near = f"use {' or '.join(map(str, legal))}, or always" if legal else "use always, never or last_block_kept"
        raise ConfigError(
            f"parallel.reshard_after_forward={number} has to be a divisor of the {ranks} ranks that share weights, but 1 and {ranks}; {near}"
        )


def check_tensor(model: Model, ranks: int) -> None:
    """Raise ConfigError for a complete network whose matrices so many ranks cannot share. It names the nearest numbers that can."""
    if ranks == 1:
        return
    if problem := _not_shared(model, ranks):
        legal = [n for n in range(1, 2 * ranks + 1) if _not_shared(model, n) is None]
        near = [max(n for n in legal if n < ranks), *[n for n in legal if n > ranks][:1]]
        raise ConfigError(f"parallel.tensor={ranks}: {problem}; use {' or '.join(map(str, near))}, or change that key")


def _tables(model: Model) -> dict[str, int]:
    """The rows of each table, by the key that decides them."""
    rows = {"vocab_size": model.vocab_size, "encoder.vocab_size": model.encoder.vocab_size}
    if model.positions == "learned":
        rows["max_sequence_length"] = model.max_sequence_length
    return {name: count for name, count in rows.items() if count}


def _check_tables(model: Model, tensor: int, parts: int) -> None:
    """Raise ConfigError for tables that can be sharded neither by rows nor by columns (`FullyShard._placement`)."""
    for name, count in _tables(model).items():
        if count % tensor and parts > 2 and model.dim % parts:
            raise ConfigError(
                f"model.{name}={count} does not divide by parallel.tensor={tensor}, nor model.dim={model.dim} by the {parts} ranks that share "
                f"weights; use model.{name}={-(-count // tensor) * tensor}"
            )


def _not_shared(model: Model, ranks: int) -> str | None:
    """Why so many ranks cannot share the matrices of a network."""
    experts = model.experts
    dense = not experts.count or experts.dense_layers
    counts = {
        "heads": model.heads,
        "ffn_dim": model.ffn_dim if dense else 0,
        "experts.ffn_dim": experts.ffn_dim if experts.count else 0,
    }
    for name, count in counts.items():
        if count % ranks:
            return f"model.{name}={count} does not divide by it"
    keys = model.heads if model.latent.kv_rank else model.kv_heads
    if keys % ranks and ranks % keys:
        return f"model.kv_heads={keys} is neither a multiple nor a divisor of it"
    for name, count in _tables(model).items():
        if (ranks - 1) * -(-count // ranks) >= count:
            return f"model.{name}={count} is too small, the last rank would have no row of the table"
    return None


def check_options(config: Config) -> None:
    """Raise ConfigError for values that cannot go together on any number of processes. It names both keys."""
    schedule, steps = config.schedule, config.run.steps
    if schedule.decay_steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        most = steps - schedule.warmup_steps
        raise ConfigError(
            f"schedule.warmup_steps={schedule.warmup_steps} and schedule.decay_steps={schedule.decay_steps} do not fit in "
            f"run.steps={steps}; {f'decay_steps at most {most}' if most > 0 else 'lower warmup_steps, or raise run.steps'}"
        )
    if config.run.init_from and config.run.resume not in ("auto", "never"):
        raise ConfigError(
            f"run.init_from={config.run.init_from} and run.resume={config.run.resume} both say where to start; keep one"
        )
    if config.parallel.activation_checkpointing == "selective" and config.parallel.compile:
        raise ConfigError(
            "parallel.activation_checkpointing=selective does not reach into blocks that parallel.compile=true compiles; set "
            "parallel.activation_memory_budget (0 to 1) instead, or activation_checkpointing=full"
        )
    if config.parallel.compile and config.parallel.activation_memory_budget < 1 and ranks_of_a_sample(config) > 1:
        raise ConfigError(
            f"parallel.activation_memory_budget={config.parallel.activation_memory_budget} does not work with {_of_a_sample(config)}: torch's "
            "compiler cannot weigh their collectives; use parallel.activation_checkpointing=full"
        )
    beyond = [step for step in config.log.gradients_at if step > steps]
    if beyond:
        raise ConfigError(f"log.gradients_at={config.log.gradients_at}: step {beyond[0]} is beyond run.steps={steps}")
    if math.isclose(config.schedule.min_ratio, 1) and config.schedule.name == "wsd":
        raise ConfigError("schedule.min_ratio=1 with schedule.name=wsd never decays; use schedule.name=constant")
