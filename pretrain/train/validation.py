"""Validation loss on a fixed list of samples: the first ones of each source, in order, at any world size."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.samples import Samples
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
            inputs = loader.validation_inputs(source, np.array(here, dtype=np.int64), rows)
        except (DataError, OSError) as error:  # said by all ranks together at the end: the others are in the same passes
            problem, inputs = problem or str(error), loader.validation_inputs(source, np.empty(0, dtype=np.int64), rows)
        losses_B = call(**{name: tensor.to(ranks.device) for name, tensor in inputs.items()}).double().cpu()
        if problem is None:
            losses[here.start : here.stop] = losses_B[: len(here)]
            tokens[here.start : here.stop] = (inputs["targets_BT"][: len(here)] != IGNORED).sum(dim=1)
    ranks.agree("reading of validation data", problem, DataError)
    return float(ranks.sum("validation losses", losses).sum() / ranks.sum("validation tokens", tokens).sum())
