"""Pairs as the tensors of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pretrain.conventions import IGNORED
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.data.stream import digest


@dataclass(frozen=True)
class PairBatch:
    """What one rank computes in one optimizer step, on the host. `micro_inputs`: of each micro-step, the network's inputs by name.

    `positions`: of its rows in the stream, in order, -1 of one that fills up; `sequences`: pairs of the step over all ranks; `digest`,
    `target_tokens`: as in data/loader.py.
    """

    positions: np.ndarray
    sequences: int
    digest: int
    target_tokens: int
    micro_inputs: list[dict[str, Tensor]]

    def micro_steps(self, sequences: int) -> int:
        """Equal on all ranks."""
        return len(self.micro_inputs)

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """The network's inputs of a micro-step, by name, on the device."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in self.micro_inputs[index].items()}


def pair_inputs(pairs: PreparedPairs, numbers: np.ndarray, start_id: int) -> dict[str, np.ndarray]:
    """These pairs as inputs of models/encoder_decoder.py, int64, padded to the longest of them: inputs are [start, y1, ... yn], targets
    [y1, ... yn, end]. Without numbers, one row that carries no loss.
    """
    sources, targets = pairs.read(numbers) if len(numbers) else ([np.array([pairs.source.eod_id])], [np.empty(0, np.int64)])
    width = max(1, *map(len, targets))
    tokens_BT = np.full((len(sources), width + 1), pairs.target.eod_id, dtype=np.int64)
    tokens_BT[:, 0] = start_id
    targets_BT = np.full((len(sources), width), IGNORED, dtype=np.int64)
    source_BS = np.full((len(sources), max(map(len, sources))), pairs.source.eod_id, dtype=np.int64)
    for row, (source, target) in enumerate(zip(sources, targets)):
        source_BS[row, : len(source)] = source
        tokens_BT[row, 1 : 1 + len(target)] = target
        targets_BT[row, : len(target)] = target
    return {
        "source_BS": source_BS,
        "source_lengths_B": np.array([len(source) for source in sources]),
        "tokens_BT": np.ascontiguousarray(tokens_BT[:, :-1]),
        "targets_BT": targets_BT,
    }


def to_tensors(inputs: dict[str, np.ndarray], pin: bool) -> dict[str, Tensor]:
    """On the host, in page-locked memory where `pin` says so."""
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors


def pair_digest(pairs: PreparedPairs, numbers: np.ndarray, positions: np.ndarray) -> int:
    """52 bits that name these pairs at these positions, whatever they are padded to: see stream.digest."""
    if not len(numbers):
        return 0
    width = max(pairs.longest)
    both = np.zeros((2, len(numbers), width), dtype=np.int64)
    for side, documents in enumerate(pairs.read(numbers)):
        for row, document in enumerate(documents):
            both[side, row, : len(document)] = document + 1
    return digest(positions, both[0], both[1])
