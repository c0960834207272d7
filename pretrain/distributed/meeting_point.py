"""Where processes meet: MASTER_ADDR and MASTER_PORT, and the addresses of this host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.errors import LaunchError

if TYPE_CHECKING:
    import torch.distributed as dist

CONNECT_SECONDS = 5.0


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
