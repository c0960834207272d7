"""Open maps of files in a bounded cache: used ones are marked as used, dropped ones are let go."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from pretrain.data.remote.cache import ShardCache

_SWEEP_SECONDS = 5.0

_all: weakref.WeakSet[MappedFiles] = weakref.WeakSet()
_all_lock = threading.Lock()
os.register_at_fork(before=_all_lock.acquire, after_in_parent=_all_lock.release, after_in_child=_all_lock.release)


class MappedFiles:
    """`open_map`, remembered for the `maxsize` most recent arguments. Safe between threads.

    Every few seconds of reading, what was read since is touched in the cache, so that it is not the next to be dropped, and where
    a mapped file was dropped all maps are closed, in every data set of this process: a map holds the space of its file.
    `sha256_of`: the content that a call of `open_map` maps.
    """

    def __init__(self, open_map: Callable[..., np.ndarray], sha256_of: Callable[..., str], cache: ShardCache, maxsize: int):
        self._map = functools.lru_cache(maxsize=maxsize)(open_map)
        self._sha256_of = sha256_of
        self._cache = cache
        self._maxsize = maxsize
        self._used: set[tuple] = set()
        self._held: set[tuple] = set()
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        with _all_lock:
            _all.add(self)

    def __call__(self, *key) -> np.ndarray:
        if time.monotonic() > self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            with _all_lock:
                everyone = list(_all)
            for maps in everyone:
                maps.sweep()
        self._used.add(key)
        return self._map(*key)

    def sweep(self) -> None:
        """Touch what was used since the last time, and close all maps if the file of one is gone."""
        used, self._used = self._used, set()
        for key in used.copy():
            self._cache.touch(self._sha256_of(*key))
        self._held |= used
        if len(self._held) > self._maxsize or any(
            not self._cache.path(self._sha256_of(*key)).exists() for key in self._held.copy()
        ):
            self._map.cache_clear()
            self._held = set()
