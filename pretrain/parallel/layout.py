"""The arithmetic of a layout: how many ranks on which axis, and how a global batch falls into micro-steps.

Pure functions of the configuration and the world size, so that every contradiction is found before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pretrain.config.parallel_schema import Precision
from pretrain.config.schema import Config
from pretrain.data.stream import micro_steps_of
from pretrain.distributed.launcher import command_for, expected_world_size, ranks_of_a_sample
from pretrain.distributed.mesh import AXES
from pretrain.errors import ConfigError, LaunchError, nearest_multiples
from pretrain.parallel.legality import (
    axes_of_a_sample,
    check_expert_groups,
    check_kept_parts,
    check_micro_batches,
    check_options,
    check_tables,
)
from pretrain.parallel.pipeline_order import bubble, order, stages_of

DDP_MEMORY_SHARE = 0.4  # `auto` replicates a state up to this share of the device memory; the rest is for activations


FORMAT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}


def state_bytes(config: Config) -> int:
    """Bytes of a parameter's weight, gradient, two moments and running mean under DDP, as AdamW has them; no optimizer has more."""
    precision = config.precision
    mean = FORMAT_BYTES["fp32"] if config.optim.ema_decay is not None else 0
    return FORMAT_BYTES[precision.master] + gradient_bytes(precision, "ddp") + 2 * FORMAT_BYTES[precision.moments] + mean


def gradient_bytes(precision: Precision, strategy: str) -> int:
    """Bytes of a parameter's gradient. DDP has buckets in the format of the weights beside sums in another one."""
    kept = precision.gradients or precision.master
    buckets = FORMAT_BYTES[precision.master] if strategy == "ddp" and kept != precision.master else 0
    return FORMAT_BYTES[kept] + buckets


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


def take_rest(config: Config, world_size: int) -> Config:
    """The configuration with the numbers that axes of -1 stand for. Raises ConfigError or LaunchError."""
    config = _take_rest_of_processes(config, world_size)
    parallel = config.parallel
    if parallel.expert != -1:
        return config
    shard = parallel.shard or world_size // ((parallel.replicate or 1) * ranks_of_a_sample(config))
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, expert=max(1, shard * parallel.context)))


def _take_rest_of_processes(config: Config, world_size: int) -> Config:
    parallel = config.parallel
    open_axes = [axis for axis in ("tensor", "context", "pipeline") if getattr(parallel, axis) == -1]
    if not open_axes:
        return config
    if len(open_axes) > 1:
        raise ConfigError(
            f"parallel.{open_axes[0]}=-1 and parallel.{open_axes[1]}=-1: one axis takes the rest; give the other a number"
        )
    sizes = {axis: getattr(parallel, axis) or 1 for axis in AXES if axis not in open_axes}
    others = math.prod(sizes.values())
    if world_size % others:
        given = " x ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise LaunchError(
            f"parallel.{open_axes[0]}=-1: {world_size} processes do not divide by {given}",
            f"start {nearest_multiples(world_size, others)}: {command_for(others)}",
        )
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, **{open_axes[0]: world_size // others}))


def plan_layout(config: Config, world_size: int, parameters: int, device_memory: int | None) -> Layout:
    """The layout of a run. `device_memory`: bytes of one device, None on CPU. Raises LaunchError or ConfigError."""
    check_options(config)
    strategy = config.parallel.strategy
    if strategy == "auto":
        strategy = _automatic(config, world_size, parameters, device_memory)
    replicate, shard = _axes(config, strategy, world_size)
    check_tables(config.model, config.parallel.tensor, shard * config.parallel.context)
    check_expert_groups(config, shard)
    if config.parallel.expert > 1:
        from pretrain.parallel.expert import check_torch

        check_torch(config.parallel.expert)
    if strategy == "fsdp":
        check_kept_parts(config, shard)
        if config.parallel.compile == "model":
            raise ConfigError(
                f"parallel.compile=model does not work with {_chosen(config, strategy)}, which gathers weights between blocks; use "
                "parallel.compile=blocks"
            )
    if strategy == "ddp" and config.parallel.compile == "model" and config.parallel.ddp.bucket_mb < 1:
        raise ConfigError(
            f"parallel.ddp.bucket_mb={config.parallel.ddp.bucket_mb:g} with parallel.compile=model: torch's compiler cuts the model at buckets of at "
            "least 1 MiB; raise it, or use parallel.compile=blocks"
        )
    micro_steps = micro_steps_of(config, replicate * shard)
    parallel, bubble_share = config.parallel, 0.0
    if parallel.pipeline > 1 and micro_steps:
        check_micro_batches(config, replicate * shard)
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
    fits = device_memory is None or parameters * state_bytes(config) <= DDP_MEMORY_SHARE * device_memory
    return "ddp" if fits else "fsdp"


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
            f"{axes_of_a_sample(config)}: {world_size} processes do not divide by {together}",
            f"start {nearest_multiples(world_size, together)}: {command_for(together)}",
        )
    data_size = world_size // together
    if not axes:
        if world_size > 1:
            raise LaunchError(
                f"parallel.strategy={strategy} runs in one process, but {world_size} were started",
                "start one (python pretrain/run.py ...) or set parallel.strategy=ddp, fsdp or auto",
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
    keys += f", {axes_of_a_sample(config)}" if together > 1 else ""
    if wanted == 0:
        given = (config.parallel.replicate or config.parallel.shard) * together
        near = nearest_multiples(world_size, given)
        raise LaunchError(f"{keys}: {world_size} processes do not divide by {given}", f"start {near}: {command_for(given)}")
    if wanted != world_size:
        raise LaunchError(
            f"{keys} expects {wanted} processes, {world_size} started",
            f"start them with: {command_for(wanted)}"
            + (" (on a host without GPU, accelerate launch needs --multi_gpu to start several)" if world_size == 1 else ""),
        )
    if world_size == 1 and config.parallel.replicate is None and config.parallel.shard is None:
        least = expected_world_size(config) or 2
        alone = f"parallel.strategy=single, or parallel.{STRATEGIES[strategy].axes[-1]}=1"
        if config.parallel.expert > 1:  # which neither of the two takes
            alone = "parallel.expert=1" + (" and parallel.strategy=single" if config.parallel.strategy == strategy else "")
        raise LaunchError(
            f"{_chosen(config, strategy)} expects several processes, 1 started",
            f"start them with: {command_for(least)} "
            f"(on a host without GPU, accelerate launch needs --multi_gpu to start several). For one process, set {alone}",
        )


def _chosen(config: Config, strategy: str) -> str:
    auto = " (the choice of auto)" if config.parallel.strategy == "auto" else ""
    return f"parallel.strategy={strategy}{auto}"
