"""The copy of a run in an object store (`checkpoint.upload`): which checkpoints it has, how they come there, and how a new machine gets them.

URL/RUN/run.json                        which copies are complete, and which start of the run may write here
URL/RUN/step-00000200-4f1d9a8b02c7/     a checkpoint as in the run directory, and in records/ the run's logs at that time

A copy counts from when run.json lists it, and run.json is one small object that is replaced as a whole. The name of a copy has the beginning of
its manifest's sha256, so no two starts ever write to the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pretrain.checkpoint import files
from pretrain.checkpoint.choose import continues, descends, goes_back_to
from pretrain.checkpoint.copies_index import CopiesIndex, Copy, is_folder_of_copy
from pretrain.checkpoint.retention import outdated
from pretrain.checkpoint.store_url import KEY
from pretrain.checkpoint.undo import Undo
from pretrain.config.schema import Checkpoint, Config
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, DataError, OtherFormatError, without_secrets
from pretrain.storage import exists, flush, make_directory, real, unrepeated
from pretrain.store_errors import WrongContentError
from pretrain.transfer import Remote, all_at_once

log = logging.getLogger(__name__)

T = TypeVar("T")
INDEX = "run.json"
RECORDS = ("starts.jsonl", "metrics.jsonl", "evaluations.jsonl", "trackers.json")
"""Files of the run directory that are copied with each checkpoint."""


def stored_run(config: Config) -> StoredRun | None:
    """The copy of a run in the object store that its configuration names; None if it names none."""
    return StoredRun(config.checkpoint.upload, config.run.name) if config.checkpoint.upload else None


class StoredRun:
    """One run's copy. What fails for want of a network or server is tried again for minutes (`transfer.py`). Methods raise CheckpointError that
    begins with the key.
    """

    def __init__(self, url: str, run: str, remote: Remote | None = None) -> None:
        self.url = f"{url.rstrip('/')}/{run}"
        self.shown = without_secrets(self.url)
        self.remote = remote or Remote()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (DataError, FileNotFoundError) as error:
            raise CheckpointError(f"{KEY}: {error}") from error

    def index(self) -> CopiesIndex | None:
        """The content of run.json. Before the first start it is missing, and this returns None."""
        return self._parsed(self._read(f"{self.url}/{INDEX}"))

    def _parsed(self, content: bytes | None) -> CopiesIndex | None:
        url = f"{self.url}/{INDEX}"
        try:
            return None if content is None else CopiesIndex.parse(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{KEY}: {without_secrets(url)}: cannot be read: {error}; restore it, or choose another {KEY} or run.name"
            ) from error

    def config_of_newest(self) -> bytes | None:
        """config.yaml of the newest copy; None without one."""
        index = self.index()
        if index is None or not index.copies:
            return None
        return self._read(f"{self.url}/{index.copies[-1].folder}/config.yaml")

    def _read(self, url: str) -> bytes | None:
        """A small file; None if it is missing."""
        try:
            with self._named():
                return self.remote.read(url)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    # ---- there -------------------------------------------------------------------------------------------------------

    def take_over(self, start: str, timeline: list[dict[str, Any]], step: int) -> None:
        """Say that this start may write here from now on, which goes on from `step`. Copies that are not in its past are listed as abandoned."""

        def taken_over(content: bytes | None) -> bytes:
            before = self._parsed(content) or CopiesIndex()
            kept = [copy for copy in before.copies if copy.step <= step and descends({"timeline": timeline}, copy.state)]
            left[:] = [copy.folder for copy in before.copies if copy not in kept]
            return CopiesIndex.of_start(start, timeline, kept, dict.fromkeys([*before.abandoned, *left])).to_json()

        left: list[str] = []
        with self._named():
            self.remote.update(f"{self.url}/{INDEX}", taken_over)
        for folder in left:
            log.warning(
                "%s/%s is of a time line that the run leaves; it stays there, and no start takes it any more",
                self.shown,
                folder,
            )

    def _own_index(self, start: str, content: bytes | None) -> CopiesIndex:
        """run.json, which has to be of this start. Raises CheckpointError if another one has taken over."""
        index = self._parsed(content)
        if index is None or index.start != start:
            other = "is gone" if index is None else f"is of another start of this run (host {index.host}, since {index.since})"
            raise CheckpointError(
                f"{KEY}: {self.shown}/{INDEX} {other}, so nothing is copied any more; end one of the two runs"
            )
        return index

    def _change(self, start: str, change: Callable[[CopiesIndex], CopiesIndex]) -> None:
        """Replace run.json. Each attempt looks anew whether it is still of this start."""
        with self._named():
            self.remote.update(f"{self.url}/{INDEX}", lambda content: change(self._own_index(start, content)).to_json())

    def upload(self, checkpoint: Path, records: Path, start: str) -> bool:
        """Copy a checkpoint and the run's `records`. Whether anything had to be sent: a copy that is whole stays as it is."""
        state, manifest = files.load_state(checkpoint), (checkpoint / files.MANIFEST).read_bytes()
        copy = Copy(
            f"{checkpoint.name}-{_digest(manifest)}",
            state["step"],
            state.get("skipped_in_a_row") or 0,
            state.get("timeline") or [],
        )
        listed = files.read_manifest(checkpoint)
        place, has = f"{self.url}/{copy.folder}", copy in self._own_index(start, self._read(f"{self.url}/{INDEX}")).copies
        with self._named():
            wanted = {name: item["bytes"] for name, item in listed.items()}
            missing = [name for name, size in wanted.items() if not has or self.remote.size(f"{place}/{name}") != size]
            if has and not missing:
                return False
            all_at_once(
                [lambda stop, name=name: self.remote.upload(checkpoint / name, f"{place}/{name}", stop) for name in missing]
            )
            for name in RECORDS:
                with contextlib.suppress(FileNotFoundError):
                    self.remote.write((records / name).read_bytes(), f"{place}/records/{name}")
            self.remote.write(manifest, f"{place}/{files.MANIFEST}")
        self._change(start, lambda index: index.with_copy(copy))
        return True

    def retire(self, policy: Checkpoint, start: str) -> None:
        """Remove the copies that the policy no longer keeps (`checkpoint.keep_last`)."""
        index = self._own_index(start, self._read(f"{self.url}/{INDEX}"))
        by_path = {Path(files.step_name(copy.step)): copy for copy in index.copies}
        newest, skipped = Path(files.step_name(index.copies[-1].step)), index.copies[-1].skipped
        gone = [by_path[path] for path in outdated([*by_path], newest, policy.keep_last, policy.keep_every_steps, skipped)]
        if gone:
            self._change(start, lambda index: index.without(gone))
        for copy in gone:
            with self._named():
                self.remote.remove_folder(f"{self.url}/{copy.folder}")

    # ---- from there --------------------------------------------------------------------------------------------------

    def lacking(self, folder: Path, resume: str) -> list[Copy]:
        """Copies that a start may need and `folder` does not have, newest first: newer ones than any there, and the one that `run.resume` names.

        Raises CheckpointError if the run directory has left the time line of the copies, and if `run.resume` is `never` and there are copies.
        """
        index, own, named = self.index(), files.complete_checkpoints(folder), _named_step(folder, resume)
        if index is None or not index.copies:
            if not own:
                self._refuse_lost(index)
            return []
        if resume == "never":
            raise CheckpointError(
                f"run.resume=never, but {self.shown} has checkpoints up to {index.copies[-1].folder}; choose another run.name or {KEY}, or "
                "run.resume=auto to continue"
            )
        if named is not None and not goes_back_to(index.timeline, named):
            has_named = exists(folder / files.step_name(named))
            return [copy for copy in index.copies if copy.step == named and not has_named]
        if own and named is None:
            self._check_line(own[-1], index)
        after = files.step_of(own[-1]) if own else -1
        return [copy for copy in reversed(index.copies) if copy.step > after]

    def _refuse_lost(self, index: CopiesIndex | None) -> None:
        """Raise CheckpointError where no copy is listed, and there are some."""
        with self._named():
            left = list(index.abandoned) if index else [name for name in self.remote.names(self.url) if is_folder_of_copy(name)]
        if left:
            why = "are of time lines that the run has left" if index else f"are there without {INDEX}"
            raise CheckpointError(
                f"{KEY}: {self.shown} has copies that {why} (up to {left[-1]}), and no other one: to start afresh, choose another run.name or {KEY}; "
                f"to go on from one of them, download it to checkpoints/{left[-1].rpartition('-')[0]} of the run directory"
            )

    def _check_line(self, newest: Path, index: CopiesIndex) -> None:
        try:
            state = files.load_state(newest)
        except CheckpointError:  # it is damaged, which is found out later
            return
        # A run that went on for a while without copying is ahead of them.
        if not continues(state.get("timeline"), index.timeline) and not descends({"timeline": index.timeline}, state):
            raise CheckpointError(
                f"{newest} is not of the time line that {self.shown} has: another start (host {index.host}, since {index.since}) went on from an earlier "
                f"step, up to {index.copies[-1].folder}. Say which one is continued: run.resume={newest} leaves the copies; to continue those, move "
                f"{newest.parents[1]} away"
            )

    def fetch(self, directory: Path, resume: str, ranks: Ranks, undo: Undo) -> None:
        """Download what a start needs and the run directory does not have, all ranks sharing the work. Every file is verified. `undo` gets what
        takes it back.

        A copy that is damaged is passed over with a warning. Raises CheckpointError if no other checkpoint is left, and for what cannot be reached.
        """
        folder = directory / "checkpoints"
        named, problem = _named_step(folder, resume), None
        for copy in self._on_main("look into the object store", lambda: self.lacking(folder, resume), ranks):
            problem = self._fetch(copy, directory, ranks, undo)
            if problem is None:
                return
            if copy.step == named:
                raise CheckpointError(f"{problem}; run.resume names it, so no other one was tried")
            if ranks.is_main:
                log.warning("damaged checkpoint: %s; falling back to the one before", problem)
        has_own = ranks.on_main(
            "sight of checkpoints", lambda: bool(files.complete_checkpoints(folder)), CheckpointError, storage=True
        )
        if problem is not None and not has_own:
            raise CheckpointError(f"{problem}; no earlier checkpoint is left to fall back to, and nothing was started afresh")

    def renew(self, checkpoint: Path, ranks: Ranks) -> bool:
        """Put the copy in the place of a damaged checkpoint of the run directory, which is set aside. Whether there is an intact copy."""

        def look() -> Copy | None:
            index = self.index() or CopiesIndex()
            return next((copy for copy in index.copies if _is_copy_of(copy, checkpoint)), None)

        copy = self._on_main("look for an intact copy", look, ranks)
        if copy is None:
            return False
        if ranks.is_main:
            log.warning("%s is damaged; its copy in %s takes its place", checkpoint, self.shown)
        problem = self._fetch(copy, checkpoint.parents[1], ranks, Undo())
        if problem is not None and ranks.is_main:
            log.warning("damaged checkpoint: %s", problem)
        return problem is None

    def _fetch(self, copy: Copy, directory: Path, ranks: Ranks, undo: Undo) -> str | None:
        """Download one copy, and the records with it; what is wrong with it, or None. `undo` gets what takes it back."""
        target = directory / "checkpoints" / files.step_name(copy.step)
        started, writing = time.monotonic(), files.writing_directory_of(target)
        found = self._on_main("manifest of a copy", lambda: self._begin(copy, writing), ranks)
        if isinstance(found, str):
            return found
        manifest, listed = found

        def download() -> str | None:
            with ranks.part("download of a checkpoint", storage=True), ranks.in_pieces("download of a checkpoint") as seen:
                for file in sorted(listed)[ranks.rank :: ranks.world_size]:
                    if problem := self._download(copy, file, listed[file], writing, lambda: seen(0)):
                        return problem
            return None

        own = ranks.attempt("download of a checkpoint", download, CheckpointError)
        problems = [problem for problem in ranks.gather("download of a checkpoint", own) if problem]
        if problems:
            ranks.on_main("end of a download", lambda: files.remove(writing), CheckpointError, storage=True)
            return problems[0]
        # The records come first: a start that ends in between downloads both again.
        self._on_main("records of a copy", lambda: self._fetch_records(copy, directory, undo), ranks)

        def commit() -> None:
            (writing / files.MANIFEST).write_bytes(manifest)
            flush(writing / files.MANIFEST)
            flush(writing)
            if exists(target):
                log.warning("set aside %s as %s", target, files.set_aside(target, "damaged").name)
            files.put_in_place(writing, target)
            log.info("downloaded %s (%.1f s)", target, time.monotonic() - started)

        ranks.on_main("commit of a download", commit, CheckpointError, storage=True)
        undo.made.append(target)
        return None

    def _begin(self, copy: Copy, writing: Path) -> tuple[bytes, dict[str, dict[str, Any]]] | str:
        """The manifest and its files, with room for them; or what is wrong."""
        url = f"{self.url}/{copy.folder}/{files.MANIFEST}"
        try:
            content = self.remote.read(url)
        except FileNotFoundError:
            return f"{without_secrets(url)}: missing, though {INDEX} lists it"
        except DataError as error:
            raise CheckpointError(f"{KEY}: {error}") from error
        if not copy.folder.endswith(_digest(content)):
            return f"{without_secrets(url)}: its content does not match the name of its folder"
        try:
            listed = files.files_of_manifest(json.loads(content, object_pairs_hook=unrepeated), without_secrets(url))
        except (ValueError, RecursionError) as error:
            return f"{without_secrets(url)}: cannot be read: {error}"
        except OtherFormatError:
            raise
        except CheckpointError as error:
            return str(error)
        total = sum(item["bytes"] for item in listed.values())
        log.info("downloading %s of %s (%.1f MB)", copy.folder, self.shown, total / 1e6)
        files.remove(writing)
        make_directory(writing)
        files.check_space(writing, total)
        return content, listed

    def _download(
        self, copy: Copy, file: str, listed: dict[str, Any], writing: Path, alive: Callable[[], object]
    ) -> str | None:
        """Download one file; what is wrong with its content, or None."""
        url, path = f"{self.url}/{copy.folder}/{file}", writing / file

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
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be written: {error.strerror}; make room") from error
        flush(path)
        return None

    def _fetch_records(self, copy: Copy, directory: Path, undo: Undo) -> None:
        """Put the records of a copy into the run directory, and keep what was there under another name."""
        for name in RECORDS:
            path, content = directory / name, self._read(f"{self.url}/{copy.folder}/records/{name}")
            if content is None:
                continue
            before = path.read_bytes() if exists(path) else None
            if before is not None and not content.startswith(before):
                stem = f"{path.stem}-before-step-{copy.step}"
                names = itertools.chain([stem], (f"{stem}.{number}" for number in itertools.count(1)))
                kept = next(place for name in names if not exists(place := path.with_name(f"{name}{path.suffix}")))
                kept.write_bytes(before)
                undo.made.append(kept)
                log.warning("%s has lines that the run in %s does not have; they are kept as %s", path, self.shown, kept.name)
            undo.replaced.append((path, before))
            path.write_bytes(content)
            flush(path)

    def _on_main(self, name: str, action: Callable[[], T], ranks: Ranks) -> T:
        """What `action`, which waits for the network, returns on the main rank, on all ranks."""
        own = ranks.attempt(name, lambda: ranks.while_alive(name, action if ranks.is_main else lambda: None), CheckpointError)
        return ranks.gather(name, own)[0]


def _is_copy_of(copy: Copy, checkpoint: Path) -> bool:
    """Whether a copy was made of this checkpoint, which is damaged: by its manifest, or else by its state."""
    try:
        files.read_manifest(checkpoint)
        return copy.folder == f"{checkpoint.name}-{_digest((checkpoint / files.MANIFEST).read_bytes())}"
    except (CheckpointError, OSError):
        pass
    try:
        state = files.load_state(checkpoint)
    except CheckpointError:
        return False
    return state["step"] == copy.step and state.get("timeline") == copy.timeline


def _named_step(folder: Path, resume: str) -> int | None:
    """The step of the run's own checkpoint that `run.resume` names, whether or not it is there."""
    path = Path(resume)
    return files.step_of(path) if files.is_checkpoint_name(path.name) and real(path.parent) == real(folder) else None


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]
