"""The unfinished work of a preparation: on disk, locked, and found again by the next start.

.NAME.preparing/lock                  held by a preparation for itself alone, or shared by its tasks
.NAME.preparing/task-00001-of-00004   held by that task; it stays, to show which tasks exist
.NAME.preparing/plan.json             the plan; every process compares it
.NAME.preparing/tokenizer/            a copy, for the output, and the hashes of its files
.NAME.preparing/parts-HASH/           the finished units of the plan with this hash
.NAME.preparing/assembled.RANDOM/     the output while it is put together

The last two names vary, because worker processes may outlive a killed parent for a while. Their late writes then reach neither
work on another plan nor another attempt at the output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.data.preparation.parts import UnitParts, writing
from pretrain.data.preparation.preparation_plan import PreparationPlan
from pretrain.data.shards.manifest import DTYPES, dtype_for
from pretrain.data.tokenizers.tokenizer import copy_difference
from pretrain.errors import DataError
from pretrain.storage import copy_tree, flush, flush_tree, refuse_existing, rename_into_place, sealed_json, sha256_of, unsealed
from pretrain.transfer import refuse_url

_BEGIN, _PARTS, _ASSEMBLED = "begin.", "parts-", "assembled."
_HASHES = "files.sha256.json"
_TASK = re.compile(r"task-(\d+)-of-(\d+)")
_OURS = re.compile(rf"lock|plan\.json|tokenizer|deduplicate|(begin\.|parts-|assembled\.).*|{_TASK.pattern}")


class WorkDirectory:
    """The work directory of `output`, locked. `WorkDirectory.locked` gives one."""

    def __init__(self, output: Path) -> None:
        self.output, self._whole = output, output.absolute()
        self.path = self._whole.parent / f".{self._whole.name}.preparing"  # not with_name, which raises for "/"
        self.tokenizer = self.path / "tokenizer"
        self._plan = self.path / "plan.json"

    @classmethod
    @contextlib.contextmanager
    def locked(cls, output: str | Path, task: tuple[int, int] | None = None) -> Iterator[WorkDirectory]:
        """Create the directory if it is missing, and hold it: alone, or as `task` (number, of how many) beside other tasks.

        It is a hidden folder beside `output`. Raises DataError at once if another process holds it. The directory is removed again if it
        gets no plan.
        """
        refuse_url("--output", output)
        directory = cls(Path(output))
        path = directory.path
        with contextlib.ExitStack() as stack:
            while True:
                with writing(directory.output):
                    path.mkdir(parents=True, exist_ok=True)
                    if stack.enter_context(_lock(path / "lock", directory.output, shared=task is not None)):
                        break
                # Its last owner has just removed it, lock and all.
            if task is not None:
                stack.enter_context(_lock(path / f"task-{task[0]:05d}-of-{task[1]:05d}", directory.output, shared=False))
            try:
                yield directory
            finally:
                if task is None and not directory.begun and path.exists():
                    directory.remove()

    @property
    def begun(self) -> bool:
        """Whether it has a plan."""
        return self._plan.exists()

    def restart(self) -> None:
        """Delete the work. Call it with the whole directory locked."""
        self._plan.unlink(missing_ok=True)
        self._remove_all_but("lock")

    def _remove_all_but(self, kept: str = "") -> None:
        for path in list(self.path.iterdir()):
            # Delete only our own files: the system may have put some there (.nfs0000...).
            if path.name == kept or not _OURS.fullmatch(path.name):
                continue
            if path.is_dir():
                self._remove_tree(path)
            else:
                path.unlink()

    def _remove_tree(self, path: Path) -> None:
        # Rename it first, so that an orphan of a killed parent cannot add a file between listing and removing.
        # On NFS a file that a process still has open stays, under another name, until that process ends.
        aside = self.path / f"{_BEGIN}{secrets.token_hex(4)}"  # no new directory: a disk without room has none for it either
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def agree(self, plan: PreparationPlan, save_tokenizer: Callable[[Path], None]) -> None:
        """Write the plan, or compare with the existing one. Raises DataError naming a difference if the work was begun with another."""
        with writing(self.path):
            if not self.begun:
                self._write_once(plan, save_tokenizer)
            self.parts_directory.mkdir(exist_ok=True)
        differences = list(self.read_plan().differences(plan))
        if differences:
            more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
            raise DataError(
                f"{self.path}: the work was begun with other inputs or options: {differences[0]}{more};"
                " go back to those, or delete the work with --restart"
            )

    def _write_once(self, plan: PreparationPlan, save_tokenizer: Callable[[Path], None]) -> None:
        # Several tasks may come here at once. All write the same, or `agree` raises an error.
        with tempfile.TemporaryDirectory(prefix=_BEGIN, dir=self.path, ignore_cleanup_errors=True) as folder:
            tokenizer, plan_file = Path(folder, "tokenizer"), Path(folder, "plan.json")
            save_tokenizer(tokenizer)
            hashes = {file.name: sha256_of(file) for file in sorted(tokenizer.iterdir())}
            (tokenizer / _HASHES).write_text(sealed_json(hashes), encoding="utf-8")
            flush_tree(tokenizer)
            with contextlib.suppress(OSError):  # another task was first
                os.rename(tokenizer, self.tokenizer)
            plan_file.write_text(plan.to_json(), encoding="utf-8")
            flush(plan_file)
            with contextlib.suppress(FileExistsError):
                os.link(plan_file, self._plan)
            flush(self.path)

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer into the new directory `target`. Raises DataError if a file is not the one that was saved."""
        hashes = self.tokenizer / _HASHES
        try:
            expected = unsealed(hashes.read_bytes())
            copy_tree(self.tokenizer, target, leave_out=_HASHES)
            other = (f"{name} has other content" for name, sha256 in expected.items() if sha256_of(target / name) != sha256)
            if problem := next(other, None) or copy_difference(target, self.read_plan().tokenizer):
                raise ValueError(problem)
        except (FileNotFoundError, ValueError) as error:
            raise DataError(f"{self.tokenizer}: damaged ({error}); start again with --restart") from error

    def read_plan(self) -> PreparationPlan:
        """The plan of the work. Raises DataError if it is missing."""
        if not self.begun:
            raise DataError(f"{self.path}: no preparation was begun there; run the tasks first")
        return PreparationPlan.from_json(self._plan.read_bytes(), str(self._plan))

    @property
    def parts_directory(self) -> Path:
        return self.path / f"{_PARTS}{sha256_of(self._plan)[:16]}"

    def parts(self, plan: PreparationPlan) -> UnitParts:
        return UnitParts(self.parts_directory, DTYPES[dtype_for(plan.tokenizer.vocab_size)], plan.settings.deduplicate)

    def tasks(self) -> int | None:
        """The number of tasks, if the work was divided, and always into the same number."""
        counts = {int(found[2]) for path in self.path.iterdir() if (found := _TASK.fullmatch(path.name))}
        return counts.pop() if len(counts) == 1 else None

    def begin_assembly(self) -> Path:
        """A new place for the output. An unfinished one from a killed process is removed."""
        with writing(self.path):
            for path in self.path.glob(_ASSEMBLED + "*"):
                self._remove_tree(path)
            # A folder inside, because the directory itself is private to its owner.
            return Path(tempfile.mkdtemp(prefix=_ASSEMBLED, dir=self.path)) / "output"

    def publish(self, assembled: Path) -> None:
        """Rename `assembled` to the output, in one step and for good, and remove the work."""
        with writing(self.path):
            flush_tree(assembled)
            refuse_existing(self.output)
            rename_into_place(assembled, self._whole)
        self.remove()

    def remove(self) -> None:
        """Remove the work. If that is interrupted, the output exists, and the next start finds it and continues."""
        self._remove_all_but()
        with contextlib.suppress(OSError):  # another process has just come, and will see the output
            self.path.rmdir()


@contextlib.contextmanager
def _lock(file: Path, output: Path, shared: bool) -> Iterator[bool]:
    """Hold `file`; False if it was removed in the meantime. Raises DataError if another process holds it."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown process"
            what = f"{file.name} of {output}" if file.name != "lock" else str(output)
            raise DataError(f"{what}: is being prepared by another process ({owner}); wait for it, or end it first") from error
        try:
            current = os.stat(file).st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            current = False
        if current:
            # If tasks share it, the message names the last one that came.
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield current
    finally:
        os.close(handle)
