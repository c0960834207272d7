"""Whether this process does anything, as Linux counts it."""

from __future__ import annotations

import os


def waits_for_storage() -> bool:
    """Whether the main thread is inside a read, write or flush that the system has not finished (state D)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"D"
    except (OSError, IndexError):
        return False


def bytes_moved() -> int:
    """Bytes that this process has read and written, where the system counts them."""
    try:
        with open("/proc/self/io", "rb") as file:
            fields = dict(line.split(b":") for line in file.read().splitlines())
        return int(fields[b"rchar"]) + int(fields[b"wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def awake_seconds() -> float | None:
    """Seconds for which the main thread ran or waited for a processor. A processor that others use too makes a rank slow, so that counts."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            running, runnable, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(running) + int(runnable)) / 1e9
