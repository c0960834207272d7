"""Loading: state.json, and tensors read into those that are there, whatever the layout they were saved under."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pretrain.checkpoint import files
from pretrain.checkpoint.safe_dcp import SafeReader, TensorPlanner, read_metadata
from pretrain.config.written import identity_of_today, of_today
from pretrain.distributed.ranks import Ranks
from pretrain.errors import CheckpointError


def load_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint, with the model's keys of this version."""
    state = files.read_json(checkpoint / files.STATE)
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / files.STATE}: is not the state of a checkpoint; choose another checkpoint")
    if isinstance(state.get("model"), dict):
        state |= of_today({"model": state["model"]})
    if isinstance(state.get("identity"), dict):
        state["identity"] = identity_of_today(state["identity"])
    return state


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor], ranks: Ranks | None) -> None:
    """Read into `tensors` in place, whatever the layout they were saved under. `ranks` None: this process alone.

    Raises CheckpointError before anything is read if a name is missing or a shape or number format differs (DCP itself would
    convert formats silently).
    """
    if ranks is None:
        _check_fit(checkpoint, tensors)
    else:
        ranks.attempt("contents of a checkpoint", lambda: _check_fit(checkpoint, tensors), CheckpointError)
    reader = SafeReader(checkpoint)
    try:
        if ranks is None or ranks.control is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process, which is what no_dist says
                dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
        else:
            with ranks.part("loading of a checkpoint"):
                dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), process_group=ranks.control)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(f"{checkpoint}: cannot be read: {first_cause(error)}") from error


def _check_fit(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    saved = read_metadata(checkpoint).state_dict_metadata
    for name, tensor in tensors.items():
        item = saved.get(name)
        if item is None:
            raise CheckpointError(f"{checkpoint}: has no {name}")
        if tuple(item.size) != tuple(tensor.shape):
            raise CheckpointError(f"{checkpoint}: {name} has shape {list(item.size)}, the run needs {list(tensor.shape)}")
        if item.properties.dtype != tensor.dtype:
            raise CheckpointError(f"{checkpoint}: {name} is {item.properties.dtype}, the run needs {tensor.dtype}")


def first_cause(error: CheckpointException) -> str:
    """What went wrong in a save or load of torch's, and on which rank, in one line."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {getattr(cause, 'strerror', None) or cause}".splitlines()[0]
    return str(error).splitlines()[0]


def saved_tensors(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors of the checkpoint whose names start with `prefix`, on the CPU, for tools that run in one process."""
    metadata = read_metadata(checkpoint).state_dict_metadata
    tensors = {n: torch.empty(i.size, dtype=i.properties.dtype) for n, i in metadata.items() if n.startswith(prefix)}
    load_tensors(checkpoint, tensors, None)
    return tensors


def saved_names(checkpoint: Path, prefix: str) -> list[str]:
    """Names in the checkpoint that start with `prefix`."""
    return [name for name in read_metadata(checkpoint).state_dict_metadata if name.startswith(prefix)]
