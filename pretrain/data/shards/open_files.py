"""Files that are read at random positions. They stay open while the system's limit of open files allows it.

    reader ──(shard, which file)──▶ OpenFiles ──▶ OpenFile.read(size, offset)        one pread, no mapping

All data sets of a process share one budget, half of the limit of open files. The soft limit (`ulimit -n`, often 1,024) is raised
up to the hard one if the data need it. Beyond the budget, the file that was opened first is closed first. It is opened again when
it is read again, which takes three more calls. Copies that a cache has evicted are closed too, because they keep their disk space.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from pretrain.storage import allow_open_files

_LEAST, _MOST = 64, 1 << 16
_SWEEP_SECONDS = 5.0
_lock = threading.Lock()
_opened: collections.deque[tuple[weakref.ref[OpenFiles], Hashable]] = collections.deque()
"""The open files of this process, the oldest first; some may be gone."""
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class OpenFile:
    """A file that any thread can read at any position. It is closed when nobody holds it any more.

    `name`: the file, in messages; `copy`: its path in a cache, if it is a copy there.
    """

    __slots__ = ("_close", "_descriptor", "copy", "name")

    def __init__(self, descriptor: int, name: object, copy: Path | None = None) -> None:
        self._descriptor, self.name, self.copy = descriptor, name, copy
        self._close = os.close  # kept here, because the module may be gone when Python ends

    @classmethod
    def at(cls, path: Path, size: int) -> OpenFile:
        """Open a local file. Raises DataError unless it has `size` bytes, and OSError only if too many files are open."""
        check_size(path, size)
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error

    def read(self, size: int, offset: int) -> bytes:
        """The `size` bytes from `offset` on. Raises DataError naming the file if they cannot be read."""
        try:
            content = os.pread(self._descriptor, size, offset)
            while len(content) < size:  # more than the system reads at once, or the end of the file
                more = os.pread(self._descriptor, size - len(content), offset + len(content))
                if not more:
                    raise DataError(
                        f"{self.name}: truncated: it has {os.fstat(self._descriptor).st_size} bytes now and is read up to byte "
                        f"{offset + size}; restore it, and leave the data alone while a run reads it"
                    )
                content += more
            return content
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error.strerror}") from error

    def __del__(self) -> None:
        self._close(self._descriptor)


class OpenFiles:
    """The files of one data set by key, opened by `open_file(key)` when they are first read. Safe between threads."""

    def __init__(self, open_file: Callable[[Any], OpenFile]) -> None:
        self._open_file = open_file
        self._files: dict[Hashable, OpenFile] = {}

    def get(self, key: Hashable) -> OpenFile:
        """The file of this key. Raises DataError if it cannot be opened."""
        file = self._files.get(key)
        return file if file is not None else self._add(key)

    def clear(self) -> None:
        """Close everything, as soon as nobody reads it."""
        self._files = {}

    def _add(self, key: Hashable) -> OpenFile:
        try:
            file = self._open_file(key)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _close_down_to(0)
            try:
                file = self._open_file(key)
            except OSError as again:
                raise DataError(f"too many open files ({again.strerror}); raise the limit with ulimit -n") from again
        _close_down_to(_budget(len(_opened) + 1) - 1)
        with _lock:
            _opened.append((weakref.ref(self), key))
        self._files[key] = file
        return file


class CachedFiles(OpenFiles):
    """The open copies of one data set in a cache.

    While data is read, every few seconds: mark the files used since the last sweep, so that the cache evicts others first. If an
    open file was evicted, close all files, in every data set of this process.
    """

    def __init__(self, open_file: Callable[[Any], OpenFile]) -> None:
        super().__init__(open_file)
        self._used: set[Path] = set()
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS

    def get(self, key: Hashable) -> OpenFile:
        if time.monotonic() > self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            with _lock:
                everyone = {files for reference, _ in _opened if isinstance(files := reference(), CachedFiles)}
            for files in everyone:
                files.sweep()
        file = super().get(key)
        self._used.add(file.copy)
        return file

    def sweep(self) -> None:
        """Mark the files used since the last sweep, and close all files if one of them was evicted."""
        used, self._used = self._used, set()
        for path in used.copy():
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        if any(not file.copy.exists() for file in list(self._files.values())):
            self.clear()


def _close_down_to(count: int) -> None:
    with _lock:
        while len(_opened) > count:
            reference, key = _opened.popleft()
            if (files := reference()) is not None:
                files._files.pop(key, None)


def _budget(wanted: int) -> int:
    """How many files may be open, if `wanted` are needed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    if wanted > soft // 2 and soft < 2 * _MOST:
        soft = allow_open_files(min(2 * _MOST, 4 * wanted))
    return max(_LEAST, min(_MOST, soft // 2))


def check_size(file: Path | str, expected: int) -> None:
    """Raise DataError unless `file` exists and has this many bytes."""
    try:
        found = os.stat(file)  # one question, because 10^4 shards are 3 * 10^4 files
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    if found is None or not stat.S_ISREG(found.st_mode):
        raise DataError(f"{file}: missing, though manifest.json lists it")
    size = found.st_size
    if size != expected:
        what = "empty" if size == 0 else "truncated" if size < expected else "too long"
        raise DataError(f"{file}: {what}: {size} bytes where manifest.json says {expected}")
