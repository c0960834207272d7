"""Which process this is, and its operations with the others: one sum, one gather, one barrier, each with a name.

Two groups are made here: torch's default one for tensors of all ranks (NCCL on CUDA, gloo on CPU), and `control`, always gloo. Those
of the axes are made in mesh.py. `control` carries what the processes agree on (verdicts, checkpoints), so that it never waits behind or
inside device work. Many ranks have `stages` besides, for their sums. Every operation has a time limit, `parallel.timeout_seconds`. A failed one raises a LostRankError that names the
operation and the ranks to blame.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pretrain.config.schema import Config
from pretrain.distributed.host_memory import keep_freed_memory
from pretrain.distributed.joining import Meeting, close_meeting
from pretrain.distributed.launcher import launched_ranks
from pretrain.distributed.monitor import Monitor
from pretrain.errors import LaunchError, LostRankError, UserError, flush_output, reason_of

T = TypeVar("T")

_ABORT_SECONDS = 120
"""Seconds after `parallel.timeout_seconds` at which NCCL gives up by itself."""
LAZY_RANKS = 64
"""From so many ranks on, gloo connects two of them when they first exchange something. Else each group would connect every rank with every other
one: a million connections of 1,024 ranks. Fewer are all connected at the start, because a first exchange with a rank that hangs has no time limit
(pytorch/gloo issue 520).
"""
TWO_STAGE_RANKS = 64
"""From so many ranks on, a sum is made in two stages (`stages_of_a_sum`). In gloo's ring each rank waits for 2 x (ranks - 1) messages, one after
the other: 8,190 of 4,096 ranks before each step, and 252 in two stages.
"""
EXIT_PAUSE_SECONDS = 0.1
"""Seconds between the last collective and the end of a process, see `stop`."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. `control` and `monitor` are None if it is the only one.

    `stages`: the groups over which a sum is made one after the other; without any, `control` makes it.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    monitor: Monitor | None = None
    stages: tuple[dist.ProcessGroup, ...] = ()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. It is picklable plain data, and travels between the run's
        own processes only.

        `name` says what the ranks are doing; a time-out names it.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._together(name):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def collect(self, name: str, value: Any) -> list[Any] | None:
        """`value` of every rank, in rank order, on the main rank; None elsewhere. What is gathered may be large."""
        if self.control is None:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        with self._together(name):
            dist.gather_object(value, values, group=self.control)
        return values

    def hand_out(self, name: str, values: list[Any] | None) -> Any:
        """The main rank has a value for each rank, in their order. Return this rank's."""
        if self.control is None:
            return values[0]
        own: list[Any] = [None]
        with self._together(name):
            dist.scatter_object_list(own, values if self.is_main else None, group=self.control)
        return own[0]

    def sum(self, name: str, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, on the CPU, equal on every rank. `values` itself may be overwritten."""
        return self._reduce(name, values, dist.ReduceOp.SUM)

    def add(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, in place and on their device: the host does not wait for a GPU. A `part` gives it a name."""
        if self.control is not None:
            dist.all_reduce(values)
        return values

    def most(self, values: Tensor) -> Tensor:
        """The largest of `values` over all ranks, likewise."""
        if self.control is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def largest(self, name: str, number: int) -> int:
        """The largest `number` of any rank."""
        return int(self._reduce(name, torch.tensor(number), dist.ReduceOp.MAX))

    def _reduce(self, name: str, values: Tensor, operation: dist.ReduceOp) -> Tensor:
        values = values.cpu()
        if self.control is not None:
            with self._together(name):
                for group in self.stages or (self.control,):
                    dist.all_reduce(values, op=operation, group=group)
        return values

    def _together(self, name: str) -> AbstractContextManager:
        return self.monitor.doing(name, waiting=True) if self.monitor else nullcontext()

    def part(self, name: str, device: bool = False, storage: bool = False, exchanges: bool = False) -> AbstractContextManager:
        """Name a part of this rank's work. Ranks that wait can see the name, and a collective that fails in the part is explained.

        `device`: the ranks exchange gradients or weights in it. `exchanges`: on a CPU it sleeps only to wait for them. `storage`: it
        reads, writes or removes files, and may wait for storage without a sign.
        """
        return self.monitor.doing(name, device=device, storage=storage, exchanges=exchanges) if self.monitor else nullcontext()

    @contextmanager
    def in_pieces(self, name: str) -> Iterator[Callable[[int], object]]:
        """Work that all ranks do a share of, which may take one of them longer than `parallel.timeout_seconds`, as long as no piece does.

        It gives a function to be called after each piece, with the piece's size. By it, those that are done hear that the others go on.
        """
        # One rank may have groups, for a model that is wrapped, and nobody who waits.
        if self.control is None or self.monitor is None:
            yield lambda size: None
            return
        every, began = self.monitor.timeout_seconds / 2, time.monotonic()

        def after_piece(size: int) -> None:
            nonlocal began
            if time.monotonic() - began >= every:
                self.sum(name, torch.tensor(1))
                began = time.monotonic()

        try:
            yield after_piece
        except LostRankError:
            raise
        except (UserError, OSError):
            self._wait_for_pieces(name)
            raise
        self._wait_for_pieces(name)

    def while_alive(self, name: str, action: Callable[[], T]) -> T:
        """What `action` returns, which may take longer than `parallel.timeout_seconds`. All ranks call this together."""
        found: Future[T] = Future()

        def act() -> None:
            try:
                found.set_result(action())
            except BaseException as error:  # raised below
                found.set_exception(error)

        with self.part(name, storage=True), self.in_pieces(name) as seen:
            # A daemon, because a process that has lost a rank does not wait for it.
            threading.Thread(target=act, name=name, daemon=True).start()
            while not wait([found], timeout=1.0).done:
                seen(0)
            return found.result()

    def _wait_for_pieces(self, name: str) -> None:
        while self.sum(name, torch.tensor(0)):
            pass

    def begin_step(self, number: int) -> None:
        """Say that the ranks agree on this step next, so that the time between two steps is known (pace.py)."""
        if self.monitor is not None:
            self.monitor.pace.begin_step(number)

    def tell_of_ranks(self, tell: Callable[[dict[str, Any]], None] | None) -> None:
        """From now on call `tell` on the main rank with what all ranks do, every few seconds and in another thread (roll_call.py)."""
        if self.monitor is not None and self.is_main:
            self.monitor.on_ranks = tell

    def attempt(self, name: str, action: Callable[[], T], kind: type[UserError], storage: bool = False) -> T:
        """The result of `action` on this rank. If it fails on any rank, all raise the first failure, naming its rank.

        An OSError becomes a `kind`; a UserError keeps its class. So no rank waits for one that gave up. `storage`: see `part`.
        """
        problem, result = None, None
        try:
            with self.part(name, storage=storage):
                result = action()
        except LostRankError:  # not a failure of the action: nobody is left to agree with
            raise
        except UserError as error:
            problem = type(error), str(error)
        except OSError as error:
            problem = kind, reason_of(error)
        self._raise_first(name, problem)
        return result

    def on_main(self, name: str, action: Callable[[], T], kind: type[UserError], storage: bool = False) -> T:
        """Run `action` on the main rank alone and return its result on every rank. A failure is raised on all (see `attempt`)."""
        result = [self.attempt(name, lambda: action() if self.is_main else None, kind, storage)]
        if self.control is not None:
            with self._together(name):
                dist.broadcast_object_list(result, src=0, group=self.control)
        return result[0]

    def agree(self, name: str, problem: str | None, kind: type[UserError]) -> None:
        """Raise `kind` on every rank if any rank has a problem; the message names the first one's rank."""
        self._raise_first(name, problem and (kind, problem))

    def _raise_first(self, name: str, problem: tuple[type[UserError], str] | None) -> None:
        for rank, found in enumerate(self.gather(name, problem)):
            if found:
                kind, text = found
                raise kind(text if self.world_size == 1 or text.startswith("rank ") else f"rank {rank}: {text}")

    def barrier(self, name: str) -> None:
        """Wait for every rank."""
        self.largest(name, 0)


ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
"""A tool that is no run: one process on a CPU."""


def choose_device(config: Config, local_rank: int) -> torch.device:
    """This rank's device. Raises LaunchError if the configuration asks for one that does not exist here."""
    wanted = config.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count > 0 and config.parallel.backend == "gloo":
        return torch.device("cuda", local_rank % count)  # NCCL would refuse two processes on one GPU
    if local_rank >= count:
        remedy = (
            f"start at most {count} processes here"
            if count
            else "set run.device=auto, or install torch with CUDA and its driver"
        )
        error = LaunchError(
            f"run.device=cuda, but torch sees {count or 'no'} GPU{'' if count < 2 else 's'} on this host; {remedy}"
        )
        raise error.on_rank(int(os.environ.get("RANK", "0")))
    return torch.device("cuda", local_rank)


def start(config: Config, alone: bool, meeting: Meeting | None = None) -> Ranks:
    """Join the run's process groups and return this process's place among them.

    `alone`: the strategy is for one process and needs no group. A wrapped model needs a group, even of one rank. `meeting`: this
    process's meeting, in which all have agreed (`Meeting.join`); by default they meet here.
    """
    global _has_groups
    rank, local_rank, world_size = launched_ranks()
    device = choose_device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if alone:
        return Ranks(rank, local_rank, world_size, device)
    backend = choose_backend(config, device)
    if meeting is None:
        meeting = Meeting(rank, local_rank, world_size, config.parallel.join_seconds, config.parallel.timeout_seconds)
        if world_size > 1:
            meeting.join({}, "")
    monitor, timeout = meeting.monitor, timedelta(seconds=config.parallel.timeout_seconds)
    if monitor is not None:
        monitor.pace.on_gpu = device.type != "cpu"
    # If a collective takes too long, NCCL ends the process without a message. The monitor comes first, and has one.
    patience = timeout + timedelta(seconds=_ABORT_SECONDS) if backend == "nccl" else timeout
    _leave_groups()
    _limit_groups(patience)
    connect_lazily(world_size)
    ranks = Ranks(rank, local_rank, world_size, device, None, monitor)
    # NCCL is not told the device (`device_id`). It would connect all groups at once: messages of one group would wait for each other
    # (`pretrain/parallel/pipeline.py`), gloo's half of a group would get torch's time limit, and a connection that fails would have none.
    with ranks.part("connection of the ranks"):
        dist.init_process_group(
            f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else "gloo",
            timeout=patience,
            store=meeting.store or dist.HashStore(),
            rank=rank,
            world_size=world_size,
        )
        _has_groups = True
        control = dist.new_group(backend="gloo", timeout=timeout)
        stages = [
            dist.new_group(members, timeout, "gloo", use_local_synchronization=True)
            for members in stages_of_a_sum(rank, world_size)
            if world_size >= TWO_STAGE_RANKS
        ]
    return replace(ranks, control=control, stages=tuple(stages))


def stages_of_a_sum(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """The ranks that this one adds up with first, which are neighbours, and then, one of each such group.

    Together they reach all ranks. The groups are as equal in size as the number of ranks allows.
    """
    width = next(size for size in range(math.isqrt(world_size), 0, -1) if world_size % size == 0)
    first = rank - rank % width
    return list(range(first, first + width)), list(range(rank % width, world_size, width))


def _limit_groups(limit: timedelta) -> None:
    """Give groups that are made from now on this time limit. Device meshes pass none on, and torch's own is 30 minutes on gloo, 10 on NCCL."""
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit


def connect_lazily(world_size: int) -> None:
    """Let gloo connect ranks when they need it, if they are many and TORCH_GLOO_LAZY_INIT does not say otherwise."""
    if world_size >= LAZY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def forget_meshes() -> None:
    """Drop what DTensor remembers of this run's meshes. A later run of the same process would get their groups, which are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        if hasattr(debug, "_clear_sharding_prop_cache"):  # private
            debug._clear_sharding_prop_cache()


def choose_backend(config: Config, device: torch.device) -> str:
    """The library that carries gradients. Raises LaunchError if it does not work on the device."""
    backend = config.parallel.backend
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("parallel.backend=nccl needs GPUs, but this run is on the CPU; use parallel.backend=gloo or auto")
    return backend


_has_groups = False
"""Whether a run of this process has made groups that it has not left."""


def _leave_groups() -> None:
    """Leave the groups of an earlier run of this process that failed. A script may call `main` again."""
    if _has_groups:
        gc.collect()  # what that run captured has to go before its groups
        _destroy_groups()


def _destroy_groups() -> None:
    global _has_groups
    _has_groups = False
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()


def stop() -> None:
    """Leave the process groups and the meeting. Call on the clean path only; a failed process just ends."""
    _destroy_groups()
    close_meeting()
    gc.collect()
    flush_output()
    # gloo's threads drop their last tensors under the GIL. Without this pause they may do so during interpreter shutdown, which
    # aborts about one process exit in a hundred.
    time.sleep(EXIT_PAUSE_SECONDS)
