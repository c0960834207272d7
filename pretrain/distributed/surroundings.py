"""Where a run takes place: the platform, hosts and their ranks, devices, network addresses, and whatever is odd about them."""

from __future__ import annotations

import collections
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.distributed.agreement import machine_name, versions
from pretrain.distributed.cores import cores_of_host
from pretrain.distributed.launcher import ranks_of_host
from pretrain.distributed.ranks import Ranks

LEAST_FILES = 4096
"""Open files of a process below which many shards or ranks may fail."""
LEAST_SHARED_GB = 1.0
"""Shared memory of a host with GPUs below which NCCL and loaders of data may fail; containers have 64 MB unless told otherwise."""
HOSTS_NAMED = 4


def platform_of(environ: Mapping[str, str] = os.environ) -> str:
    """The scheduler or service that started this process, as far as its environment says; empty if it does not."""
    if job := environ.get("SLURM_JOB_ID"):
        restarts = int(environ.get("SLURM_RESTART_COUNT", "0") or 0)
        return f"Slurm job {job}" + (f", start {restarts + 1}" if restarts else "")
    if task := environ.get("SKYPILOT_TASK_ID"):
        return f"SkyPilot task {task}"
    if "TRAINING_JOB_NAME" in environ or "SM_CURRENT_HOST" in environ:
        return f"SageMaker job {environ.get('TRAINING_JOB_NAME', '')}".strip()
    if "KUBERNETES_SERVICE_HOST" in environ:
        return f"Kubernetes pod {environ.get('HOSTNAME', '')}".strip()
    return ""


def surroundings(ranks: Ranks) -> dict[str, Any]:
    """What is known of the place of a run, as JSON values. All ranks call it together and get the same."""
    own = {
        "host": socket.gethostname(),
        "device": machine_name(str(ranks.device)),
        "address": _address(),
        "odd": _oddities(ranks.device, ranks_of_host(ranks.world_size)),
    }
    everyone = ranks.gather("surroundings", own) if ranks.world_size > 1 else [own]
    hosts = collections.Counter(rank["host"] for rank in everyone)
    odd = collections.defaultdict(list)
    for rank in everyone:
        for what in rank["odd"]:
            odd[what].append(rank["host"])
    if len(set(hosts.values())) > 1:
        odd["has another number of ranks than other hosts"] = [host for host, n in hosts.items() if n != max(hosts.values())]
    if len(hosts) > 1:
        for rank in everyone:
            if rank["address"].startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
                odd["resolves its own name to 127.x, where other hosts cannot reach it: set GLOO_SOCKET_IFNAME"].append(
                    rank["host"]
                )
    return {
        "platform": platform_of(),
        "hosts": dict(hosts),
        "devices": dict(collections.Counter(rank["device"] for rank in everyone)),
        "address": own["address"],
        "interfaces": {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name in os.environ},
        "odd": {what: list(dict.fromkeys(where)) for what, where in odd.items()},
        **versions(),
    }


def describe_surroundings(found: dict[str, Any]) -> list[str]:
    """The same in a few lines."""
    hosts, devices = found["hosts"], found["devices"]
    each = sorted(set(hosts.values()))
    named = ", ".join(list(hosts)[:HOSTS_NAMED]) + (", ..." if len(hosts) > HOSTS_NAMED else "")
    ranks = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
    what = ", ".join(name if len(devices) == 1 else f"{count} x {name}" for name, count in devices.items())
    parts = [
        *([found["platform"]] if found["platform"] else []),
        f"{len(hosts)} host{'s' if len(hosts) > 1 else ''} ({named}) with {ranks} rank{'s' if each[-1] > 1 else ''}{' each' if len(hosts) > 1 else ''}",
        what,
        f"torch {found['version of torch']}",
    ]
    if len(hosts) > 1:
        over = "".join(f", {name}={value}" for name, value in found["interfaces"].items())
        parts.append(f"network address {found['address']}{over}")
    lines = [f"place    {'; '.join(parts)}"]
    for what, where in found["odd"].items():
        named = ", ".join(where[:HOSTS_NAMED]) + (f" and {len(where) - HOSTS_NAMED} more" if len(where) > HOSTS_NAMED else "")
        lines.append(f"note     {named}: {what}")
    return lines


def _address() -> str:
    """The address that this host's name resolves to: where gloo listens, unless it is told an interface."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "none (the host name does not resolve)"


def _oddities(device: torch.device, ranks_here: int) -> list[str]:
    """What may go wrong on this host later."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        found.append(f"a process may open {soft} files only; raise it with ulimit -n {LEAST_FILES}")
    if cores_of_host() < ranks_here:
        found.append(f"{ranks_here} ranks share {cores_of_host()} cores")
    if device.type == "cuda":
        shared = Path("/dev/shm")
        if shared.is_dir() and (size := shutil.disk_usage(shared).total / 1e9) < LEAST_SHARED_GB:
            found.append(f"/dev/shm has {size:.2f} GB; NCCL needs more (docker run --shm-size, an emptyDir of medium Memory)")
    return found
