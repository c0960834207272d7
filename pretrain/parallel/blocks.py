"""Changes to a network that every strategy makes: number formats, recomputation, compilation. Networks know nothing of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.config.schema import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare_blocks(network: nn.Module, config: Config) -> None:
    """Set the compute format of a network; recompute and compile its blocks if the configuration says so."""
    set_compute_format(network, DTYPES[config.precision.compute])
    if config.parallel.compile:
        compile_blocks(network)
    if config.parallel.activation_checkpointing:
        recompute_blocks(network)


def set_compute_format(network: nn.Module, dtype: torch.dtype) -> None:
    """Set the number format of a network's residual stream, and with it of all matrix products."""
    for module in network.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype


def compile_blocks(network: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward of each block that shares no weights. Call it before `recompute_blocks`."""
    for unit in network.units():
        if unit.role == "block" and unit.apart:
            for module in unit.modules:
                module.forward = torch.compile(module.forward, backend=backend)


def recompute_blocks(network: nn.Module) -> None:
    """Store only the inputs of each block, and recompute its activations in backward (Chen et al., arXiv 1604.06174)."""
    for unit in network.units():
        if unit.role == "block":
            for module in unit.modules:
                module.forward = functools.partial(_recomputed, module.forward)


def _recomputed(forward: Any, *args: Any, **options: Any) -> Any:
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **options)
    return forward(*args, **options)
