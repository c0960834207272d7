"""The cores of a host, and which of them a process computes on (`run.affinity`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pretrain.errors import ConfigError

SYSTEM = Path("/sys")
_before: set[int] | None = None
"""The cores that this process had before it was kept on some of them."""


def cores_of_host() -> int:
    """The cores that the processes of this host may compute on."""
    return len(_allowed()) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if _before is None else _before


@contextmanager
def kept_on_cores(affinity: str, device: torch.device, local_rank: int, ranks_here: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, on the cores that `run.affinity` means. Raises ConfigError where that cannot be."""
    global _before
    if affinity == "none":
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"run.affinity={affinity}: this system has no affinity of processes; set it to none")
    allowed = os.sched_getaffinity(0)
    own = cores_near(device, allowed) if device.type == "cuda" else share_of_cores(allowed, local_rank, ranks_here)
    _before = allowed
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        _before = None


def share_of_cores(allowed: set[int], place: int, ranks: int) -> set[int]:
    """The cores of process `place` of `ranks` on this host: neighbours, on as few NUMA nodes as can be. Raises ConfigError if there are too few."""
    if len(allowed) < ranks:
        raise ConfigError(
            f"run.affinity=cores: {ranks} processes share {len(allowed)} cores, and each needs one of its own; set it to none"
        )
    ordered = sorted(allowed, key=_position)
    return set(ordered[place * len(ordered) // ranks : (place + 1) * len(ordered) // ranks])


def _position(core: int) -> tuple[int, int, int, int]:
    """Node, socket, and core, which the threads of one core share."""
    folder = SYSTEM / "devices" / "system" / "cpu" / f"cpu{core}"
    nodes = [int(path.name[4:]) for path in folder.glob("node*") if path.name[4:].isdigit()]
    package, number = (_number(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    return min(nodes, default=0), package, number, core


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def cores_near(device: torch.device, allowed: set[int]) -> set[int]:
    """The cores on the GPU's NUMA node. Raises ConfigError where the system does not say, or none of them may be used."""
    known = torch.cuda.get_device_properties(device)
    name = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        near = read_list((SYSTEM / "bus" / "pci" / "devices" / name / "local_cpulist").read_text())
    except OSError as error:
        raise ConfigError(
            f"run.affinity=cores: the system does not say which cores are near GPU {name} ({error.strerror}); set it to none"
        ) from error
    if not near & allowed:
        raise ConfigError(f"run.affinity=cores: none of the cores near GPU {name} may be used by this process; set it to none")
    return near & allowed


def read_list(text: str) -> set[int]:
    """Cores as Linux lists them: 0-3,8,10-11."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
