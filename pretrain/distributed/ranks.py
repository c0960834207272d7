"""Which process this is, and how the processes of a run find, await and leave each other.

Ranks come from RANK, LOCAL_RANK and WORLD_SIZE, as torchrun, `accelerate launch` and schedulers set them; nothing is guessed.
Two groups: torch's default one for gradients (NCCL on CUDA, gloo on CPU), and `control`, always gloo, for what processes say
to each other about the run (barriers, verdicts, checkpoints), so that it never waits behind or inside device work.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.errors import LaunchError, UserError, reason_of

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. `control` is None when it is alone."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. Picklable plain data, between the run's own processes only.

        `name` says what the ranks are doing; a time-out names it.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, name: str, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, on the CPU, equal on every rank. `values` itself may be overwritten."""
        return self._reduce(name, values, dist.ReduceOp.SUM)

    def largest(self, name: str, number: int) -> int:
        """The largest `number` of any rank."""
        return int(self._reduce(name, torch.tensor(number), dist.ReduceOp.MAX))

    def _reduce(self, name: str, values: Tensor, operation: dist.ReduceOp) -> Tensor:
        values = values.cpu()
        if self.control is not None:
            dist.all_reduce(values, op=operation, group=self.control)
        return values

    def attempt(self, name: str, action: Callable[[], T], kind: type[UserError]) -> T:
        """The result of `action` on this rank. If it fails on any rank, all raise the first failure, naming its rank.

        An OSError becomes a `kind`; a UserError keeps its class. So no rank is left waiting for one that gave up.
        """
        problem, result = None, None
        try:
            result = action()
        except UserError as error:
            problem = type(error), str(error)
        except OSError as error:
            problem = kind, reason_of(error)
        for rank, found in enumerate(self.gather(name, problem)):
            if found:
                kind, text = found
                raise kind(text if self.world_size == 1 or text.startswith("rank ") else f"rank {rank}: {text}")
        return result

    def on_main(self, name: str, action: Callable[[], T], kind: type[UserError]) -> T:
        """The main rank's result of an `action` that it alone does, on every rank; a failure is raised on all (see `attempt`)."""
        return self.gather(name, self.attempt(name, lambda: action() if self.is_main else None, kind))[0]

    def agree(self, name: str, problem: str | None, kind: type[UserError]) -> None:
        """Raise `kind` on every rank if any rank has a problem; the message names the first one's rank."""
        for rank, text in enumerate(self.gather(name, problem)):
            if text:
                raise kind(text if self.world_size == 1 else f"rank {rank}: {text}")

    def barrier(self, name: str, seconds: float) -> None:
        """Wait for every rank; after `seconds`, LaunchError naming the barrier and the ranks that did not come."""
        if self.control is None:
            return
        try:
            dist.monitored_barrier(self.control, timeout=timedelta(seconds=seconds), wait_all_ranks=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LaunchError(
                f"rank {self.rank}: barrier {name!r} was not reached by all ranks in {seconds:g} s: {reason}"
            ) from error


def launched_ranks() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as the launcher set them; (0, 0, 1) where there is none. LaunchError when incomplete."""
    present = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not present:
        return 0, 0, 1
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"the launcher set {', '.join(present)} but not {', '.join(missing)}; start with torchrun or accelerate launch"
        )
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except ValueError as error:
        raise LaunchError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {error}") from error
    return rank, local_rank, world_size


def choose_device(config: Config, local_rank: int) -> torch.device:
    """This rank's device. LaunchError when the configuration asks for one that is not there."""
    wanted = config.run.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        error = LaunchError(f"run.device=cuda: this host shows {count} GPUs; start at most {count} processes here")
        raise error.on_rank(int(os.environ.get("RANK", "0")))
    return torch.device("cuda", local_rank)


def start(config: Config, alone: bool) -> Ranks:
    """Join the run's process groups and return this process's place among them.

    `alone`: the strategy is for one process and needs no group. A wrapped model needs one, of one rank if need be.
    """
    rank, local_rank, world_size = launched_ranks()
    device = choose_device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if alone:
        return Ranks(rank, local_rank, world_size, device)
    backend = config.parallel.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError("parallel.backend=nccl needs GPUs, and this run is on the CPU; use parallel.backend=gloo or auto")
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    spec = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else "gloo"
    extra: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(spec, timeout=timeout, **_rendezvous(rank, world_size), **extra)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, local_rank, world_size, device, control)


def _rendezvous(rank: int, world_size: int) -> dict[str, Any]:
    # After a restart, torchrun's agent still holds the addresses of the dead attempt's gloo pairs in the store it shares with
    # its workers, and the new attempt would connect to them: each attempt gets a name space of its own.
    if world_size == 1:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise LaunchError(
            "several nodes with restarts: the nodes' agents count restarts each for itself and the ranks would not meet again; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, as launch/torchrun_multinode.sh does, or --max-restarts 0"
        )
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": world_size}


def stop() -> None:
    """Leave the process groups. Call on the clean path only; a failed process just ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    sys.stdout.flush()
    # gloo's threads drop their last tensors under the GIL: without this pause they may do so inside interpreter shutdown,
    # which aborts about one process exit in a hundred.
    time.sleep(0.1)
