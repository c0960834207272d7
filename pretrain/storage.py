"""Files and directories that survive a crash: flushed to the disk, replaced or renamed in one step, appended to by whole lines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import resource
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pretrain.errors import FULL, DataError, clipped

log = logging.getLogger(__name__)

_SEAL = "seal"


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Create a directory and those above it where they are missing, their names durable. A lost name would take all below it."""
    missing = list(itertools.takewhile(lambda place: not exists(place), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        flush(place.parent)


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
    """Replace a small file by a text: see `replace_file`."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"), durable)


def replace_file(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Replace a file atomically by what `write` puts into the path that it is given: a reader, or a crash, sees the old content or the new, never a part.

    `durable`: wait for the disk, which takes tens of milliseconds on a network file system.
    """
    # A process of another host may have this one's number, and threads share it.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(aside)
        if durable:
            flush(aside)
        os.replace(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError):
            raise _named(error, path) from error
        raise


def real(path: Path) -> Path:
    """The path without links. Where links go in a circle, `Path.resolve` raises RuntimeError in Python 3.11. This does not; opening it says what is wrong."""
    return Path(os.path.realpath(path))


def copy_tree(source: Path, target: Path, copy: Callable[[Path, Path], object] = shutil.copyfile, leave_out: str = "") -> None:
    """Copy a directory into the new directory `target`, without files named `leave_out`. Raises OSError of the file that failed; shutil.copytree
    raises a list without an errno.
    """
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy_tree(path, target / path.name, copy, leave_out)
        elif path.name != leave_out:
            copy(path, target / path.name)


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


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, as far as the system lets it. The limit is often 1,024, for programs that call
    select(), which no library here does. Returns what it is then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and raised > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return raised
    return soft


def exists(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists, it raises OSError if that cannot be known (ESTALE, EIO, EACCES). It is False for a name that is too
    long, and for links in a circle.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return False
        raise
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


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty if the file is missing, or cannot be read at the moment."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def sealed_json(content: Mapping[str, Any]) -> str:
    """A JSON object with a sha256 of itself in it (`seal`), so that `unsealed` notices every change of a value."""
    return json.dumps({**content, _SEAL: _seal_of(content)}, indent=2) + "\n"


def unsealed(text: bytes) -> dict[str, Any]:
    """The object that `sealed_json` wrote. Raises ValueError for anything else, and for an object that was altered."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if content.pop(_SEAL, None) != _seal_of(content):
        raise ValueError("damaged, or edited by hand: its values do not match its seal")
    return content


def _seal_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ---- directories that are complete or invisible --------------------------------------------------------------------------


@contextlib.contextmanager
def staged_directory(output: Path) -> Iterator[Path]:
    """A hidden sibling of `output` to write into; it becomes `output` when the block ends, and vanishes if the block raises.

    The name is random, so two processes that prepare the same output never see each other's files. The first to finish wins, and
    the other gets the error. A process that is killed inside the block leaves `.NAME.*.partial`, which nothing reads. Raises
    DataError if `output` is a file or a non-empty directory, before any work and again at the rename.
    """
    output = output.absolute()  # not os.path.abspath, which takes link/../output for output
    refuse_existing(output)
    stage = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{output}: cannot be created: {error.strerror}") from error
    try:
        with named_if_full(output):
            yield stage
            flush_tree(stage)
        rename_into_place(stage, output)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


@contextlib.contextmanager
def named_if_full(output: Path) -> Iterator[None]:
    """Name what was to be written in the system's error about a full disk. It names no file where a write fails, and one that is hidden where
    none can be created.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _named(error, output) from error


def make_once(path: Path, what: str, make: Callable[[], object]) -> None:
    """Have `make` put a directory in place at `path`, unless it is there. One process makes it; others wait, and say so.

    `what`: a phrase for messages. Raises DataError if it cannot be written.
    """
    if path.exists():  # complete: it was renamed into place
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("data: waiting for another process, which prepares %s into %s", what, path)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make()
    except OSError as error:
        raise DataError(f"{path}: {what} cannot be written: {error.strerror}; set data.cache.dir") from error


def refuse_existing(output: Path) -> None:
    """Raise DataError, naming `output`, unless it is free: absent, or an empty directory that a finished one can replace."""
    if output.is_symlink():
        raise DataError(f"{output}: is a link, which a finished directory cannot replace; give the place that it leads to")
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise DataError(f"{output}: already exists; choose another output or remove it first")


def refuse_existing_file(output: Path) -> None:
    """Raise DataError, naming `output`, if something is there, or if no file can be written there. Its folder is made if it is missing."""
    if os.path.lexists(output):
        raise DataError(f"{output}: already exists; choose another output or remove it first")
    try:
        if not exists(output.parent):
            output.parent.mkdir(parents=True)
        output.open("x").close()  # a read-only disk or a name that is too long shows only so
        output.unlink()
    except OSError as error:
        raise DataError(f"{output}: cannot be created: {error.strerror}; choose another output") from error


def rename_into_place(stage: Path, output: Path) -> None:
    """Rename the directory `stage` to `output`, durably. Raises DataError if something appeared there in the meantime."""
    try:
        os.rename(stage, output)  # atomic; replaces an empty directory, never a filled one
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise DataError(f"{output}: was created by another process meanwhile; it was left as it is") from error
        raise
    flush(output.parent)


def flush_tree(root: Path) -> None:
    """Make every file and name below `root` durable."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            flush(Path(directory, name))
        flush(Path(directory))
