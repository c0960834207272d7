"""Safetensors files, written and read one tensor at a time.

    8 bytes    length of the header, little-endian
    header     JSON: tensor name -> dtype, shape and [start, end) of its bytes after the header
    data       the tensors' raw little-endian bytes, one after the other

The library writes a file from tensors that are all in memory, and reads through a memory map whose pages stay resident. Here a
header follows from names, shapes and formats that are known before, and data is written and read with plain file operations. The
format: https://github.com/huggingface/safetensors#format. Whether a file is sound is for the library to say.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.errors import CheckpointError, clipped
from pretrain.storage import unrepeated

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = {code: dtype for dtype, code in CODES.items()}
ALL_DTYPES = DTYPES | {code: dtype for dtype, code in INTEGERS.items()}
"""Number formats by the format's names for them: of weights, and with those of integers."""
MOST_TENSORS, LONGEST_NAME = 100_000, 1_000
"""Tensors of one file, and characters of a name. DeepSeek-V3 has 91,000 tensors in its 163 files together."""
_LONGEST_HEADER = 16 * 2**20  # bytes; with 100,000 tensors of usual names


@dataclass(frozen=True)
class Spec:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


# ---- writing ----------------------------------------------------------------------------------------------------------


def cut_into_shards(specs: Sequence[Spec], shard_bytes: int) -> dict[str, list[Spec]]:
    """File name -> its tensors, in order: as many as fit in `shard_bytes`, and at least one."""
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and (size + spec.nbytes > shard_bytes or len(shards[-1]) == MOST_TENSORS):
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


class ShardedWriter:
    """Writes tensors in the order of `specs` into the files of a model directory, and the index where there are several.

    `hashes` has the sha256 of every tensor's bytes, by name, as they were handed over.
    """

    def __init__(self, directory: Path, specs: Sequence[Spec], shard_bytes: int) -> None:
        self.directory = directory
        self.shards = cut_into_shards(specs, shard_bytes)
        self.hashes: dict[str, str] = {}
        self._places = [(name, spec) for name, shard in self.shards.items() for spec in shard]
        self._file: Any = None
        self._name = ""

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if kind is None:
            if len(self.hashes) != len(self._places):
                raise RuntimeError(f"{len(self.hashes)} of {len(self._places)} tensors were written")
            self._write_index()

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor."""
        file, spec = self._places[len(self.hashes)]
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise RuntimeError(f"{name} {list(tensor.shape)} {tensor.dtype} was written where {spec} was planned")
        if file != self._name:
            self._open(file)
        content = raw_bytes(tensor.contiguous())
        self._file.write(content)
        self.hashes[name] = hashlib.sha256(content).hexdigest()

    def _open(self, name: str) -> None:
        if self._file is not None:
            self._file.close()
        self._file = (self.directory / name).open("wb")
        self._file.write(header_of(self.shards[name]))
        self._name = name

    def _write_index(self) -> None:
        if len(self.shards) == 1:
            return
        total = sum(spec.nbytes for _, spec in self._places)
        index = {"metadata": {"total_size": total}, "weight_map": {spec.name: name for name, spec in self._places}}
        (self.directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def header_of(specs: Sequence[Spec]) -> bytes:
    """The first bytes of a file that holds these tensors, one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": (CODES | INTEGERS)[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # so that the data is aligned
    return len(content).to_bytes(8, "little") + content


# ---- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file; `code` is the format's name for its number format."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A file whose tensors are read one by one. Raises CheckpointError naming the file when it is missing, cut short or damaged."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; only safetensors are read, other formats can execute code")
        try:
            self._refuse_absurd_header()
            with safe_open(path, framework="np"):  # reads the header only, and holds it against the length of the file
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length), object_pairs_hook=unrepeated)
        except (SafetensorError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged: {str(error).splitlines()[0]}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        header.pop("__metadata__", None)
        if longest := max((name for name in header if len(name) > LONGEST_NAME), key=len, default=""):
            raise CheckpointError(f"{path}: a tensor's name has more than {LONGEST_NAME:,} characters: {clipped(longest)}")
        self.places = {
            name: Place(item["dtype"], tuple(item["shape"]), *(8 + length + offset for offset in item["data_offsets"]))
            for name, item in header.items()
        }

    def _refuse_absurd_header(self) -> None:
        """Raise CheckpointError for a header whose reading alone takes minutes, or memory for nothing."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise CheckpointError(
                    f"{self.path}: damaged: its header says {length:,} bytes, and {_LONGEST_HEADER:,} are read at most"
                )
            tensors = file.read(length).count(b"data_offsets")
        if tensors > MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: its header has {tensors:,} tensors, and {MOST_TENSORS:,} are read at most; split the file"
            )

    def read(self, name: str) -> Tensor:
        """A tensor of one of the number formats in ALL_DTYPES."""
        place = self.places[name]
        content = torch.empty(place.end - place.start, dtype=torch.uint8)
        view, done = memoryview(content.numpy()), 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(place.start)
            while done < len(view):
                size = file.readinto(view[done:])
                if not size:
                    raise CheckpointError(f"{self.path}: was cut short while it was read")
                done += size
        return content.view(ALL_DTYPES[place.code]).reshape(place.shape)
