"""A bounded folder of downloaded files, shared by all processes of a node.

    DIR/files/SHA256      complete and checked; its modification time is when it was last used
    DIR/partial/SHA256    being downloaded by the process that holds its lock, already with its final length
    DIR/lock              held while room is made
    DIR/sets/SHA256/      manifests and tokenizers, small and never evicted (see remote_files.py)

A file is named by its content. So equal shards of two data sets are kept once, and a shard that changed at its origin is another
file. Locks are `flock`s, which end with their process: a killed process blocks nobody, and the next one that makes room removes its
leftovers. An evicted file stays readable in a process that has it open (POSIX unlink). Its space is freed when the process closes
it, which readers do within seconds (`CachedFiles` in open_files.py).

The folder itself is the only record of what is used. It is read anew under the lock whenever room is made, so the count cannot
drift, even after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import FULL, DataError

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 100 * 10**9
_POLL_SECONDS = 0.05

_locked: set[int] = set()
"""Descriptors with a lock. A forked child closes them, or it would keep the lock of its parent's download."""


def _close_locked() -> None:
    for descriptor in list(_locked):
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_close_locked)


def default_directory() -> Path:
    """`pretrain` in the user's cache folder (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain"


class ShardCache:
    """Files by their sha256, at most `limit_bytes` of them. Safe between threads, processes and forks; pickles.

    `wait_seconds`: how long to wait for space that other downloads hold.
    """

    def __init__(self, directory: str | Path | None = None, limit_bytes: int = DEFAULT_LIMIT, wait_seconds: float = 600.0):
        self.directory = default_directory() if directory is None else Path(os.path.abspath(directory))
        self.limit_bytes = limit_bytes
        self.wait_seconds = wait_seconds
        self._files = self.directory / "files"
        self._partial = self.directory / "partial"
        try:
            for folder in (self._files, self._partial, self.sets):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.cache.dir={self.directory}: cannot be created: {error.strerror}; choose another folder"
            ) from error

    def __reduce__(self):
        return ShardCache, (self.directory, self.limit_bytes, self.wait_seconds)

    @property
    def sets(self) -> Path:
        """The folder of manifests and tokenizers."""
        return self.directory / "sets"

    def path(self, sha256: str) -> Path:
        """The path of the file with this content, whether it exists or not."""
        return self._files / sha256

    def touch(self, sha256: str) -> bool:
        """Mark a file as used, so that others are evicted before it. False if it is not here (any more)."""
        try:
            os.utime(self.path(sha256))
        except FileNotFoundError:
            return False
        return True

    def drop(self, sha256: str) -> None:
        """Remove a file, for instance a damaged one."""
        self.path(sha256).unlink(missing_ok=True)

    def open(self, sha256: str, size: int, place: str, download: Callable[[int], None]) -> BinaryIO:
        """The file with this content, open for reading. If it is missing, `download` fetches it.

        `download` gets a descriptor and must fill it with exactly `size` bytes of the content `sha256`, or raise. If several
        readers of any process need the same file, one downloads it and the others wait. `place`: the name of the file in errors.
        Raises DataError for a file above the limit, for a full disk, and if no space is freed within `wait_seconds`.
        """
        if size > self.limit_bytes:
            raise DataError(
                f"{place}: {size} bytes are more than data.cache.limit_gb={self.limit_bytes / 1e9:g} ({self.limit_bytes} bytes); "
                "raise data.cache.limit_gb, or prepare the data with smaller shards"
            )
        while True:
            file = self._open_present(sha256, size, place)
            if file is not None:
                return file
            with self._sole_downloader(sha256) as descriptor:
                if descriptor is not None and not self.path(sha256).exists():
                    return self._fetch(descriptor, sha256, size, place, download)

    def _open_present(self, sha256: str, size: int, place: str) -> BinaryIO | None:
        try:
            file = self.path(sha256).open("rb")
        except FileNotFoundError:
            return None
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            file.close()
            log.warning("%s: its copy %s has %d bytes, not %d; downloading it again", place, self.path(sha256), actual, size)
            self.drop(sha256)
            return None
        self.touch(sha256)
        return file

    def _fetch(self, descriptor: int, sha256: str, size: int, place: str, download: Callable[[int], None]) -> BinaryIO:
        partial = self._partial / sha256
        try:
            os.ftruncate(descriptor, 0)  # the leftovers of a killed process must not count twice
            self._make_room(descriptor, size, place)
            download(descriptor)
            os.fsync(descriptor)  # else a power cut could leave a file with the right name and size but other content
            file = partial.open("rb")
            with _lock(self.directory / "lock"):  # else a process that counts meanwhile could see it in neither folder
                os.rename(partial, self.path(sha256))
            return file
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise DataError(
                    f"{place}: no space left in data.cache.dir={self.directory} for {size} bytes; free some, or lower data.cache.limit_gb"
                ) from error
            raise

    def _make_room(self, descriptor: int, size: int, place: str) -> None:
        """Evict the least recently used files until `size` bytes fit. Reserve these by giving the partial file its length."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            with _lock(self.directory / "lock"):
                self._remove_abandoned()
                files = sorted(_listing(self._files))
                total = _total(files) + _total(_listing(self._partial))
                for _, length, path in files:
                    if total + size <= self.limit_bytes:
                        break
                    path.unlink(missing_ok=True)
                    total -= length
                    log.debug("%s: evicted, to make room for %s", path, place)
                if total + size <= self.limit_bytes:
                    os.ftruncate(descriptor, size)
                    return
            if time.monotonic() > deadline:
                raise DataError(
                    f"{place}: no room in data.cache.dir={self.directory} for {self.wait_seconds:g} s: {total} bytes are being fetched by "
                    f"others; raise data.cache.limit_gb={self.limit_bytes / 1e9:g}"
                )
            time.sleep(_POLL_SECONDS)

    def _remove_abandoned(self) -> None:
        """Remove partial files that no living process holds."""
        for _, _, path in _listing(self._partial):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # being downloaded
            else:
                # Another process may be about to lock it; it then checks whether the name is still that file.
                if _is_at(descriptor, path):
                    path.unlink()
                    log.info("%s: removed the partial file of a process that ended while downloading", path)
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _sole_downloader(self, sha256: str) -> Iterator[int | None]:
        """The descriptor of the partial file once no other process has it; None if another process had it meanwhile."""
        path = self._partial / sha256
        with _lock(path) as descriptor:
            yield descriptor if _is_at(descriptor, path) else None
            if _is_at(descriptor, path):  # the partial file was not used: the file came from elsewhere
                path.unlink()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Create `path` if it is missing, and hold its lock alone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(f"data.cache.dir: {path} cannot be written: {error.strerror}") from error
    _locked.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            reason = f"{path} cannot be locked: {error.strerror}; name a folder on each node's own disk"
            raise DataError(f"data.cache.dir: {reason}") from error
        yield descriptor
    finally:
        _locked.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit, because a forked child may hold a copy of the descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _total(files: list[tuple[int, int, Path]]) -> int:
    return sum(size for _, size, _ in files)


def _listing(folder: Path) -> list[tuple[int, int, Path]]:
    """(modification time in ns, size, path) of each file."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # evicted or renamed since
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
    return found
