"""One process that stands for a rank of a run of many, without the others; and on the meta device, without values.

    ranks       all groups exist, and their collectives move nothing (torch's process group `fake`)
    tensors     on the meta device: shapes and no values; on another one, values that mean nothing (`bench.py speed --one-rank-of`)
    FSDP2       takes the meta device for one that has streams, on which all is done at once
    host        what waits there (`parallel.activation_offload`) has sizes here, and no memory

So all the code of a layout runs as it does on that rank of a GPU, and makes tensors of the same sizes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pretrain.distributed.ranks import Ranks, forget_meshes
from pretrain.parallel import activation_offload


class _Stream(torch.cpu.Stream):
    """As a GPU's, it says when it is done: FSDP2 keeps what replicas exchange until then."""

    def record_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()


class _MetaDevice:
    """What torch asks of the module of a kind of devices; it has none for the meta device."""

    Stream, Event, stream = _Stream, torch.cpu.Event, staticmethod(torch.cpu.stream)

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_initialized() -> bool:
        return True


class _Transfers:
    """In the place of `activation_offload.Transfers`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
        with _disable_current_modes():  # memory of the host, which a count of the device's does not see
            copy = torch.empty_like(tensor, device="meta")
        return copy.shape, copy.stride(), copy.dtype

    def to_device(self, sizes: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        return [torch.empty_strided(shape, strides, dtype=dtype, device=self.device) for shape, strides, dtype in sizes]

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        return None


@contextmanager
def stand_in(rank: int, world_size: int, device: torch.device | None = None) -> Iterator[Ranks]:
    """Be a rank of so many, and nobody else. `device`: one on which tensors have values, which mean nothing; None: the meta device.

    Raises RuntimeError in a process that has process groups.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a run already, and cannot stand for another one")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # imported here because it is private

    with _on_meta() if device is None else nullcontext():
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield Ranks(rank, 0, world_size, device or torch.device("meta"))
        finally:
            dist.destroy_process_group()
            forget_meshes()


@contextmanager
def _on_meta() -> Iterator[None]:
    # Imported here because they are private. The first one has collectives for the meta device.
    import torch.distributed._tools.fake_collectives
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with (
        patch.dict(dist.Backend.backend_capability, {"fake": ["cpu", "meta"]}),
        patch.object(torch, "meta", _MetaDevice, create=True),
        patch.object(torch.accelerator, "current_stream", _Stream),
        patch.object(activation_offload, "Transfers", _Transfers),
        patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
    ):
        yield
