"""The directory of a run: where it is, who holds it, which run it is, and what state it is in.

Some files are essential: if writing the lock, identity.json, config.yaml, starts.jsonl or a checkpoint fails, the run stops. Others
only observe: if status.json, ranks.json, metrics.jsonl, TensorBoard or a log fails, the run warns and goes on.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.config.schema import Run
from pretrain.errors import CheckpointError, ConfigError, reason_of
from pretrain.observe.logs import Tolerated
from pretrain.observe.metrics import STARTS_FILE, read_lines
from pretrain.observe.writing_thread import WritingThread
from pretrain.storage import append_line, exists, make_directory, real, replace_text
from pretrain.train.run_lock import LockKind, RunLock

log = logging.getLogger(__name__)

_WRITER_SECONDS = 5.0
"""How long the status of a failed run waits for log lines, where the run could not wait for them: the monitor gives it 10 s (`Monitor._end`)."""
_LONGEST_NAME = 255  # bytes, of a file or folder, on every common file system


def directory_of(run: Run) -> Path:
    """`run.dir`/`run.name`. Raises ConfigError for a name that leads out of `run.dir`, or if no directory can be there."""
    name = Path(run.name)
    if name.is_absolute() or not name.parts or ".." in name.parts or not run.dir:
        raise ConfigError(
            f"run.name={run.name}, run.dir={run.dir or repr('')}: the run must lie below run.dir; give run.name without '..' or a leading '/', "
            "and the folder in run.dir"
        )
    path = Path(run.dir) / name
    for place in [*reversed(path.parents), path]:
        key = f"run.dir={run.dir}" if place in [Path(run.dir), *Path(run.dir).parents] else f"run.name={run.name}"
        try:
            if exists(place):
                if not place.is_dir():
                    raise ConfigError(f"{key}: {place} is a file; give a folder")
            elif place.is_symlink():
                raise ConfigError(
                    f"{key}: {place} is a link to {os.readlink(place)}, which leads nowhere; make that folder, or remove the link"
                )
            elif len(os.fsencode(place.name)) > _LONGEST_NAME:  # below a missing folder the system would not say so yet
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(place))
        except OSError as error:
            raise ConfigError(f"{key}: {reason_of(error)}") from error
    return path


class RunDirectory:
    """Held by the main rank for as long as the process lives; the other ranks only know its path.

    `newest`: name of the last checkpoint that is known to be complete, for status.json. `devices`: those of this start.
    """

    def __init__(self, path: Path, lock: LockKind = "auto") -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.token = ""
        self.newest: str | None = None
        self.devices = 1
        self._device: int | None = None
        """The file system of `run.dir`, when the directory was claimed."""
        self._recorded: tuple[dict[str, Any], str, dict[str, Any]] | None = None
        self._started, self._begun, self._spent_before = utc_now(), time.monotonic(), 0.0
        self._status_lines = Tolerated(str(path / "status.json"))
        self._statuses: collections.deque[tuple[str, bool]] = collections.deque()
        """What status.json is to say, oldest first, and whether it has to be durable."""
        self._status_lock = threading.Lock()
        self.writer: WritingThread | None = None
        """The thread for what only observes, while the run trains."""
        self._lock = RunLock(path, lock)

    def claim(self) -> None:
        """Create or take over the directory. Raises CheckpointError if another process holds it."""
        try:
            make_directory(self.path)
            self._device = os.stat(self.path).st_dev
            self.token = self._lock.acquire()
        except OSError as error:
            raise CheckpointError(f"{reason_of(error)}; the run cannot be kept there: choose another run.dir") from error
        before = self.status().get("device_seconds")
        self._spent_before = float(before) if isinstance(before, (int, float)) else 0.0
        # What a process left that was killed while it wrote.
        for pattern in (".*.json.????????", ".config.yaml.????????"):
            for litter in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    litter.unlink()
        for name in files.discard_unfinished(self.checkpoints):
            log.info("removed %s, which an interrupted save left behind", self.checkpoints / name)

    def check(self) -> None:
        """Raise CheckpointError if `claim` would be refused. Nothing is changed."""
        try:
            place = next(place for place in [self.path, *self.path.absolute().parents] if place.exists())
            if not os.access(place, os.W_OK | os.X_OK):
                raise CheckpointError(f"{place}: this process may not write there; choose another run.dir")
            self._lock.check()
        except OSError as error:  # .lock belongs to another user, or is not a file
            raise CheckpointError(reason_of(error)) from error

    def identity(self) -> dict[str, Any] | None:
        """The identity of the run in this directory; None for a new directory."""
        path = self.path / "identity.json"
        return files.read_json(path) if exists(path) else None

    def saved_last(self) -> str | None:
        """Name of the last saved checkpoint by status.json; None if it names none."""
        name = self.status().get("checkpoint")
        return name if isinstance(name, str) else None

    def was_resumed_from(self, path: Path) -> bool:
        """Whether an earlier start of the run gave this path as `run.resume`."""
        starts, place = self.path / STARTS_FILE, real(path)
        for start in read_lines(starts) if exists(starts) else ():
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # a damaged line
                given = Path(start["config"]["run"]["resume"])
                if given == path or real(Path(start["folder"]) / given) == place:
                    return True
        return False

    def config(self) -> Path | None:
        """config.yaml of the last start; None for a new directory."""
        path = self.path / "config.yaml"
        return path if exists(path) else None

    def record_start(self, identity: dict[str, Any], config: str, start: dict[str, Any]) -> None:
        """Write the run's identity and resolved configuration, and append the step of this start to starts.jsonl."""
        replace_text(self.path / "identity.json", json.dumps(identity, indent=1) + "\n")
        replace_text(self.path / "config.yaml", config)
        append_line(self.path / STARTS_FILE, json.dumps(start))
        self._recorded = identity, config, start

    def restore_record(self) -> None:
        """Write the record of this start again if somebody has removed it, or the whole directory, while the run trains."""
        try:
            if self._recorded is None or exists(self.path / "identity.json"):
                return
        except OSError as error:  # the save that follows fails for the same reason, on all ranks together
            log.warning("%s: cannot be looked at: %s", self.path, reason_of(error))
            return
        try:
            make_directory(self.path)
            if os.stat(self.path).st_dev != self._device:
                log.warning(
                    "%s: its storage is not mounted any more. From here on the run is kept below the mount point, without its earlier checkpoints; end "
                    "it, move the directory away, mount the storage, and move the new checkpoints to the run's",
                    self.path,
                )
            else:
                log.warning(
                    "%s: identity.json is gone, so somebody has removed the directory while the run trains. What describes the run is written again; "
                    "logs and earlier checkpoints are lost, and the lock with them: start no second run there",
                    self.path,
                )
            self.record_start(*self._recorded)
        except OSError as error:
            log.warning("%s: it cannot be written: %s", self.path, reason_of(error))

    def release(self) -> None:
        """Release the directory for another process; the end of the process does so too."""
        self._lock.release()

    @property
    def is_held(self) -> bool:
        """Whether this process has claimed the directory, and may write into it."""
        return self._lock.owner is not None

    @property
    def has_status(self) -> bool:
        """Whether a run has started here before."""
        return (self.path / "status.json").exists()

    def status(self) -> dict[str, Any]:
        """The content of status.json, empty if it is missing. It only observes, so an unreadable one is a warning."""
        path = self.path / "status.json"
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s: cannot be read: %s", path, getattr(error, "strerror", None) or error)
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def device_seconds(self) -> float:
        """Seconds of devices in all starts of the run, each until its last sign of life. Known to the main rank only."""
        return self._spent_before + self.devices * (time.monotonic() - self._begun)

    def write_status(self, state: str, step: int, reason: str | None = None) -> None:
        """status.json: running, finished, preempted, stopped or failed. A failure to write it is a warning.

        While the run is `running`, `updated` is its sign of life, which the `writer` writes. The end of a run is written at once, after the log
        lines that wait.
        """
        status = {
            "state": state,
            "step": step,
            "reason": reason,
            "checkpoint": self.newest,
            "started": self._started,
            "updated": utc_now(),
            "device_seconds": round(self.device_seconds, 3),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._statuses.append((json.dumps(status) + "\n", state != "running"))
        if self.writer is not None and state == "running":
            self.writer.put(self._write_newest_status)
            return
        if self.writer is not None:
            self.writer.wait(_WRITER_SECONDS)
        self._write_newest_status()

    def _write_newest_status(self) -> None:
        """Write the newest status, unless it is written already: an older one never takes its place."""
        with self._status_lock:
            text = None
            while self._statuses:
                text, durable = self._statuses.popleft()
            if text is None:
                return
            self._status_lines.attempt(lambda: replace_text(self.path / "status.json", text, durable))
            if durable:
                self._status_lines.close()


def utc_now() -> str:
    """The time, UTC, as ISO 8601 says it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
