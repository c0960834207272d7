"""Files that survive a crash: flushed to the disk, replaced in one step, appended to by whole lines, named by their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.errors import clipped

_SEAL = "seal"


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path, seen: Callable[[int], object] | None = None) -> str:
    """sha256 of a file's content, in hexadecimal; memory is bounded. `seen` is called with the number of bytes after each piece."""
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            if seen is not None:
                seen(size)
    return digest.hexdigest()


def replace_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace a small file atomically: a reader, or a crash, sees the old content or the new, never a part.

    `durable`: wait for the disk, which takes tens of milliseconds on a network file system.
    """
    # A process of another host may have this one's number, and threads share it.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_text(text, encoding="utf-8")
        if durable:
            flush(aside)
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise _named(error, path) from error


def append_line(path: Path, text: str) -> None:
    """Append one line to a file and create the file if it is missing. If a crash or a full disk tore the last line, end that line first.

    The file is opened for each line, because an open handle may go stale on a network file system.
    """
    data = text.encode() + b"\n"
    try:
        with path.open("ab+", buffering=0) as file:
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                data = data if file.read(1) == b"\n" else b"\n" + data
            if (written := file.write(data)) != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes found room", str(path))
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the name of the file, which the system leaves out when a write fails."""
    return OSError(error.errno, error.strerror, str(path))


def plain(value: Any) -> Any:
    """The same value for JSON, with null in place of numbers that are not finite, because JSON has none."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def exists(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists, it raises OSError if that cannot be known (ESTALE, EIO, EACCES)."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def unrepeated(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as `json.loads(object_pairs_hook=unrepeated)` gives it. Raises ValueError for a name that occurs twice: readers
    would disagree on which one counts.
    """
    content = dict(items)
    if len(content) != len(items):
        seen: set[str] = set()
        twice = next(name for name, _ in items if name in seen or seen.add(name))
        raise ValueError(f"{clipped(twice)} is there twice")
    return content


def sealed_json(content: Mapping[str, Any]) -> str:
    """A JSON object with a sha256 of itself in it (`seal`), so that `unsealed` notices every change of a value."""
    return json.dumps({**content, _SEAL: _seal_of(content)}, indent=2) + "\n"


def unsealed(text: bytes, required: bool = True) -> dict[str, Any]:
    """The object that `sealed_json` wrote. Unless `required`, an object without a seal is read too, as older versions
    wrote it.

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
