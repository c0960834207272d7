"""The state of a run as named tensors, the same names under every strategy, and the one reader of a checkpoint's payload.

    model.<parameter>                 weights
    optim.<state>.<parameter>         optimizer state, e.g. optim.exp_avg.layers.0.mlp.up.weight
    rng.<rank>.cpu | cuda             torch's generators, per rank

Hyper-parameters are not here: they follow from the configuration and the step. A payload holds tensors only, so nothing is executed to
read it. Two places of stock DCP unpickle what they find: `.metadata` is a raw pickle, and items that are no tensors are loaded with
`weights_only=False`. Here an unpickler that knows the few classes of metadata reads the first. The second does not exist: any other item
is refused.
"""

from __future__ import annotations

import functools
import gc
import math
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh

from pretrain.checkpoint.files import METADATA, read_manifest
from pretrain.distributed.ranks import Ranks
from pretrain.distributed.shards import local
from pretrain.errors import CheckpointError
from pretrain.optim.optimizer import OptimizerSet

PORTION_BYTES = 1 << 30
"""What a rank reads of a checkpoint before all ranks hear of it. They wait for one portion at most `parallel.timeout_seconds`."""


# ---- names ------------------------------------------------------------------------------------------------------------


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights, by name; sharing memory with the model."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_tensors(optimizer: OptimizerSet) -> dict[str, Tensor]:
    """The optimizers' state by state and parameter name. The tensors share memory with the optimizers. Creates a state that does not exist yet."""
    return {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


@torch.no_grad()
def first_nonfinite(tensors: dict[str, Tensor]) -> str | None:
    """The first tensor of which this rank's part holds a value that is not finite; None where there is no such value.

    One pass over the values where they are: the 2-norm of a tensor is not finite where one of its values is not. Those of huge values
    overflow as well, so that suspects are looked at again. (The maximum norm, which cannot, is 50 times slower on a CPU.)
    """
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    found: list[str] = []
    for device in {tensor.device for tensor in parts.values()}:
        here = {n: t for n, t in parts.items() if t.device == device and t.is_floating_point() and t.numel()}
        norms = torch._foreach_norm(list(here.values()), 2) if here else []
        finite = torch.stack([norm.double() for norm in norms]).isfinite().tolist() if norms else []
        found += [name for name, good in zip(here, finite) if not good and not here[name].isfinite().all()]
    return min(found, key=list(tensors).index, default=None)


def rng_tensors(ranks: Ranks) -> dict[str, Tensor]:
    """This rank's random generators. The rank is in the name: a payload keeps one of several plain tensors of one name."""
    tensors = {f"rng.{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        tensors[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return tensors


def restore_rng(tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Set this rank's generators from `rng_tensors` that were read back."""
    for name, value in tensors.items():
        if name == f"rng.{ranks.rank}.cpu":
            torch.set_rng_state(value)
        elif name == f"rng.{ranks.rank}.cuda":
            torch.cuda.set_rng_state(value, ranks.device)


# ---- the reader -------------------------------------------------------------------------------------------------------


class Payload:
    """The tensors of a checkpoint, whatever the layout they were saved under. Nothing is read before it is asked for.

    Its methods raise CheckpointError for a payload that is damaged, hostile or not what is asked for.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    @property
    def items(self) -> dict[str, TensorStorageMetadata]:
        """Shape, number format and pieces of every tensor, by name."""
        return self._metadata.state_dict_metadata

    def names(self, prefix: str = "") -> list[str]:
        """The names that start with `prefix`."""
        return [name for name in self.items if name.startswith(prefix)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, in the format they were saved in. Only their parts of the payload are read."""
        tensors = {name: torch.empty(self.items[name].size, dtype=self.items[name].properties.dtype) for name in names}
        self._fill(tensors)
        return tensors

    def read_all(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names start with `prefix`: see `read`."""
        return self.read(self.names(prefix))

    def load(
        self, tensors: dict[str, Tensor], ranks: Ranks, converts: bool = False, replicas: DeviceMesh | None = None
    ) -> None:
        """Read into `tensors` in place, on all ranks together. A rank reads the pieces that its shards need.

        `replicas`: ranks that hold equal parts of all these tensors. The first of them reads, and sends the others what it has read, so that
        not every node reads the storage. It goes portion by portion. So no rank waits for more than one portion of another's.

        Raises CheckpointError on all ranks, before anything is read, if a name is missing or a shape differs. So it does for another number
        format, unless the load `converts` (DCP itself converts silently).
        """
        ranks.attempt("contents of a checkpoint", lambda: self._check_fit(tensors, converts), CheckpointError)
        reads, portions = replicas is None or replicas.get_local_rank() == 0, _portions(tensors)
        for number in range(ranks.largest("portions of a checkpoint", len(portions))):
            portion = portions[number] if number < len(portions) else {}  # stages of a pipeline differ
            own = portion if reads else {}
            ranks.attempt("loading of a checkpoint", lambda own=own: own and self._fill(own), CheckpointError, storage=True)
            if replicas is not None:
                with ranks.part("state from the replica that read it", device=True):
                    for tensor in portion.values():
                        _hand_on(tensor, replicas.get_group())

    def _check_fit(self, tensors: dict[str, Tensor], converts: bool) -> None:
        for name, tensor in tensors.items():
            item = self.items.get(name)
            if item is None:
                remedy = f"; that parameter had another optimizer: restore optim.groups, or start anew with run.init_from={self.checkpoint}"
                raise CheckpointError(f"{self.checkpoint}: has no {name}{remedy if name.startswith('optim.') else ''}")
            if tuple(item.size) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self.checkpoint}: {name} has shape {list(item.size)}, the run needs {list(tensor.shape)}"
                )
            if not converts and item.properties.dtype != tensor.dtype:
                raise CheckpointError(f"{self.checkpoint}: {name} is {item.properties.dtype}, the run needs {tensor.dtype}")

    def _fill(self, tensors: dict[str, Tensor]) -> None:
        # DCP's own plan of this process alone finds every piece; plans of several ranks would be the same, after two collectives more.
        reader, planner = dcp.FileSystemReader(self.checkpoint), _TensorPlanner()
        try:
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            planner.set_up_planner(tensors, self._metadata, is_coordinator=True)
            reader.read_data(planner.create_local_plan(), planner).wait()
        except CheckpointError:
            raise
        except Exception as error:  # a payload that does not fit its table of contents can raise anything
            reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
            raise CheckpointError(f"{self.checkpoint}: cannot be read: {reason.splitlines()[0]}") from error

    @functools.cached_property
    def _metadata(self) -> Metadata:
        metadata, listed = read_metadata(self.checkpoint), read_manifest(self.checkpoint)
        for stored in (metadata.storage_data or {}).values():
            if stored.relative_path not in listed:
                raise CheckpointError(
                    f"{self.checkpoint}: its tensors lie in {stored.relative_path}, which its manifest does not list, so that no hash proves them"
                )
        return metadata


def _portions(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in portions of which this rank's parts have `PORTION_BYTES` at most, but for a larger tensor, which is one of its own."""
    portions: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        size = local(tensor).nbytes
        if not portions or size > room:
            portions.append({})
            room = PORTION_BYTES
        portions[-1][name] = tensor
        room -= size
    return portions


@torch.no_grad()
def _hand_on(tensor: Tensor, group: ProcessGroup) -> None:
    """The first rank's values for all ranks of a group, in place, in whatever format."""
    own = local(tensor)
    if own.numel():
        sent = own.contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent)


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """A load plan of tensors. Other items do not get past `read_metadata`; this is the second lock on the same door."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"item {read_item.dest_index.fqn} is not a tensor, and reading it could execute code")


# ---- metadata ---------------------------------------------------------------------------------------------------------

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


class MetadataUnpickler(pickle.Unpickler):
    """Reads a table of contents, and nothing that could execute code. Raises UnpicklingError for anything else."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # Equal ones are one object: each part has its size, and its place three times, and so have weights and moments.
        self.size = functools.cache(torch.Size)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) == ("torch", "Size"):
            return self.size
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python searches for unreachable cycles whenever many objects were made. Millions are made here, in no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collections()
def read_metadata(directory: Path) -> Metadata:
    """DCP's metadata of a checkpoint directory. Raises CheckpointError for a missing, broken or hostile file."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: refused: it holds a {type(metadata).__name__}, not checkpoint metadata")
        _check_places(metadata, path)
        _check_tensors(metadata, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything, and hold anything
        raise CheckpointError(f"{path}: refused: {error}") from error
    return metadata


def _check_places(metadata: Metadata, path: Path) -> None:
    if not isinstance(metadata.storage_data or {}, dict):
        raise CheckpointError(f"{path}: refused: it has no table of places")
    good: set[str] = set()  # a file has the parts of many tensors
    for stored in (metadata.storage_data or {}).values():
        file = getattr(stored, "relative_path", None)
        if isinstance(file, str) and file in good:
            continue
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(f"{path}: refused: it names a file that is not in the checkpoint: {file}")
        good.add(file)


def _check_tensors(metadata: Metadata, path: Path) -> None:
    if not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(f"{path}: refused: it has no table of tensors")
    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(item, TensorStorageMetadata):
            raise CheckpointError(f"{path}: refused: item {name} is not a tensor, and reading it could execute code")
        if not isinstance(getattr(item.properties, "dtype", None), torch.dtype):
            raise CheckpointError(f"{path}: refused: {name} has no number format")
        if not make_whole(item):
            raise CheckpointError(f"{path}: refused: the pieces of {name} do not make the whole of it")


_CUT_AT_MOST = 8
"""Dimensions along which a tensor is cut. Layouts cut two or three; a hostile file may not make work without end."""


def make_whole(item: TensorStorageMetadata) -> bool:
    """Whether the pieces of a tensor cover each element exactly once.

    Corners decide it, in a time that grows with the number of pieces and not with its square. Each box has a sign at each of its corners,
    which changes from one corner to the next along an edge. These signs are the mixed derivative of how often an element is covered.
    So those of the boxes add up to those of the whole if and only if the boxes cover each element once.
    """
    whole, boxes = tuple(item.size), [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
    if not boxes or any(len(begin) != len(whole) or len(size) != len(whole) for begin, size in boxes):
        return not boxes and 0 in whole
    # The whole comes first, as a box that is taken away.
    begins, sizes = (
        np.array([first, *others], dtype=np.int64) for first, others in zip(((0,) * len(whole), whole), zip(*boxes))
    )
    if min(begins.min(initial=0), sizes.min(initial=0)) < 0 or (begins > sizes[0] - sizes).any():
        return False
    cut = np.flatnonzero((sizes != sizes[0]).any(0) | (sizes[0] == 0))
    if len(cut) > _CUT_AT_MOST or math.prod(whole[d] + 1 for d in cut) >= 1 << 63:
        return False
    places, signs = np.zeros((len(begins), 1), dtype=np.int64), np.ones((len(begins), 1))
    signs[0] = -1
    for d in cut:
        numbers = places * (whole[d] + 1)  # one number for each place, as in a flat tensor
        places = np.concatenate([numbers + begins[:, [d]], numbers + begins[:, [d]] + sizes[:, [d]]], axis=1)
        signs = np.concatenate([signs, -signs], axis=1)
    _, which = np.unique(places, return_inverse=True)
    return not np.bincount(which.ravel(), weights=signs.ravel()).any()
