"""Counts the collectives of a run, and the bytes that they send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.parallel.traffic import EXCHANGE, GATHER, RECEIVE, REDUCE, SCATTER, SEND

_NAMES = {
    "reduce_scatter": SCATTER,
    "reduce": REDUCE,
    "gather": GATHER,
    "all_to_all": EXCHANGE,
    "alltoall": EXCHANGE,
    "send": SEND,
    "recv": RECEIVE,
}
"""Kinds by a part of the operator's name. The first that fits counts."""


class CountCollectives(TorchDispatchMode):
    """Counts what reaches torch's collective operators, from Python or from DDP's reducer, and the bytes that this rank sends.

    Bytes are those of algorithms on a ring of n ranks. Each rank sends (n - 1) / n of a tensor that is gathered or scattered, and twice as much of one
    that is reduced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = kind_of(function._opname)
            if kind is not None:
                self.counts[kind] += 1
                self.bytes += _bytes_sent(kind, args)
        return function(*args, **(kwargs or {}))


def kind_of(operator: str) -> str | None:
    """The kind of a collective by the name of torch's operator; None for what moves nothing (waits)."""
    if "barrier" in operator or "wait" in operator:
        return None
    plain = operator.replace("allreduce", "reduce")
    return next((kind for part, kind in _NAMES.items() if part in plain), operator.strip("_"))


def _bytes_sent(kind: str, args: tuple) -> float:
    tensors = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    sizes = [tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)]
    ranks = _ranks(args)
    if not sizes or kind == RECEIVE:
        return 0.0
    if kind in (GATHER, SCATTER):  # input and output are both among the arguments
        return max(sizes) * (ranks - 1) / ranks
    if kind == REDUCE:
        return 2 * sum(sizes) * (ranks - 1) / ranks
    if kind == EXCHANGE:
        return _bytes_exchanged(args, ranks)
    return sum(sizes)


def _bytes_exchanged(args: tuple, ranks: int) -> float:
    """The bytes of the second tensor without the part for this rank. `args` are (output, input, group, sizes of what comes, of what goes, ...)."""
    sent, group, splits = args[1], dist.ProcessGroup.unbox(args[2]), args[4]
    if not splits:
        return sent.nbytes * (ranks - 1) / ranks
    row = sent.nbytes / max(1, len(sent))
    return row * (sum(splits) - splits[group.rank()])


def _ranks(args: tuple) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except RuntimeError:  # the operator of a reduction
                continue
    return 1
