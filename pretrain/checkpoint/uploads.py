"""The thread that copies a run's checkpoints into an object store while training goes on (`checkpoint.upload`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint import files
from pretrain.checkpoint.stored_run import KEY, StoredRun
from pretrain.config.schema import Checkpoint
from pretrain.errors import CheckpointError, line_of

log = logging.getLogger(__name__)


class Uploads:
    """Of one start of a run, on the main rank. Training never waits for it, but for the last one at the end.

    While a checkpoint is on its way, it must stay (`in_use`). Of those that are saved meanwhile, only the newest is copied next, beside those that
    `checkpoint.keep_every_steps` keeps for ever. A failure is warned of, and the next checkpoint is tried anew: the run has its own.
    """

    def __init__(self, stored: StoredRun, directory: Path, policy: Checkpoint, start: str) -> None:
        self.stored, self.directory, self.policy, self.start = stored, directory, policy, start
        self.in_use: Path | None = None
        self.problem: str | None = None
        """Why the newest checkpoint is not there."""
        self._waiting: list[tuple[Path, int]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_said = False

    def begin(self, step: int, newest: Path | None, alive: Callable[[], object] = lambda: None) -> None:
        """Take over the copy for this start, which goes on from `step`, and copy its `newest` checkpoint if that is not there. `alive` is called now
        and then. Raises CheckpointError.
        """
        self.stored.begin(self.start, step, alive)
        self.stored.upload_records(self.directory)
        if newest is not None:
            self.offer(newest, 0)

    def offer(self, checkpoint: Path, skipped: int) -> None:
        """Copy a checkpoint that is complete, beside the training. `skipped`: steps in a row that were skipped before it."""
        with self._lock:
            late = [path for path, _ in self._waiting if not self._stays(path)]
            self._waiting = [(path, number) for path, number in self._waiting if self._stays(path)] + [(checkpoint, skipped)]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload of checkpoints", daemon=True)
                self._thread.start()
        for path in late:
            log.warning("%s: %s is not copied, because copying takes longer than the time between two saves", KEY, path.name)

    def _stays(self, path: Path) -> bool:
        every = self.policy.keep_every_steps
        return self.policy.keep_last == 0 or bool(every and files.step_of(path) % every == 0)

    def wait(self, seconds: float) -> bool:
        """Wait for what is on its way, at most so long; whether all of it has ended."""
        thread = self._thread
        if thread is not None:
            if not self._has_said and self.in_use is not None:
                log.info("waiting until %s is copied to %s", self.in_use.name, self.stored.shown)
                self._has_said = True
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.in_use = self._thread = None
                    return
                self.in_use, skipped = self._waiting.pop(0)
            self._copy(self.in_use, skipped)

    def _copy(self, checkpoint: Path, skipped: int) -> None:
        began, self.problem = time.monotonic(), None
        try:
            self.stored.check_owner(self.start)
            self.stored.upload(checkpoint)
            self.stored.upload_records(self.directory)
            self.stored.retire(checkpoint, self.policy, skipped)
            log.info("copied %s to %s (%.1f s)", checkpoint, self.stored.shown, time.monotonic() - began)
        except CheckpointError as error:
            self.problem = f"{error}; {checkpoint} itself is good"
        except Exception as error:  # whatever the library of an object store raises
            self.problem = f"{KEY}: {self.stored.shown}: {line_of(error)}; {checkpoint} itself is good"
            log.debug("upload of a checkpoint", exc_info=True)
        if self.problem is not None:
            log.warning("%s", self.problem)
