"""How much memory a rank of a run needs on a GPU, found on any machine.

A step runs on torch's meta device, where tensors have shapes and no values, and each tensor is counted while it exists. It is the code that runs on a
GPU, and the run's own strategy places the network. One process stands for a rank, and its collectives move nothing (parallel/stand_in.py). In the
place of a kernel of attention stands an operator that keeps as much. Inductor changes compiled blocks and cuts them into forward and backward, and
their operators run one by one.

By formula: the moments of optimizers; the buckets of DDP, whose code needs values. Loads of experts are taken to be even.

Left out: what CUDA and NCCL take for themselves (about 1 GB), workspaces of kernels, and gaps between tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.schema import Config
from pretrain.conventions import FEWEST_STARTS
from pretrain.data.tasks import Spans
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import Ranks
from pretrain.distributed.shards import local
from pretrain.errors import ConfigError
from pretrain.models import attention, network_without_values
from pretrain.models.causal_blocks import causal_attention
from pretrain.models.decoder import Decoder, count_parameters
from pretrain.models.families import family_of
from pretrain.models.masks import Mask, attention_backend
from pretrain.optim.rules import count_moments
from pretrain.parallel.collectives import extend
from pretrain.parallel.ddp import accumulates_in_buckets
from pretrain.parallel.layout import FORMAT_BYTES, Layout, plan_layout, take_rest
from pretrain.parallel.pipeline_order import loss_rank, stages_of
from pretrain.parallel.stand_in import stand_in
from pretrain.parallel.strategy import Strategy
from pretrain.train.allocations import Allocations
from pretrain.train.number_format import FormatChoice
from pretrain.train.plan import with_format
from pretrain.train.resolve import resolve

_GPU = torch.device("cuda")
_MOST_TOKENS = 2**24
"""Tokens of a micro-step that are estimated. It takes minutes: its losses are computed in chunks, one after the other."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank when the most memory is in use."""

    weights: int
    moments: int
    beside: int
    """Weights in the compute format: copies for a step, or what FSDP2 has gathered."""
    buffers: int
    """What DDP sends gradients from."""
    gradients: int
    """Those that exist then."""
    all_gradients: int
    """Those of the end of a step."""
    activations: int
    """All else: what forward keeps for backward, and what the loss, backward and communication need for a moment."""

    @property
    def most(self) -> int:
        """When the most memory is in use."""
        return self.weights + self.moments + self.beside + self.buffers + self.gradients + self.activations


@dataclass(frozen=True)
class MemoryEstimate:
    """`layout`: how the run is spread; `parameters`: those of the whole model; `stages`: of the first rank of each place in the pipeline."""

    layout: Layout
    parameters: int
    stages: list[RankMemory]

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that needs the most."""
        return max(self.stages, key=lambda stage: stage.most)

    @property
    def most(self) -> int:
        """What a GPU must have."""
        return self.fullest.most


def estimate_memory(given: Config, world_size: int, device_memory: int | None = None) -> MemoryEstimate:
    """The memory of a rank of a run on `world_size` GPUs. `device_memory`: bytes of each, for `parallel.strategy: auto`. No file is opened.

    Raises ConfigError for what cannot be trained or is not known here, and LaunchError for a number of processes that does not fit.
    """
    config = with_format(resolve(take_rest(given, world_size)), FormatChoice("bf16", "GPUs compute in it"))
    refuse_unknown(config)
    refuse_micro_sequences(config.batch.micro_sequences, config.data.sequence_length)
    parameters = count_parameters(network_without_values(config))
    layout = plan_layout(config, world_size, parameters, device_memory)
    stages = []
    # Or the compiler, which compiled for another estimate before, compiles for sizes of any number, and keeps other tensors. It imports itself.
    torch.compiler.reset()
    for stage in range(layout.pipeline):
        with stand_in(stage * (world_size // layout.pipeline), world_size) as ranks:
            stages.append(measure_rank(config, layout, ranks))
    return MemoryEstimate(layout, parameters, stages)


def refuse_unknown(config: Config) -> None:
    """Raise ConfigError for a configuration whose memory cannot be estimated."""
    if config.parallel.cuda_graph:
        raise ConfigError("parallel.cuda_graph=true is not known to the estimate of memory; set it to false")
    if config.data.pairs is not None:
        raise ConfigError(
            "data.pairs is not known to the estimate of memory, because lengths of pairs vary; start a short run on a GPU and look at `memory` in its "
            "metrics"
        )
    if not family_of(config.model.family).is_ours:
        raise ConfigError(
            f"model.family={config.model.family} is not known to the estimate of memory, because its attention is code of transformers; start a short "
            "run on a GPU and look at `memory` in its metrics"
        )
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not given, and the estimate of memory opens no data; give it as model.vocab_size=N"
        )


def refuse_micro_sequences(sequences: int, length: int) -> None:
    """Raise ConfigError for more sequences in a micro-step than are estimated. `length`: tokens of each."""
    if sequences * length > _MOST_TOKENS:
        raise ConfigError(
            f"batch.micro_sequences={sequences} is too large for the estimate of memory: it takes at most {_MOST_TOKENS:,} tokens in a micro-step; "
            f"give at most {max(1, _MOST_TOKENS // length)}"
        )


def measure_rank(config: Config, layout: Layout, ranks: Ranks) -> RankMemory:
    """What a rank of this layout holds. All ranks call it together, unless one stands for the others; `ranks` says on which device.

    The second step is counted, for which all is compiled.
    """
    strategy, network = _placed(config, layout, ranks)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    weights = sum(local(parameter).nbytes for parameter in network.parameters())
    copies = 0 if strategy.weight_copies is None else strategy.weight_copies.bytes
    moments = _bytes_of_moments(network, config)
    step = _Step(config, _micro_steps(config, layout))
    strategy.forward_backward(_Step(config, stages_of(config.parallel) if layout.pipeline > 1 else 1), 1)
    known = [*network.parameters(), *(strategy.weight_copies.copies.values() if copies else ())]
    all_gradients = sum(local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None)
    if are_views := _are_views(config, layout):
        known += [parameter.grad for parameter in parameters if parameter.grad is not None]
    else:
        network.zero_grad()
    with Allocations(known) as counted:
        of_gradients = _step_and_note_gradients(strategy, step, counted)
    held = counted.at_most()
    of_gradients |= counted.numbers_of(parameter.grad for parameter in parameters if parameter.grad is not None)
    gradients = all_gradients if are_views else sum(held.get(number, 0) for number in of_gradients)
    gathered = sum(held.get(number, 0) for number in counted.filled_again)
    others = sum(held.values()) - gathered - (0 if are_views else gradients)
    if config.parallel.offload and layout.strategy == "fsdp":
        weights = moments = gradients = 0
    buffers = _bytes_of_buckets(network, config, layout)
    return RankMemory(weights, moments, copies + gathered, buffers, gradients, all_gradients, others)


def _step_and_note_gradients(strategy: Strategy, step: _Step, counted: Allocations) -> set[int]:
    """The numbers of what FSDP2 keeps of gradients between micro-steps."""
    noted: set[int] = set()
    with strategy.noting(lambda: noted.update(counted.numbers_of(strategy.data_axes.partial_gradients()))):
        strategy.forward_backward(step, 1)
    return noted


def _placed(config: Config, layout: Layout, ranks: Ranks) -> tuple[Strategy, Decoder]:
    """The network as the run's strategy places it. DDP places what one process has; with offload, what moves is counted as if it stayed."""
    parallel = dataclasses.replace(config.parallel, offload=False)
    mesh = Mesh(layout.axes, ranks, loss_rank(config.parallel))
    kind = "single" if layout.strategy == "ddp" else layout.strategy
    strategy, network = Strategy(kind, dataclasses.replace(config, parallel=parallel), mesh), network_without_values(config)
    _attend_as_on_a_gpu(network)
    strategy.place(network, _cut_as_on_a_gpu)
    return strategy, network


def _cut_as_on_a_gpu(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
    """A backend of torch.compile: inductor changes the graph and cuts it into forward and backward, and the operators then run one by one."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.compile_fx import compile_fx

    # It would take what is on the meta device for a constant.
    patches = {"joint_graph_constant_folding": False}
    return compile_fx(graph, inputs, inner_compile=lambda part, inputs, **_: boxed_nop(part, inputs), config_patches=patches)


def _micro_steps(config: Config, layout: Layout) -> int:
    """As many as it takes until no step holds more but token ids, at most those of a step. With 1f1b a rank begins a new one after each backward."""
    schedule, stages = config.parallel.pipeline_schedule, stages_of(config.parallel)
    if layout.pipeline == 1:
        enough = 2
    elif schedule == "gpipe":
        enough = layout.micro_steps
    else:
        enough = stages + 1 if schedule == "1f1b" else 2 * stages
    return min(enough, layout.micro_steps)


def _bytes_of_moments(network: nn.Module, config: Config) -> int:
    trained = sum(local(parameter).numel() for parameter in network.parameters() if parameter.requires_grad)
    means = trained if config.optim.ema_decay is not None else 0
    return FORMAT_BYTES[config.precision.moments] * (count_moments(network, config.optim) - means) + 4 * means


def _are_views(config: Config, layout: Layout) -> bool:
    """Whether gradients lie in DDP's buckets. Else those of a micro-step that is not synchronised are made beside them."""
    is_synced = layout.micro_steps == 1 or config.parallel.grad_sync == "every"
    views = config.parallel.ddp.gradient_as_bucket_view and is_synced
    return layout.strategy == "ddp" and (views or accumulates_in_buckets(config, layout.replicate))


def _bytes_of_buckets(network: nn.Module, config: Config, layout: Layout) -> int:
    """Bytes of DDP's buckets, which have the format of the weights. 0 if the buckets are the gradients."""
    is_alike = config.precision.gradients in (None, config.precision.master)
    if layout.strategy != "ddp" or (is_alike and _are_views(config, layout)):
        return 0
    return FORMAT_BYTES[config.precision.master] * count_parameters(network)


class _Step:
    """A step of a rank, for `Strategy`: all tokens are zeros."""

    def __init__(self, config: Config, count: int) -> None:
        self.config, self.count = config, count

    def micro_steps(self, sequences: int) -> int:
        return self.count

    def micro(self, index: int, sequences: int, device: torch.device) -> dict[str, Tensor]:
        data, spans = self.config.data, Spans.of_data(self.config.data)
        if spans is None:
            lengths = dict.fromkeys(
                ["tokens_BT", "targets_BT", *(["documents_BT"] if data.document_mask else [])], data.sequence_length
            )
        else:
            lengths = {"source_BS": spans.source_length, "tokens_BT": spans.target_length, "targets_BT": spans.target_length}
        inputs = {name: torch.zeros(sequences, length, dtype=torch.int64, device=device) for name, length in lengths.items()}
        if data.document_mask and self.config.model.attention_backend == "varlen":
            inputs["starts_BN"] = torch.zeros(sequences, FEWEST_STARTS, dtype=torch.int32, device=device)
        if self.config.model.dropout or self.config.model.attention_dropout:
            inputs["keys_B"] = torch.zeros(sequences, dtype=torch.int64, device=device)
        return inputs


# ---- attention -----------------------------------------------------------------------------------------------------------


def _attend_as_on_a_gpu(network: Decoder) -> None:
    """Let attention keep for backward what it keeps on a GPU. What axes set comes before it."""
    by_blocks = attention_backend(network.config, _GPU, training=True) in ("flex", "varlen")
    for module in network.modules():
        if isinstance(module, attention.Scored):
            extend(module, _AttentionOfGpu, by_blocks=by_blocks)
    if by_blocks:
        network.make_mask = lambda *_: None


class _AttentionOfGpu:
    """Attention with an operator that keeps as much as the kernel of a GPU. `by_blocks`: FlexAttention, or that of documents of any length, which need no
    mask of a tensor.
    """

    by_blocks: bool

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        scale: float,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        dropout: Any = None,
    ) -> Tensor:
        is_flex = self.by_blocks and mask is None
        if dropout is not None or (not is_flex and (soft_cap or sinks is not None)):
            return super().attend(q, k, v, mask, scale, soft_cap, sinks, dropout=dropout)  # matrix products, on any device
        if q.shape[1] != k.shape[1] and (mask is not None or q.dtype == torch.float32):  # see `repeats_groups`
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        if mask is None:
            y, lse, _ = causal_attention(q, k, v, scale)
            if sinks is None:
                return y
            return (y * torch.sigmoid(lse.view(y.shape[:3]) - sinks.float()[:, None])[..., None]).to(y.dtype)  # see `_flex`
        if not q.is_meta:
            return super().attend(q, k, v, mask, scale)
        bias = _bias(mask, q.dtype).expand(*q.shape[:2], q.shape[2], -1)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)[0]


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of a mask in each layer, for the kernel of a GPU that takes one: numbers, in rows of a multiple of 8."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, mask.new_full((), float("-inf"), dtype=dtype))
    odd = mask.shape[-1] % 8
    return functional.pad(mask, (0, 8 - odd))[..., : mask.shape[-1]] if odd else mask
