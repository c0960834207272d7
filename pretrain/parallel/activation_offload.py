"""What blocks store for backward waits in host memory (`parallel.activation_offload`).

    forward     block i computes                   the tensors of block i - 1 are copied to the host, on a stream of their own
    backward    block i computes its gradients     those of block i - 1 are copied back

So a device holds the stored tensors of about two blocks, not of all. Weights stay: a strategy decides how long they are kept. What a block is given
beside its hidden states stays as well, because all blocks share it: rotary tables, masks, the states of an encoder. With recomputation of
blocks, little but their inputs travels.

No bit changes. On a CPU the copies are made all the same, and save nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

SMALLEST = 1024
"""Elements of the smallest tensor that is copied: small copies cost more than they save."""


def offload_activations(network: nn.Module) -> None:
    """Keep what each block stores for backward in host memory. Call it after all else that changes the forward of blocks."""
    blocks = OffloadedBlocks()
    for unit in network.units():
        if unit.role == "block":
            for module in unit.modules:
                module.forward = functools.partial(blocks.forward, module.forward)


class OffloadedBlocks:
    """The blocks of a network in the order in which they run. They share one stream for copies."""

    def __init__(self) -> None:
        self.transfers: Transfers | None = None
        self.latest: weakref.ref[StoredTensors] | None = None

    def forward(self, forward: Callable, *args: Any, **options: Any) -> Any:
        """Call the forward of a block. Its first tensor is the hidden states."""
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        hidden, *shared = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if self.transfers is None and hidden.device.type != "cpu":
            self.transfers = Transfers(hidden.device)
        stored = StoredTensors(self.transfers, self.latest, {_address(tensor) for tensor in shared})
        self.latest = weakref.ref(stored)
        with saved_tensors_hooks(stored.pack, stored.unpack):
            result = forward(*args, **options)
        stored.end_forward()
        return result


class Transfers:
    """Copies between a device and its host, on a stream of their own. The stand-in for a GPU has another kind (stand_in.py)."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Begin a copy, after what the device has been told to compute."""
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            return torch.empty_like(tensor, device="cpu", pin_memory=self.stream.device.type == "cuda").copy_(
                tensor, non_blocking=True
            )

    def to_device(self, tensors: list[Tensor]) -> list[Tensor]:
        """Begin copies of what is on the host."""
        with self.stream:
            copies = [tensor.to(self.stream.device, non_blocking=True) for tensor in tensors]
        for tensor in copies:
            tensor.record_stream(torch.accelerator.current_stream())
        return copies

    def record(self) -> torch.Event:
        """What happens once the copies that have begun are made."""
        return self.stream.record_event()

    def wait(self, event: torch.Event) -> None:
        """Let the device compute nothing more before that."""
        torch.accelerator.current_stream().wait_event(event)


class StoredTensors:
    """What one pass through one block stores. Autograd's graph holds it, and frees it with the graph."""

    def __init__(self, transfers: Transfers | None, before: weakref.ref[StoredTensors] | None, shared: set[int]) -> None:
        self.transfers, self.shared = transfers, shared
        self._before = before or (lambda: None)
        self.on_device: list[Tensor] = []
        """The tensors, until they are copied; a device may not reuse their memory before. In backward, from when they are back."""
        self.on_host: list[Tensor] = []
        self.numbers: dict[tuple, int] = {}
        self.event: torch.Event | None = None
        """Recorded after the last copy in one direction."""

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Begin to copy a tensor, once for all operators that store it. Its number stands for it."""
        stays = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or type(tensor) is not Tensor
        if stays or tensor.numel() < SMALLEST or tensor.layout != torch.strided or _address(tensor) in self.shared:
            return tensor
        place = (_address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if place not in self.numbers:
            self.numbers[place] = len(self.on_host)
            self.on_device.append(tensor)
            self.on_host.append(self._copy(tensor))
        return self.numbers[place]

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self.transfers is None else self.transfers.to_host(tensor)

    def end_forward(self) -> None:
        """End the block's forward. The tensors of the block before were copied while this one computed, and are freed."""
        if self.transfers is None:
            self.on_device = []
            return
        self.event = self.transfers.record()
        if (before := self._before()) is not None:
            before.free()

    def free(self) -> None:
        """Free the device's tensors once their copies are made."""
        self.transfers.wait(self.event)
        self.on_device = []

    def unpack(self, packed: Tensor | int) -> Tensor:
        """A stored tensor, on the device. Those of the block before begin to come back as well."""
        if isinstance(packed, Tensor):
            return packed
        if self.transfers is None:
            return self.on_host[packed]
        self.bring_back()
        if (before := self._before()) is not None:
            before.bring_back()
        self.transfers.wait(self.event)
        return self.on_device[packed]

    def bring_back(self) -> None:
        """Begin to copy the tensors to the device, unless they are there: those of the last block never left."""
        if self.on_device or not self.on_host:
            return
        self.on_device, self.event = self.transfers.to_device(self.on_host), self.transfers.record()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # memory has no address on the meta device
