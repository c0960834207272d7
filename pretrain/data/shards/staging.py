"""Directories that are complete or invisible: written under a hidden name, flushed to disk, then renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pretrain.data.remote.transfer import is_url, shown
from pretrain.errors import ConfigError, DataError
from pretrain.storage import flush


@contextlib.contextmanager
def staged_directory(output: Path) -> Iterator[Path]:
    """A hidden sibling of `output` to write into; it becomes `output` when the block ends, and vanishes if the block raises.

    The name is random, so two processes that prepare the same output never see each other's files. The first to finish wins, and
    the other gets the error. A process that is killed inside the block leaves `.NAME.*.partial`, which nothing reads. Raises
    DataError if `output` is a file or a non-empty directory, before any work and again at the rename.
    """
    output = Path(os.path.abspath(output))
    refuse_existing(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise DataError(f"{output}: cannot be created: {error.strerror}") from error
    try:
        # mkdtemp makes the directory private, but a data set must be as readable as its owner's umask says.
        stage.chmod(0o777 & ~_umask())
        yield stage
        flush_tree(stage)
        rename_into_place(stage, output)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def refuse_url(option: str, path: object) -> None:
    """Raise ConfigError for a URL in place of a directory: object stores cannot rename a directory into place."""
    if is_url(path):
        raise ConfigError(
            f"{option} {shown(str(path))}: is a URL; name a directory on a local or shared disk, and copy it when it is finished "
            "(training reads prepared data from URLs)"
        )


def refuse_existing(output: Path) -> None:
    """Raise DataError, naming `output`, unless it is free: absent, or an empty directory."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise DataError(f"{output}: already exists; choose another output or remove it first")


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


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
