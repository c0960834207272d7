"""`pretrain/run.py` with one step measured on every rank: collectives, bytes sent, peak memory. `tools/check_equivalence.py` starts it.

The step is the third: DDP lays out its buckets anew at the end of the first one. A run of fewer steps measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    # Started by path, Python puts this file's own folder first (see run.py).
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.distributed.shards import local
from pretrain.parallel.traffic import EXCHANGE, GATHER, RECEIVE, REDUCE, SCATTER, SEND, expected_traffic
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


_plain_step = Trainer.step


def _measured_step(trainer: Trainer, *arguments: Any) -> Any:
    if trainer.progress.step != MEASURED_STEP - 1:
        return _plain_step(trainer, *arguments)
    record, measured = measure(trainer, lambda: _plain_step(trainer, *arguments))
    measured.write(trainer.directory.path, trainer.ranks.rank)
    return record


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
    with mock.patch.object(Trainer, "step", _measured_step):
        return main(arguments)


# ---- collectives -------------------------------------------------------------------------------------------------------

_NAMES = {
    "reduce_scatter": SCATTER,
    "reduce": REDUCE,
    "gather": GATHER,
    "all_to_all": EXCHANGE,
    "alltoall": EXCHANGE,
    "send": SEND,
    "recv": RECEIVE,
}
"""Kinds by a part of the operator's name. The first that fits counts."""


class CountCollectives(TorchDispatchMode):
    """Counts what reaches torch's collective operators, from Python or from DDP's reducer, and the bytes that this rank sends.

    Bytes are those of algorithms on a ring of n ranks. Each rank sends (n - 1) / n of a tensor that is gathered or scattered, and twice as much of one
    that is reduced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = kind_of(function._opname)
            if kind is not None:
                self.counts[kind] += 1
                self.bytes += _bytes_sent(kind, args)
        return function(*args, **(kwargs or {}))


def kind_of(operator: str) -> str | None:
    """The kind of a collective by the name of torch's operator; None for what moves nothing (waits)."""
    if "barrier" in operator or "wait" in operator:
        return None
    plain = operator.replace("allreduce", "reduce")
    return next((kind for part, kind in _NAMES.items() if part in plain), operator.strip("_"))


def _bytes_sent(kind: str, args: tuple) -> float:
    tensors = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    sizes = [tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)]
    ranks = _ranks(args)
    if not sizes or kind == RECEIVE:
        return 0.0
    if kind in (GATHER, SCATTER):  # input and output are both among the arguments
        return max(sizes) * (ranks - 1) / ranks
    if kind == REDUCE:
        return 2 * sum(sizes) * (ranks - 1) / ranks
    if kind == EXCHANGE:
        return _bytes_exchanged(args, ranks)
    return sum(sizes)


def _bytes_exchanged(args: tuple, ranks: int) -> float:
    """The bytes of the second tensor without the part for this rank. `args` are (output, input, group, sizes of what comes, of what goes, ...)."""
    sent, group, splits = args[1], dist.ProcessGroup.unbox(args[2]), args[4]
    if not splits:
        return sent.nbytes * (ranks - 1) / ranks
    row = sent.nbytes / max(1, len(sent))
    return row * (sum(splits) - splits[group.rank()])


def _ranks(args: tuple) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except RuntimeError:  # the operator of a reduction
                continue
    return 1


if __name__ == "__main__":
    sys.exit(measured_main(sys.argv[1:]))
