"""A run's checkpoints in an object store (`checkpoint.upload`): what is there, how it comes there, and how a new machine gets it.

URL/RUN/owner.json                               the start of the run that may write here
URL/RUN/config.yaml  identity.json  starts.jsonl  metrics.jsonl
URL/RUN/checkpoints/step-00000200/               as in the run directory; manifest.json comes last: what has one is complete
URL/RUN/checkpoints/abandoned-step-00000300/     of a time line that the run has left
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint import files
from pretrain.checkpoint.retention import outdated
from pretrain.config.schema import Checkpoint, Config
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, ConfigError, DataError, without_secrets
from pretrain.storage import exists, flush, make_directory, real, replace_text
from pretrain.transfer import Remote, WrongContentError, is_url

log = logging.getLogger(__name__)

KEY = "checkpoint.upload"
RECORDS = ("config.yaml", "identity.json", "starts.jsonl", "metrics.jsonl")
"""Files of the run directory that are copied beside the checkpoints."""
_AT_ONCE = 4
"""Files of a checkpoint that are sent at the same time."""
_READ_ONLY = ("http", "https", "hf")


def check_store(url: str) -> None:
    """Raise ConfigError for what cannot be an object store to write to."""
    if not is_url(url):
        raise ConfigError(f"{KEY}={url}: is no URL; give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER", KEY)
    if "::" in url or url.split("://")[0].lower() in _READ_ONLY:
        raise ConfigError(
            f"{KEY}={without_secrets(url)}: checkpoints cannot be written there; give s3://, gs:// or file://", KEY
        )


def stored_run(config: Config) -> StoredRun | None:
    """The copy of a run in the object store that its configuration names; None if it names none."""
    return StoredRun(config.checkpoint.upload, config.run.name) if config.checkpoint.upload else None


@dataclass(frozen=True)
class Lacking:
    """Complete checkpoints of an object store that a run directory does not have: those `newer` than any there, newest first, and the one that
    `run.resume` names.
    """

    newer: tuple[str, ...]
    named: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that a start downloads, if all are intact: the newest, then the named one."""
        return list(dict.fromkeys([*self.newer[:1], *([self.named] if self.named else [])]))


class StoredRun:
    """The copy of one run in an object store. What fails for want of a network or server is tried again for minutes (`transfer.py`).

    Methods raise CheckpointError that begins with the key.
    """

    def __init__(self, url: str, run: str, remote: Remote | None = None) -> None:
        self.url = f"{url.rstrip('/')}/{run}"
        self.shown = without_secrets(self.url)
        self.remote = remote or Remote()

    def _of(self, checkpoint: str, file: str = "") -> str:
        return f"{self.url}/checkpoints/{checkpoint}" + (f"/{file}" if file else "")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (DataError, FileNotFoundError) as error:
            raise CheckpointError(f"{KEY}: {error}") from error

    # ---- what is there ----------------------------------------------------------------------------------------------

    def complete(self) -> Iterator[str]:
        """Names of the complete checkpoints, newest first. Each one costs a request."""
        with self._named():
            for name in sorted(filter(files.is_checkpoint_name, self._names()), key=_step, reverse=True):
                if self.remote.size(self._of(name, files.MANIFEST)) is not None:
                    yield name

    def _names(self) -> list[str]:
        return self.remote.names(f"{self.url}/checkpoints")

    def lacking(self, folder: Path, resume: str) -> Lacking:
        """What a start needs and `folder` does not have. Raises CheckpointError if `run.resume` is `never` and there are checkpoints."""
        if resume == "never":
            for name in self.complete():
                raise CheckpointError(
                    f"run.resume=never, but {self.shown} has checkpoints up to {name}; choose another run.name or {KEY}, or "
                    "run.resume=auto to continue"
                )
        own = files.complete_checkpoints(folder)
        after = files.step_of(own[-1]) if own else -1
        newer = list(itertools.takewhile(lambda name: _step(name) > after, self.complete()))
        path = Path(resume)
        is_own = files.is_checkpoint_name(path.name) and real(path.parent) == real(folder)
        is_wanted = is_own and not os.path.lexists(path) and path.name in self.complete()
        return Lacking(tuple(newer), path.name if is_wanted else None)

    def read(self, name: str) -> bytes | None:
        """A small file of the run; None if it is missing."""
        with self._named(), contextlib.suppress(FileNotFoundError):
            return self.remote.read(f"{self.url}/{name}")
        return None

    # ---- there -------------------------------------------------------------------------------------------------------

    def begin(self, start: str, step: int, alive: Callable[[], object] = lambda: None) -> None:
        """Take over the copy for this start, which goes on from `step`. Later checkpoints are of a time line that the run leaves. `alive` is called
        after each file that is moved.
        """
        owner = {
            "start": start,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with self._named():
            self.remote.write(json.dumps(owner).encode(), f"{self.url}/owner.json")
        for name in [name for name in self.complete() if _step(name) > step]:
            aside = self._set_aside(name, alive)
            log.warning("set aside %s/checkpoints/%s as %s; nothing of it is deleted", self.shown, name, aside)

    def check_owner(self, start: str) -> None:
        """Raise CheckpointError if another start of the run has taken over the copy."""
        try:
            owner = json.loads(self.read("owner.json") or b"{}")
        except ValueError:
            owner = {}
        owner = owner if isinstance(owner, dict) else {}
        if owner.get("start") != start:
            raise CheckpointError(
                f"{KEY}: {self.shown} belongs to another start of this run (host {owner.get('host', 'unknown')}, since "
                f"{owner.get('since', 'unknown')}); end one of the two"
            )

    def upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint of the run directory there, unless it is there already. One of another time line that has its name is set aside."""
        manifest, name = (checkpoint / files.MANIFEST).read_bytes(), checkpoint.name
        stored = self.read(f"checkpoints/{name}/{files.MANIFEST}")
        if stored == manifest:
            return
        if stored is not None:
            self._set_aside(name)
        with self._named():
            self.remote.remove(self._of(name))  # what an interrupted upload left behind
            with ThreadPoolExecutor(_AT_ONCE, "upload") as pool:
                sent = [
                    pool.submit(self.remote.upload, checkpoint / file, self._of(name, file))
                    for file in files.read_manifest(checkpoint)
                ]
                for future in sent:
                    future.result()
            self.remote.write(manifest, self._of(name, files.MANIFEST))

    def upload_records(self, directory: Path) -> None:
        """Copy what else describes the run."""
        with self._named():
            for name in RECORDS:
                with contextlib.suppress(FileNotFoundError):  # metrics.jsonl before the first line
                    self.remote.write((directory / name).read_bytes(), f"{self.url}/{name}")

    def retire(self, newest: Path, policy: Checkpoint, skipped: int) -> None:
        """Remove the checkpoints that the policy no longer keeps (`checkpoint.keep_last`), and what interrupted uploads and removals left behind."""
        with self._named():
            complete = [newest.with_name(name) for name in self.complete()][::-1]
            kept = {path.name for path in complete}
            left = [name for name in self._names() if files.is_checkpoint_name(name) and name not in kept]
            for path in outdated(complete, newest, policy.keep_last, policy.keep_every_steps, skipped):
                self.remote.remove(self._of(path.name, files.MANIFEST))
                self.remote.remove(self._of(path.name))
            for name in left:
                self.remote.remove(self._of(name))

    def _set_aside(self, name: str, alive: Callable[[], object] = lambda: None) -> str:
        """Give a checkpoint the first free name `abandoned-NAME`. Object stores cannot rename: files are copied within the store."""
        with self._named():
            taken = set(self._names())
            names = itertools.chain([f"abandoned-{name}"], (f"abandoned-{name}.{number}" for number in itertools.count(1)))
            aside = next(other for other in names if other not in taken)
            listed = self._listed(self._of(name, files.MANIFEST), self.remote.read(self._of(name, files.MANIFEST)))
            for file in [*([] if isinstance(listed, str) else listed), files.MANIFEST]:
                with contextlib.suppress(FileNotFoundError):  # it is damaged
                    self.remote.copy(self._of(name, file), self._of(aside, file))
                alive()
            self.remote.remove(self._of(name, files.MANIFEST))
            self.remote.remove(self._of(name))
        return aside

    # ---- from there --------------------------------------------------------------------------------------------------

    def fetch(self, directory: Path, resume: str, ranks: Ranks) -> None:
        """Download what a start needs and the run directory does not have, all ranks sharing the work. Every file is verified.

        A checkpoint that is damaged there is passed over with a warning. Raises CheckpointError if no other one is left, and for what cannot be
        reached.
        """
        folder = directory / "checkpoints"
        lacking = ranks.on_main(
            "look into the object store", lambda: self.lacking(folder, resume), CheckpointError, storage=True
        )
        fetched: set[str] = set()
        problem = None
        for name in lacking.newer:
            problem = self._fetch(name, folder, ranks)
            if problem is None:
                fetched.add(name)
                break
            if ranks.is_main:
                log.warning("damaged checkpoint: %s; falling back to the one before", problem)
        has_own = ranks.on_main(
            "sight of checkpoints", lambda: bool(files.complete_checkpoints(folder)), CheckpointError, storage=True
        )
        if problem is not None and not has_own:
            raise CheckpointError(f"{problem}; no earlier checkpoint is left to fall back to, and nothing was started afresh")
        if (
            lacking.named is not None
            and lacking.named not in fetched
            and (problem := self._fetch(lacking.named, folder, ranks))
        ):
            raise CheckpointError(f"{problem}; run.resume names it, so no other one was tried")
        if lacking.newer:
            ranks.on_main("records of an uploaded run", lambda: self._fetch_records(directory), CheckpointError, storage=True)

    def renew(self, checkpoint: Path, ranks: Ranks) -> bool:
        """Put the copy in the place of a damaged checkpoint of the run directory, which is set aside. Whether there is an intact copy."""
        has = ranks.on_main(
            "look for an intact copy",
            lambda: self.read(f"checkpoints/{checkpoint.name}/{files.MANIFEST}") is not None,
            CheckpointError,
            storage=True,
        )
        if not has:
            return False
        if ranks.is_main:
            log.warning("%s is damaged; looking for an intact copy of it in %s", checkpoint, self.shown)
        problem = self._fetch(checkpoint.name, checkpoint.parent, ranks)
        if problem is not None and ranks.is_main:
            log.warning("damaged checkpoint: %s", problem)
        return problem is None

    def _fetch(self, name: str, folder: Path, ranks: Ranks) -> str | None:
        """Download one checkpoint; what is wrong with it, or None."""
        started, writing = time.monotonic(), files.writing_directory_of(folder / name)

        def begin() -> tuple[bytes, dict[str, dict[str, Any]]] | str:
            url = self._of(name, files.MANIFEST)
            with self._named():
                content = self.remote.read(url)
            listed = self._listed(url, content)
            if isinstance(listed, str):
                return listed
            total = sum(item["bytes"] for item in listed.values())
            log.info("downloading %s of %s (%.1f MB)", name, self.shown, total / 1e6)
            files.remove(writing)
            make_directory(writing)
            files.check_space(writing, total)
            return content, listed

        found = ranks.on_main("manifest of an uploaded checkpoint", begin, CheckpointError, storage=True)
        if isinstance(found, str):
            return found
        content, listed = found

        def download() -> str | None:
            with ranks.part("download of a checkpoint", storage=True), ranks.in_pieces("download of a checkpoint") as seen:
                for file in sorted(listed)[ranks.rank :: ranks.world_size]:
                    if problem := self._download(name, file, listed[file], writing, lambda: seen(0)):
                        return problem
            return None

        own = ranks.attempt("download of a checkpoint", download, CheckpointError)
        problems = [problem for problem in ranks.gather("download of a checkpoint", own) if problem]

        def commit() -> None:
            if problems:
                files.remove(writing)
                return
            (writing / files.MANIFEST).write_bytes(content)
            flush(writing / files.MANIFEST)
            flush(writing)
            if exists(folder / name):
                log.warning("set aside %s as %s", folder / name, files.set_aside(folder / name, "damaged").name)
            files.put_in_place(writing, folder / name)
            log.info("downloaded %s (%.1f s)", folder / name, time.monotonic() - started)

        ranks.on_main("commit of a downloaded checkpoint", commit, CheckpointError, storage=True)
        return problems[0] if problems else None

    def _download(self, name: str, file: str, listed: dict[str, Any], writing: Path, alive: Callable[[], object]) -> str | None:
        """Download one file; what is wrong with its content, or None."""
        url, path = self._of(name, file), writing / file

        def cancelled() -> bool:
            alive()
            return False

        make_directory(path.parent)
        with path.open("wb") as target:
            try:
                self.remote.download(url, listed["bytes"], listed["sha256"], target.fileno(), cancelled)
            except FileNotFoundError:
                return f"{without_secrets(url)}: missing"
            except WrongContentError as error:
                return error.found
            except DataError as error:
                raise CheckpointError(f"{KEY}: {error}") from error
            target.flush()
            os.fsync(target.fileno())
        return None

    def _listed(self, url: str, content: bytes) -> dict[str, dict[str, Any]] | str:
        """The files of a manifest, or what is wrong with it."""
        try:
            return files.files_of_manifest(json.loads(content), without_secrets(url))
        except ValueError as error:
            return f"{without_secrets(url)}: cannot be read: {error}"
        except CheckpointError as error:
            return str(error)

    def _fetch_records(self, directory: Path) -> None:
        for name in RECORDS:
            content, path = self.read(name), directory / name
            # Older ones are the beginning of those in the store.
            if content is not None and (not path.exists() or content.startswith(path.read_bytes())):
                replace_text(path, content.decode("utf-8", "replace"))


def _step(name: str) -> int:
    return files.step_of(Path(name))
