"""Loading: pick exactly one checkpoint, verify it, compare it with the run, read it into the tensors that are there."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint import files
from pretrain.checkpoint.safe_dcp import SafeReader, TensorPlanner, read_metadata
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError

log = logging.getLogger(__name__)


def choose_checkpoint(run_directory: Path, resume: str, ranks: Ranks) -> Path | None:
    """The checkpoint to continue from, verified by all ranks together; None for a fresh start.

    A path is where a run without checkpoints of its own starts; once it has some, it continues from those, so that the same
    command can be given again after an interruption. A damaged checkpoint is fallen back from, and that is said, except when
    it was given as a path itself; when every one is damaged that is an error, never a fresh start.
    """
    # The main rank's view of the directory decides: another node may see it a moment later.
    found = ranks.on_main("choice of a checkpoint", lambda: _candidates(run_directory / "checkpoints", resume), CheckpointError)
    candidates = list(found)
    while candidates:
        problem = first_damage(candidates[-1], ranks)
        if problem is None:
            return candidates[-1]
        if len(candidates) == 1:
            raise CheckpointError(f"{problem}; no earlier checkpoint is left to fall back to, and nothing was started afresh")
        if ranks.is_main:
            log.warning("damaged checkpoint: %s; falling back to %s", problem, candidates[-2])
        candidates.pop()
    return None


def _candidates(folder: Path, resume: str) -> list[Path]:
    """Checkpoints to try, best last."""
    own, incomplete = files.complete_checkpoints(folder), files.incomplete_checkpoints(folder)
    for path in incomplete:
        log.warning("incomplete checkpoint: %s has no %s and is passed over", path, files.MANIFEST)
    if resume == "never":
        if own:
            raise CheckpointError(
                f"run.resume=never, but {folder.parent} has checkpoints up to {own[-1].name}; "
                "choose another run.name, or run.resume=auto to continue"
            )
        return []
    if resume not in ("auto", "required"):
        if not own:
            return files.resolve(Path(resume))
        if Path(resume).resolve() in [checkpoint.resolve() for checkpoint in own[:-1]]:
            raise CheckpointError(
                f"run.resume={resume}: {folder.parent} has newer checkpoints, up to {own[-1].name}; "
                "start a run of another name from it, or move the newer ones away"
            )
        log.info("run.resume=%s: this run has checkpoints of its own and continues from those", resume)
        return own
    if resume == "required" and not own:
        raise CheckpointError(f"run.resume=required, but {folder} has no complete checkpoint")
    if incomplete and not own:
        raise CheckpointError(
            f"{incomplete[-1]} has no {files.MANIFEST}, and there is no complete checkpoint: a partial copy? "
            "Restore it, or remove it to start afresh"
        )
    return own


def first_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """The first thing wrong with a checkpoint's files, the ranks sharing the hashing; None when it is intact."""
    problem = None
    try:
        files.verify(checkpoint, ranks.rank, ranks.world_size)
    except CheckpointError as error:
        problem = str(error)
    return next((text for text in ranks.gather("hashes of a checkpoint", problem) if text), None)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    return files.read_json(checkpoint / files.STATE)


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor], ranks: Ranks | None) -> None:
    """Read into `tensors` in place, whatever the layout they were saved under. `ranks` None: this process alone.

    Raises CheckpointError before anything is read if a name is missing or a shape or number format differs (DCP itself would
    convert formats silently).
    """
    saved = read_metadata(checkpoint).state_dict_metadata
    for name, tensor in tensors.items():
        item = saved.get(name)
        if item is None:
            raise CheckpointError(f"{checkpoint}: has no {name}")
        if tuple(item.size) != tuple(tensor.shape):
            raise CheckpointError(f"{checkpoint}: {name} has shape {list(item.size)}, the run needs {list(tensor.shape)}")
        if item.properties.dtype != tensor.dtype:
            raise CheckpointError(f"{checkpoint}: {name} is {item.properties.dtype}, the run needs {tensor.dtype}")
    reader = SafeReader(checkpoint)
    try:
        if ranks is None or ranks.control is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process, which is what no_dist says
                dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
        else:
            dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), process_group=ranks.control)
    except CheckpointException as error:  # a BaseException
        cause = next(iter(error.failures.values()))[0] if error.failures else error
        raise CheckpointError(f"{checkpoint}: cannot be read: {str(cause).splitlines()[0]}") from error


def saved_tensors(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint whose names start with `prefix`, on the CPU, for tools that run in one process."""
    metadata = read_metadata(checkpoint).state_dict_metadata
    tensors = {n: torch.empty(i.size, dtype=i.properties.dtype) for n, i in metadata.items() if n.startswith(prefix)}
    load_tensors(checkpoint, tensors, None)
    return tensors


def saved_names(checkpoint: Path, prefix: str) -> list[str]:
    """Names in the checkpoint that start with `prefix`."""
    return [name for name in read_metadata(checkpoint).state_dict_metadata if name.startswith(prefix)]
