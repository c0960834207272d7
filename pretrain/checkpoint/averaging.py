"""The mean of the weights of several checkpoints, as a checkpoint with weights only.

    payload of each checkpoint --one tensor at a time--> sum of its shares in fp64 --> fp32 --> payload

The mean of the last checkpoints of one run often predicts better than each of them (stochastic weight averaging, arXiv 1803.05407; the
transformer of arXiv 1706.03762 was scored so). After a constant learning rate it does much of what a decay would do (arXiv 2507.17634). Checkpoints of several runs from one
start make a model soup (arXiv 2203.05482).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pretrain.checkpoint import files
from pretrain.checkpoint.payload import Payload
from pretrain.checkpoint.planners import on_meta
from pretrain.checkpoint.save import write_alone
from pretrain.config.written import model_identity
from pretrain.errors import CheckpointError, ConfigError, shown
from pretrain.progress import ByteProgress


@dataclass(frozen=True)
class Averaged:
    """What was averaged: the checkpoints, their shares, which add up to 1, and the number of parameters of the mean."""

    checkpoints: tuple[Path, ...]
    shares: tuple[float, ...]
    parameters: int


def checkpoints_to_average(paths: Sequence[Path], last: int | None = None) -> list[Path]:
    """The checkpoints that `average_checkpoints` is to take: of each path itself, or its newest; or the `last` ones of the run at the only path.

    Raises CheckpointError or ConfigError where there are not as many.
    """
    if last is None:
        found = [files.checkpoints_at(path)[-1] for path in paths]
        if len(found) == 1:
            raise ConfigError(f"{found[0]}: one checkpoint has no mean; name several, or a run and --last")
    elif len(paths) == 1:
        found = files.checkpoints_at(paths[0])
        if len(found) < last:
            raise ConfigError(
                f"{paths[0]}: has {len(found)} checkpoint{'s' * (len(found) > 1)}, not the {last} of --last={last}"
            )
        found = found[-last:]
    else:
        raise ConfigError(f"--last={last} is for one run, and {len(paths)} paths are given; give one, or leave --last out")
    return found


def average_checkpoints(checkpoints: Sequence[Path], output: Path, shares: Sequence[float] | None = None) -> Averaged:
    """Write the mean of the weights of checkpoints of one architecture, as `run.init_from` and the tools take it.

    `shares`: how much each of them counts, as positive numbers of any sum; all count alike without. The sum is in fp64, and the mean in
    fp32. Whole numbers, and infinities of a mask, have to be the same in all of them. All but the weights (tokenizer, configuration) is that of the last one. Every
    file is verified first. Raises CheckpointError, ConfigError or DataError, and leaves nothing behind, when anything fails.
    """
    files.refuse_as_output(output)
    shares = _parts_of_one(checkpoints, shares)
    sources = [_Ingredient(path) for path in checkpoints]
    with ByteProgress("verifying the checkpoints", sum(source.bytes for source in sources)) as seen:
        for source in sources:
            files.verify(source.path, seen=seen.add)
    last = sources[-1]
    for source in sources[:-1]:
        source.refuse_other_than(last)
    formats = {name: _format_of_mean(name, sources) for name in last.shapes}
    with ByteProgress("averaging", sum(source.payload_bytes for source in sources)) as done:
        mean, tensors = _Mean(sources, shares, formats, done), on_meta(last.shapes, torch.float32, formats)
        write_alone(output, tensors, _state(sources, shares), last.attachments, mean.read)
    return Averaged(tuple(checkpoints), tuple(shares), sum(math.prod(shape) for shape in last.shapes.values()))


def _parts_of_one(checkpoints: Sequence[Path], shares: Sequence[float] | None) -> list[float]:
    shares = [1.0] * len(checkpoints) if shares is None else list(shares)
    if len(shares) != len(checkpoints):
        raise ConfigError(f"{len(shares)} shares for {len(checkpoints)} checkpoints; give one for each, in their order")
    if odd := [share for share in shares if not 0 < share < math.inf]:
        raise ConfigError(f"a share of {odd[0]}: shares are positive numbers; leave out a checkpoint that is not to count")
    manifests = [files.manifest_hash(path) for path in checkpoints]
    if twice := [path for path, manifest in zip(checkpoints, manifests) if manifests.count(manifest) > 1]:
        also = "" if twice[0] == twice[1] else f", also as {twice[1]}"
        raise ConfigError(f"{twice[0]} is named twice{also}; give it a larger share instead")
    largest = max(shares)  # so that no sum overflows
    whole = math.fsum(share / largest for share in shares)
    parts = [share / largest / whole for share in shares]
    if lost := [share for share, part in zip(shares, parts) if not part]:
        raise ConfigError(f"a share of {lost[0]} is nothing beside {largest}; leave out a checkpoint that is not to count")
    return parts


_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _format_of_mean(name: str, sources: Sequence[_Ingredient]) -> torch.dtype:
    """fp32, or fp64 where a checkpoint has it; integers keep their format. Raises CheckpointError for formats without a mean."""
    formats = {source.payload.items[name].properties.dtype: source for source in sources}
    if all(dtype in _FLOATS for dtype in formats):
        return torch.float64 if torch.float64 in formats else torch.float32
    if len(formats) > 1 or not set(formats) <= set(_INTEGERS):
        dtype, source = next(pair for pair in formats.items() if pair[0] not in _FLOATS)
        raise CheckpointError(
            f"{source.path}: {name} has no mean: it is {dtype}, and all checkpoints need floating-point numbers there, or equal integers"
        )
    return next(iter(formats))


class _Ingredient:
    """A checkpoint to be averaged: what its records say of it, and its payload."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest, self.payload = path, files.read_manifest(path), Payload(path)
        self.bytes = sum(item["bytes"] for item in self.manifest.values())

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        return files.load_state(self.path)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.payload.items[name].size) for name in self.payload.names("model.")}

    @property
    def payload_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(math.prod(shape) * self.payload.items[name].properties.dtype.itemsize for name, shape in self.shapes.items())

    @property
    def attachments(self) -> dict[str, Path]:
        """What lies beside payload and state, of the files that were verified."""
        beside = [name for name in self.manifest if not name.endswith(".distcp")]
        return {name: self.path / name for name in sorted({*beside} - {files.METADATA, files.STATE})}

    def refuse_other_than(self, other: _Ingredient) -> None:
        """Raise CheckpointError where the two hold different architectures, or ids that stand for other texts."""
        ours, theirs = (
            model_identity(dataclasses.asdict(files.model_of(source.path, source.state))) for source in (self, other)
        )
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                self._refuse(other, f"{name} is {shown(ours.get(name))} here and {shown(theirs.get(name))} there")
        if odd := sorted(self.shapes.items() ^ other.shapes.items()):
            self._refuse(other, f"{odd[0][0]} is not there with the same shape")
        ours, theirs = ({n: f["sha256"] for n, f in s.manifest.items() if _decides_ids(n)} for s in (self, other))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                self._refuse(other, f"{name} is {'another file' if name in ours and name in theirs else 'in one of them only'}")

    def _refuse(self, other: _Ingredient, why: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path} and {other.path} have no mean: {why}; take checkpoints of one model and one tokenizer"
        )


def _decides_ids(name: str) -> bool:
    """Whether a file of a checkpoint is one of a tokenizer that decides which ids a text gets."""
    folder, _, file = name.partition("/")
    return folder in ("tokenizer", "source_tokenizer") and file != "tokenizer_config.json"


class _Mean:
    """The means of the tensors, one by one; holds the last one."""

    def __init__(
        self, sources: Sequence[_Ingredient], shares: Sequence[float], formats: dict[str, torch.dtype], done: ByteProgress
    ) -> None:
        self.sources, self.shares, self.formats, self.done = sources, shares, formats, done
        self.current: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """The mean of the tensor of this name. A save asks for each one several times in a row."""
        if name not in self.current:
            self.current = {}  # before the next is read
            self.current = {name: self._sum(name).to(self.formats[name])}
        return self.current[name]

    def _sum(self, name: str) -> Tensor:
        first = self._read(self.sources[0], name)
        has_mean = first.is_floating_point() and bool(first.isfinite().all())
        if not has_mean:  # integers, or a mask of infinities: the same in all of them, or refused
            for source in self.sources[1:]:
                self._refuse_other(source, name, first)
            return first
        total = first.double().mul_(self.shares[0])
        del first  # before the next is read
        for source, share in zip(self.sources[1:], self.shares[1:]):
            self._add(total, source, name, share)
        return total

    def _add(self, total: Tensor, source: _Ingredient, name: str, share: float) -> None:
        # A function of its own, so that nothing of one checkpoint is alive when the next is read.
        value = self._read(source, name)
        if not value.isfinite().all():
            raise CheckpointError(f"{source.path}: {name} holds numbers that are not finite; leave this checkpoint out")
        total.add_(value, alpha=share)

    def _refuse_other(self, source: _Ingredient, name: str, first: Tensor) -> None:
        floats = first.is_floating_point()
        wide, value = torch.float64 if floats else first.dtype, self._read(source, name)
        if not torch.equal(value.to(wide), first.to(wide)):
            what = "holds numbers that are not finite" if floats else f"is {first.dtype}, and not the same in all checkpoints"
            raise CheckpointError(f"{self.sources[0].path}: {name} {what}; leave this checkpoint out")

    def _read(self, source: _Ingredient, name: str) -> Tensor:
        [value] = source.payload.read([name]).values()
        self.done.add(value.nbytes)
        return value


def _state(sources: Sequence[_Ingredient], shares: Sequence[float]) -> dict[str, Any]:
    """state.json of the mean: what it is a mean of, and otherwise what the last checkpoint says of its model and its data."""
    last = sources[-1].state
    averaged = [
        {
            "path": str(source.path.resolve()),
            "manifest": files.manifest_hash(source.path),
            "share": share,
            **{name: source.state[name] for name in ("step", "samples", "tokens")},
        }
        for source, share in zip(sources, shares)
    ]
    carried = {name: last[name] for name in ("step", "samples", "tokens", "model", "identity", "imported") if name in last}
    return {**carried, "world_size": 1, "layout": "averaged", "averaged": averaged}
