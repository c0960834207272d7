"""The directory of a run: who holds it, which run it is, and what state it is in."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.errors import CheckpointError
from pretrain.storage import replace_text

log = logging.getLogger(__name__)


class RunDirectory:
    """Held by the main rank for as long as the process lives; the other ranks only know its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.token = ""
        self._lock: Any = None
        self._held = False

    def claim(self) -> dict[str, Any] | None:
        """Create or take over the directory; the identity of the run it holds, None of a new one.

        Raises CheckpointError if another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            raise CheckpointError(f"{self.path} is in use by {holder}; wait for it, or choose another run.name") from error
        except OSError as error:
            raise CheckpointError(
                f"{self.path / '.lock'}: cannot be locked: {error.strerror}; use storage with flock"
            ) from error
        self.token = f"process {os.getpid()} on {socket.gethostname()}"
        self._lock.truncate(0)
        self._lock.write(self.token)
        self._lock.flush()
        self._held = True
        for name in files.discard_unfinished(self.checkpoints):
            log.info("removed %s, which an interrupted save left behind", self.checkpoints / name)
        path = self.path / "identity.json"
        return files.read_json(path) if path.exists() else None

    def record_start(self, identity: dict[str, Any], config: str, start: dict[str, Any]) -> None:
        """Say which run is here, with its resolved configuration, and append to starts.jsonl where it starts or goes on."""
        replace_text(self.path / "identity.json", json.dumps(identity, indent=1) + "\n")
        replace_text(self.path / "config.yaml", config)
        with (self.path / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(start) + "\n")

    def sees(self, token: str) -> bool:
        """Whether this rank finds what the main rank wrote: whether both look at the same storage."""
        try:
            return (self.path / ".lock").read_text(encoding="utf-8") == token
        except OSError:
            return False

    def release(self) -> None:
        """Let another process have it; the end of the process does so too."""
        if self._lock is not None:
            self._lock.close()
            self._held = False

    @property
    def is_held(self) -> bool:
        """Whether this process has claimed the directory, and may write into it."""
        return self._held

    @property
    def has_status(self) -> bool:
        """Whether a run has started here before."""
        return (self.path / "status.json").exists()

    def write_status(self, state: str, step: int, reason: str | None = None) -> None:
        """status.json: running, finished, preempted or failed."""
        replace_text(self.path / "status.json", json.dumps({"state": state, "step": step, "reason": reason}) + "\n")
