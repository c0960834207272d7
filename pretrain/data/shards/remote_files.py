"""Prepared data behind a URL: the manifest and the tokenizer are downloaded when it is opened, shards when they are read.

Shards go through a `ShardCache`, and are checked against the manifest's hashes before they can be read. The hashes of the small
files are not known beforehand, so they are downloaded at every opening. They are kept in `CACHE/sets/`, in a folder named by
their content, because checkpoints copy the tokenizer for as long as a run lasts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from pretrain.data.shards.manifest import Manifest, StoredFile, read_manifest, tokenizer_difference
from pretrain.data.shards.shard_cache import ShardCache
from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, JSON_NAME, MODEL_NAME
from pretrain.errors import DataError, without_secrets
from pretrain.storage import sha256_of, staged_directory
from pretrain.transfer import Cancelled, Remote, join

log = logging.getLogger(__name__)


class RemoteFiles:
    """The files of one prepared directory at `url`. Safe between threads and after a fork; pickles.

    `directory`: local, with manifest.json and tokenizer/. Construct it with `open_remote`.
    """

    def __init__(self, url: str, directory: Path, cache: ShardCache, remote: Remote):
        self.url = url
        self.directory = directory
        self.cache = cache
        self.remote = remote
        # Not a method of self: its threads would keep alive the object whose end stops them.
        self._prefetcher = Prefetcher(functools.partial(_open, url, cache, remote))
        weakref.finalize(self, self._prefetcher.close)

    def __reduce__(self):
        return RemoteFiles, (self.url, self.directory, self.cache, self.remote)

    def place(self, name: str) -> str:
        """The URL of a file, for messages."""
        return without_secrets(join(self.url, name))

    def open(self, file: StoredFile) -> BinaryIO:
        """The local copy of a file, open for reading; it is downloaded if it is missing. It stays readable after the cache evicts it.

        Raises DataError naming the URL and the remedy.
        """
        return _open(self.url, self.cache, self.remote, file)

    def prefetch(self, files: Iterable[StoredFile]) -> None:
        """Download files in the background, in order, up to half of the cache. Returns at once."""
        chosen, total = [], 0
        for file in files:
            total += file.size
            if total > self.cache.limit_bytes // 2:
                break  # more would evict files that were just downloaded or are being read
            if not self.cache.touch(file.sha256):
                chosen.append(file)
        if chosen:
            self._prefetcher.add(chosen)

    def verify(self, files: Iterable[StoredFile], fetch: bool, seen: Callable[[int], object] | None = None) -> None:
        """Hash the local copies, and with `fetch` download the others, which checks them too. `seen`: see `sha256_of`.

        A damaged copy is evicted with a warning, and downloaded again now or when it is read. Raises DataError if that fails.
        """
        for file in files:
            copy = self.cache.path(file.sha256)
            with contextlib.suppress(FileNotFoundError):  # not downloaded yet, or evicted meanwhile
                if sha256_of(copy, seen) != file.sha256:
                    log.warning("%s: its copy %s is damaged; it is downloaded again", self.place(file.name), copy)
                    self.cache.drop(file.sha256)
            if fetch:
                self.open(file).close()

    def directory_with(self, name: str, sha256: str) -> Path:
        """A local directory with the small file `name` of this content, downloaded if it is missing.

        Raises DataError if the file does not exist or has another content.
        """
        directory = self.cache.sets / sha256
        if not (directory / name).is_file():
            content = _required(self.remote, join(self.url, name))
            if hashlib.sha256(content).hexdigest() != sha256:
                raise DataError(
                    f"{self.place(name)}: content does not match its hash in manifest.json; restore or re-prepare it"
                )
            _keep(directory, {name: content})
        return directory


def open_remote(url: str, cache: ShardCache | None = None, remote: Remote | None = None) -> tuple[RemoteFiles, Manifest]:
    """Download the manifest and the tokenizer of the prepared directory at `url`, but no shard yet.

    Raises DataError, naming the URL, for anything missing, damaged or of another version. For a protocol without its backend, it names
    the package to install.
    """
    cache, remote = cache or ShardCache(), remote or Remote()
    manifest = _required(
        remote, join(url, "manifest.json"), "is this a directory written by tools/prepare_data.py, or its parent (try /train)?"
    )
    files = {"manifest.json": manifest, **_tokenizer_files(remote, url)}
    identity = "".join(f"{name}\0{hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(files.items()))
    directory = cache.sets / hashlib.sha256(identity.encode()).hexdigest()
    _keep(directory, files)
    try:
        parsed = read_manifest(directory)
        if difference := tokenizer_difference(directory / "tokenizer", parsed):
            raise DataError(
                f"{without_secrets(join(url, 'tokenizer'))} is not the tokenizer that {without_secrets(url)} was prepared with: {difference}; restore it or "
                "prepare again"
            )
    except DataError as error:
        raise DataError(str(error).replace(str(directory), without_secrets(url).rstrip("/"))) from error
    return RemoteFiles(url, directory, cache, remote), parsed


def _open(
    url: str, cache: ShardCache, remote: Remote, file: StoredFile, cancelled: Callable[[], bool] = lambda: False
) -> BinaryIO:
    place = without_secrets(join(url, file.name))

    def download(descriptor: int) -> None:
        try:
            remote.download(join(url, file.name), file.size, file.sha256, descriptor, cancelled)
        except FileNotFoundError as error:
            raise DataError(f"{place}: missing, though manifest.json lists it; upload it again") from error

    return cache.open(file.sha256, file.size, place, download)


def _required(remote: Remote, url: str, hint: str = "upload it again") -> bytes:
    try:
        return remote.read(url)
    except FileNotFoundError as error:
        raise DataError(f"{without_secrets(url)}: missing; {hint}") from error


def _tokenizer_files(remote: Remote, url: str) -> Mapping[str, bytes]:
    """The tokenizer's files, by name and content. Every possible name is asked for, because https cannot list a folder."""
    found = {}
    for name in (JSON_NAME, CONFIG_NAME):
        with contextlib.suppress(FileNotFoundError):
            found[f"tokenizer/{name}"] = remote.read(join(url, f"tokenizer/{name}"))
    if f"tokenizer/{JSON_NAME}" not in found:
        found = {f"tokenizer/{MODEL_NAME}": _required(remote, join(url, f"tokenizer/{MODEL_NAME}"))}
    return found


def _keep(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a folder that is named by their content. It appears complete or not at all, whoever else writes it."""
    if _holds(directory, files):
        return
    shutil.rmtree(directory, ignore_errors=True)  # damaged or missing
    try:
        with staged_directory(directory) as stage:
            for name, content in files.items():
                (stage / name).parent.mkdir(exist_ok=True)
                (stage / name).write_bytes(content)
    except (DataError, OSError) as error:
        if not _holds(directory, files):  # else another process was first
            raise DataError(f"data.cache.dir: {directory} cannot be written: {error}; choose another folder") from error


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return all((directory / name).read_bytes() == content for name, content in files.items())
    return False


# ---- prefetching --------------------------------------------------------------------------------------------------------

_THREADS = 2
_LONGEST = 64  # files that wait
_JOIN_SECONDS = 2.0


class Prefetcher:
    """Downloads files in daemon threads, first asked first served. Safe between threads.

    At most _LONGEST files wait. Beyond that the oldest ones are given up, and the readers that need them download them. `open_file`
    should end with `Cancelled` soon after `cancelled()` is true. A DataError is logged and not raised: the reader that needs the
    file gets it again. After a fork the child starts with an empty queue and its own threads.
    """

    def __init__(self, open_file: Callable[[StoredFile, Callable[[], bool]], BinaryIO]):
        self._open_file = open_file
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: collections.deque[StoredFile] = collections.deque(maxlen=_LONGEST)
        self._running: set[StoredFile] = set()
        self.threads: list[threading.Thread] = []

    def add(self, files: Iterable[StoredFile]) -> None:
        """Download these soon. Returns at once."""
        if os.getpid() != self._process:
            self._start()
        with self._changed:
            if self._closed:
                return
            for file in files:
                if file not in self._waiting and file not in self._running:
                    self._waiting.append(file)
            while len(self.threads) < _THREADS:
                self.threads.append(threading.Thread(target=self._work, daemon=True, name="prefetch"))
                self.threads[-1].start()
            self._changed.notify_all()

    def close(self) -> None:
        """Give up waiting files, cancel running downloads, and end the threads."""
        if os.getpid() != self._process:  # a forked child: the threads belong to the parent
            return
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                file = self._waiting.popleft()
                self._running.add(file)
            try:
                self._open_file(file, lambda: self._closed).close()
            except Cancelled:
                return
            except DataError as error:
                log.warning("prefetch: %s", error)
            except Exception:  # a defect of ours or of a backend; the reader gets it again, with its own traceback
                log.exception("prefetch of %s", file)
            finally:
                with self._changed:
                    self._running.discard(file)
