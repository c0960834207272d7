"""How a network is spread over ranks, behind verbs that the training loop uses without knowing the layout.

In every layout the gradient that ends up in `parameter.grad` is the sum over all ranks and micro-steps. The loss is divided once, by the
target tokens of the whole step, and nothing is averaged after that. `Strategy` composes what the axes need:

    blocks.py        number formats, recomputation, compilation: alike under every layout
    weight_copies.py weights in the compute format, cast once per step
    cuda_graph.py    a micro-step that is recorded and launched as one, in one process
    tensor.py        the tensor axis: which part of a matrix a rank computes with
    context.py       the context axis: which positions of a sequence; keys and values are gathered, or travel round (ring.py, ring_parts.py);
                     encoder-decoders have two sequences (context_pairs.py)
    pipeline.py      the pipeline axis: which layers, in which order of micro-batches
    expert.py        the expert axis: which experts of a layer
    single.py, ddp.py, fsdp.py
                     the data axes: where weights lie, and how gradients of different samples are added (`DataAxes`)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from pretrain.config.schema import Config
from pretrain.data.stream import StepBatch
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import local
from pretrain.models.loss import Losses
from pretrain.models.width import initial_scales
from pretrain.parallel.blocks import DTYPES, prepare_blocks, set_master_format
from pretrain.parallel.context import ContextAxis
from pretrain.parallel.context_pairs import PairedContextAxis
from pretrain.parallel.cuda_graph import RecordedMicroStep
from pretrain.parallel.expert import ExpertAxis
from pretrain.parallel.fp8 import set_fp8
from pretrain.parallel.initialise import initialise
from pretrain.parallel.layout import STRATEGIES
from pretrain.parallel.pipeline import PipelineAxis
from pretrain.parallel.ring import RingAxis
from pretrain.parallel.tensor import TensorAxis
from pretrain.parallel.weight_copies import WeightCopies, keeps_casts

CONTEXT_AXES = {"allgather": ContextAxis, "ring": RingAxis, "pairs": PairedContextAxis}
"""What makes the context axis, by `parallel.context_method`. Encoder-decoders always use `pairs`."""


class DataAxes(Protocol):
    """How ranks that see different samples hold the weights and add their gradients. It is made with (config, mesh).

    After `finish_step`, `parameter.grad` holds the sum over micro-steps and over the ranks with other samples or positions. It is never
    averaged. `Strategy.forward_backward` adds what the axes tensor and pipeline have in parts.
    """

    def place(self, network: nn.Module, fill: Callable[[nn.Module], None]) -> nn.Module:
        """Put a meta-device network on this rank, give its parameters values with `fill`, return what to call.

        `fill` draws every value by the name of its parameter, so all ranks get the same weights. The result has the network's forward, and the
        network itself keeps the plain parameter names.
        """

    def micro_step(self, last: bool) -> AbstractContextManager:
        """The context of a micro-step's forward and backward. It synchronises gradients as `parallel.grad_sync` says.

        Under `fsdp` it may be that of a backward alone: pipelines make several forward passes before.
        """

    def partial_gradients(self) -> Iterable[Tensor]:
        """What is kept of gradients for the last micro-step of a step, beside those of the parameters."""

    def finish_step(self) -> None:
        """Synchronise what is left after the last micro-step."""

    def release(self) -> None:
        """Free what a forward pass without backward leaves behind. Afterwards parameters are the sharded ones again."""


class Strategy:
    """A network on this rank, as the training loop holds it: `place` it once, then compute with it."""

    def __init__(self, strategy: str, config: Config, mesh: Mesh) -> None:
        module, kind = STRATEGIES[strategy].made_by.split(".")  # imported on use: torch's FSDP takes a moment
        self.config, self.mesh = config, mesh
        self.sharing_replicas = mesh.replicas if strategy == "ddp" else None
        """Ranks that have the same plain tensors, and can share the work of updating them."""
        self.records_micro_steps = config.parallel.cuda_graph and strategy == "single"
        self.keeps_casts = keeps_casts(config, strategy, mesh.data_size)
        self.data_axes: DataAxes = getattr(importlib.import_module(f"pretrain.parallel.{module}"), kind)(config, mesh)
        sizes, method = mesh.sizes, "pairs" if config.model.encoder.layers else config.parallel.context_method
        self.pipeline_axis = PipelineAxis(config, mesh) if sizes["pipeline"] > 1 else None
        self.tensor_axis = TensorAxis(mesh) if sizes["tensor"] > 1 else None
        self.context_axis = CONTEXT_AXES[method](mesh) if sizes["context"] > 1 else None
        self.expert_axis = ExpertAxis(mesh) if sizes["expert"] > 1 else None

    def place(self, network: nn.Module, backend: str | Callable = "inductor") -> None:
        """Spread a network that is on the meta device over the ranks, and draw its initial weights. `backend`: see `prepare_blocks`."""
        set_master_format(network, DTYPES[self.config.precision.master])
        if self.config.precision.fp8 != "none":
            set_fp8(network, self.config.precision, self.mesh.sizes["tensor"])
        if self.pipeline_axis is not None:
            self.pipeline_axis.keep(network, layer_costs(network, self.config))
        if self.tensor_axis is not None:
            self.tensor_axis.split(network, *([self.context_axis.rows] if self.context_axis else []))
        if self.context_axis is not None:
            self.context_axis.split(network)
        if self.expert_axis is not None:
            self.expert_axis.split(network)
        prepare_blocks(network, self.config, backend)
        self.network = network
        """What this rank trains and saves, by the names of the whole network."""
        scales = initial_scales(network, self.config.optim.base_width)
        self._call = self.data_axes.place(network, lambda placed: initialise(placed, self.config.run.seed, scales))
        self.weight_copies = WeightCopies(network, DTYPES[self.config.precision.compute]) if self.keeps_casts else None
        if self.records_micro_steps:
            self._compute = RecordedMicroStep(self._compute, network, self.mesh.device)

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter in sums over layers. Exactly one of the pipeline's ranks that hold a copy does."""
        return self.pipeline_axis is None or self.pipeline_axis.counts(name)

    def sum_over_layers(self, value: Tensor) -> Tensor:
        """The sum over the ranks that have other layers of this rank's part of the network."""
        return value if self.pipeline_axis is None else self.pipeline_axis.sum(value)

    def forward_backward(self, batch: StepBatch, target_tokens: int) -> Losses:
        """Compute the gradients of this rank's share of a step. Return the losses of its tokens by sequence, [B] each, not yet divided.

        `target_tokens`: target tokens of the whole step, over all ranks.
        """
        micro_steps = batch.micro_steps(self.config.batch.micro_sequences)
        if self.pipeline_axis is not None:
            inputs = partial(self._inputs, batch)
            losses = self.pipeline_axis.forward_backward(self._call, micro_steps, inputs, self._backward, target_tokens)
        else:
            with nullcontext() if self.weight_copies is None else self.weight_copies.in_use():
                losses = [self._micro_step(batch, i, i == micro_steps - 1, target_tokens) for i in range(micro_steps)]
        self.data_axes.finish_step()
        if self.tensor_axis is not None:
            self.tensor_axis.sum_gradients()
        if self.pipeline_axis is not None:
            self.pipeline_axis.sum_shared_gradients()
        return Losses(*(torch.cat(part) for part in zip(*losses)))

    def _inputs(self, batch: StepBatch, index: int) -> dict[str, Tensor]:
        return batch.micro(index, self.config.batch.micro_sequences, self.mesh.device)

    def _micro_step(self, batch: StepBatch, index: int, last: bool, target_tokens: int) -> Losses:
        inputs = self._inputs(batch, index)
        with self.data_axes.micro_step(last=last):
            return self._compute(inputs, target_tokens)

    def _compute(self, inputs: dict[str, Tensor], target_tokens: int | Tensor) -> Losses:
        losses = self._call(**inputs, with_cross_entropy=True)
        (losses.objective_B.sum() / target_tokens).backward()
        return Losses(losses.objective_B.detach(), losses.cross_entropy_B)

    def _backward(self, last: bool, run: Callable[[], None]) -> None:
        with self.data_axes.micro_step(last=last):
            run()

    def gradients(self) -> Iterator[Tensor]:
        """This rank's part of all that exists of gradients."""
        yield from (local(p.grad) for p in self.network.parameters() if p.grad is not None)
        yield from self.data_axes.partial_gradients()

    @contextmanager
    def noting(self, note: Callable[[], None]) -> Iterator[None]:
        """Call `note` after each micro-step."""
        micro_step = self.data_axes.micro_step

        @contextmanager
        def noted(last: bool) -> Iterator[None]:
            with micro_step(last=last):
                yield
            note()

        self.data_axes.micro_step = noted
        try:
            yield
        finally:
            self.data_axes.micro_step = micro_step

    def take_wait(self) -> float | None:
        """Seconds that this rank waited for other stages since the last call. None without a pipeline, and on a GPU, where the host does not wait."""
        if self.pipeline_axis is None or self.mesh.device.type == "cuda":
            return None
        waited, self.pipeline_axis.waited = self.pipeline_axis.waited, 0.0
        return waited

    @torch.no_grad()
    def evaluate(self, **inputs: object) -> Tensor:
        """The network's forward without gradients: losses with targets, else logits. Call `release` after the last one."""
        result = self._call(**inputs) if self.pipeline_axis is None else self.pipeline_axis.evaluate(self._call, inputs)
        if self.context_axis is None or inputs.get("targets_BT") is None:
            return result
        return self.context_axis.sum_losses(result)

    def release(self) -> None:
        """Free what `evaluate` leaves behind, before the next step."""
        self.data_axes.release()


def layer_costs(network: nn.Module, config: Config) -> list[int]:
    """FLOPs per token of each layer of a whole network, by which it is cut into stages."""
    length = config.data.sequence_length
    return network.flops_by_layer(*((length, length) if config.model.encoder.layers else (length,)))
