"""Whether a checkpoint is intact, found out by all ranks together.

A file that *cannot be read* (EIO, ESTALE, one that a node does not see yet) says nothing of the checkpoint. It is tried again for a while, and
then the run stops. A file whose *content differs* from its hash is damaged.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pretrain.checkpoint import files
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, OtherFormatError, UnreadableError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before a file that cannot be read is tried again."""


def on_main_patiently(ranks: Ranks, name: str, look: Callable[[], T], instead: str = "") -> T:
    """What `look` finds on the main rank, on all ranks. Where that is unreadable, it is tried again (`_patiently`)."""
    return _patiently(lambda: ranks.on_main(name, look, UnreadableError), instead)


def _patiently(look: Callable[[], T], instead: str) -> T:
    """The result of `look`, which all ranks call together, tried again after growing pauses where it raises UnreadableError on all.

    `instead`: for the message of the last one, what else can be done than wait for the storage.
    """
    said = None
    for seconds in RETRY_SECONDS:
        try:
            return look()
        except UnreadableError as error:
            if str(error) != said:
                said = str(error)
                log.warning("%s; tried again for %g s", error, sum(RETRY_SECONDS))
            time.sleep(seconds)
    try:
        return look()
    except UnreadableError as error:
        raise UnreadableError(
            f"{error}; tried for {sum(RETRY_SECONDS):g} s, nothing was changed: when the storage can be read, the same command continues{instead}"
        ) from error


def first_damage(checkpoint: Path, ranks: Ranks, content: bool = True, instead: str = "") -> str | None:
    """The first thing wrong with the content of a checkpoint's files, the ranks sharing the hashing; None when it is intact.

    A file that no rank finds is gone, which is damage. Raises UnreadableError, on all ranks, for one that stays unreadable where it is,
    or that some ranks find and others do not; `instead` ends its message. Raises OtherFormatError for another version of the format.
    """
    intact = False
    manifest: str | None = None

    def look() -> str | None:
        nonlocal intact, manifest
        failed: CheckpointError | None = None
        try:
            # The others wait for it, and see why. A file may take hours, and the ranks that have none are done at once.
            with ranks.part("hashes of a checkpoint", storage=True), ranks.in_pieces("hashes of a checkpoint") as seen:
                if not intact:
                    files.verify(checkpoint, ranks.rank, ranks.world_size, seen, content)
                    manifest = files.manifest_hash(checkpoint)
            intact = True
        except CheckpointError as error:
            failed = error
        if (damage := _damage_of(ranks.gather("hashes of a checkpoint", failed), ranks)) is not None:
            return damage
        _check_same(checkpoint, ranks, manifest)
        return None

    return _patiently(look, instead)


def _damage_of(failures: list[CheckpointError | None], ranks: Ranks) -> str | None:
    """What the ranks' failures to verify a checkpoint come to; see `first_damage`. All ranks call it together."""
    for failed in failures:
        if isinstance(failed, OtherFormatError):
            raise failed
    if damage := [failed for failed in failures if failed and not isinstance(failed, UnreadableError)]:
        return str(damage[0])
    paths = [failed.path for failed in failures if failed and failed.missing]
    seen = ranks.gather("sight of a checkpoint's files", [os.path.exists(path) for path in paths]) if paths else []
    for number, path in enumerate(paths):
        if not any(rank[number] for rank in seen):
            return f"{path}: missing"
    for rank, failed in enumerate(failures):
        if failed:
            where = "" if ranks.world_size == 1 else f"rank {rank}: "
            raise UnreadableError(f"{where}{failed}" + (" here, and other ranks find it" if failed.missing else ""))
    return None


def _check_same(checkpoint: Path, ranks: Ranks, manifest: str | None) -> None:
    """Raise CheckpointError, on all ranks, where a path means another checkpoint on another rank: a copy that each node has, say.

    `manifest`: hash of this rank's, which holds the hashes of all files.
    """
    everyone = ranks.gather("manifests of a checkpoint", (manifest, socket.gethostname(), str(checkpoint.absolute())))
    first, main_host, main_path = everyone[0]
    for rank, (other, host, path) in enumerate(everyone):
        if other != first:
            raise CheckpointError(
                f"{checkpoint} is another checkpoint on rank {rank} ({host}: {path}) than on rank 0 ({main_host}: {main_path}); put it on "
                "storage that all nodes share, or an equal copy on each, and give its absolute path"
            )
