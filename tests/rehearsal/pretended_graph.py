"""A CUDA graph of the pretended device: the operators that were called, and their tensors.

As on a GPU, nothing has happened when a recording ends: what was written is undone, and new memory holds anything. A replay calls the operators again,
and its results go to the memory that the recording used.
"""

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(found) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Call:
    """A call of an operator. `new`: those of its results that are no views of its arguments."""

    def __init__(self, operator, args, named) -> None:
        self.operator, self.args, self.named = operator, args, named
        self.new: list[Tensor] = []

    def call(self):
        result = self.operator(*self.args, **self.named)
        self.new = self._new_in(result)
        return result

    def call_again(self) -> None:
        for tensor, value in zip(self.new, self._new_in(self.operator(*self.args, **self.named)), strict=True):
            tensor.detach().copy_(value)

    def _new_in(self, result) -> list[Tensor]:
        returned = self.operator._schema.returns
        results = [result] if len(returned) == 1 else result or ()
        return [tensor for kind, value in zip(returned, results) if kind.alias_info is None for tensor in tensors_in(value)]

    def written(self) -> list[Tensor]:
        """The tensors that it writes to."""
        arguments = self.operator._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, self.args)} | self.named
        return [
            tensor
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(given.get(argument.name))
        ]


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.new: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors from outside that are written to, and what was in them."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that compiled code stays compiled while it is recorded; `is_infra_mode` says so to torch before 2.13."""
        return True

    is_infra_mode = ignore_compile_internals

    def __torch_dispatch__(self, operator, types, args=(), named=None):
        call = Call(operator, args, named or {})
        for tensor in call.written():
            if memory_of(tensor) not in self.new:
                self.before.setdefault(memory_of(tensor), (tensor, tensor.detach().clone()))
        result = call.call()
        self.new |= {memory_of(tensor): tensor for tensor in call.new}
        self.calls.append(call)
        return result


class CUDAGraph:
    @contextlib.contextmanager
    def recording(self):
        found = Recording()
        with found:
            yield
        for tensor, value in found.before.values():
            tensor.detach().copy_(value)
        for tensor in found.new.values():
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
        self.calls = found.calls

    @torch.no_grad()
    def replay(self) -> None:
        for call in self.calls:
            call.call_again()
