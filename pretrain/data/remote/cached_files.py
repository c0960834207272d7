"""Open files of a bounded cache: used ones are marked as used, dropped ones are let go."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from pretrain.data.remote.cache import ShardCache
from pretrain.data.shards.open_files import OpenFile, OpenFiles

_SWEEP_SECONDS = 5.0

_all: weakref.WeakSet[CachedFiles] = weakref.WeakSet()
_all_lock = threading.Lock()
os.register_at_fork(before=_all_lock.acquire, after_in_parent=_all_lock.release, after_in_child=_all_lock.release)


class CachedFiles(OpenFiles):
    """The open copies of one data set. Safe between threads.

    While data is read, every few seconds: mark the files used since the last sweep, so that the cache evicts others first. Where a
    file was evicted that is open, close all files, in every data set of this process: an open file holds its space.
    `sha256_of`: the content of the file with a key.
    """

    def __init__(self, open_file: Callable[[Any], OpenFile], sha256_of: Callable[[Any], str], cache: ShardCache) -> None:
        super().__init__(open_file)
        self._sha256_of = sha256_of
        self._cache = cache
        self._used: set[Hashable] = set()
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        with _all_lock:
            _all.add(self)

    def get(self, key: Hashable) -> OpenFile:
        if time.monotonic() > self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            with _all_lock:
                everyone = list(_all)
            for files in everyone:
                files.sweep()
        self._used.add(key)
        return super().get(key)

    def sweep(self) -> None:
        """Touch what was used since the last time, and close all files if one of them was evicted."""
        used, self._used = self._used, set()
        for key in used.copy():
            self._cache.touch(self._sha256_of(key))
        if any(not self._cache.path(self._sha256_of(key)).exists() for key in list(self._files)):
            self.clear()
