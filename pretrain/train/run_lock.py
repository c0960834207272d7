"""Who holds a run directory: one trainer at a time, on file systems with flock and without.

    DIR/.lock    JSON: process, host, a token of its own, how it is held; its owner touches it every 15 s

With flock the system itself knows whether the owner lives. Without flock (Lustre without `-o flock`, some NFS) its signs of life tell. Some file
systems keep a lock to one host, and nobody can see that (Lustre with `-o localflock`, NFS with `local_lock`, FUSE). So `auto` asks for signs of
life where the owner is on another host, even if the lock is free.

An owner on this host is gone if its process has ended. An owner on another host is watched for a minute. If a stopped owner was taken for gone and
then continues, it finds another token and ends at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from pretrain.errors import CheckpointError, flush_output, print_error
from pretrain.storage import replace_text

log = logging.getLogger(__name__)

BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0
"""How long an owner on another host must show no sign of life before it counts as gone."""
SIGHT_SECONDS = 90.0
"""How long a rank looks for the main rank's lock: another node may see it a moment later."""
_CONFIRM_SECONDS = 2.0
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}

LockKind = Literal["auto", "flock", "file"]


@dataclass(frozen=True)
class Owner:
    """The content of `.lock`. `where`: the booted system and its process namespace, within which `process` and `started` are valid."""

    process: int
    host: str
    where: str
    started: str
    token: str
    kind: str
    released: bool = False

    @classmethod
    def this_process(cls, kind: str) -> Owner:
        return cls(os.getpid(), socket.gethostname(), _where(), _start_of(os.getpid()) or "", secrets.token_hex(8), kind)

    @property
    def title(self) -> str:
        return f"process {self.process} on {self.host}"


class RunLock:
    """The lock of one run directory. `acquire`, then hold it until `release` or the end of the process."""

    def __init__(self, directory: Path, kind: LockKind) -> None:
        self.path, self.kind = directory / ".lock", kind
        self.owner: Owner | None = None
        self._file: IO[str] | None = None
        self._over = threading.Event()

    def acquire(self) -> str:
        """Take the lock and return its token. Raises CheckpointError naming the process that holds it, OSError if writing fails."""
        kind = self._choose_kind()
        holder = None
        if kind == "flock":
            self._take_flock()
            holder, _ = read_owner(self.path)
        if kind == "file" or self._may_live(holder):
            self._wait_for_death()
        self.owner = Owner.this_process(kind)
        self._write(self.owner)
        if kind == "file":
            time.sleep(_CONFIRM_SECONDS)  # if two come at the same moment, the later writer keeps the lock
            self._refuse_other(self.owner)
        threading.Thread(target=self._beat, args=(self.owner,), name="run-lock", daemon=True).start()
        return self.owner.token

    def check(self) -> None:
        """Raise CheckpointError if `acquire` would be refused. Nothing is changed. It watches an owner as `acquire` does."""
        if not self.path.exists():
            return
        kind = self.kind
        if kind != "file":
            with self.path.open("a+", encoding="utf-8") as file:
                try:
                    self._flock(file)
                except OSError as error:
                    if kind == "flock" or error.errno not in _NO_FLOCK:
                        raise self._cannot_lock(error) from error
                    kind = "file"
        holder, _ = read_owner(self.path)
        if kind == "file" or self._may_live(holder):
            self._wait_for_death()

    def _may_live(self, holder: Owner | None) -> bool:
        """Whether this owner may live although the system gave us its lock. It may be on a node without flock, or on a host whose locks are not
        known here.
        """
        return holder is not None and (holder.kind == "file" or (self.kind == "auto" and holder.where != _where()))

    def release(self) -> None:
        """Release the lock for another process."""
        self._over.set()
        if self.owner is not None:
            holder, _ = read_owner(self.path)
            if holder is not None and holder.token == self.owner.token:
                try:
                    self._write(Owner(**asdict(self.owner) | {"released": True}))
                except OSError as error:  # the next process has to watch the lock for a while
                    log.warning("%s: cannot be released: %s", self.path, error.strerror)
            self.owner = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _choose_kind(self) -> Literal["flock", "file"]:
        if self.kind != "auto":
            return self.kind
        probe = self.path.with_name(f".flock-{secrets.token_hex(4)}")
        try:
            with probe.open("w", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            log.info("%s: the file system has no flock (%s); run.lock=file is used", self.path.parent, error.strerror)
            return "file"
        finally:
            probe.unlink(missing_ok=True)
        return "flock"

    def _take_flock(self) -> None:
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            self._flock(self._file)
        except OSError as error:
            raise self._cannot_lock(error) from error

    def _flock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use(read_owner(self.path)[0]) from error

    def _cannot_lock(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: cannot be locked: {error.strerror}; set run.lock=auto or file for a file system without flock"
        )

    def _in_use(self, holder: Owner | None) -> CheckpointError:
        by = holder.title if holder else "another process"
        return CheckpointError(f"{self.path.parent} is in use by {by}; wait for it, or choose another run.name")

    def _wait_for_death(self) -> None:
        """Return once the lock's content shows no living owner. Raises CheckpointError if a living process holds it."""
        holder, seen = read_owner(self.path)
        if seen is None or (holder is not None and holder.released):
            return
        if holder is not None and holder.where == _where():
            if _start_of(holder.process) == holder.started:
                raise self._in_use(holder)
            return
        title = holder.title if holder else "a process that has not said who it is"
        log.warning("%s was held by %s; waiting %g s for a sign of life", self.path.parent, title, STALE_SECONDS)
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            now_holder, now = read_owner(self.path)
            if now_holder is not None and now_holder.released:
                return
            if now != seen:
                raise self._in_use(now_holder)
        log.warning("%s: no sign of life of %s; taking over", self.path.parent, title)

    def _write(self, owner: Owner) -> None:
        text = json.dumps(asdict(owner)) + "\n"
        if owner.kind == "file":
            replace_text(self.path, text)
            return
        # Written in place, because the system's lock belongs to this file. Flushed, so that other nodes find it.
        # Not by the file object: what it could not write it would try again when it is closed, and that error would hide the first one.
        handle, data = self._file.fileno(), text.encode()
        try:
            os.ftruncate(handle, 0)
            if (written := os.write(handle, data)) != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes found room")
            os.fsync(handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _refuse_other(self, owner: Owner) -> None:
        holder, _ = read_owner(self.path)
        if holder is not None and holder.token != owner.token:
            self.owner = None
            raise self._in_use(holder)

    def _beat(self, owner: Owner) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._refuse_other(owner)
                os.utime(self.path)
            except OSError as error:  # either the storage comes back, or writing the run's own files fails
                log.warning("%s: %s", self.path, error.strerror)
            except CheckpointError as error:
                if not self._over.is_set():
                    print_error(CheckpointError(f"this process was taken for dead: {error}"))
                    flush_output()
                    os._exit(CheckpointError.exit_code)


def read_owner(path: Path) -> tuple[Owner | None, tuple[str, int] | None]:
    """The owner that a `.lock` names, None if it is not legible. Also its content and time, which change while the owner lives."""
    try:
        with path.open(encoding="utf-8") as file:  # opened anew each time: a network file system then looks at the server
            text, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError):
        return None, ("", 0)
    try:
        return Owner(**json.loads(text)), (text, changed)
    except (ValueError, TypeError):
        return None, (text, changed)


def sees_token(directory: Path, token: str) -> bool:
    """Whether this rank finds the main rank's token, so that both use the same storage. It looks for SIGHT_SECONDS."""
    deadline = time.monotonic() + SIGHT_SECONDS
    while True:
        holder, _ = read_owner(directory / ".lock")
        if holder is not None and holder.token == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _where() -> str:
    """The booted system and the namespace in which process numbers are unique; a unique value if that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(8)}"


def _start_of(process: int) -> str | None:
    """When a process of this system began, which tells it from a later one with the same number; None if no such process exists."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
