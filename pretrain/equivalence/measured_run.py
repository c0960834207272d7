"""`pretrain/run.py` with one step measured on every rank: collectives, bytes sent, peak memory. `tools/check_equivalence.py` starts it.

The step is the third: DDP lays out its buckets anew at the end of the first one. A run of fewer steps measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path, Python puts this file's own folder first (see run.py).
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from pretrain.distributed.shards import local
from pretrain.equivalence.counting import CountCollectives
from pretrain.parallel.traffic import expected_traffic
from pretrain.run import main
from pretrain.train.trainer import Trainer

MEASURED_STEP = 3


@dataclass
class Measured:
    """What a rank did in its measured step."""

    collectives: dict[str, int]
    """Those of forward and backward, by kind."""
    expected: dict[str, int]
    """The same by formula, as far as there is one."""
    formula: dict[str, str]
    """The same as sums."""
    unknown: list[str] | None
    """Kinds without a formula; None: all of them."""
    sent: int | None
    """Bytes that forward and backward send, on a ring of ranks. None where nothing is counted: with `parallel.compile`."""
    sent_by_ddp: int
    """Bytes that DDP would send on as many ranks, if it reduced gradients once in a step."""
    peak: int
    """Most bytes of tensors at a time, in the whole step."""
    micro_steps: int

    @property
    def as_expected(self) -> bool:
        """Whether all kinds that have a formula follow it."""
        if self.unknown is None:
            return True
        return {kind: count for kind, count in self.collectives.items() if kind not in self.unknown} == self.expected

    def write(self, run: Path, rank: int) -> None:
        _file(run, rank).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_measured(run: Path, ranks: int) -> list[Measured]:
    """What each rank measured; empty for a run that was too short."""
    files = [_file(run, rank) for rank in range(ranks)]
    return [Measured(**json.loads(file.read_text(encoding="utf-8"))) for file in files] if all(map(Path.exists, files)) else []


def _file(run: Path, rank: int) -> Path:
    return run / f"measured-rank-{rank}.json"


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """While this is open, every trainer measures its third step."""
    plain = Trainer.step

    def step(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.progress.step != MEASURED_STEP - 1:
            return plain(trainer, *arguments)
        record, measured = measure(trainer, lambda: plain(trainer, *arguments))
        measured.write(trainer.directory.path, trainer.ranks.rank)
        return record

    Trainer.step = step
    try:
        yield
    finally:
        Trainer.step = plain


def measure(trainer: Trainer, step: Callable[[], Any]) -> tuple[Any, Measured]:
    """Take a step of a trainer; its result, and what was measured meanwhile."""
    config, ranks, strategy, taken = trainer.config, trainer.ranks, trainer.strategy, []
    # Compiled code knows no such modes.
    counter = CountCollectives() if config.parallel.compile == "none" else None
    plain = strategy.forward_backward

    def counted(batch: Any, target_tokens: int) -> Any:
        taken.append(batch.micro_steps(config.batch.micro_sequences))
        with counter or contextlib.nullcontext():
            return plain(batch, target_tokens)

    strategy.forward_backward = counted
    try:
        record, peak = peak_of(trainer, step)
    finally:
        del strategy.forward_backward
    [micro_steps] = taken
    traffic = expected_traffic(config, trainer.plan.layout, ranks.rank)
    known = (
        ({}, {}, None)
        if traffic is None
        else (traffic.step(micro_steps), traffic.formula(micro_steps), sorted(traffic.unknown))
    )
    counts, sent = (dict(counter.counts), round(counter.bytes)) if counter else ({}, 0 if ranks.world_size == 1 else None)
    gradients = trainer.plan.parameters * (2 if config.precision.reduce == "bf16" else 4)
    by_ddp = 2 * gradients * (ranks.world_size - 1) // ranks.world_size
    return record, Measured(counts, *known, sent, by_ddp, peak, micro_steps)


def peak_of(trainer: Trainer, step: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a step, and the most bytes that its tensors take at a time.

    On a GPU its allocator knows. On a CPU the sum has weights, moments, DDP's buckets, and the most that torch's allocator
    gave to this thread beside them. Python's own memory and other threads' allocations are not in it. Memory that other threads free counts until
    the end of the step.
    """
    device = trainer.ranks.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        record = step()
        return record, torch.cuda.max_memory_allocated(device)
    held = _bytes_of_state(trainer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        record = step()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return record, held + most


def _bytes_of_state(trainer: Trainer) -> int:
    parameters = list(trainer.model.parameters())
    parts = [local(tensor) for tensor in (*parameters, *trainer.optimizer.tensors().values())]
    buckets = sum(parameter.nbytes for parameter in parameters) if trainer.plan.layout.strategy == "ddp" else 0
    return buckets + sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}.values())


def measured_main(arguments: list[str]) -> int:
    """`pretrain/run.py` with these arguments, and a measured step."""
    with measuring():
        return main(arguments)


if __name__ == "__main__":
    sys.exit(measured_main(sys.argv[1:]))
