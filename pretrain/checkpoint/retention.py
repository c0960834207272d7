"""Which checkpoints a run keeps, and the removal of the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.checkpoint import files
from pretrain.config.schema import Checkpoint
from pretrain.errors import reason_of

log = logging.getLogger(__name__)


def outdated(complete: list[Path], newest: Path, keep_last: int, keep_every_steps: int, skipped: int = 0) -> list[Path]:
    """Those of the `complete` checkpoints that need not be kept. `newest` was just committed and stays. Later checkpoints do not belong to this
    run's past: they are neither counted nor returned. `skipped`: steps in a row that were skipped before `newest`.
    """
    if keep_last == 0:
        return []
    found = [path for path in complete if files.step_of(path) <= files.step_of(newest)]
    # What was saved among skipped steps has one and the same weights, perhaps ruined ones. It does not count, and the newest of it is enough.
    taken = [path for path in found if files.step_of(path) <= files.step_of(newest) - skipped]
    keep = {newest, *taken[-keep_last:]}
    if keep_every_steps:
        keep |= {p for p in found if files.step_of(p) % keep_every_steps == 0}
    return [path for path in found if path not in keep]


def retire(target: Path, policy: Checkpoint, skipped: int = 0, in_use: Path | None = None) -> threading.Thread:
    """Give up the checkpoints beside this new one that the policy no longer keeps, but for the one `in_use`. Main rank only. `skipped`: see
    `outdated`.

    The thread removes their files, which may take minutes. Ranks need not wait for it, and the next save should, for the room. What cannot be
    removed is warned of: the run needs the new checkpoint, not the room of the old one.
    """
    old: list[Path] = []
    left: list[Path] = []
    with _tried_again():
        found = files.complete_checkpoints(target.parent)
        old = outdated(found, target, policy.keep_last, policy.keep_every_steps, skipped)
    for path in old:
        if path != in_use:
            with _tried_again():
                files.give_up(path)
    with _tried_again():
        left = files.unfinished(target.parent)  # also what an earlier removal could not remove

    def remove() -> None:
        for path in left:
            if not files.remove(path):
                log.warning(
                    "an older checkpoint could not be removed, which is tried again at the next save: %s is still there", path
                )

    thread = threading.Thread(target=remove, name="removal of older checkpoints")
    thread.start()
    return thread


@contextmanager
def _tried_again() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("an older checkpoint could not be removed, which is tried again at the next save: %s", reason_of(error))
