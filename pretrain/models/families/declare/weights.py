"""The weight map of a family: which tensors of Hugging Face's our parameters are, in both directions.

An entry names a group of our parameters and the group of their tensors that hold the same numbers, and how those are laid out.
`{layer}` in a name stands for every block and `{expert}` for every routed expert. An entry applies where our parameters exist, so
that one map serves models with and without biases, or with dense layers among those of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pretrain.config.model_schema import Model

Shape = tuple[int, ...]


class TensorLayout(Protocol):
    """How one group of tensors is written as another. Both directions are exact inverses: no number changes."""

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        """Their tensors, of ours in the entry's order."""

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        """Our tensors, of these shapes. Where theirs do not fit, the result has other shapes, which the caller refuses."""


class Same:
    """The same tensor under another name."""

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return ours

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        return theirs


class JoinedByReaders(Same):
    """The same tensors under other names, which readers concatenate before they use them: a file may have cut the whole elsewhere."""

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        return CONCATENATED.to_ours([torch.cat(theirs)], shapes, model)


class Transposed(Same):
    """Matrices as [in, out] (GPT-2's Conv1D), stacked ones each by itself."""

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return [tensor.mT.contiguous() for tensor in ours]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        return [tensor.mT.contiguous() for tensor in theirs]


class OneRow(Same):
    """A vector as a matrix of one row."""

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return [tensor[None] for tensor in ours]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        return [tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor for tensor in theirs]


@dataclass(frozen=True)
class Concatenated:
    """Several of ours, one after the other along the output dimension, as one of theirs; `transposed`: as [in, out]. `dim`: 1 with experts before it."""

    transposed: bool = False
    dim: int = 0

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        whole = torch.cat(ours, self.dim)
        return [whole.T.contiguous() if self.transposed else whole]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        whole = theirs[0].T if self.transposed else theirs[0]
        sizes = [shape[self.dim] for shape in shapes]
        if whole.dim() <= self.dim or sum(sizes) != whole.shape[self.dim]:
            return [whole for _ in shapes]
        return [part.contiguous() for part in whole.split(sizes, self.dim)]


@dataclass(frozen=True)
class Interleaved:
    """Two of ours, [E, F] or [E, F, D], as one of theirs whose last dimension takes from them in turn; `transposed`: as [E, D, 2F]."""

    transposed: bool = False

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        pair = [tensor.mT for tensor in ours] if self.transposed else ours
        return [torch.stack(pair, dim=-1).flatten(-2)]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        parts = theirs[0][..., ::2], theirs[0][..., 1::2]
        return [(part.mT if self.transposed else part).contiguous() for part in parts]


@dataclass(frozen=True)
class FusedPerGroup:
    """Several of ours as one of theirs, whose rows are those of one group of heads after the other: [group 0: q, k, v; group 1: q, k, v; ...].

    `groups` says how many there are. Each has equally many rows of every tensor of ours.
    """

    groups: Callable[[Model], int]

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return [torch.cat([tensor.unflatten(0, (self.groups(model), -1)) for tensor in ours], dim=1).flatten(0, 1)]

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        rows = [shape[0] for shape in shapes]
        if theirs[0].shape[0] != sum(rows):
            return [theirs[0] for _ in shapes]
        groups = self.groups(model)
        parts = theirs[0].unflatten(0, (groups, -1)).split([count // groups for count in rows], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]


class Stacked:
    """One of ours with the experts along the first dimension, as one of theirs per expert."""

    def to_theirs(self, ours: list[Tensor], model: Model) -> list[Tensor]:
        return list(ours[0].unbind())

    def to_ours(self, theirs: list[Tensor], shapes: list[Shape], model: Model) -> list[Tensor]:
        if any(tensor.shape != theirs[0].shape for tensor in theirs):
            odd = next(tensor for tensor in theirs if tensor.shape != theirs[0].shape)
            return [odd]
        return [torch.stack(theirs)]


SAME, TRANSPOSED, ONE_ROW, STACKED, JOINED_BY_READERS = Same(), Transposed(), OneRow(), Stacked(), JoinedByReaders()
FUSED_PER_HEAD = FusedPerGroup(lambda model: model.heads)
INTERLEAVED, INTERLEAVED_TRANSPOSED = Interleaved(), Interleaved(transposed=True)
CONCATENATED, CONCATENATED_TRANSPOSED = Concatenated(), Concatenated(transposed=True)


@dataclass(frozen=True)
class Entry:
    """A line of a weight map: `ours` and `theirs` are one name or several. `when`: the models it is for, by default all that have ours."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: TensorLayout = SAME
    when: Callable[[Model], bool] | None = None


TRAINING_ONLY = "multi_token."
"""Parameters of ours that have no place in Hugging Face's model of the family; exports leave them out."""


def entry(
    ours: str | Sequence[str],
    theirs: str | Sequence[str],
    layout: TensorLayout = SAME,
    when: Callable[[Model], bool] | None = None,
) -> Entry:
    """An `Entry`; a single name may be given as it is."""
    return Entry(*((names,) if isinstance(names, str) else tuple(names) for names in (ours, theirs)), layout, when)


def resolve(entries: Sequence[Entry], model: Model, parameters: Sequence[str]) -> list[Entry]:
    """The map of one model: every name spelled out, and every parameter in exactly one entry, but for those of TRAINING_ONLY.

    Raises ValueError naming a parameter that the map leaves out, or has twice: an error of the family's file.
    """
    existing = {name for name in parameters if not name.startswith(TRAINING_ONLY)}
    resolved, owner = [], {}
    depth = max(model.layers, model.encoder.layers)
    for line in entries:
        if line.when is not None and not line.when(model):
            continue
        layers = range(depth) if any("{layer}" in name for name in line.ours) else range(1)
        for layer in layers:
            ours = tuple(name.format(layer=layer) for name in line.ours)
            present = [name for name in ours if name in existing]
            if not present:
                continue
            if len(present) != len(ours) or any(name in owner for name in ours):
                raise ValueError(f"the weight map has {ours} in part or twice: {present}")
            theirs = tuple(
                name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                for name in line.theirs
                for expert in (range(model.experts.count) if "{expert}" in name else range(1))
            )
            resolved.append(Entry(ours, theirs, line.layout))
            owner |= dict.fromkeys(ours, line)
    if missing := existing - set(owner):
        raise ValueError(f"the weight map has no entry for {sorted(missing)[0]} ({len(missing)} in all)")
    return resolved
