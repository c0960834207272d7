"""A launcher decides the ranks of a run and where they meet, and nothing else. Ranks come from RANK, LOCAL_RANK and WORLD_SIZE,
the meeting point from MASTER_ADDR and MASTER_PORT; nothing is guessed. What `accelerate launch` sets besides is for accelerate_settings.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.config.schema import Config
from pretrain.distributed.accelerate_settings import refuse_contradictions
from pretrain.errors import LaunchError

if TYPE_CHECKING:
    import torch.distributed as dist

CONNECT_SECONDS = 5.0

# Launchers that start several tasks and set no RANK: the variable with their number, and the launcher's name. SLURM_NTASKS is not
# listed, because a batch script has it too, and so has the one process that the script starts.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH)",
    "PMI_SIZE": "mpirun (MPICH, Intel MPI)",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}


def launched_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as the launcher set them; (0, 0, 1) without a launcher. LaunchError for impossible values."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    present = [name for name in names if name in environ]
    if not present:
        return 0, 0, 1
    missing = [name for name in names if name not in environ]
    if missing:
        raise LaunchError(
            f"the launcher set {', '.join(present)} but not {', '.join(missing)}; start with torchrun or accelerate launch"
        )
    for name in names:
        if not re.fullmatch(r"-?[0-9]+", environ[name].strip()):
            raise LaunchError(f"{name}={environ[name]} is not an integer; start with torchrun or accelerate launch")
    rank, local_rank, world_size = (int(environ[name]) for name in names)
    if world_size < 1:
        raise LaunchError(f"WORLD_SIZE={world_size} must be at least 1: it is the number of processes")
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} is not in 0..{world_size - 1}, the ranks of WORLD_SIZE={world_size}")
    most = ranks_of_host(world_size, environ)
    if not 0 <= local_rank < most:
        whole = f"LOCAL_WORLD_SIZE={most}" if most < world_size else f"WORLD_SIZE={world_size}"
        raise LaunchError(f"LOCAL_RANK={local_rank} is not in 0..{most - 1}, the processes of a host with {whole}")
    return rank, local_rank, world_size


def ranks_of_host(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """The processes of the run on this host; all of them unless the launcher says otherwise."""
    here = environ.get("LOCAL_WORLD_SIZE", "")
    return min(world_size, int(here)) if here.isdecimal() and int(here) else world_size


def check_launcher(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise LaunchError for the first accelerate setting that contradicts the configuration; drop loader-changing settings."""
    refuse_contradictions(config, environ)
    _check_started(config, environ)
    # With both variables set, transformers loads weights on the first rank only.
    if environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING")
        environ.pop("ACCELERATE_USE_FSDP", None)


def _check_started(config: Config, environ: MutableMapping[str, str]) -> None:
    # accelerate sets ACCELERATE_USE_CPU when it starts one process. It also sets MASTER_ADDR only if the user asked for several.
    # Without this check a run with strategy=auto would train alone and say nothing.
    if "ACCELERATE_USE_CPU" in environ and "MASTER_ADDR" in environ and "RANK" not in environ:
        wanted = max(2, expected_world_size(config) or 2)
        raise LaunchError(
            "accelerate launch was asked for several processes and started one: without several GPUs it needs --multi_gpu "
            "--num_processes N, or --config_file launch/accelerate/cpu_2.yaml; or start them with: " + command_for(wanted)
        )
    if "RANK" in environ:
        return
    for name, launcher in _TASKS.items():
        tasks = environ.get(name, "").strip()
        if tasks.isdecimal() and int(tasks) > 1:
            arguments = " ".join(shlex.quote(a) for a in sys.argv[1:])
            several = "launch/torchrun_multinode.sh as one task per node"
            if launcher == "srun":
                several = f"srun bash launch/srun_task.sh {arguments}, or sbatch --nodes N launch/slurm.sbatch {arguments}"
            raise LaunchError(
                f"{launcher} started {tasks} tasks ({name}) without RANK, and each would train alone; on one host start them with: "
                f"{command_for(int(tasks))}; on several, {several}; for runs of one process each, set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1"
            )


def ranks_of_a_sample(config: Config) -> int:
    """How many ranks see the same samples."""
    return math.prod(max(size, 1) for size in (config.parallel.tensor, config.parallel.context, config.parallel.pipeline))


def expected_world_size(config: Config) -> int | None:
    """The fewest processes that the configuration asks for; None if any number will do."""
    parallel = config.parallel
    if parallel.strategy == "single":
        return 1
    expert = max(parallel.expert, 1)  # -1: any number
    shard = parallel.shard or expert // math.gcd(parallel.context, expert)
    least = (parallel.replicate or 1) * shard * ranks_of_a_sample(config)
    if parallel.replicate or parallel.shard or least > 1:
        return least
    return None if parallel.strategy == "auto" else 2  # at least; the launcher may start more


def command_for(processes: int) -> str:
    """The command that starts this run with so many processes on one host, without `--check` and `--ranks`."""
    asked = " ".join(shlex.quote(a) for a in sys.argv[1:])
    arguments = re.sub(r"(^| )--(check|ranks[ =]\d+)(?= |$)", "", asked).strip()
    return f"torchrun --nproc-per-node {processes} {sys.argv[0]} {arguments}".rstrip()


@dataclass(frozen=True)
class MeetingPoint:
    """Where processes meet: MASTER_ADDR and MASTER_PORT. `attempt`: the number of torchrun's start if its agent holds a store, else None."""

    host: str
    port: int
    attempt: str | None

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> MeetingPoint:
        """Read it from the environment. Raises LaunchError for a missing or impossible value."""
        host, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
            if not value:
                raise LaunchError(
                    f"the launcher set WORLD_SIZE={environ.get('WORLD_SIZE')} but not {name}; set it to "
                    f"{'the host of rank 0' if name == 'MASTER_ADDR' else 'a free port there'}, or start with torchrun"
                )
        if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise LaunchError(
                f"MASTER_PORT={port} is not a port; set it to a number from 1 to 65535, free on the host of rank 0"
            )
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return cls(host, int(port), None)
        if int(environ.get("GROUP_WORLD_SIZE", "1")) > 1 and int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise LaunchError(
                "several nodes with restarts: the nodes' agents count restarts each for itself and the ranks would not meet again; "
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, as launch/torchrun_multinode.sh does, or --max-restarts 0"
            )
        return cls(host, int(port), environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def agent_store(self) -> dist.Store:
        """torchrun's own store, in a namespace of this attempt, because it still holds the addresses of earlier ones. Raises OSError."""
        import torch.distributed as dist

        connection = socket.create_connection((self.host, self.port), CONNECT_SECONDS)  # torch would retry aloud
        address = connection.getpeername()[0]
        connection.close()
        return dist.PrefixStore(f"attempt_{self.attempt}", dist.TCPStore(address, self.port, is_master=False))


def addresses_of_this_host(point: MeetingPoint) -> list[str]:
    """Addresses at which the others may reach this host, the likeliest first."""
    found = []
    with contextlib.suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing: it only chooses an address
            found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [place[0] for *_, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*found, point.host]))


def wrong_address(point: MeetingPoint) -> str:
    """The problem with MASTER_ADDR, seen from the main rank; empty if it is right."""
    if point.attempt is not None:
        return ""
    try:
        found = socket.getaddrinfo(point.host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"MASTER_ADDR={point.host} cannot be resolved ({error.strerror})"
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return ""
    return f"MASTER_ADDR={point.host} is not an address of {socket.gethostname()}, where rank 0 runs; set it to that host"


def store_at(addresses: Iterable[str], port: int, point: MeetingPoint, rank: int) -> dist.Store:
    """torch's store in the main rank's process, at the first of these addresses that answers. Raises LaunchError."""
    import torch.distributed as dist

    problem: OSError = ConnectionRefusedError()
    for address in addresses:
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
            return dist.TCPStore(address, port, is_master=False)
        except OSError as error:
            problem = error
    raise LaunchError(
        f"rank {rank} ({socket.gethostname()}) reaches rank 0 at port {point.port} and not at port {port} "
        f"({problem.strerror or problem}); ranks need every port of each other's hosts"
    )
