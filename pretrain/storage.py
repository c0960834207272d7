"""Files that survive a crash: flushed to the disk, replaced in one step, named by their content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path, seen: Callable[[int], object] | None = None) -> str:
    """sha256 of a file's content, in hexadecimal; memory bounded. `seen` is told how many bytes were read, piece by piece."""
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            if seen is not None:
                seen(size)
    return digest.hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write a small file such that a reader, or a crash, sees the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    flush(aside)
    os.replace(aside, path)


def unrepeated(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as `json.loads(object_pairs_hook=unrepeated)` gives it. Raises ValueError for a name that it has twice: readers
    would differ on which is meant.
    """
    if len(dict(items)) != len(items):
        names = [name for name, _ in items]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return dict(items)
