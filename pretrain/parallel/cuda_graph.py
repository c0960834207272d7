"""A micro-step as a CUDA graph (`parallel.cuda_graph`): its kernels are recorded once, and then launched together.

    three micro-steps    run as ever, on the stream that records, so that torch compiles and loads what it needs
    the next one         is recorded, which computes nothing
    from then on         its inputs are copied to where the recorded kernels read them, and the kernels are launched at once

Recorded kernels use the same memory in each launch. So the inputs and the gradients have memory of their own. The number of target tokens of the step
is a tensor: a Python number would be recorded with the kernels.

It helps where kernels take less time than their launch, as in small models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.config.schema import Config
from pretrain.errors import ConfigError, TrainingError
from pretrain.models.families import family_of
from pretrain.models.loss import Losses

UNRECORDED = 3
"""Micro-steps before one is recorded. torch's notes on CUDA graphs ask for as many."""


def check_cuda_graph(config: Config, strategy: str, device: torch.device) -> None:
    """Raise ConfigError for `parallel.cuda_graph` where it has no effect, or where a recorded micro-step would compute something else."""
    parallel, family = config.parallel, config.model.family
    if not parallel.cuda_graph or strategy != "single":
        return
    if device.type != "cuda":
        raise ConfigError("parallel.cuda_graph=true has no effect on a CPU; set it to false")
    reasons = {
        f"model.experts.count={config.model.experts.count}: the host adds up what routers report": config.model.experts.count,
        f"model.family={family} is code of transformers, which may wait for the device": not family_of(family).is_ours,
        "with model.attention_backend=varlen the micro-steps differ in shape": config.model.attention_backend == "varlen",
        "the micro-steps of data.pairs differ in shape": config.data.pairs is not None,
        "parallel.activation_offload=true allocates memory of the host in each micro-step": parallel.activation_offload,
        f"parallel.activation_checkpointing={parallel.activation_checkpointing} asks for the state of random numbers, "
        "which parallel.compile with parallel.activation_memory_budget does not": parallel.activation_checkpointing != "none",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"parallel.cuda_graph=true cannot record this micro-step: {reason}; set parallel.cuda_graph=false"
            )


class RecordedMicroStep:
    """Calls `compute(inputs, target_tokens)`, which adds to the gradients of `network`, and records it for the latest shapes of inputs.

    While somebody watches layers (`network.watch_layer`), it is called without a recording: what is recorded asks nobody.
    """

    def __init__(
        self, compute: Callable[[dict[str, Tensor], Tensor], Losses], network: nn.Module, device: torch.device
    ) -> None:
        self.compute, self.network, self.device = compute, network, device
        self.stream = torch.cuda.Stream(device)
        self.target_tokens = torch.ones((), device=device)
        self.gradients: dict[nn.Parameter, Tensor] = {}
        """The memory of the gradients, once something is recorded. An optimizer may forget gradients between two steps."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.shapes: dict[str, tuple] = {}
        self.taken = 0
        """Micro-steps without a recording, of inputs of these shapes."""

    def __call__(self, inputs: dict[str, Tensor], target_tokens: int) -> Losses:
        self.target_tokens.fill_(target_tokens)
        self._return_gradients()
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
        if shapes != self.shapes:
            self.shapes, self.taken, self.graph = shapes, 0, None
        if self.network.watch_layer is not None:
            return self._without_recording(inputs)
        if self.graph is None and self.taken < UNRECORDED:
            self.taken += 1
            return self._without_recording(inputs)
        if self.graph is None:
            self._record(inputs)
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return Losses(*(part.clone() for part in self.losses))

    def _return_gradients(self) -> None:
        """At the beginning of a step, let the gradients be zeros in their memory."""
        forgotten = [parameter for parameter in self.gradients if parameter.grad is None]
        if forgotten:
            torch._foreach_zero_([self.gradients[parameter] for parameter in forgotten])
        for parameter in forgotten:
            parameter.grad = self.gradients[parameter]

    def _without_recording(self, inputs: dict[str, Tensor]) -> Losses:
        # Autograd adds to a gradient on the stream on which it first saw the parameter. Another one than that which records would break the recording.
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            losses = self.compute(inputs, self.target_tokens)
        current.wait_stream(self.stream)
        self.kinds = {p: p.grad.dtype for p in self.network.parameters() if p.grad is not None}
        return losses

    def _record(self, inputs: dict[str, Tensor]) -> None:
        for parameter, dtype in self.kinds.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            self.gradients[parameter] = parameter.grad
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that read batches and write checkpoints go on meanwhile; only this thread may not wait for the device.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.losses = self.compute(self.inputs, self.target_tokens)
        except RuntimeError as error:
            # torch ends the recording of a micro-step that failed, and that fails as well: the cause is the first error.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise TrainingError(
                f"parallel.cuda_graph=true: this micro-step cannot be recorded ({str(cause).splitlines()[0]}); set parallel.cuda_graph=false"
            ) from error
        self.graph = graph
