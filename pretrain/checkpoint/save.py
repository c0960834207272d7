"""Saving: written aside, hashed, flushed, renamed. A checkpoint is complete or invisible (invariant 6).

every rank   shards of the payload -> .writing-step-N/        hash and flush what it wrote
main rank    state.json, config.yaml, tokenizer -> same;  manifest.json last;  flush;  rename to step-N/;  retention

A program that never holds a whole model (the importer) writes its tensors one at a time. They are cut into pieces of rows, so that a rank
which starts from them reads its own rows and little more.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pretrain.checkpoint import files
from pretrain.checkpoint.payload import METADATA_FILE
from pretrain.config.schema import Checkpoint
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, reason_of
from pretrain.storage import flush, plain, sha256_of

log = logging.getLogger(__name__)

# A tensor that is written by itself is cut into so many pieces at most. None but the last is smaller than that.
PIECES, PIECE_BYTES = 64, 2**20
FILE_BYTES = 4 * 10**9  # of a payload file that is written tensor by tensor


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    attachments: dict[str, Path | str],
    policy: Checkpoint,
    ranks: Ranks,
) -> tuple[Path, str]:
    """Save a run's state on all ranks together, then retire what the policy no longer keeps; the complete checkpoint, and the sha256 of
    its manifest.

    What cannot be removed is warned of: the run needs the new checkpoint, not the room of the old one.
    """
    target = folder / files.directory_of(step)
    manifest = write_checkpoint(target, tensors, state, attachments, ranks)
    if ranks.is_main:
        try:
            with ranks.part("removal of older checkpoints", storage=True):
                files.discard_unfinished(folder)  # what an earlier removal could not remove
                files.retire(folder, target, policy.keep_last, policy.keep_every_steps)
        except OSError as error:
            log.warning("an older checkpoint could not be removed, which is tried again at the next save: %s", reason_of(error))
    return target, manifest


def write_checkpoint(
    target: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    attachments: dict[str, Path | str],
    ranks: Ranks,
    read: Callable[[str], Tensor] | None = None,
) -> str:
    """Write one checkpoint directory on all ranks together; the sha256 of its manifest.

    `state` becomes state.json, `attachments` are files or directories copied in under their names, or texts. With `read`, the tensors have
    shapes only, and it gives their values one by one, in their order, to a process that never holds them all. After a failure on any rank
    every rank raises CheckpointError, nothing of this save is visible and earlier checkpoints are untouched.
    """
    writing = files.writing_directory_of(target)
    try:
        ranks.on_main("start of a save", lambda: _start(writing, tensors), CheckpointError, storage=True)
        hashes = ranks.attempt(
            "payload of a checkpoint", lambda: _write_payload(writing, tensors, ranks, read), CheckpointError, storage=True
        )
        written = {name: h for part in ranks.gather("hashes of a checkpoint", hashes) for name, h in part.items()}
        return ranks.on_main(
            "commit of a checkpoint",
            lambda: _commit(writing, target, written, state, attachments),
            CheckpointError,
            storage=True,
        )
    except CheckpointError as error:
        if ranks.is_main:
            shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(f"{writing}: {error}") from error


def _start(writing: Path, tensors: dict[str, Tensor]) -> None:
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    # Whole sizes: the ranks' shards add up to them, on storage that they share. torch reports a disk that fills up while it
    # writes as a mismatch of positions, so it is better to look before.
    needed, free = sum(t.numel() * t.element_size() for t in tensors.values()), shutil.disk_usage(writing).free
    if free < needed:
        raise CheckpointError(
            f"it takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; make room, or lower checkpoint.keep_last"
        )


def _write_payload(
    directory: Path, tensors: dict[str, Tensor], ranks: Ranks, read: Callable[[str], Tensor] | None
) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of the files that this rank wrote."""
    try:
        _save_payload(directory, tensors, ranks, read)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(_first_cause(error)) from error
    return {path.name: _flushed(path) for path in sorted(directory.glob(f"__{ranks.rank}_*"))}


def _first_cause(error: CheckpointException) -> str:
    """What went wrong in a save of torch's, and on which rank, in one line."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {getattr(cause, 'strerror', None) or cause}".splitlines()[0]
    return str(error).splitlines()[0]


def _save_payload(directory: Path, tensors: dict[str, Tensor], ranks: Ranks, read: Callable[[str], Tensor] | None) -> None:
    if read is not None:
        writer, planner = StreamingWriter(directory), StreamingPlanner(read)
    else:
        writer, planner = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1), None
    if ranks.control is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process, which is what no_dist says
            dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=True)
    else:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=ranks.control)


def _write_attachments(directory: Path, state: dict[str, Any], attachments: dict[str, Path | str]) -> dict[str, dict[str, Any]]:
    names = [METADATA_FILE, files.STATE]
    saved_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    files.write_json(directory / files.STATE, plain({**state, "saved_at": saved_at}))
    for name, source in attachments.items():
        if isinstance(source, str):
            (directory / name).write_text(source, encoding="utf-8")
            flush((directory / name).parent)
            names.append(name)
        elif source.is_dir():
            shutil.copytree(source, directory / name)
            names += [str(p.relative_to(directory)) for p in sorted((directory / name).rglob("*")) if p.is_file()]
            flush(directory / name)
        else:
            shutil.copyfile(source, directory / name)
            names.append(name)
    return {name: _flushed(directory / name) for name in names}


def _flushed(path: Path) -> dict[str, Any]:
    flush(path)
    return files.describe_file(path)


def _commit(
    writing: Path, target: Path, hashes: dict[str, dict[str, Any]], state: dict[str, Any], attachments: dict[str, Path | str]
) -> str:
    hashes = hashes | _write_attachments(writing, state, attachments)
    for name, expected in hashes.items():
        path = writing / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{name} of another rank is not visible here; the run directory must be on storage shared by all nodes"
            )
    files.write_json(writing / files.MANIFEST, {"format": files.FORMAT, "version": files.VERSION, "files": hashes})
    flush(writing)
    manifest = sha256_of(writing / files.MANIFEST)
    if aside := files.put_in_place(writing, target):
        log.warning("%s was there already, of a time line that this run has left; it is now %s", target, aside.name)
    return manifest


# ---- tensor by tensor -------------------------------------------------------------------------------------------------


class StreamingPlanner(dcp.DefaultSavePlanner):
    """A plan to write tensors that are not there yet: the state dict holds their shapes, on the meta device.

    `read` gives the value of one by name. It is asked for them in the order of the state dict, several times in a row for one.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.read = read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, tensor in self.state_dict.items() for item in _pieces(name, tensor)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        chunk = write_item.tensor_data.chunk
        whole = self.read(write_item.index.fqn)
        piece = whole if not whole.dim() else whole.narrow(0, chunk.offsets[0], chunk.sizes[0])
        return piece.clone()  # torch.save writes all of what a view looks at


def _pieces(name: str, tensor: Tensor) -> list[WriteItem]:
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, math.ceil(rows / PIECES), math.ceil(rows * PIECE_BYTES / max(1, tensor.nbytes)))
    properties = TensorProperties(dtype=tensor.dtype)
    items = []
    for start in range(0, max(1, rows), step):
        offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim():
            offsets[0], sizes[0] = start, min(step, rows - start)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


class StreamingWriter(dcp.FileSystemWriter):
    """torch's file writer, which would keep every tensor of a file alive until the file is complete."""

    def write_data(self, plan: SavePlan, planner: StreamingPlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        number, stream = 0, None
        try:
            for item in plan.items:
                if stream is None or stream.tell() >= FILE_BYTES:
                    if stream is not None:
                        stream.close()
                    name = f"{plan.storage_data.prefix}{number}.distcp"
                    stream, number = (Path(self.path) / name).open("wb"), number + 1
                start = stream.tell()
                torch.save(planner.resolve_data(item), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        finally:
            if stream is not None:
                stream.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def on_meta(shapes: dict[str, Any], dtype: torch.dtype, others: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """Tensors without values, to plan with. `others`: number formats of those that have another than `dtype`."""
    others = others or {}
    return {name: torch.empty(shape, dtype=others.get(name, dtype), device="meta") for name, shape in shapes.items()}
