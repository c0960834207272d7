"""A checkpoint's payload, read and written one tensor at a time.

For programs that never hold a whole model: the exporter reads what a training run saved, in whatever layout, and the importer writes
what a training run reads. Reading goes through DCP's own plan, so that of sharded tensors every piece is found; written tensors are cut
into pieces of rows, so that a rank which starts from them reads its own rows and little more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pretrain.checkpoint.safe_dcp import SafeReader, TensorPlanner, read_metadata
from pretrain.errors import CheckpointError

PIECES, PIECE_BYTES = 64, 2**20  # a written tensor is cut into so many pieces at most, none smaller than that but the last
FILE_BYTES = 4 * 10**9  # of a written payload file


class SavedTensors:
    """The tensors of a checkpoint whose names start with `prefix`, by the rest of their names; read when asked for."""

    def __init__(self, checkpoint: Path, prefix: str) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix
        self._metadata = read_metadata(checkpoint)
        self._reader = SafeReader(checkpoint)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.items: dict[str, TensorStorageMetadata] = {
            name.removeprefix(prefix): item
            for name, item in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix)
        }

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Whole tensors on the CPU, in the format they were saved in; only their parts of the payload are read."""
        items = {self.prefix + name: self.items[name] for name in names}
        tensors = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in items.items()}
        planner = TensorPlanner()
        try:
            planner.set_up_planner(tensors, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # a payload that does not fit its table of contents can raise anything
            raise CheckpointError(f"{self.checkpoint}: {names[0]} cannot be read: {str(error).splitlines()[0]}") from error
        return list(tensors.values())


class StreamingPlanner(dcp.DefaultSavePlanner):
    """A plan to write tensors that are not there yet: the state dict holds their shapes, on the meta device.

    `read` gives the value of one by name. It is asked for them in the order of the state dict, several times in a row for one.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.read = read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, tensor in self.state_dict.items() for item in _pieces(name, tensor)])
        return self.plan

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
