"""What torch's checkpoint writer asks for values: tensors as they are or were held, or tensor by tensor.

A program that never holds a whole model (the importer) writes its tensors one at a time. They are cut into pieces of rows, so that a rank
which starts from them reads its own rows and little more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pretrain.checkpoint.payload import make_whole
from pretrain.errors import CheckpointError

# A tensor that is written by itself is cut into so many pieces at most. None but the last is smaller than that.
PIECES, PIECE_BYTES = 64, 2**20
FILE_BYTES = 4 * 10**9  # of a payload file that is written tensor by tensor


class _LinearPlanner(dcp.DefaultSavePlanner):
    """torch's planner, which would compare each part of a tensor with each other part: half an hour for thousands of ranks."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, and the table of contents. Raises CheckpointError where the parts of a tensor overlap, or leave some of it out."""
        shares, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        for name, item in metadata.state_dict_metadata.items():
            if not make_whole(item):
                raise CheckpointError(
                    f"the parts of {name} that the ranks hold do not make the whole of it; please report this layout"
                )
        paths: dict[str, Any] = {}
        for share in reversed(shares):  # the first rank's count, and the file has always had this order
            paths |= share.planner_data or {}
        return shares, dataclasses.replace(metadata, planner_data=paths if self.flatten_state_dict else None)


class HoldingPlanner(_LinearPlanner):
    """A plan to write tensors as they are when they are written, or as they were when they were held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[MetadataIndex, Tensor] = {}
        """Values by place, where they are other than those of the state dict."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.held[write_item.index] if self.held else super().resolve_data(write_item)

    def release(self) -> None:
        """Let go of everything."""
        self.held, self.state_dict = {}, {}


class StreamingPlanner(_LinearPlanner):
    """A plan to write tensors that are not there yet: the state dict holds their shapes, on the meta device.

    `read` gives the value of one by name. It is asked for them in the order of the state dict, several times in a row for one.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.read = read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, tensor in self.state_dict.items() for item in _pieces(name, tensor)])
        return self.plan

    def release(self) -> None:
        """Nothing is held."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        chunk = write_item.tensor_data.chunk
        whole = self.read(write_item.index.fqn)
        piece = whole if not whole.dim() else whole.narrow(0, chunk.offsets[0], chunk.sizes[0])
        return piece.clone()  # torch.save writes all of what a view looks at


def _pieces(name: str, tensor: Tensor) -> list[WriteItem]:
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, math.ceil(rows / PIECES), math.ceil(rows * PIECE_BYTES / max(1, tensor.nbytes)))
    properties = TensorProperties(dtype=tensor.dtype)
    items = []
    for start in range(0, max(1, rows), step):
        offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim():
            offsets[0], sizes[0] = start, min(step, rows - start)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


class StreamingWriter(dcp.FileSystemWriter):
    """torch's file writer, which would keep every tensor of a file alive until the file is complete."""

    def write_data(self, plan: SavePlan, planner: StreamingPlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        number, stream = 0, None
        try:
            for item in plan.items:
                if stream is None or stream.tell() >= FILE_BYTES:
                    if stream is not None:
                        stream.close()
                    name = f"{plan.storage_data.prefix}{number}.distcp"
                    stream, number = (Path(self.path) / name).open("wb"), number + 1
                start = stream.tell()
                torch.save(planner.resolve_data(item), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        finally:
            if stream is not None:
                stream.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def on_meta(shapes: dict[str, Any], dtype: torch.dtype, others: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """Tensors without values, to plan with. `others`: number formats of those that have another than `dtype`."""
    others = others or {}
    return {name: torch.empty(shape, dtype=others.get(name, dtype), device="meta") for name, shape in shapes.items()}
