"""How much memory a rank of a run needs on a GPU, found on any machine.

What stays is counted: weights, gradients, moments, copies. What comes and goes is measured: a micro-step runs on torch's meta device, where
tensors have shapes and no values, and each tensor is counted from when it is made until nobody holds it. It is the code that runs on a GPU. In the
place of a kernel of attention stands an operator that keeps as much. Compiled blocks are cut into forward and backward as torch's compiler cuts
them, and their operators run one by one.

Left out: what CUDA and NCCL take for themselves (about 1 GB), workspaces of kernels, and gaps between tensors.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models import attention, build_network
from pretrain.models.causal_blocks import causal_attention
from pretrain.models.decoder import Decoder, count_parameters
from pretrain.models.families import family_of
from pretrain.models.layers import Embedding
from pretrain.models.masks import Mask, attention_backend
from pretrain.models.output_head import OutputHead
from pretrain.optim.rules import count_moments
from pretrain.parallel.blocks import DTYPES, prepare_blocks, set_master_format
from pretrain.parallel.explain import kept_bytes
from pretrain.parallel.layout import FORMAT_BYTES, Layout, gradient_bytes, plan_layout, take_rest
from pretrain.parallel.weight_copies import WeightCopies, keeps_casts
from pretrain.train.number_format import FormatChoice
from pretrain.train.plan import with_format
from pretrain.train.resolve import resolve

_GPU = torch.device("cuda")
_BLOCK = 512
"""torch's allocator hands out multiples of so many bytes."""
_UNKNOWN = {"pipeline": 1, "tensor": 1, "context": 1, "expert": 1, "activation_offload": False, "cuda_graph": False}
"""Keys of `parallel` that are not known here, with the values that they must have."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a rank. `layout`: how the run is spread; `parameters`: those of the whole model."""

    layout: Layout
    parameters: int
    weights: int
    moments: int
    beside: int
    """Weights in the compute format: copies for a step, or what FSDP2 has gathered at one time."""
    buffers: int
    """What gradients are sent from."""
    gradients: int
    """Where a step has one micro-step: those that exist when the most memory is in use."""
    all_gradients: int
    activations: int
    """All else, when the most memory is in use: what forward keeps for backward, and what the loss and backward need for a moment."""

    @property
    def most(self) -> int:
        """When the most memory is in use."""
        return self.weights + self.moments + self.beside + self.buffers + self.gradients + self.activations


def estimate_memory(given: Config, world_size: int, device_memory: int | None = None) -> MemoryEstimate:
    """The memory of a rank of a run on `world_size` GPUs of `device_memory` bytes, of which `parallel.strategy: auto` asks. Nothing is read.

    Raises ConfigError for what cannot be trained or is not known here, and LaunchError for a number of processes that does not fit.
    """
    config = with_format(resolve(take_rest(given, world_size)), FormatChoice("bf16", "GPUs compute in it"))
    _refuse_unknown(config)
    with torch.device("meta"):
        network = build_network(config.model, config.loss)
    parameters = count_parameters(network)
    layout = plan_layout(config, world_size, parameters, device_memory)
    precision, means = config.precision, parameters if config.optim.ema_decay is not None else 0
    moments = FORMAT_BYTES[precision.moments] * (count_moments(network, config.optim) - means) + 4 * means
    weights, gradients = FORMAT_BYTES[precision.master] * parameters, gradient_bytes(precision, layout.strategy) * parameters
    if config.parallel.offload and layout.strategy == "fsdp":
        weights = gradients = moments = 0
    beside, buffers = _beside(network, config, layout)
    activations, new = _measure(network, config, layout)
    parts, has_sums = layout.state_parts, layout.micro_steps > 1 or layout.strategy == "fsdp" or _are_views(config, layout)
    weights, moments, gradients = (-(-size // parts) for size in (weights, moments, gradients))
    now = gradients if has_sums else new
    if now + activations < gradients:  # the most is in use when a micro-step is over
        now, activations = gradients, 0
    return MemoryEstimate(layout, parameters, weights, moments, beside, buffers, now, gradients, activations)


def _refuse_unknown(config: Config) -> None:
    for name, only in _UNKNOWN.items():
        if getattr(config.parallel, name) != only:
            given, wanted = (str(value).lower() for value in (getattr(config.parallel, name), only))
            raise ConfigError(f"parallel.{name}={given} is not known to the estimate of memory; set it to {wanted}")
    if config.precision.fp8 != "none":
        raise ConfigError(f"precision.fp8={config.precision.fp8} is not known to the estimate of memory; set it to none")
    if config.model.encoder.layers or config.data.pairs is not None or not family_of(config.model.family).splits:
        raise ConfigError(
            "the estimate of memory is for decoders of pretrain, without data.pairs, model.encoder and model.family=hf"
        )
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not given, and the estimate of memory opens no data; give it as model.vocab_size=N"
        )


def _beside(network: nn.Module, config: Config, layout: Layout) -> tuple[int, int]:
    """Weights in the compute format, and what gradients are sent from."""
    kept, options = kept_bytes(config, layout), config.parallel
    if layout.strategy == "single":
        return kept, 0
    if layout.strategy == "ddp":
        # `gradient_bytes` has the buckets where they differ in format from the sums.
        has_own = not _are_views(config, layout) and config.precision.gradients in (None, config.precision.master)
        return kept, has_own * FORMAT_BYTES[config.precision.master] * count_parameters(network)
    sizes = {role: [] for role in ("block", "others")}
    for unit in network.units():
        size = sum(parameter.numel() for module in unit.modules for parameter in module.parameters())
        sizes["block" if unit.role == "block" else "others"].append(size)
    ahead = sorted(sizes["block"])[-2 - options.prefetch :]
    gathered = FORMAT_BYTES[config.precision.compute] * (sum(ahead) + sum(sizes["others"]))
    return max(kept, gathered), FORMAT_BYTES[config.precision.reduce] * max(sizes["block"])


def _are_views(config: Config, layout: Layout) -> bool:
    """Whether gradients lie in DDP's buckets. Those of a micro-step that is not synchronised are made beside them."""
    is_synced = layout.micro_steps == 1 or config.parallel.grad_sync == "every"
    return layout.strategy == "ddp" and config.parallel.ddp.gradient_as_bucket_view and is_synced


# ---- what comes and goes -----------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, without those of `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {_place(tensor) for tensor in known}
        self.live: dict[int, tuple[int, int]] = {}
        """By place a number of its own, because places are used again, and bytes."""
        self.numbers = itertools.count()
        self.now = self.most = 0
        self.at_most: dict[int, int] = {}
        """Bytes by number, when the most were in use."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that torch's compiler works beside it; `is_infra_mode` says so to torch before 2.13."""
        return True

    is_infra_mode = ignore_compile_internals

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        results = operator(*arguments, **(options or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result)
        return results

    def _count(self, tensor: Tensor) -> None:
        place = _place(tensor)
        if place in self.live or place in self.known:
            return
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self.live[place] = next(self.numbers), size
        self.now += size
        if self.now > self.most:
            self.most, self.at_most = self.now, dict(self.live.values())
        weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        self.now -= self.live.pop(place)[1]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _measure(network: Decoder, config: Config, layout: Layout) -> tuple[int, int]:
    """Run two micro-steps of a network on the meta device, and count in the second one, for which all is compiled.

    When the most memory is in use, of all that a micro-step has made: bytes of other things than gradients, and of gradients.
    """
    is_sharded = layout.strategy == "fsdp"
    # FSDP2 hands gathered matrices to the network in the compute format, and takes each gradient away when it is there.
    set_master_format(network, DTYPES[config.precision.compute if is_sharded else config.precision.master])
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if is_sharded and isinstance(module, (Embedding, OutputHead)) and config.precision.reduce == "fp32":
                parameter.grad_dtype = torch.float32
            elif not is_sharded and config.precision.gradients and parameter.dim() > 1:
                parameter.grad_dtype = DTYPES[config.precision.gradients]
    if is_sharded:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    _attend_as_on_a_gpu(network)
    prepare_blocks(network, config, "aot_eager_decomp_partition")
    copies = None
    if keeps_casts(config, layout.strategy, layout.data_size):
        copies = WeightCopies(network, DTYPES[config.precision.compute])
    inputs = _inputs(config)
    with copies.in_use() if copies else nullcontext():
        _micro_step(network, inputs)
        known = [*parameters, *inputs.values(), *(copies.copies.values() if copies else ())]
        if layout.micro_steps > 1:
            known += [parameter.grad for parameter in parameters if parameter.grad is not None]
        else:
            network.zero_grad()
        with Allocations(known) as counted:
            _micro_step(network, inputs)
    places = {_place(parameter.grad) for parameter in parameters if parameter.grad is not None}
    gradients = sum(counted.at_most.get(number, 0) for place, (number, _) in counted.live.items() if place in places)
    return counted.most - gradients, gradients


def _inputs(config: Config) -> dict[str, Tensor]:
    rows, length = config.batch.micro_sequences, config.data.sequence_length
    names = ["tokens_BT", "targets_BT", *(["documents_BT"] if config.data.document_mask else [])]
    inputs = {name: torch.empty(rows, length, dtype=torch.int64, device="meta") for name in names}
    if config.model.dropout or config.model.attention_dropout:
        inputs["keys_B"] = torch.empty(rows, dtype=torch.int64, device="meta")
    return inputs


def _micro_step(network: nn.Module, inputs: dict[str, Tensor]) -> None:
    network(**inputs, with_cross_entropy=True).objective_B.sum().backward()


def _attend_as_on_a_gpu(network: Decoder) -> None:
    """Let attention keep for backward what it keeps on a GPU."""
    by_blocks = attention_backend(network.config, _GPU, training=True) == "flex"

    def attend(
        q, k, v, mask: Mask | None, scale: float, soft_cap: float = 0.0, sinks: Tensor | None = None, dropout=None
    ) -> Tensor:
        if dropout is not None or (not by_blocks and (soft_cap or sinks is not None)):
            return attention.attend(q, k, v, mask, scale, soft_cap, sinks, dropout)  # matrix products, on any device
        if q.shape[1] != k.shape[1] and (
            (mask is not None and not by_blocks) or q.dtype == torch.float32
        ):  # see `repeats_groups`
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return causal_attention(q, k, v, scale)[0]

    for module in network.modules():
        if isinstance(module, attention.Scored):
            module.attend = attend
    if by_blocks:
        network.make_mask = lambda *_: None
