"""torch.distributed.checkpoint, read without executing anything.

Two places of stock DCP unpickle what they find: `.metadata` is a raw pickle, and items that are no tensors are loaded with
`weights_only=False`. Here the first goes through an unpickler that knows the few classes metadata is made of, and the second
does not exist: a payload has tensors only, and any other item is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from pretrain.errors import CheckpointError

METADATA_FILE = ".metadata"

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    *((_DCP + "metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "Metadata", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (_DCP + "filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "Path"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


def _memory_format(kind: type, name: str) -> _MEM_FORMAT_ENCODING:
    """What `getattr` does for the one enumeration that metadata has: Python 3.11.0 to 3.11.3 pickle its members as such a call."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"an attribute of {kind!r} has no place in checkpoint metadata")
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


def read_metadata(directory: Path) -> Metadata:
    """DCP's metadata of a checkpoint directory. Raises CheckpointError for a missing, broken or hostile file."""
    path = directory / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: refused: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: refused: it holds a {type(metadata).__name__}, not checkpoint metadata")
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            raise CheckpointError(f"{path}: refused: item {name} is not a tensor, and reading it could execute code")
    return metadata


class SafeReader(dcp.FileSystemReader):
    """A file reader that takes metadata through the allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """A load plan of tensors. Other items do not get past `read_metadata`; this is the second lock on the same door."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"item {read_item.dest_index.fqn} is not a tensor, and reading it could execute code")
