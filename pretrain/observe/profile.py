"""A profile of one step: a trace of every rank, and a page on where the main rank's milliseconds and gigabytes go.

RUN/profile/step-N.rank-R.trace.json.gz    chrome trace, by torch.profiler
RUN/profile/step-N.md                      the page, made from the main rank's trace
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from pretrain.distributed.shards import local
from pretrain.errors import clipped, reason_of
from pretrain.observe.logs import TRACEBACKS
from pretrain.observe.profile_page import Held, page, usage_of
from pretrain.observe.profile_time import COMMUNICATION, GRADIENTS, STEP

log = logging.getLogger(__name__)


class Computing(Protocol):
    """What holds the weights and computes their gradients. `Strategy` (pretrain/parallel) is one."""

    network: nn.Module

    def gradients(self) -> Iterable[Tensor]: ...

    def noting(self, note: Callable[[], None]) -> AbstractContextManager: ...


@dataclass(frozen=True)
class Recorded:
    """What is profiled: a step of this rank, with what computes it and the optimizers that it has."""

    directory: Path
    """The run's directory, in which the folder `profile` is made."""
    step: int
    rank: int
    device: torch.device
    waited: float
    """Seconds that the step waited for its batch before."""
    strategy: Computing
    optimizers: list[Optimizer]
    means: list[Tensor]
    """Running means of weights."""
    tell: Callable[[float], None] = lambda share: None
    """Is given the main rank's share of the step in which a collective ran, and nothing else."""


@contextmanager
def profiled(what: Recorded) -> Iterator[None]:
    """Record what happens inside. A file that cannot be written is a warning, because a profile only observes the run.

    A GPU is waited for before and after, so that the profile has this step alone.
    """
    on_gpu = what.device.type == "cuda"
    gradients: list[dict[int, int]] = []

    def note(*_: object) -> None:
        with record_function(f"{GRADIENTS}{len(gradients)}"):
            gradients.append(_by_storage(x for x in what.strategy.gradients() if x.device.type == what.device.type))

    counting = register_optimizer_step_pre_hook(note)
    parameters = list(what.strategy.network.parameters())
    weights, state = _bytes(parameters, what.device), _bytes([*_state_of(what.optimizers), *what.means], what.device)
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])], profile_memory=True)
    _wait(what.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(what.device)
    profiler.start()
    try:
        with record_function(STEP), what.strategy.noting(note):
            yield
            _wait(what.device)
    finally:
        profiler.stop()
        counting.remove()
    peak = torch.cuda.max_memory_allocated(what.device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _write(what, profiler, Held(weights, state, gradients, peak, on_gpu))


def _write(what: Recorded, profiler: profile, held: Held) -> None:
    folder, name = what.directory / "profile", f"step-{what.step:08d}"
    path = folder / f"{name}.rank-{what.rank}.trace.json.gz"
    try:
        folder.mkdir(exist_ok=True)
        aside = folder / f".{path.name}.{os.getpid()}.json.gz"  # torch compresses what ends so
        profiler.export_chrome_trace(str(aside))
        os.replace(aside, path)
        if what.rank == 0:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
            usage = usage_of(events, what.waited, held)
            what.tell(usage.groups[COMMUNICATION] / usage.seconds)
            (folder / f"{name}.md").write_text(page(what.step, path.name, usage), encoding="utf-8")
            log.info("step %d was profiled: %s", what.step, folder / f"{name}.md")
    except Exception as error:  # torch raises RuntimeError for a file that it cannot open; a trace of a later torch may differ
        logging.getLogger(TRACEBACKS).exception("profile of a step")
        reason = reason_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        log.warning("the profile of step %d cannot be written: %s; the run goes on", what.step, clipped(reason, 300))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of this rank's parts, of those that are on the device."""
    return sum(local(tensor).nbytes for tensor in tensors if tensor.device.type == device.type)


def _state_of(optimizers: list[Optimizer]) -> list[Tensor]:
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, Tensor)]


def _by_storage(gradients: Iterable[Tensor]) -> dict[int, int]:
    """Address of a storage -> bytes of the gradients in it."""
    found: dict[int, int] = {}
    for gradient in gradients:
        address = gradient.untyped_storage().data_ptr()
        found[address] = found.get(address, 0) + gradient.nbytes
    return found
