"""Saving: written aside, hashed, flushed, renamed. A checkpoint is complete or invisible (invariant 6).

every rank   shards of the payload -> .writing-step-N/        hash and flush what it wrote
main rank    state.json, config.yaml, tokenizer -> same;  manifest.json last;  flush;  rename to step-N/;  retention
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint import files
from pretrain.checkpoint.restore import first_cause
from pretrain.checkpoint.safe_dcp import METADATA_FILE
from pretrain.checkpoint.streamed import StreamingPlanner, StreamingWriter
from pretrain.config.schema import Checkpoint
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError, reason_of
from pretrain.storage import flush, plain, sha256_of

log = logging.getLogger(__name__)


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
        raise CheckpointError(first_cause(error)) from error
    return {path.name: _flushed(path) for path in sorted(directory.glob(f"__{ranks.rank}_*"))}


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
