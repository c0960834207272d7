"""Which layouts are legal: what ranks cannot share, and which keys cannot go together. Pure functions of the configuration, and of torch's version.

Each raises ConfigError before anything is allocated. The message names the keys and, where there are any, the nearest legal values.
"""

from __future__ import annotations

import math

import torch

from pretrain.config.foreign import value_advice
from pretrain.config.model_schema import Model
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models.families import family_of
from pretrain.models.layer_specs import layer_specs
from pretrain.parallel.pipeline_order import DEFERRING, stages_of


def axes_of_a_sample(config: Config) -> str:
    """The axes over which ranks share samples, as `key=size`. Empty if ranks share none."""
    return ", ".join(_split_over(config.parallel, "context", "tensor", "pipeline"))


def _split_over(parallel: Parallel, *axes: str) -> list[str]:
    """Those of the axes that have several ranks, each as `key=size`."""
    return [f"parallel.{axis}={size}" for axis in axes if (size := getattr(parallel, axis)) > 1]


def check_options(config: Config) -> None:
    """Raise ConfigError for values that cannot go together on any number of processes. It names both keys."""
    steps = config.run.steps
    if advice := value_advice("run.resume", config.run.resume):
        raise ConfigError(f"run.resume={config.run.resume} is not the path of a checkpoint{advice}")
    if config.run.init_from and config.run.resume not in ("auto", "never"):
        raise ConfigError(
            f"run.init_from={config.run.init_from} and run.resume={config.run.resume} both say where to start; keep one"
        )
    compiled = config.parallel.compile != "none"
    cut_up = _split_over(config.parallel, "tensor", "expert")
    if config.parallel.activation_checkpointing == "selective" and config.parallel.compile == "blocks" and cut_up:
        raise ConfigError(
            f"parallel.activation_checkpointing=selective does not reach into what parallel.compile=blocks compiles with {' and '.join(cut_up)}; use "
            "activation_checkpointing=full"
        )
    if config.parallel.activation_offload and config.parallel.compile == "model":
        raise ConfigError(
            "parallel.activation_offload=true works between blocks, which parallel.compile=model makes one; use parallel.compile=blocks"
        )
    within_blocks = _split_over(config.parallel, "context", "tensor")
    if compiled and config.parallel.activation_memory_budget < 1 and within_blocks:
        raise ConfigError(
            f"parallel.activation_memory_budget={config.parallel.activation_memory_budget} does not work with {' and '.join(within_blocks)}: torch's "
            "compiler cannot weigh their collectives; use parallel.activation_checkpointing=full"
        )
    if compiled and config.parallel.tensor > 1 and config.model.experts.count and torch.__version__ < "2.13":
        raise ConfigError(
            f"parallel.compile={config.parallel.compile} with parallel.tensor={config.parallel.tensor} and model.experts: the compiler of torch "
            f"{torch.__version__} ends with an error of its own; install torch 2.13, or set parallel.compile=none"
        )
    if config.precision.fp8 != "none":
        _check_fp8(config)
    for name, listed in (("gradients_at", config.log.gradients_at), ("profile", config.log.profile)):
        beyond = [step for step in listed if step > steps]
        if beyond:
            raise ConfigError(f"log.{name}={listed}: step {beyond[0]} is beyond run.steps={steps}")


def _check_fp8(config: Config) -> None:
    family, schedule = config.model.family, config.parallel.pipeline_schedule
    if not family_of(family).is_ours:
        raise ConfigError(
            f"precision.fp8={config.precision.fp8}: models of model.family={family} are code of transformers, whose products stay as they are; "
            "set it to none"
        )
    if config.parallel.pipeline > 1 and schedule in DEFERRING:
        raise ConfigError(
            f"precision.fp8={config.precision.fp8}: parallel.pipeline_schedule={schedule} puts off gradients of weights in bf16; use 1f1b"
        )


def check_backend(config: Config, strategy: str, on_gpu: bool) -> None:
    """Raise ConfigError for exchanges of a GPU's tensors that torch's gloo lacks: it only adds them up and broadcasts them.

    `strategy`: what `parallel.strategy` has come to; all axes but `replicate` need fsdp. Its first gather ended the process by a signal on an H200,
    and issue 152645 of pytorch is about another that does.
    """
    if config.parallel.backend != "gloo" or not on_gpu or strategy == "single":
        return
    exchanges = config.optim.name == "muon" and config.parallel.replicate != 1
    if strategy != "ddp" or exchanges:
        what = "optim.name=muon" if strategy == "ddp" else f"parallel.strategy={strategy}"
        raise ConfigError(
            f"parallel.backend=gloo does not work with {what} on GPUs: gloo supports only all-reduce and broadcast of GPU tensors; set it to nccl"
        )


def check_context(config: Config) -> None:
    """Raise ConfigError for a complete configuration whose sequences context-parallel ranks cannot share."""
    model, ranks, translation = config.model, config.parallel.context, config.validation.translation
    reasons: dict[tuple[str, str], bool] = {
        (
            f"validation.translation.every_steps={translation.every_steps} decodes with a cache of whole sequences",
            "validation.translation.every_steps=0",
        ): bool(translation.every_steps),
        (
            f"model.predict_ahead={model.predict_ahead} shifts sequences, which parallel.tensor={config.parallel.tensor} cuts as well",
            "parallel.tensor=1",
        ): bool(model.predict_ahead and config.parallel.tensor > 1),
        (f"model.attention_backend={model.attention_backend} needs whole masks", "model.attention_backend=sdpa"): (
            model.attention_backend in ("flex", "varlen")
        ),
    }
    tensor = config.parallel.tensor
    if odd := _odd_linear_heads(model, ranks, tensor):
        shared = f" / parallel.tensor={tensor}" if tensor > 1 else ""
        reasons[f"{odd[0]}={odd[1]}{shared} does not divide by it", f"{odd[0]} to a multiple"] = True
    lengths = {f"batch.lengths.{i}.length": stage.length for i, stage in enumerate(config.batch.lengths)}
    for name, length in (lengths | {"data.sequence_length": config.data.sequence_length}).items():
        reasons[f"2 x {ranks} stretches of {name}={length} tokens are empty", f"{name}={2 * ranks} or more"] = (
            length < 2 * ranks
        )
    for (reason, other), holds in reasons.items():
        if ranks > 1 and holds:
            raise ConfigError(f"parallel.context={ranks}: {reason}; set parallel.context=1, or {other}")
    if ranks > 1 and config.parallel.context_method == "ring":
        _check_ring(config)


def _odd_linear_heads(model: Model, ranks: int, split: int = 1) -> tuple[str, int] | None:
    """The heads of linear attention that so many ranks cannot share, after `split` ranks have shared them: key heads, or the value heads of a single key
    head. None if they can, or if no layer has linear attention.
    """
    sizes = model.linear_attention
    if not any(sizes.pattern or []):
        return None
    keys = max(1, sizes.key_heads // split)
    name, count = ("value_heads", sizes.value_heads // split) if keys == 1 else ("key_heads", keys)
    return (f"model.linear_attention.{name}", getattr(sizes, name)) if count % ranks else None


def _check_ring(config: Config) -> None:
    if config.model.encoder.layers:
        raise ConfigError(
            f"parallel.context_method=ring: pairs of sequences (model.family={config.model.family}) are gathered; use allgather"
        )
    if config.model.attention_dropout:
        raise ConfigError(
            f"parallel.context_method=ring: its kernels drop no weights, as model.attention_dropout={config.model.attention_dropout:g} asks; use allgather"
        )
    if config.parallel.compile != "none":
        raise ConfigError(
            "parallel.context_method=ring: torch's compiler cannot trace messages between two ranks; use allgather, or set "
            "parallel.compile=none"
        )


def check_pipeline(config: Config) -> None:
    """Raise ConfigError for a complete configuration whose layers the ranks of a pipeline cannot share."""
    model, parallel = config.model, config.parallel
    ranks, stages = parallel.pipeline, stages_of(parallel)
    if ranks == 1:
        return
    layers = model.layers + model.encoder.layers
    keys, schedule = f"parallel.pipeline={ranks}", parallel.pipeline_schedule
    if stages > ranks:
        keys += (
            f", parallel.pipeline_chunks={parallel.pipeline_chunks}"
            if schedule == "interleaved"
            else f", parallel.pipeline_schedule={schedule}"
        )
    if stages > layers:
        most = layers * ranks // stages
        remedy = f"use at most parallel.pipeline={most}" if most > 1 else "set parallel.pipeline=1"
        if stages > ranks and layers >= ranks:
            remedy = "use parallel.pipeline_schedule=" + ("zero_bubble" if schedule in DEFERRING else "1f1b")
            remedy += (
                f" or parallel.pipeline_chunks={layers // ranks}" if schedule == "interleaved" and layers >= 2 * ranks else ""
            )
        raise ConfigError(f"{keys}: {stages} stages need as many layers, but the model has {layers}; {remedy}, or more layers")
    if schedule in ("interleaved", "dualpipev") and config.data.pairs is not None:
        raise ConfigError(
            f"parallel.pipeline={ranks}: steps of pairs differ in their number of micro-batches, which "
            f"parallel.pipeline_schedule={schedule} cannot take; use 1f1b"
        )
    if schedule in DEFERRING:
        _check_deferring(config)


def _check_deferring(config: Config) -> None:
    parallel = config.parallel
    named = f"parallel.pipeline_schedule={parallel.pipeline_schedule}"
    if parallel.compile != "none":
        raise ConfigError(
            f"{named} computes the gradients of weights apart, which parallel.compile={parallel.compile} joins with the others; set "
            "parallel.compile=none, or use 1f1b or interleaved"
        )
    if parallel.grad_sync == "every":
        raise ConfigError(
            f"{named} has gradients of weights after the last micro-batch only, so parallel.grad_sync=every cannot be; use last or auto"
        )


def check_micro_batches(config: Config, data_size: int) -> None:
    """Raise ConfigError for steps that have too few micro-batches for the pipeline, or a number that its schedule cannot take."""
    ranks, schedule = config.parallel.pipeline, config.parallel.pipeline_schedule
    unit, least = config.batch.micro_sequences * data_size, 2 * ranks if schedule == "dualpipev" else ranks

    def takes(count: int) -> bool:
        return count >= least and not (schedule == "interleaved" and count % (count // ranks))

    named = {f"batch.ramp.{i}.sequences": stage.sequences for i, stage in enumerate(config.batch.ramp)}
    for name, sequences in (named | {"batch.sequences": config.batch.sequences}).items():
        count = sequences // unit
        if not takes(count):
            near = next(n for n in range(count, count + least + 1) if takes(n))
            needing = "stages" if least == stages_of(config.parallel) else "ranks"
            reason = (
                f"the {least} {needing} need at least as many" if count < least else f"schedule {schedule} cannot deal them out"
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
    if ranks > 1 and not any(spec.experts for spec in layer_specs(model)):
        raise ConfigError(
            f"parallel.expert={ranks}: model.experts.dense_layers names every layer with an MLP, so none has experts; set parallel.expert=1"
        )
    if ranks > 1 and count % ranks:
        near = _nearest_divisors(count, ranks)
        raise ConfigError(
            f"parallel.expert={ranks}: model.experts.count={count} does not divide by it; use {near}, or change that key"
        )


def check_expert_groups(config: Config, shard: int) -> None:
    """Raise ConfigError unless the ranks that share weights fall into expert groups."""
    ranks, context = config.parallel.expert, config.parallel.context
    if shard * context % ranks:
        near = _nearest_divisors(math.gcd(shard * context, config.model.experts.count or 0), ranks)
        raise ConfigError(
            f"parallel.expert={ranks}: the {shard * context} ranks that share weights (parallel.shard={shard} x parallel.context={context}) "
            f"do not divide by it; use {near}, or another parallel.shard"
        )


def _nearest_divisors(count: int, number: int) -> str:
    return _nearest([n for n in range(1, count + 1) if count % n == 0], number)


def _nearest(legal: list[int], number: int) -> str:
    """The next lower and the next higher one of these rising numbers, which begin with 1."""
    return " or ".join(map(str, [max(n for n in legal if n < number), *[n for n in legal if n > number][:1]]))


def check_kept_parts(config: Config, shard: int) -> None:
    """Raise ConfigError for ranks among which weights cannot be kept after forward. torch 2.13 knows such groups of whole meshes only."""
    parallel = config.parallel
    number, ranks = parallel.reshard_after_forward, shard * parallel.context
    if not isinstance(number, int):
        return
    if others := _split_over(parallel, "tensor", "pipeline", "expert"):
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
        raise ConfigError(f"parallel.tensor={ranks}: {problem}; use {_nearest(legal, ranks)}, or change that key")


def _tables(model: Model) -> dict[str, int]:
    """The rows of each table, by the key that decides them."""
    rows = {"vocab_size": model.vocab_size, "encoder.vocab_size": model.encoder.vocab_size}
    if model.positions == "learned":
        rows["max_sequence_length"] = model.max_sequence_length
    return {name: count for name, count in rows.items() if count}


def check_tables(model: Model, tensor: int, parts: int) -> None:
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
    dense = not experts.count or any(spec.mlp == "mlp" for spec in layer_specs(model))
    counts = {
        "heads": model.heads,
        "ffn_dim": model.ffn_dim if dense else 0,
        "experts.ffn_dim": experts.ffn_dim if experts.count else 0,
    }
    for name, count in counts.items():
        if count % ranks:
            return f"model.{name}={count} does not divide by it"
    if odd := _odd_linear_heads(model, ranks):
        return f"{odd[0]}={odd[1]} does not divide by it"
    keys = model.heads if model.latent.kv_rank else model.kv_heads
    if keys % ranks and ranks % keys:
        return f"model.kv_heads={keys} is neither a multiple nor a divisor of it"
    for name, count in _tables(model).items():
        if (ranks - 1) * -(-count // ranks) >= count:
            return f"model.{name}={count} is too small, the last rank would have no row of the table"
    return None
