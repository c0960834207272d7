"""Freed memory of the host, which a process that trains on a CPU keeps for its next tensors."""

from __future__ import annotations

import ctypes
import os

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1
"""Parameters of glibc's mallopt (malloc.h)."""
_NEVER = -1
SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables of the environment that say how glibc's malloc gives memory back."""


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to give no freed memory back to the system. Returns whether it took the settings.

    By default each large tensor is mapped anew, and the system fills every page with zeros at its first use, which takes a tenth of a step in
    bf16 (docs/benchmarks.md). This is for the main thread, which trains: other threads have heaps of 64 MB, and map what is larger. The peak
    stays the same where steps do; glibc before 2.38 may place tensors of the largest size up to four times before it finds their room again.
    Other allocators (jemalloc, tcmalloc, musl) take no notice, and settings in the environment hold.
    """
    if any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
