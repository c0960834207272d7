"""What did not fit into a GPU's memory: which keys to change, and what lay in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pretrain.config.schema import Config
from pretrain.errors import TrainingError, reason_of
from pretrain.parallel.layout import Layout
from pretrain.parallel.weight_copies import keeps_casts
from pretrain.train.plan import Plan
from pretrain.train.run_directory import RunDirectory

HISTORY_ENTRIES = 200_000
"""Allocations that are remembered; a step of a large model makes some ten thousand."""


def remember_allocations(config: Config, device: torch.device) -> None:
    """With `log.memory_history`, let torch remember where each allocation came from."""
    if config.log.memory_history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, device=device)


@contextmanager
def explaining_memory(doing: str, plan: Plan, directory: RunDirectory, rank: int) -> Iterator[None]:
    """Turn an error of CUDA's allocator into one line for the user. The history of allocations goes into a file, if it was kept.

    `doing`: what the memory is for, as the beginning of that line.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = ". ".join(str(error).splitlines()[0].split(". ")[:2]).rstrip(".")  # what was asked for, and what is there
        kept = (
            _write_history(directory.path, rank)
            if plan.config.log.memory_history
            else "log.memory_history=true writes what lies in memory"
        )
        what = f"{doing} needs more memory than there is ({said}); {'; or '.join(remedies(plan.config, plan.layout))}; {kept}"
        raise TrainingError(what).on_rank(rank) from error


def remedies(config: Config, layout: Layout) -> list[str]:
    """What to change, the cheapest first; what is in force already is left out."""
    parallel, micro = config.parallel, config.batch.micro_sequences
    found = []
    if config.precision.compute == "fp32":
        found.append("set precision.compute=bf16")
    if micro > 1 and not config.batch.tokens:
        found.append(f"lower batch.micro_sequences={micro}, which changes no sample and no gradient")
    if config.batch.tokens:
        micro_tokens = config.batch.micro_tokens
        found.append(
            f"lower batch.micro_tokens={micro_tokens}"
            if micro_tokens
            else "set batch.micro_tokens to less than a rank's share of batch.tokens"
        )
    if keeps_casts(config, layout.strategy, layout.data_size):
        found.append("set precision.keep_casts=false, which frees 2 bytes per weight")
    if layout.strategy == "ddp":
        found.append("set parallel.strategy=fsdp, which shards weights, gradients and optimizer state")
    if parallel.cuda_graph:
        found.append("set parallel.cuda_graph=false; then activation_checkpointing or activation_offload can be set")
    elif parallel.activation_checkpointing != "full":
        found.append("set parallel.activation_checkpointing=full, which computes activations twice")
    elif not parallel.activation_offload and parallel.compile != "model":
        found.append("set parallel.activation_offload=true, which keeps activations in the host's memory")
    if layout.strategy == "fsdp":
        found.append("use more GPUs for a copy of the model (parallel.shard, tensor, context)")
    return found or ["use a smaller model or a GPU with more memory"]


def _write_history(directory: Path, rank: int) -> str:
    path = directory / "profile" / f"out-of-memory.rank-{rank}.pickle"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        return f"what lay in memory could not be written: {reason_of(error)}"
    return f"what lay in memory is in {path}, for pytorch.org/memory_viz"
