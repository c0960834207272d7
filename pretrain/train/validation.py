"""Validation loss on a fixed list of samples: the first ones of each source, in order, at any world size."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pretrain.data.samples import Samples
from pretrain.data.stream import documents_of
from pretrain.data.targets import IGNORED
from pretrain.data.training_data import BatchLoader
from pretrain.distributed.ranks import Ranks
from pretrain.errors import DataError


@torch.no_grad()
def validate(
    call: nn.Module, source: Samples, sequences: int, micro_sequences: int, loader: BatchLoader, ranks: Ranks
) -> float:
    """Mean token loss over the first `sequences` samples of a source (0: all), the same on every rank.

    Each sample's summed loss is put in its place in one list and the list is added up in order in fp64, so that the result
    does not depend on how the samples were spread over ranks. Every rank makes the same number of forward passes: sharded
    weights are gathered by all ranks together.
    """
    count = min(sequences, len(source)) if sequences else len(source)
    losses = torch.zeros(count, dtype=torch.float64)
    tokens = torch.zeros(count, dtype=torch.int64)
    problem: str | None = None
    per_pass = micro_sequences * loader.data_size
    for first in range(0, count, per_pass):
        start = first + loader.data_rank * micro_sequences
        here = range(min(start, count), min(start + micro_sequences, count))
        # A short pass is filled up with a repeated sample that carries no loss.
        inputs, targets = np.empty((2, micro_sequences, source.sequence_length), dtype=np.int64)
        samples = np.pad(np.array(here, dtype=np.int64), (0, micro_sequences - len(here)))
        try:
            source.fill(samples, np.arange(micro_sequences), inputs, targets)
        except (DataError, OSError) as error:  # said by all ranks together at the end: the others are in the same passes
            problem = problem or str(error)
            inputs[:], targets[:] = 0, 0
        targets[len(here) :] = IGNORED
        documents = documents_of(inputs, source.data.eod_id) if loader.mask_documents else None
        arrays = {"tokens_BT": inputs, "targets_BT": targets, "documents_BT": documents}
        tensors = {name: torch.from_numpy(a).to(ranks.device) for name, a in arrays.items() if a is not None}
        losses_B = call(**tensors).double().cpu()
        losses[here.start : here.stop] = losses_B[: len(here)]
        tokens[here.start : here.stop] = torch.from_numpy((targets[: len(here)] != IGNORED).sum(axis=1))
    ranks.agree(problem, DataError)
    if ranks.control is not None:
        dist.all_reduce(losses, group=ranks.control)
        dist.all_reduce(tokens, group=ranks.control)
    return float(losses.sum() / tokens.sum())
