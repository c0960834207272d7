"""Changes to a network that every strategy makes: number formats, recomputation, compilation. Networks know nothing of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config.schema import Config
from pretrain.models.compiling import compile_strictly
from pretrain.models.output_head import OutputHead

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}

_STORED = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
           "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu")  # fmt: skip
"""Operators whose results `selective` stores. They cost the most to compute. `bmm` is not among them: attention that is not fused makes
its scores with it, which are the largest tensors of all."""


def prepare_blocks(network: nn.Module, config: Config) -> None:
    """Set the compute format of a network; compile, recompute and offload its blocks as the configuration says."""
    options = config.parallel
    set_compute_format(network, DTYPES[config.precision.compute])
    if options.compile != "none":
        compile_loss(network)
    if options.compile == "blocks":
        compile_blocks(network, budget=options.activation_memory_budget)
    if options.activation_checkpointing != "none":
        recompute_blocks(network, options.activation_checkpointing == "selective", options.checkpoint_every_block)
    if options.activation_offload:
        from pretrain.parallel.activation_offload import offload_activations

        offload_activations(network)
    if options.compile == "model":
        compile_model(network, budget=options.activation_memory_budget)


def set_master_format(network: nn.Module, dtype: torch.dtype) -> None:
    """Set the number format in which a network's matrices are stored. Vectors stay in fp32."""
    for parameter in network.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)


def set_compute_format(network: nn.Module, dtype: torch.dtype) -> None:
    """Set the number format of a network's residual stream, and with it of all matrix products."""
    for module in network.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype


def compile_blocks(network: nn.Module, backend: str = "inductor", budget: float = 1.0) -> None:
    """Compile the forward of each block that shares no weights. Call it before `recompute_blocks`.

    `budget`: the share of activations that the compiler may store. It holds for all that this process compiles from now on.
    """
    torch._functorch.config.activation_memory_budget = budget
    for unit in network.units():
        if unit.role == "block" and unit.apart:
            for module in unit.modules:
                module.forward = compile_strictly(module.forward, backend=backend)


def compile_loss(network: nn.Module) -> None:
    """Compile the arithmetic on a network's logits. Its products are torch's own in any case."""
    for module in network.modules():
        if isinstance(module, OutputHead):
            module.options = dataclasses.replace(module.options, compiled=True)


def compile_model(network: nn.Module, backend: str = "inductor", budget: float = 1.0) -> None:
    """Compile the forward of a network as a whole, as far as no part of it is left out (a graph break)."""
    torch._functorch.config.activation_memory_budget = budget
    network.forward = compile_strictly(network.forward, backend=backend)


def recompute_blocks(network: nn.Module, selective: bool = False, every: int = 1) -> None:
    """Recompute the activations of every so many-th block in backward (Chen et al., arXiv 1604.06174).

    Stored are the block's inputs, and with `selective` the results of its projections and attention (arXiv 2205.05198). A block must not
    change such a result in place: torch 2.13 would store the changed one, and say nothing. Every family is tested for it.
    """
    # torch's compiler knows no other function than its own default, which therefore is not named.
    contexts = {"context_fn": _store_products} if selective else {}
    blocks = [unit for unit in network.units() if unit.role == "block"]
    for unit in blocks[::every]:
        for module in unit.modules:
            module.forward = functools.partial(_recomputed, module.forward, contexts)


def _recomputed(forward: Callable, contexts: dict[str, Callable], *args: Any, **options: Any) -> Any:
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **options)
    return forward(*args, **options)


def _store_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _stored_operators() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _stored_operators() -> set[Any]:
    fused = {getattr(torch.ops.aten, name).default for name in _STORED if hasattr(torch.ops.aten, name)}
    ours = torch.ops.pretrain.causal_attention.default, torch.ops.pretrain.causal_attention_fp32.default
    return fused | {torch.ops.higher_order.flex_attention, *ours}
