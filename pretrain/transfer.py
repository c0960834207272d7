"""Bytes from and to any fsspec URL, with retries for failures that may pass.

After a broken connection, a 5xx answer, a truncated body or a stalled transfer, the transfer is tried again. The wait doubles each
time and is drawn at random from its upper half. Retries end `Patience.give_up` seconds after the first failure. Errors that
waiting cannot mend (not found, not allowed, no credentials) fail at once. Each retry is logged; the libraries' own silent retries
are switched off if possible.

Credentials and endpoints come from the environment, as each library defines them: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_PROFILE, AWS_ENDPOINT_URL and FSSPEC_S3_ANON (s3fs), GOOGLE_APPLICATION_CREDENTIALS (gcsfs), HF_TOKEN and HF_ENDPOINT
(huggingface_hub), HTTPS_PROXY, NO_PROXY and ~/.netrc (https).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import queue
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pretrain.errors import ConfigError, DataError, without_secrets
from pretrain.storage import replace_file
from pretrain.store_errors import PassingError, WrongContentError, judged, protocol_of

log = logging.getLogger(__name__)

T = TypeVar("T")
_AT_ONCE = 4  # jobs of `all_at_once`
_CHUNK = 8 << 20
_CONNECT_SECONDS = 10
_PART, _MOST_PARTS = 16 << 20, 9000  # of a file that is written; S3 takes 10,000
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::.*://)")


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to retry, in seconds except for `contents`.

    `stall`: longest wait for the next 8 MiB, so a transfer slower than 140 kB/s is stalled. `first_delay`, `longest_delay`: waits between
    attempts. `give_up`: time from the first failure on. `contents`: how often a file with wrong content is downloaded.
    """

    stall: float = 60.0
    first_delay: float = 0.5
    longest_delay: float = 30.0
    give_up: float = 300.0
    contents: int = 3


class Cancelled(Exception):
    """A download that nobody waits for any more."""


class _WrongContent(Exception):
    """All bytes arrived, but they are not those of the manifest."""


def is_url(path: object) -> bool:
    """Whether this is a URL for fsspec rather than a local path."""
    return bool(_URL.match(str(path)))


def refuse_url(option: str, path: object) -> None:
    """Raise ConfigError for a URL in place of a directory: object stores cannot rename a directory into place."""
    if is_url(path):
        raise ConfigError(
            f"{option} {without_secrets(str(path))}: is a URL; name a directory on a local or shared disk, and copy it when it is finished "
            "(training reads prepared data from URLs)"
        )


def join(url: str, name: str) -> str:
    """The URL of the file `name` in the directory `url`, before any query, and inside the first link of a chain (`zip://d::s3://b/f.zip`)."""
    links = url.split("::")
    place = next((i for i, link in enumerate(links) if "://" in link), 0)
    base, mark, query = links[place].partition("?") if links[place].startswith("http") else (links[place], "", "")
    links[place] = base.rstrip("/") + "/" + name + mark + query
    return "::".join(links)


class Remote:
    """Reads and writes files of fsspec URLs. Safe between threads and after a fork; pickles."""

    def __init__(self, patience: Patience | None = None):
        self.patience = patience or Patience()
        self._systems: dict[tuple[int, str], Any] = {}  # by process: connections do not survive a fork

    def __reduce__(self):
        return Remote, (self.patience,)

    def download(
        self, url: str, size: int, sha256: str, descriptor: int, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Write the file into `descriptor` and check its hash on the way. Raises DataError naming the URL and the remedy."""

        def attempt() -> None:
            digest, received = hashlib.sha256(), 0
            with open(descriptor, "wb", closefd=False) as file:
                file.seek(0)
                for chunk in self._chunks(url, cancelled):
                    received += len(chunk)
                    if received > size:
                        raise _WrongContent(f"more than the {size} bytes that manifest.json says")
                    digest.update(chunk)
                    file.write(chunk)
            if received < size:
                raise _WrongContent(f"{received} bytes where manifest.json says {size}")
            if digest.hexdigest() != sha256:
                raise _WrongContent(f"sha256 {digest.hexdigest()} where manifest.json says {sha256}")

        self.persist(url, attempt, cancelled)

    def read(self, url: str) -> bytes:
        """The content of a small file. Raises FileNotFoundError if it is missing, else DataError."""
        return self.persist(url, lambda: b"".join(self._chunks(url, lambda: False)), lambda: False)

    def upload(self, path: Path, url: str, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Write a local file to the URL, in place of what is there. Raises DataError, and FileNotFoundError if the local file is gone."""
        expected = path.stat().st_size
        self.ask(url, lambda system, place: _put(url, system, place, path), "written", cancelled)
        if (size := self.size(url)) != expected:
            raise DataError(
                f"{without_secrets(url)}: has {size} bytes where {path} has {expected}; is something else written there?"
            )

    def write(self, content: bytes, url: str) -> None:
        """Write a small file, in place of what is there: whole, or not at all. Raises DataError."""
        self.ask(url, lambda system, place: _put(url, system, place, content), "written")

    def update(self, url: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replace a small file by what `change` makes of its content, None where it is missing. Each attempt reads it anew. Raises DataError, and what
        `change` raises.
        """

        def attempt() -> None:
            try:
                content = b"".join(self._chunks(url, lambda: False))
            except FileNotFoundError:
                content = None
            made = change(content)
            try:
                _put(url, *self.system(url), made)
            except Exception as error:
                raise judged(url, error, "written") from error

        self.persist(url, attempt)

    def names(self, url: str) -> list[str]:
        """Names in the directory, sorted; empty if it is missing. Raises DataError."""

        def listing(system: Any, place: str) -> list[str]:
            system.invalidate_cache()
            return sorted(found.rstrip("/").rsplit("/", 1)[-1] for found in system.ls(place, detail=False))

        try:
            return self.ask(url, listing)
        except FileNotFoundError:
            return []

    def size(self, url: str) -> int | None:
        """Bytes of the file at the URL, or None if it is missing. Raises DataError."""
        try:
            return self.ask(url, lambda system, place: system.info(place)["size"])
        except FileNotFoundError:
            return None

    def remove_folder(self, url: str) -> None:
        """Remove all files below the URL, which may be missing. No character in it is a pattern. Raises DataError."""

        def remove(system: Any, place: str) -> None:
            system.invalidate_cache()
            for path in system.find(place):
                system.rm_file(path)
            if protocol_of(url) == "file":
                shutil.rmtree(place, ignore_errors=True)

        with contextlib.suppress(FileNotFoundError):
            self.ask(url, remove, "removed")

    def ask(
        self, url: str, question: Callable[[Any, str], T], done: str = "read", cancelled: Callable[[], bool] = lambda: False
    ) -> T:
        """What `question` returns for the file system and the path in it, with retries. `done`: what is done to the file, for a message.

        Raises DataError, and FileNotFoundError for what is missing.
        """

        def attempt() -> T:
            try:
                return question(*self.system(url))
            except Exception as error:
                raise judged(url, error, done) from error

        return self.persist(url, attempt, cancelled)

    def persist(self, url: str, attempt: Callable[[], Any], cancelled: Callable[[], bool] = lambda: False) -> Any:
        """The result of `attempt`, which is repeated by the rules above if it raises PassingError. `url`: for messages."""
        patience, first_failure, delay, contents = self.patience, None, self.patience.first_delay, 0
        while True:
            try:
                return attempt()
            except _WrongContent as error:
                contents += 1
                if contents >= patience.contents:
                    found = f"{without_secrets(url)}: downloaded {contents} times, each time {error}"
                    wrong = WrongContentError(f"{found}; restore the file there, or prepare the data again")
                    wrong.found = found
                    raise wrong from error
                reason = str(error)
            except PassingError as error:
                reason = str(error).removeprefix(f"{without_secrets(url)}: ")
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            if now - first_failure > patience.give_up:
                raise DataError(
                    f"{without_secrets(url)}: still failing after {now - first_failure:.0f} s of retries: {reason}; check the server and the network"
                )
            for system in list(self._systems.values()):
                system.invalidate_cache()  # a listing may hold the size of a file that was replaced since
            wait = delay * random.uniform(0.5, 1.0)
            log.warning("%s: %s; trying again in %.1f s", without_secrets(url), reason, wait)
            _sleep(wait, cancelled)
            delay = min(2 * delay, patience.longest_delay)

    def _chunks(self, url: str, cancelled: Callable[[], bool]) -> Iterator[bytes]:
        """The content, piece by piece. A thread of its own reads it, so that a backend that hangs can be abandoned."""
        pieces: queue.Queue[bytes | BaseException] = queue.Queue(maxsize=2)
        left = threading.Event()  # the thread puts at most two more pieces after that
        threading.Thread(target=self._produce, args=(url, pieces, left), daemon=True, name="transfer").start()
        try:
            while True:
                piece = self._next(pieces, cancelled)
                if isinstance(piece, BaseException):
                    raise judged(url, piece) from piece
                if not piece:
                    return
                yield piece
        finally:
            left.set()
            while not pieces.empty():  # the thread may be waiting for room
                pieces.get_nowait()

    def _next(self, pieces: queue.Queue, cancelled: Callable[[], bool]) -> bytes | BaseException:
        deadline = time.monotonic() + self.patience.stall
        while True:
            if cancelled():
                raise Cancelled
            try:
                return pieces.get(timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise PassingError(f"nothing came for {self.patience.stall:g} s") from None

    def _produce(self, url: str, pieces: queue.Queue, left: threading.Event) -> None:
        try:
            with self.open(url) as file:
                piece = None
                while piece != b"" and not left.is_set():
                    piece = _fill(file, left)
                    pieces.put(piece)
        except BaseException as error:  # raised in the calling thread
            pieces.put(error)

    def open(self, url: str, at_random: bool = False) -> Any:
        """The file as fsspec opens it, to be read from start to end, or `at_random`. `judged` handles its errors."""
        system, path = self.system(url)
        opening = {} if at_random or "::" in url else _options(protocol_of(url), self.patience.stall)[1]
        return system.open(path, "rb", **opening)

    def system(self, url: str) -> tuple[Any, str]:
        """The fsspec file system of a URL, and the path in it."""
        import fsspec

        if "::" in url:  # fsspec decides the options of the links of a chain
            return fsspec.core.url_to_fs(url)
        protocol, place = protocol_of(url), (os.getpid(), url.rsplit("/", 1)[0])
        system = self._systems.get(place)
        if system is None:
            system, _ = fsspec.core.url_to_fs(url, **_options(protocol, self.patience.stall)[0])
            if protocol in ("s3", "s3a"):
                system.retries = 1  # ours are logged
            self._systems[place] = system
        return system, system._strip_protocol(url)


def all_at_once(jobs: list[Callable[[Callable[[], bool]], object]]) -> None:
    """Call the jobs, a few at a time in threads, each with a function that says whether to stop. The first failure stops the others, and is raised.

    The threads do not keep a process from ending.
    """
    waiting: queue.SimpleQueue[Callable[[Callable[[], bool]], object]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                waiting.get_nowait()(stop.is_set)
            except queue.Empty:
                return
            except Cancelled:
                return
            except BaseException as error:
                failures.append(error)
                stop.set()

    threads = [threading.Thread(target=work, name="upload of a file", daemon=True) for _ in range(min(_AT_ONCE, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _options(protocol: str, stall: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the file system and of opening a file, for backends whose defaults do not fit one read from start to end."""
    if protocol in ("s3", "s3a"):
        config = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": stall,
            "retries": {"total_max_attempts": 1},
            "response_checksum_validation": "when_required",  # the manifest's sha256 is stronger, and its error is clearer
        }
        return {"config_kwargs": config, "use_listings_cache": False}, {"block_size": _CHUNK, "cache_type": "none"}
    if protocol in ("http", "https"):
        import aiohttp

        # By default a body ends after 300 s.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=stall)
        # block_size=0: one request, streamed. With a size given, the size is not asked for.
        return {"client_kwargs": {"timeout": timeout, "trust_env": True}}, {"block_size": 0, "size": 1}
    if protocol in ("gs", "gcs", "hf"):
        return {}, {"block_size": _CHUNK, "cache_type": "none"}
    return {}, {}


def _put(url: str, system: Any, place: str, content: bytes | Path) -> None:
    """Write a file: these bytes, or a copy of a local file. On a local disk it is replaced as a whole, as object stores do."""
    protocol = protocol_of(url)
    if protocol == "file":
        os.makedirs(os.path.dirname(place), exist_ok=True)
        copied = (lambda aside: aside.write_bytes(content)) if isinstance(content, bytes) else partial(shutil.copyfile, content)
        replace_file(Path(place), copied)
    elif isinstance(content, bytes):
        system.pipe_file(place, content)
    else:
        # By default s3fs sends ten parts of 50 MiB at a time.
        parts = {"chunksize": max(_PART, content.stat().st_size // _MOST_PARTS + 1), "max_concurrency": 2}
        system.put_file(str(content), place, **(parts if protocol in ("s3", "s3a") else {}))


def _fill(file: Any, left: threading.Event) -> bytes:
    """The next chunk, whole unless the file ends. A trickle must not look like progress."""
    parts, missing = [], _CHUNK
    while missing and not left.is_set():
        part = file.read(missing)
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sleep(seconds: float, cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        if cancelled():
            raise Cancelled
        time.sleep(min(remaining, 0.2))
