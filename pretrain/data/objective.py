"""What a network is asked of a sample: the task that turns a sample's tokens into the network's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pretrain.data.stream import documents_of


class Objective(Protocol):
    """Samples in, inputs of a network out, as a pure function."""

    def inputs(self, tokens_BT: Tensor, targets_BT: Tensor, positions_B: np.ndarray) -> dict[str, Tensor]:
        """The network's inputs by name, each with a row per sample, `targets_BT` among them. Given are the samples' tokens, for each the
        one after it (or IGNORED), int64, and the samples' positions in the stream.
        """

    def for_validation(self) -> Objective:
        """The same where nothing is to depend on the run: positions are then those in the validation source."""

    def lengths(self, sequence_length: int) -> tuple[float, ...]:
        """Tokens that the network sees of a sample: of it, or of its source and of its target."""

    def added_tokens(self, vocab_size: int) -> list[str]:
        """Tokens beyond the `vocab_size` of the tokenizer, as transformers calls them, in the order of their ids."""

    def identity(self) -> dict[str, Any]:
        """JSON values that change when what is made of a sample does."""

    def describe(self) -> list[str]:
        """Lines for the log."""


@dataclass(frozen=True)
class NextToken:
    """Every token is to be predicted from those before it. `mask_eod_id`: the token that closes a document, where attention ends with it."""

    mask_eod_id: int | None = None

    def inputs(self, tokens_BT: Tensor, targets_BT: Tensor, positions_B: np.ndarray) -> dict[str, Tensor]:
        inputs = {"tokens_BT": tokens_BT, "targets_BT": targets_BT}
        if self.mask_eod_id is not None:
            inputs["documents_BT"] = torch.from_numpy(documents_of(tokens_BT.numpy(), self.mask_eod_id))
        return inputs

    def for_validation(self) -> NextToken:
        return self

    def lengths(self, sequence_length: int) -> tuple[float, ...]:
        return (sequence_length,)

    def added_tokens(self, vocab_size: int) -> list[str]:
        return []

    def identity(self) -> dict[str, Any]:
        return {"name": "next_token"}

    def describe(self) -> list[str]:
        return []
