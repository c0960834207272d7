"""Connections between a rank and the switchboard: lines of JSON, in both directions. Nothing in a message is executed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

from pretrain.errors import LaunchError

PROTOCOL = "pretrain 3"
_LONGEST = 8 << 20  # bytes of a message
LONGEST_HELLO = 8 << 10
"""Bytes of a message from a peer that has not said hello yet, for example a port scanner."""
SEND_SECONDS = 10.0
"""How long a message may take to be sent, or received once it has begun to come."""
VANISHED_SECONDS = 120
"""After so long without a sign from the other host its connection counts as broken."""


class Channel:
    """A connection that carries JSON objects in both directions. Any thread may send; one thread receives.

    `longest`: bytes that a message may have.
    """

    def __init__(self, connection: socket.socket, longest: int = _LONGEST) -> None:
        self.longest = longest
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Some firewalls drop idle connections. And a host that vanished is noticed even if nothing is sent to it, before a collective has
        # waited for it for ten minutes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle, every = 30, 15
        count, milliseconds = (VANISHED_SECONDS - idle) // every, 1000 * VANISHED_SECONDS
        options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": count, "TCP_USER_TIMEOUT": milliseconds}
        for name, value in options.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self._sending = threading.Lock()
        self._buffer = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, **values: Any) -> None:
        """Raises OSError when the other side is gone."""
        self.write(encoded(kind, **values))

    def write(self, data: bytes) -> None:
        """Send a message that was `encoded`. Raises OSError when the other side is gone."""
        with self._sending:
            self.connection.sendall(data)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for messages and return those that have come. Raises OSError when the connection is closed, and ValueError for
        what is no message.
        """
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the connection was closed")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if max(map(len, [*lines, self._buffer])) > self.longest:
            raise ValueError("a message without end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in messages):
            raise ValueError("not a message")
        return messages

    def trust(self) -> None:
        """Accept long messages from now on: the other side has said who it is."""
        self.longest = _LONGEST

    def close(self) -> None:
        self.connection.close()


def encoded(kind: str, **values: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def listen(port: int) -> socket.socket:
    """A socket that takes connections at a port of every address of this host; 0: at any free port. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a port that is taken is refused below
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def hello(channel: Channel, rank: int, world_size: int, token: str, seconds: float = SEND_SECONDS) -> list[dict[str, Any]]:
    """Introduce a rank to the switchboard; return its answer and any messages after that.

    `token`: identifies the switchboard that is wanted, "" for any; `seconds`: how long to wait for the answer. Raises LaunchError if the
    switchboard refuses the rank, OSError or ValueError if the other side is not a switchboard.
    """
    me = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "process": os.getpid()}
    channel.send("hello", protocol=PROTOCOL, token=token, **me)
    messages: list[dict[str, Any]] = []
    channel.connection.settimeout(seconds)
    while not messages:
        messages = channel.receive()
    channel.connection.settimeout(SEND_SECONDS)
    if messages[0]["kind"] == "refused":
        raise LaunchError(messages[0]["line"])
    if messages[0]["kind"] != "welcome":
        raise ValueError("not a switchboard")
    return messages


def is_communication(error: BaseException) -> bool:
    """Whether an exception of torch says that ranks could not reach each other."""
    import torch.distributed as dist

    said = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or any(part in str(error) for part in said)
