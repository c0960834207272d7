"""Counts tensors while they exist, on any device: each one from when an operator makes it until nobody holds it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.distributed.shards import local

_BLOCK = 512
"""torch's allocator hands out multiples of so many bytes."""


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators make or read, except `known` ones. FSDP2 frees the memory of tensors it keeps; they count while they
    have memory.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {place_of_memory(tensor) for tensor in known}
        self.live: dict[int, tuple[int, int]] = {}
        """By place a number of its own, because places are used again, and bytes."""
        self.numbers = itertools.count()
        self.changes: list[tuple[int, int]] = []
        """One after the other: a number, and the bytes that it takes from now on."""
        self.filled_again: set[int] = set()
        """The numbers of tensors to which FSDP2 gave their memory back: gathered weights."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that torch's compiler works beside it; `is_infra_mode` says so to torch before 2.13."""
        return True

    is_infra_mode = ignore_compile_internals

    def __enter__(self) -> Allocations:
        resize, counted = torch.UntypedStorage.resize_, self

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            counted._count(storage, filled_again=True)
            return result

        self.resizing = patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        self.resizing.start()
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        self.resizing.stop()
        super().__exit__(*problem)

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it makes plain operators of it
        results = operator(*arguments, **(options or {}))
        # What is taken may be older: a mask that is kept from step to step.
        for tensor in tree_leaves((results, arguments, options)):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage, filled_again: bool = False) -> None:
        place = storage._cdata
        if place in self.known or (place in self.live and not filled_again):
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if place not in self.live:
            self.live[place] = next(self.numbers), 0
            weakref.finalize(storage, self._set, place, None)
        if filled_again:
            self.filled_again.add(self.live[place][0])
        self._set(place, size)

    def _set(self, place: int, size: int | None) -> None:
        number, _ = self.live[place] if size is not None else self.live.pop(place)
        if size is not None:
            self.live[place] = number, size
        self.changes.append((number, size or 0))

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Their numbers, as far as they are counted and exist."""
        return {self.live[place][0] for place in map(place_of_memory, tensors) if place in self.live}

    def at_most(self) -> dict[int, int]:
        """Bytes by number, when the most were in use."""
        held: dict[int, int] = {}
        now, most, found = 0, 0, 0
        for place, (number, size) in enumerate(self.changes):
            now += size - held.get(number, 0)
            held[number] = size
            if now > most:
                most, found = now, place + 1
        return dict(self.changes[:found])


def place_of_memory(tensor: Tensor) -> int:
    """What tells the memory of a tensor, or of this rank's part of it, from all other memory that is in use."""
    return local(tensor).untyped_storage()._cdata
