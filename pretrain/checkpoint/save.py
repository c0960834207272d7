"""Saving: written aside, hashed, flushed, renamed. A checkpoint is complete or invisible.

every rank   shards of the payload -> .writing-step-N/        hash and flush what it wrote
main rank    state.json, config.yaml, tokenizer -> same;  manifest.json last;  flush;  rename to step-N/;  retention
"""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from pretrain.checkpoint import files
from pretrain.checkpoint.host_copies import HostCopies
from pretrain.checkpoint.payload import MetadataUnpickler
from pretrain.checkpoint.planners import HoldingPlanner, StreamingPlanner, StreamingWriter
from pretrain.distributed.ranks import ALONE, Ranks
from pretrain.errors import CheckpointError
from pretrain.storage import copy_tree, flush, make_directory, plain, rename_into_place

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses of the main rank before it looks again for a file that another rank has written."""


@dataclass
class AgreedPlan:
    """Which rank writes what, and where. Kept from one save to the next, because the main rank finds it for all: of 1,024 ranks that takes minutes."""

    own: SavePlan | None = None
    """What this rank has."""
    share: SavePlan | None = None
    """What of that it writes."""
    results: list[WriteResult] | None = None
    """The places where it has written that."""
    metadata: Metadata | None = None
    """The table of contents without places, from the plan to the first save; on the main rank only."""
    contents: bytes | None = None
    """`.metadata` with the `results` of all ranks; on the main rank only. It is not kept as objects, which Python would search for cycles."""


class Saving:
    """A checkpoint on its way to the disk.

        begin    all ranks together: the folder, and which rank writes what
        hold     copies what this rank will write, so that training may go on and change it
        write    each rank by itself, also in a thread: payload, hashes, flush
        finish   all ranks together: manifest and rename

    `state` becomes state.json, `attachments` are files or directories copied in under their names, or texts. `read` is for a process that
    never holds all tensors: they have shapes only, and it gives their values one by one, in their order. `agreed` is that of an earlier save,
    if there was one. After a failure on any rank, every rank raises CheckpointError. Nothing of this save is visible then, and earlier
    checkpoints are untouched.
    """

    def __init__(
        self,
        target: Path,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        attachments: dict[str, Path | str],
        ranks: Ranks,
        read: Callable[[str], Tensor] | None = None,
        agreed: AgreedPlan | None = None,
    ) -> None:
        self.agreed = agreed or AgreedPlan()
        self.target, self.tensors, self.state, self.attachments, self.ranks = target, tensors, state, attachments, ranks
        self.writing = files.writing_directory_of(target)
        if read is not None:
            self.writer, self.planner = StreamingWriter(self.writing), StreamingPlanner(read)
        else:
            options = {"single_file_per_rank": True, "sync_files": True, "thread_count": 1}
            self.writer, self.planner = dcp.FileSystemWriter(self.writing, **options), HoldingPlanner()
        # The ranks pack what they exchange outside of the exchange, in which they wait with a limit. A process that is alone packs nothing.
        # The bytes come from the processes of this run, as those of torch's own collectives of objects, and never from a file.
        self.pack, self.unpack = (_same, _same) if ranks.control is None else (pickle.dumps, pickle.loads)
        self.results: list[WriteResult] = []
        self.hashes: dict[str, dict[str, Any]] = {}
        self.problem: CheckpointError | None = CheckpointError("its files were not written to the end")
        self.thread: threading.Thread | None = None
        self.host_copies: HostCopies | None = None

    def begin(self) -> None:
        """Make the folder, and agree on who writes what."""
        with self._cleaned():
            self.ranks.on_main("start of a save", lambda: _start(self.writing), CheckpointError, storage=True)
            own = self.ranks.attempt("plan of a checkpoint", self._plan_own, CheckpointError, storage=True)
            if self.ranks.largest("comparison of a checkpoint's plan", int(own != self.agreed.own)):
                self._agree(own)
            self.plan = self.planner.finish_plan(self.agreed.share)
            needed = self.ranks.sum("size of a checkpoint", torch.tensor(_bytes_of(self.plan), dtype=torch.int64))
            self.ranks.on_main(
                "look at free space", lambda: files.check_space(self.writing, int(needed)), CheckpointError, storage=True
            )
            self.tensors = {}

    def _agree(self, own: SavePlan) -> None:
        self.agreed.own = self.agreed.results = None  # whatever fails from here on
        plans = self.ranks.collect("plans of a checkpoint", self.pack(own))
        shares = self._on_main("plan of all ranks", lambda: self._plan_all(plans))
        self.agreed.share = self.unpack(self.ranks.hand_out("shares of a checkpoint", shares))
        self.agreed.own = own

    def _on_main(self, name: str, action: Callable[[], T]) -> T | None:
        """What `action`, which may take the main rank minutes, returns there; None elsewhere."""
        return self.ranks.attempt(
            name, lambda: self.ranks.while_alive(name, lambda: action() if self.ranks.is_main else None), CheckpointError
        )

    def _plan_own(self) -> SavePlan:
        meta = self.writer.storage_meta()
        self.planner.set_up_planner(state_dict=self.tensors, storage_meta=meta, is_coordinator=self.ranks.is_main)
        self.writer.set_up_storage_writer(self.ranks.is_main)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _plan_all(self, packed: list[Any]) -> list[Any]:
        shares, self.agreed.metadata = self.planner.create_global_plan([self.unpack(plan) for plan in packed])
        return [self.pack(share) for share in self.writer.prepare_global_plan(shares)]

    def hold(self, copies: HostCopies) -> None:
        """Copy what this rank writes to the host's memory."""
        self.host_copies = copies
        # torch would otherwise write what is on the host by a stream of the GPU, and wait for all that training has queued there.
        self.writer.per_thread_copy_ahead = 0
        self.planner.held = copies.take({item.index: self.planner.resolve_data(item).detach() for item in self.plan.items})

    def write_beside(self) -> None:
        """`write` in a thread."""

        def write() -> None:
            if self.ranks.device.type == "cuda":
                torch.cuda.set_device(self.ranks.device)  # a new thread's is the first one
            self.write()

        self.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self.thread.start()

    def write_now(self) -> None:
        """`write` in this thread, which others may have to wait for."""
        with self.ranks.part("payload of a checkpoint", storage=True):
            self.write()

    def write(self) -> None:
        """Write, hash and flush this rank's files. What goes wrong is raised by `finish`, on all ranks together."""
        try:
            if self.host_copies is not None:
                self.host_copies.wait()
            if self.plan.items:  # torch would leave an empty file, which no result names
                self.results = self.writer.write_data(self.plan, self.planner).wait()
            self.planner.release()
            # Not from a listing of the folder, to which thousands of other ranks are adding their files.
            names = {result.storage_data.relative_path for result in self.results}
            self.hashes = {name: _flushed(self.writing / name) for name in sorted(names)}
            self.problem = None
        except CheckpointError as error:
            self.problem = error
        except Exception as error:  # a full disk is an OSError, or what torch makes of it
            reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
            # torch's file format names its own source when a write comes up short.
            short = "a file could not be written to its end; is the disk full, or a limit of file sizes reached? torch says: "
            self.problem = CheckpointError((short if "inline_container" in reason else "") + reason.splitlines()[0])

    @property
    def is_written(self) -> bool:
        """Whether nothing is left to be written on this rank."""
        return self.thread is None or not self.thread.is_alive()

    def finish(self) -> str:
        """Wait until all is written, and make the checkpoint visible; the sha256 of its manifest."""
        with self._cleaned():
            self.ranks.attempt("payload of a checkpoint", self._wait, CheckpointError, storage=True)
            hashes = self.ranks.collect("hashes of a checkpoint", self.hashes)
            if self.ranks.largest("comparison of a checkpoint's contents", int(self.results != self.agreed.results)):
                self._agree_on_contents()
            listed = {name: described for part in hashes or () for name, described in part.items()}
            self._on_main("files of a checkpoint", lambda: _await_files(self.writing, listed))
            return self.ranks.on_main("commit of a checkpoint", lambda: self._commit(listed), CheckpointError, storage=True)

    def _agree_on_contents(self) -> None:
        self.agreed.results = None  # whatever fails from here on
        results = self.ranks.collect("places of a checkpoint", self.pack(self.results))
        contents = self._on_main("contents of a checkpoint", lambda: self._list_contents(results))
        self.agreed.metadata, self.agreed.contents, self.agreed.results = None, contents, self.results

    def _list_contents(self, packed: list[Any]) -> bytes:
        """`.metadata`, as torch's FileSystemWriter.finish makes it. It is not written here: an interrupted save may leave this thread behind."""
        metadata = self.agreed.metadata or MetadataUnpickler(BytesIO(self.agreed.contents)).load()
        places = {result.index: result.storage_data for results in packed for result in self.unpack(results)}
        of_torch = {"storage_meta": self.writer.storage_meta(), "version": CURRENT_DCP_VERSION}
        return pickle.dumps(replace(metadata, storage_data=places, **of_torch))

    def _wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
        if self.problem is not None:
            raise self.problem

    def _commit(self, hashes: dict[str, dict[str, Any]]) -> str:
        # If all lies where it lay at an earlier save, that save's bytes serve again. They name its folder, which nobody reads.
        (self.writing / files.METADATA).write_bytes(self.agreed.contents)
        return _commit(self.writing, self.target, hashes, self.state, self.attachments)

    @contextmanager
    def _cleaned(self) -> Iterator[None]:
        """Remove what was written if it fails. All ranks fail together."""
        try:
            yield
        except CheckpointError as error:
            if self.ranks.is_main:
                files.remove(self.writing)
            raise CheckpointError(f"{self.writing}: {error}") from error


def write_checkpoint(
    target: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    attachments: dict[str, Path | str],
    ranks: Ranks,
    read: Callable[[str], Tensor] | None = None,
) -> str:
    """Write one checkpoint directory on all ranks together, and wait for it; the sha256 of its manifest. See `Saving`."""
    saving = Saving(target, tensors, state, attachments, ranks, read)
    saving.begin()
    saving.write_now()
    return saving.finish()


def write_alone(
    output: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    attachments: dict[str, Path | str],
    read: Callable[[str], Tensor],
) -> None:
    """Write the checkpoint of a tool, which is no run and holds no model: beside `output`, and renamed when it is complete.

    Otherwise as `write_checkpoint`. Its CheckpointErrors name `output`; one of `read` is raised as it is, because it names the user's file.
    """
    problems: list[CheckpointError] = []

    def reading(name: str) -> Tensor:
        try:
            return read(name)
        except CheckpointError as error:
            problems.append(error)
            raise

    try:
        make_directory(output.parent)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
            stage = Path(folder) / "checkpoint"
            try:
                write_checkpoint(stage, tensors, state, attachments, ALONE, reading)
            except CheckpointError as error:
                reason = str(error).removeprefix(f"{files.writing_directory_of(stage)}: ")
                raise (problems[0] if problems else CheckpointError(f"{output}: {reason}")) from error
            rename_into_place(stage, output)
    except OSError as error:
        named = Path(error.filename) if error.filename else output
        raise CheckpointError(f"{named if named in output.parents else output}: {error.strerror or error}") from error


def _same(value: T) -> T:
    return value


def _start(writing: Path) -> None:
    files.remove(writing)
    make_directory(writing.parent)
    writing.mkdir()


def _bytes_of(plan: SavePlan) -> int:
    """Bytes of the values that a rank writes."""
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(part.chunk.sizes) * part.properties.dtype.itemsize for part in parts)


def _write_attachments(directory: Path, state: dict[str, Any], attachments: dict[str, Path | str]) -> dict[str, dict[str, Any]]:
    names = [files.METADATA, files.STATE]
    saved_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    files.write_json(directory / files.STATE, plain({**state, "saved_at": saved_at}))
    for name, source in attachments.items():
        if isinstance(source, str):
            (directory / name).write_text(source, encoding="utf-8")
            flush((directory / name).parent)
            names.append(name)
        elif source.is_dir():
            copy_tree(source, directory / name)
            names += [str(p.relative_to(directory)) for p in sorted((directory / name).rglob("*")) if p.is_file()]
            flush(directory / name)
        else:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / name)
            flush((directory / name).parent)
            names.append(name)
    return {name: _flushed(directory / name) for name in names}


def _flushed(path: Path) -> dict[str, Any]:
    flush(path)
    return files.describe_file(path)


def _await_files(writing: Path, described: dict[str, dict[str, Any]]) -> None:
    """Wait until what all ranks have written is seen here. For some seconds, NFS may say what it knew of a file before. Raises CheckpointError."""
    missing = list(described)
    for seconds in (*LOOK_AGAIN_SECONDS, 0.0):
        missing = [name for name in missing if _size_of(writing / name) != described[name]["bytes"]]
        if missing:
            time.sleep(seconds)
    if missing:
        raise CheckpointError(
            f"{missing[0]} of another rank is not visible here; the run directory must be on storage shared by all nodes"
        )


def _size_of(path: Path) -> int | None:
    try:
        with path.open("rb") as file:  # NFS asks the server when a file is opened
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def _commit(
    writing: Path, target: Path, hashes: dict[str, dict[str, Any]], state: dict[str, Any], attachments: dict[str, Path | str]
) -> str:
    hashes = hashes | _write_attachments(writing, state, attachments)
    files.write_json(writing / files.MANIFEST, {"format": files.FORMAT, "version": files.VERSION, "files": hashes})
    flush(writing)
    manifest = files.manifest_hash(writing)
    if aside := files.put_in_place(writing, target):
        log.warning("%s was there already, of a time line that this run has left; it is now %s", target, aside.name)
    return manifest
