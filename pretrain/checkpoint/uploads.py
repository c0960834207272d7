"""The thread that copies a run's checkpoints into an object store while training goes on (`checkpoint.upload`)."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from pretrain.checkpoint import files
from pretrain.checkpoint.store_url import KEY
from pretrain.checkpoint.stored_run import StoredRun
from pretrain.config.schema import Checkpoint
from pretrain.errors import CheckpointError, line_of

log = logging.getLogger(__name__)


class Uploads:
    """Copies the checkpoints of one start of a run, on the main rank. Training waits for it only at the end, for the last copy.

    The newest checkpoint is copied first, then those that `checkpoint.keep_every_steps` keeps for ever and that are not there yet. One that was
    saved while another is on its way is left out when a newer one comes. A failure is warned of, and tried anew when the next checkpoint is saved.
    """

    def __init__(self, stored: StoredRun, directory: Path, policy: Checkpoint, start: str) -> None:
        self.stored, self.directory, self.policy, self.start = stored, directory, policy, start
        self.in_use: Path | None = None
        """The checkpoint that is on its way, which has to stay."""
        self._newest: Path | None = None
        self._done: set[str] = set()
        self._tried: set[str] = set()
        self._verified: set[str] = set()
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_said = False

    @property
    def problem(self) -> str | None:
        """Why a checkpoint that should be there is not."""
        problems = list(self._problems.values())  # in one step, because the thread that copies changes them
        return problems[-1] if problems else None

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return self._thread is not None

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint that is complete, beside the training, and what is kept for ever and not there yet."""
        with self._lock:
            late, self._newest = self._newest, checkpoint
            self._verified.add(checkpoint.name)  # when it was saved, or when the run started from it
            self._tried.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload of checkpoints", daemon=True)
                self._thread.start()
        if late is not None and not self._stays(late.name):
            log.warning("%s: %s is not copied, because copying takes longer than the time between two saves", KEY, late.name)

    def _stays(self, name: str) -> bool:
        """Whether the policy keeps a checkpoint of this name for ever."""
        every = self.policy.keep_every_steps
        return self.policy.keep_last == 0 or bool(every and files.step_of(Path(name)) % every == 0)

    def wait(self, seconds: float) -> bool:
        """Wait for what is on its way, at most so long; whether all of it has ended."""
        thread, path = self._thread, self.in_use
        if thread is not None:
            if not self._has_said and path is not None:
                log.info("waiting until %s is copied to %s", path.name, self.stored.shown)
                self._has_said = True
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._lock:
                self.in_use = self._next()
                if self.in_use is None:
                    self._thread = None
                    return
            self._copy(self.in_use)

    def _next(self) -> Path | None:
        path, self._newest = self._newest, None
        if path is not None:
            return path
        try:
            found = files.complete_checkpoints(self.directory / "checkpoints")
        except (OSError, CheckpointError) as error:
            log.warning("%s: %s", KEY, line_of(error))
            return None
        return next((path for path in found if self._stays(path.name) and path.name not in self._done | self._tried), None)

    def _copy(self, checkpoint: Path) -> None:
        began = time.monotonic()
        self._tried.add(checkpoint.name)
        if checkpoint.name not in self._verified and not self._is_intact(checkpoint):
            self._done.add(checkpoint.name)
            return
        try:
            was_sent = self.stored.upload(checkpoint, self.directory, self.start)
        except Exception as error:  # also what the library of an object store raises
            reason = str(error) if isinstance(error, CheckpointError) else f"{KEY}: {self.stored.shown}: {line_of(error)}"
            if not (checkpoint / files.MANIFEST).exists():
                return  # it is no longer kept
            self._problems[checkpoint.name] = f"{reason}; {checkpoint} itself is good"
            log.warning("%s", self._problems[checkpoint.name])
            log.debug("upload of a checkpoint", exc_info=True)
            return
        for name in [name for name in self._problems if not self._stays(name) or name == checkpoint.name]:
            del self._problems[name]  # of an older one, which this one makes up for
        self._done.add(checkpoint.name)
        if was_sent:
            log.info("copied %s to %s (%.1f s)", checkpoint, self.stored.shown, time.monotonic() - began)
        try:
            self.stored.retire(self.policy, self.start)
        except Exception as error:
            log.warning("%s: older copies could not be removed: %s", KEY, str(error).removeprefix(f"{KEY}: "))

    def _is_intact(self, checkpoint: Path) -> bool:
        """Whether an older checkpoint is what was saved. A damaged one is not copied."""
        try:
            files.verify(checkpoint)
        except CheckpointError as error:
            log.warning("%s: %s is not copied: %s", KEY, checkpoint.name, error)
            return False
        self._verified.add(checkpoint.name)
        return True
