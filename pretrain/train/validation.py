"""Validation loss on a fixed list of samples: the first ones of each source, in order, at any world size."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pretrain.data.pairs.batch import pair_inputs
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.samples import Samples
from pretrain.data.stream import documents_of
from pretrain.data.targets import IGNORED
from pretrain.data.training_data import BatchLoader
from pretrain.distributed.ranks import Ranks
from pretrain.errors import DataError


@torch.no_grad()
def validate(
    call: nn.Module, source: Samples | PreparedPairs, sequences: int, rows: int, loader: BatchLoader, ranks: Ranks
) -> float:
    """Mean token loss over the first `sequences` samples of a source (0: all), `rows` in a forward pass, the same on every rank.

    Each sample's summed loss is put in its place in one list and the list is added up in order in fp64, so that the result
    does not depend on how the samples were spread over ranks. Every rank makes the same number of forward passes: sharded
    weights are gathered by all ranks together.
    """
    count = min(sequences, len(source)) if sequences else len(source)
    losses = torch.zeros(count, dtype=torch.float64)
    tokens = torch.zeros(count, dtype=torch.int64)
    problem: str | None = None
    per_pass = rows * loader.data_size
    for first in range(0, count, per_pass):
        start = first + loader.data_rank * rows
        here = range(min(start, count), min(start + rows, count))
        try:
            arrays = _inputs(source, np.array(here, dtype=np.int64), rows, loader.mask_documents)
        except (DataError, OSError) as error:  # said by all ranks together at the end: the others are in the same passes
            problem, arrays = problem or str(error), _nothing(source)
        inputs = {name: torch.from_numpy(array).to(ranks.device) for name, array in arrays.items()}
        losses_B = call(**inputs).double().cpu()
        if problem is None:
            losses[here.start : here.stop] = losses_B[: len(here)]
            tokens[here.start : here.stop] = torch.from_numpy((arrays["targets_BT"][: len(here)] != IGNORED).sum(axis=1))
    ranks.agree(problem, DataError)
    if ranks.control is not None:
        dist.all_reduce(losses, group=ranks.control)
        dist.all_reduce(tokens, group=ranks.control)
    return float(losses.sum() / tokens.sum())


def _inputs(source: Samples | PreparedPairs, samples: np.ndarray, rows: int, mask_documents: bool) -> dict[str, np.ndarray]:
    """The network's inputs by name. A short pass of samples of one length is filled up with a repeated one that carries no loss."""
    if isinstance(source, PreparedPairs):
        return pair_inputs(source, samples)
    inputs, targets = np.empty((2, rows, source.sequence_length), dtype=np.int64)
    source.fill(np.pad(samples, (0, rows - len(samples))), np.arange(rows), inputs, targets)
    targets[len(samples) :] = IGNORED
    documents = {"documents_BT": documents_of(inputs, source.data.eod_id)} if mask_documents else {}
    return {"tokens_BT": inputs, "targets_BT": targets, **documents}


def _nothing(source: Samples | PreparedPairs) -> dict[str, np.ndarray]:
    """Inputs that carry no loss, for a rank that cannot read its own."""
    if isinstance(source, PreparedPairs):
        return pair_inputs(source, np.empty(0, dtype=np.int64))
    inputs = np.zeros((1, source.sequence_length), dtype=np.int64)
    return {"tokens_BT": inputs, "targets_BT": np.full_like(inputs, IGNORED)}
