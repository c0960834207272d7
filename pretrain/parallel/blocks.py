"""Changes to a network that every strategy makes: number formats, recomputation, compilation. Networks know nothing of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config.schema import Config
from pretrain.errors import ConfigError, TrainingError
from pretrain.models.compiling import compile_strictly
from pretrain.models.network import Unit
from pretrain.models.output_head import OutputHead

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}

_STORED = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
           "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu")  # fmt: skip
_OURS = ("causal_attention", "causal_attention_fp32", "multiply_rows")
"""Operators whose results `selective` stores. They cost the most to compute. `bmm` is not among them: attention that is not fused makes
its scores with it, which are the largest tensors of all. A network without experts has no `multiply_rows`."""


def prepare_blocks(network: nn.Module, config: Config, backend: str | Callable = "inductor") -> None:
    """Set the compute format of a network; compile, recompute and offload its blocks as the configuration says. `backend`: torch.compile's, for
    the blocks or the model; the loss is compiled by its own default only.
    """
    options = config.parallel
    set_compute_format(network, DTYPES[config.precision.compute])
    if options.compile != "none" and backend == "inductor":
        compile_loss(network)
    recomputes, selective = options.activation_checkpointing != "none", options.activation_checkpointing == "selective"
    recompute = functools.partial(recompute_blocks, network, selective, options.checkpoint_every_block)
    if selective and options.compile != "none":
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_warning_of_changes)
    if recomputes:
        recompute(is_one_graph if options.compile == "blocks" else lambda unit: True)
    if options.compile != "none":
        torch._functorch.config.activation_memory_budget = options.activation_memory_budget
    if options.compile == "blocks":
        compile_blocks(network, backend)
        if recomputes:
            recompute(lambda unit: not is_one_graph(unit))
            # Otherwise torch tries what it has compiled in the order of last use. It may then recompute with another version than ran forward.
            # That saves other tensors, which is a CheckpointError (pytorch issue 166926).
            torch._C._dynamo.eval_frame._set_lru_cache(False)
    if options.activation_offload:
        from pretrain.parallel.activation_offload import offload_activations

        offload_activations(network)
    if options.compile == "model":
        compile_model(network, backend)


def _is_no_warning_of_changes(record: logging.LogRecord) -> bool:
    """torch warns of results that a block changes in place, for which every family is tested."""
    return "context_fn is passed" not in record.getMessage()


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


def is_one_graph(unit: Unit) -> bool:
    """Whether torch's compiler can take a unit and its recomputation as a whole.

    It cannot look into code that is not ours, nor into exchanges of rows whose number only the host knows. And torch 2.13 fails to keep the
    device mesh of matrices that ranks share (an AssertionError about what is saved for backward).
    """
    modules = [module for top in unit.modules for module in top.modules()]
    ours = all(type(m).__module__.startswith(("pretrain.", "torch.")) for m in modules)
    traceable = not any(hasattr(type(m).forward, "_torchdynamo_disable") for m in modules)
    return ours and traceable and not any(isinstance(p, DTensor) for m in modules for p in m.parameters(recurse=False))


def compile_blocks(network: nn.Module, backend: str | Callable = "inductor") -> None:
    """Compile the forward of each block that shares no weights.

    What `recompute_blocks` has changed before is compiled with its recomputation. The compiler then leaves out what backward does not need: a
    block's last projection, which is a quarter of the products of a Llama's block. It cannot do so for a block of several graphs, whose
    recomputation would leave all of it uncompiled.
    """
    for unit in network.units():
        if unit.role == "block" and unit.apart:
            for module in unit.modules:
                module.forward = _compile(module.forward, [module], backend)


def check_compiled_blocks(network: nn.Module, config: Config) -> None:
    """Raise ConfigError for a whole network of which `parallel.compile: blocks` would compile nothing."""
    if config.parallel.compile == "blocks" and not any(unit.apart for unit in network.units() if unit.role == "block"):
        raise ConfigError(
            "parallel.compile=blocks: the blocks of this model share weights, so none is compiled; set parallel.compile=none"
        )


def compile_loss(network: nn.Module) -> None:
    """Compile the arithmetic on a network's logits. Its products are torch's own in any case."""
    for module in network.modules():
        if isinstance(module, OutputHead):
            module.options = dataclasses.replace(module.options, compiled=True)


def compile_model(network: nn.Module, backend: str | Callable = "inductor") -> None:
    """Compile the forward of a network as a whole, as far as no part of it is left out (a graph break). A block that is recomputed may not be."""
    modules = [module for unit in network.units() for module in unit.modules]
    network.forward = _compile(network.forward, modules, backend, cuts_for_ddp=True)


def _compile(forward: Callable, modules: list[nn.Module], backend: str | Callable, cuts_for_ddp: bool = False) -> Callable:
    """The compiled `forward`, which computes what `modules` compute. Those of them that are recomputed may not be left out of it. `cuts_for_ddp`: see
    `compile_strictly`.
    """
    from torch._dynamo.utils import counters

    compiled, before = compile_strictly(forward, cuts_for_ddp=cuts_for_ddp, backend=backend), {}
    for module in modules:
        if hasattr(module.forward, "breaks_before"):
            module.forward.breaks_before = before

    @functools.wraps(compiled)
    def call(*args: Any, **options: Any) -> Any:
        before.clear()
        before.update(counters["graph_break"])
        return compiled(*args, **options)

    return call


def recompute_blocks(
    network: nn.Module, selective: bool = False, every: int = 1, only: Callable[[Unit], bool] = lambda unit: True
) -> None:
    """Recompute the activations of every so many-th block in backward (Chen et al., arXiv 1604.06174), of those that are asked for.

    Stored are the block's inputs, and with `selective` the results of its projections and attention (arXiv 2205.05198). A block must not
    change such a result in place: torch 2.13 would store the changed one, and say nothing. Every family is tested for it.
    """
    # torch's compiler knows no other function than its own default, which therefore is not named.
    contexts = {"context_fn": _store_products} if selective else {}
    blocks = [unit for unit in network.units() if unit.role == "block"]
    for unit in filter(only, blocks[::every]):
        for module in unit.modules:
            module.forward = _recomputed(module.forward, contexts)


def _recomputed(forward: Callable, contexts: dict[str, Callable]) -> Callable:
    def block(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and call.breaks_before is not None:
            _refuse_to_be_left_out(call.breaks_before)
        return forward(*args, **options)

    @functools.wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, **contexts, **options)
        return forward(*args, **options)

    call.breaks_before = None
    return call


def _refuse_to_be_left_out(before: dict[str, int]) -> None:
    """Raise TrainingError if a block runs uncompiled because of a graph break that was not there `before`, and not because nothing is compiled."""
    from torch._dynamo.utils import counters

    if reasons := [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]:
        raise TrainingError(
            f"torch's compiler leaves a block out that is recomputed ({reasons[-1].splitlines()[0]}), which would run uncompiled; set "
            "parallel.activation_checkpointing=none, or another parallel.compile"
        )


def _store_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    stored = _stored_operators("torch.nn.attention.varlen" in sys.modules)
    return CheckpointPolicy.MUST_SAVE if operator in stored else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _stored_operators(with_varlen: bool) -> set[Any]:
    names = [(torch.ops.aten, name) for name in _STORED] + [(torch.ops.pretrain, name) for name in _OURS]
    names += [(torch.ops.torch_attn, "_varlen_attn")] if with_varlen else []
    return {getattr(ops, name).default for ops, name in names if hasattr(ops, name)} | {torch.ops.higher_order.flex_attention}
