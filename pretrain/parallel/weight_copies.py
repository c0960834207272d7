"""Copies of matrices in the compute format, made once per step (`precision.keep_casts`).

    weights, fp32    cast at the beginning of a step
    copies, bf16     what the products of all its micro-steps multiply with
    gradients        go to the weights, as those of casts do

Without copies, each micro-step casts every matrix where it is used, and keeps the cast for backward or makes it again there. The numbers are
the same, so no bit of a gradient changes. FSDP2 has no use for copies: it casts what it gathers.

A copy is handed out within a step only, where weights do not change. Whatever else computes with the network casts as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pretrain.config.schema import Config


def keeps_casts(config: Config, strategy: str, data_size: int) -> bool:
    """Whether matrices are cast once per step. `strategy`: the one that was chosen; `data_size`: how many ranks see different samples."""
    precision, parallel, batch = config.precision, config.parallel, config.batch
    if strategy == "fsdp" or precision.compute == precision.master:
        return False
    if precision.keep_casts is not None:
        return precision.keep_casts
    if parallel.activation_checkpointing != "none" or parallel.activation_offload or parallel.activation_memory_budget < 1:
        return False
    if batch.tokens is not None:  # of pairs
        return batch.micro_tokens is not None and batch.tokens > batch.micro_tokens * data_size
    return max([batch.sequences, *(stage.sequences for stage in batch.ramp)]) > batch.micro_sequences * data_size


class WeightCopies:
    """Copies of all matrices that the modules of a network cast. They get memory when they are first used."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.names: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """By module, the weights of which it has copies, by the names that the module has for them."""
        for module in network.modules():
            found = ((name, module._parameters.get(name)) for name in getattr(module, "casts", ()))
            if own := {name: weight for name, weight in found if weight is not None}:
                self.names[module] = own
        for unit in network.units():
            if unit.lends_to is not None:
                self.names[unit.lends_to] = {"weight": unit.modules[0].weight}
        self.weights = {weight for own in self.names.values() for weight in own.values()}
        self.copies: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def bytes(self) -> int:
        """The memory that all copies take."""
        return sum(weight.numel() for weight in self.weights) * self.dtype.itemsize

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Cast the weights as they are now, and let modules multiply with the copies meanwhile."""
        if not self.copies:
            # Parameters: what offloads activations leaves them where they are.
            self.copies = {w: nn.Parameter(torch.empty_like(w, dtype=self.dtype), requires_grad=False) for w in self.weights}
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), list(self.copies))
        for module, own in self.names.items():
            module.__dict__["copies"] = {name: self.copies[weight] for name, weight in own.items()}
        try:
            yield
        finally:
            for module in self.names:
                del module.__dict__["copies"]
