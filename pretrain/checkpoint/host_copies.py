"""Copies of tensors in the host's memory, for a save that is written while training goes on."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class HostCopies:
    """Buffers that are made once and used by every save.

    From a GPU, copies run on a stream of their own, beside the next step's forward and backward passes. `hold_back` makes the update wait for them.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, sources: dict[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Begin to copy. What comes back is complete after `wait`."""
        for key, source in sources.items():
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                self._buffers[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._buffers = {key: self._buffers[key] for key in sources}
        on_gpu = next((source.device for source in sources.values() if source.is_cuda), None)
        if on_gpu is None:
            self._copy(sources)
            return self._buffers
        stream = torch.cuda.Stream(on_gpu)
        stream.wait_stream(torch.cuda.current_stream(on_gpu))  # the update before has to be over
        with torch.cuda.stream(stream):
            self._copy(sources)
            self._copied = stream.record_event()
        return self._buffers

    def _copy(self, sources: dict[Hashable, Tensor]) -> None:
        for key, source in sources.items():
            self._buffers[key].copy_(source, non_blocking=True)

    def hold_back(self) -> None:
        """Let what the GPU does from now on wait for the copies. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()
