"""A web server on the loopback that serves a folder, or passes requests on to another server, and misbehaves as it is told."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class FaultyServer:
    """`faults[name]`: what happens to the coming GETs of paths that end with `name`, one after the other; then none. `put_faults`: likewise for PUTs,
    of which each is a status, or `reset`.

    A number: that status. `reset`: the connection breaks in the body. `truncate`: it is closed there. `stall`: nothing more comes
    in the body, until `let_go` is set. `slow`: a trickle. `wrong`: one bit differs. `half`: a complete answer with half of it.
    """

    def __init__(self, folder: Path | None = None, upstream: str | None = None):
        self.folder = folder
        self.upstream = upstream
        self.faults: dict[str, list[str | int]] = {}
        self.put_faults: dict[str, list[str | int]] = {}
        self.gets: list[str] = []
        self.stalled = threading.Event()
        self.let_go = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"faulty": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def count(self, name: str) -> int:
        """GETs of paths that end with `name`."""
        return sum(path.endswith(name) for path in self.gets)

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self, path: str) -> str | int | None:
        with self.lock:
            self.gets.append(path)
            for name, faults in self.faults.items():
                if path.endswith(name) and faults:
                    return faults.pop(0)
        return None


@contextlib.contextmanager
def faulty_server(folder: Path | None = None, upstream: str | None = None) -> Iterator[FaultyServer]:
    server = FaultyServer(folder, upstream)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    faulty: FaultyServer

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        status, headers, _ = self._answer()
        self._head(status, headers)

    def do_GET(self) -> None:
        fault = self.faulty.next_fault(urlsplit(self.path).path)
        if isinstance(fault, int):
            self._head(fault, {"Content-Length": "0"})
            return
        status, headers, body = self._answer()
        if fault == "half":
            body = body[: len(body) // 2]
            headers = {**headers, "Content-Length": str(len(body))}
        if fault == "wrong":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self._head(status, headers)
        with contextlib.suppress(ConnectionError):
            self._send(body, fault)

    def do_PUT(self) -> None:
        if self.headers.get("Expect"):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del self.headers["Expect"]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        fault = next((faults.pop(0) for name, faults in self.faulty.put_faults.items() if path.endswith(name) and faults), None)
        if fault == "reset":
            self._break()
            return
        status, headers, answer = (fault, {"Content-Length": "0"}, b"") if fault else self._answer(body)
        self._head(status, headers)
        self.wfile.write(answer)

    do_POST = do_DELETE = do_PUT

    def _break(self) -> None:
        """A close that says RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _send(self, body: bytes, fault: str | None) -> None:
        half = len(body) // 2
        if fault == "slow":
            for start in range(0, len(body), 64):
                self.wfile.write(body[start : start + 64])
                time.sleep(0.02)
                if self.faulty.let_go.is_set():
                    return
        elif fault in ("reset", "truncate", "stall"):
            self.wfile.write(body[:half])
            self.wfile.flush()
            if fault == "stall":
                self.faulty.stalled.set()
                self.faulty.let_go.wait()
            self._break() if fault == "reset" else self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, sent: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        if self.faulty.upstream is not None:
            upstream = http.client.HTTPConnection(urlsplit(self.faulty.upstream).netloc)
            upstream.request(self.command, self.path, sent, headers=dict(self.headers.items()))
            answer = upstream.getresponse()
            kept = {
                k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection", "server", "date")
            }
            return answer.status, kept, answer.read()
        file = self.faulty.folder / urlsplit(self.path).path.lstrip("/")
        if not file.is_file():
            return 404, {"Content-Length": "0"}, b""
        body = file.read_bytes()
        return 200, {"Content-Length": str(len(body))}, body
