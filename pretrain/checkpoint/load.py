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

    `auto` and `required` fall back from a damaged checkpoint to the one before it, and say so; when every one is damaged that is
    an error, never a fresh start. A path is taken or refused.
    """
    folder = run_directory / "checkpoints"
    if resume in ("auto", "required", "never"):
        candidates = files.complete_checkpoints(folder)
        if resume == "never" and candidates:
            raise CheckpointError(
                f"run.resume=never, but {run_directory} has checkpoints up to {candidates[-1].name}; "
                "choose another run.name, or run.resume=auto to continue"
            )
        if resume == "required" and not candidates:
            raise CheckpointError(f"run.resume=required, but {folder} has no complete checkpoint")
    else:
        candidates = files.resolve(Path(resume))
    # One rank's view of the directory decides, should another see it a moment later.
    candidates = ranks.gather(candidates)[0]
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


def first_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """The first thing wrong with a checkpoint's files, the ranks sharing the hashing; None when it is intact."""
    problem = None
    try:
        files.verify(checkpoint, ranks.rank, ranks.world_size)
    except CheckpointError as error:
        problem = str(error)
    return next((text for text in ranks.gather(problem) if text), None)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    return files.read_json(checkpoint / files.STATE)


def check_identity(saved: dict[str, Any], own: dict[str, Any], checkpoint: Path) -> None:
    """Raise CheckpointError listing every value that makes the checkpoint another run's than this configuration's."""
    differences = [
        f"{name} was {was} and is {now}"
        for name in sorted(saved.keys() | own.keys())
        if (was := saved.get(name)) != (now := own.get(name))
    ]
    if differences:
        raise CheckpointError(
            f"{checkpoint} belongs to another run: {'; '.join(differences)}; choose another run.name, or restore these values"
        )


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
