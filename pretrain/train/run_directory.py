"""The directory of a run: who holds it, which run it is, and what state it is in."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.storage import replace_text
from pretrain.train.run_lock import LockKind, RunLock, sees_token

log = logging.getLogger(__name__)


class RunDirectory:
    """Held by the main rank for as long as the process lives; the other ranks only know its path."""

    def __init__(self, path: Path, lock: LockKind = "auto") -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.token = ""
        self._lock = RunLock(path, lock)

    def claim(self) -> dict[str, Any] | None:
        """Create or take over the directory; the identity of the run it holds, None of a new one.

        Raises CheckpointError if another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.token = self._lock.acquire()
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
        return sees_token(self.path, token)

    def release(self) -> None:
        """Let another process have it; the end of the process does so too."""
        self._lock.release()

    @property
    def is_held(self) -> bool:
        """Whether this process has claimed the directory, and may write into it."""
        return self._lock.owner is not None

    @property
    def has_status(self) -> bool:
        """Whether a run has started here before."""
        return (self.path / "status.json").exists()

    def write_status(self, state: str, step: int, reason: str | None = None) -> None:
        """status.json: running, finished, preempted or failed."""
        replace_text(self.path / "status.json", json.dumps({"state": state, "step": step, "reason": reason}) + "\n")
