"""Files that survive a crash: flushed to the disk, replaced in one step, named by their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SEAL = "seal"


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


def sealed_json(content: Mapping[str, Any]) -> str:
    """A JSON object with a sha256 of itself in it (`seal`), so that `unsealed` notices every change of a value."""
    return json.dumps({**content, _SEAL: _seal_of(content)}, indent=2) + "\n"


def unsealed(text: bytes, required: bool = True) -> dict[str, Any]:
    """The object that `sealed_json` wrote; without `required` also one without a seal, as older versions wrote them.

    Raises ValueError for anything else, and for an object that was altered.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if required or _SEAL in content:
        seal = content.pop(_SEAL, None)
        if seal != _seal_of(content):
            raise ValueError("damaged, or edited by hand: its values do not match its seal")
    return content


def _seal_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
