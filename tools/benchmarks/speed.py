"""Tokens per second of training steps of any model, with any options, on any device and number of ranks; nothing is saved.

One process may stand for a rank of a run of many (`Speed.one_rank_of`). It computes what that rank computes, by the same kernels, and needs the
same memory, but its exchanges move nothing (parallel/stand_in.py). So its values mean nothing, and no run of that layout is faster.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.corpora import byte_tokenizer, write_tokens
from benchmarks.measure import Options, Row, require

from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.config.written import flatten
from pretrain.data.stream import StepBatch
from pretrain.distributed import ranks as distributed
from pretrain.distributed.cores import kept_on_cores
from pretrain.distributed.launcher import ranks_of_host
from pretrain.distributed.ranks import Ranks
from pretrain.errors import ConfigError, LaunchError
from pretrain.observe.flops import peak_flops
from pretrain.observe.profile import Recorded, profiled
from pretrain.parallel.layout import take_rest
from pretrain.parallel.stand_in import stand_in
from pretrain.train.plan import Plan, make_plan
from pretrain.train.queued_step import QueuedStep
from pretrain.train.run_directory import RunDirectory
from pretrain.train.session import prepare_process
from pretrain.train.starting_point import StartingPoint
from pretrain.train.trainer import Trainer

WARM_UP = 5
"""Steps that are not measured: they allocate, compile, record a CUDA graph (`parallel/cuda_graph.py`), and on a GPU fill the queue."""

_ALONE_TOKENS = 1 << 24
"""Most tokens of the data of a rank that stands alone. Data for all of 1,024 ranks would take gigabytes."""
_OF_A_RUN = (
    "run.tokens", "run.init_from", "data.stages", "data.validation", "data.text", "batch.ramp", "batch.lengths", "schedule", "validation",
    "checkpoint", "log",
)  # fmt: skip
"""Keys of a file that are about its data, its length or what it keeps. They get their defaults, unless the command line has them."""


@dataclass(frozen=True)
class Speed:
    """What to measure. `config`: the file of a model or of a run; `overrides`: further keys, as `pretrain/run.py` takes them."""

    config: Path | None
    length: int
    micro: int
    """Sequences of a micro-step of a rank."""
    accumulation: int
    """Micro-steps of a step."""
    steps: int
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    """A folder for the profile of one more step."""
    one_rank_of: int | None = None
    """This process alone stands for `rank` of so many."""
    rank: int = 0


def device_of(asked: Speed) -> str:
    """Where it is measured: cpu or cuda. Raises LaunchError for a device that this host lacks."""
    given = load_config(asked.config, list(asked.overrides))[0]
    return distributed.choose_device(given, distributed.launched_ranks()[1]).type


def measure_speed(asked: Speed, name: str, options: Options) -> list[Row]:
    """A row of this rank; of all ranks together but for the memory, which is this rank's."""
    _, local_rank, world_size = distributed.launched_ranks()
    if asked.one_rank_of is not None:
        if world_size > 1:
            raise LaunchError(f"--one-rank-of={asked.one_rank_of} is for one process, and {world_size} were started; start it by python")
        if not 0 <= asked.rank < asked.one_rank_of:
            raise ConfigError(f"--rank={asked.rank} is no rank of --one-rank-of={asked.one_rank_of}; give one of 0 to {asked.one_rank_of - 1}")
        world_size = asked.one_rank_of
    if decided := [word for word in asked.overrides if re.match(r"(batch|run\.steps|run=.*\bsteps)\b", word)]:
        raise ConfigError(f"{' '.join(decided)}: --micro, --accumulation and --steps decide it; remove it")
    folder = options.work / f"rank-{local_rank}"
    given = load_config(asked.config, list(asked.overrides))[0]
    if given.data.pairs is not None:
        raise ConfigError(f"data.pairs={given.data.pairs}: speed measures steps of --length tokens, not of pairs; give a model without pairs")
    parallel = take_rest(given, world_size).parallel
    data_ranks = max(1, world_size // (parallel.tensor * parallel.context * parallel.pipeline))
    sequences = asked.micro * asked.accumulation * data_ranks
    samples = (WARM_UP + asked.steps + 1) * sequences
    if asked.one_rank_of is not None:  # one rank reads few of them; the data may repeat
        samples = min(samples, _ALONE_TOKENS // asked.length + 1)
    write_tokens(folder / "tokens", byte_tokenizer(folder), (samples + 1) * (asked.length + 1), 1 << 24)
    config, _ = load_config(asked.config, [*_own_keys(asked, folder, sequences), *asked.overrides])
    prepare_process(config)
    device = distributed.choose_device(config, local_rank)
    with kept_on_cores(config.run.affinity, device, local_rank, ranks_of_host(1 if asked.one_rank_of else world_size)):
        return _measure(asked, name, config, device, world_size, folder, options)


def _measure(
    asked: Speed, name: str, config: Config, device: torch.device, world_size: int, folder: Path, options: Options
) -> list[Row]:
    plan = make_plan(config, world_size, device)
    torch.set_float32_matmul_precision("high" if plan.config.precision.tf32 else "highest")
    with _started(asked, plan, device) as ranks:
        return _measure_steps(asked, name, plan, ranks, folder, options)


@contextmanager
def _started(asked: Speed, plan: Plan, device: torch.device) -> Iterator[Ranks]:
    """This rank among the others, or one that stands for it."""
    if asked.one_rank_of is None:
        ranks = distributed.start(plan.config, plan.layout.strategy == "single")
        yield ranks
        distributed.stop()
        return
    if plan.layout.strategy != "fsdp":
        raise ConfigError(
            f"--one-rank-of={asked.one_rank_of} with parallel.strategy={plan.layout.strategy}: a rank alone is measured with fsdp only. A rank of ddp "
            "computes what one process does: measure parallel.strategy=single"
        )
    if plan.layout.axes["expert"] > 1:
        raise ConfigError("--one-rank-of with parallel.expert: what others would send to a rank's experts is not known; remove parallel.expert")
    with stand_in(asked.rank, asked.one_rank_of, device) as ranks:
        yield ranks


def _measure_steps(asked: Speed, name: str, plan: Plan, ranks: Ranks, folder: Path, options: Options) -> list[Row]:
    device, world_size = ranks.device, ranks.world_size
    started = time.monotonic()
    trainer = Trainer(plan, ranks, RunDirectory(folder / "run"), StartingPoint())
    built = time.monotonic() - started
    options.say(f"{name}: {plan.parameters:,} parameters on {device}, built in {built:.1f} s")
    seconds, tokens, first, loss = _steps(trainer, asked.steps, device)
    if asked.profile is not None:
        asked.profile.mkdir(parents=True, exist_ok=True)
        _profile(trainer, asked.profile)
    ranks.barrier("end of the measurement")
    require(asked.one_rank_of is not None or (loss == loss and loss < 100), f"the loss is {loss}")
    rate = tokens / seconds
    peak = peak_flops(device, plan.config.precision.compute)
    share = f"MFU {100 * rate * plan.flops_per_token(0) / (peak * world_size):.1f}%, " if peak else ""
    result = f"loss {loss:.3f}" if asked.one_rank_of is None else f"rank {asked.rank} alone: its exchanges moved nothing"
    note = f"{share}peak {_peak_gb(device):.1f} GB, built in {built:.1f} s, first step {first:.1f} s, {result}"
    note += f"; steps of {tokens // asked.steps:,} tokens in {plan.layout.micro_steps} micro-steps"
    return [
        Row(
            "speed", name, rate, "tokens/s", "wall", note=f"{note}; {plan.parameters / 1e9:.2f}B parameters, {plan.layout.name}"
        )
    ]


def _own_keys(asked: Speed, folder: Path, sequences: int) -> list[str]:
    defaults = flatten(dataclasses.asdict(Config()), complete=True)
    left_out = tuple(f"{key}." for key in _OF_A_RUN)
    return [
        *(f"{key}={json.dumps(value)}" for key, value in defaults.items() if f"{key}.".startswith(left_out)),
        f"run={{dir: {folder}, name: run, steps: {WARM_UP + asked.steps + 1}, resume: never}}",
        f"data={{sequence_length: {asked.length}, sources: [{{path: {folder}/tokens}}]}}",
        f"batch={{sequences: {sequences}, micro_sequences: {asked.micro}}}",
        f"model.max_sequence_length={asked.length}",
        "schedule.warmup_steps=1",
        "checkpoint.export_check=false",
        "log.tensorboard=false",
    ]


def _steps(trainer: Trainer, steps: int, device: torch.device) -> tuple[float, int, float, float]:
    """Seconds and target tokens of all measured steps, seconds of the first step of all, and the last loss. Figures are read as a run reads them."""
    batches = trainer.loader.batches(0)
    gc.collect()
    gc.disable()
    ahead, start, first, counted = None, time.monotonic(), 0.0, 0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            _wait(device)
            start = time.monotonic()
        begin = time.monotonic()
        batch = next(batches)
        tokens = _target_tokens(trainer, batch)
        counted += tokens if number >= WARM_UP else 0
        before, ahead = ahead, trainer.step(batch, tokens)
        if before is not None:
            _loss(trainer, before)
        if number == 0:
            _wait(device)
            first = time.monotonic() - begin
    loss = _loss(trainer, ahead)
    _wait(device)
    gc.enable()
    return time.monotonic() - start, counted, first, loss


def _loss(trainer: Trainer, step: QueuedStep) -> float:
    """Wait for a step's figures, as a run does. Those of a rank that stands alone mean nothing, also if they are not finite."""
    return float(step.figures.read()["loss"]) if _is_alone(trainer) else trainer.settle(step).loss


def _is_alone(trainer: Trainer) -> bool:
    return trainer.ranks.control is None and trainer.ranks.world_size > 1


def _target_tokens(trainer: Trainer, batch: StepBatch) -> int:
    """Those of a step on all ranks together. All samples have the same number."""
    if _is_alone(trainer):
        return batch.target_tokens * trainer.mesh.data_size
    return int(trainer.ranks.sum("target tokens", torch.tensor(batch.target_tokens if trainer.mesh.counts_samples else 0)))


def _profile(trainer: Trainer, folder: Path) -> None:
    batch, number = trainer.loader.read(trainer.progress.samples), trainer.progress.step + 1
    ranks, optimizer, tokens = trainer.ranks, trainer.optimizer, _target_tokens(trainer, batch)
    means = list(optimizer.means.values())
    with profiled(Recorded(folder, number, ranks.rank, ranks.device, 0.0, trainer.strategy, optimizer.optimizers, means)):
        trainer.step(batch, tokens)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
