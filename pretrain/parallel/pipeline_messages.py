"""The messages between the stages of a pipeline: hidden states one way, their gradients the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.distributed.mesh import Mesh
from pretrain.parallel.pipeline_order import BACKWARD, Action, needs


class Stages(Protocol):
    """What messages ask of a rank's place in a pipeline (`PipelineAxis`)."""

    mesh: Mesh
    rank: int
    stages: int
    rank_of: list[int]
    spans: list[range]
    groups: dict[tuple[str, bool], dist.ProcessGroup]
    network: nn.Module
    waited: float


class Passed(NamedTuple):
    """A forward pass that waits for its backward."""

    taken: tuple[Tensor, ...]
    returned: tuple[Tensor, ...]


class Mail:
    """The messages of a step. Those that come in are asked for one action ahead, so that they travel while the rank computes.

    What was sent is let go once its receiver is known to have it: a message that comes from there was computed later. Otherwise the hidden states of
    all micro-batches would be kept until the end of the step. `places`: when each rank computes what (pipeline_order.py); empty if nothing is
    let go.
    """

    def __init__(self, axis: Stages, places: list[dict[Action, int]]) -> None:
        self.axis, self.places = axis, places
        self.sent: list[tuple[int, Action, dist.Work, Tensor]] = []
        """For each message: the receiver, the action that takes it, the work under way, and the tensor."""
        self.kept: dict[Action, tuple[Tensor, ...]] = {}
        """Messages from this rank to itself."""
        self.coming: dict[Action, tuple[tuple[Tensor, ...], list[dist.Work]]] = {}

    def send(self, kind: str, other: int, number: int, tensors: Iterable[Tensor]) -> None:
        """Send what a stage of this rank returned to another stage."""
        if not 0 <= other < self.axis.stages:
            return
        rank = self.axis.rank_of[other]
        if rank == self.axis.rank:
            self.kept[Action(kind, other, number)] = tuple(x.detach() for x in tensors)
            return
        group = self.axis.groups[kind, rank > self.axis.rank]
        for x in tensors:
            x = x.detach().contiguous()
            work = dist.isend(x, group=group, group_dst=rank, tag=self._tag(other, number))
            self.sent.append((rank, Action(kind, other, number), work, x))

    def _tag(self, stage: int, number: int) -> int:
        return stage + self.axis.stages * number

    def expect(
        self,
        actions: list[Action],
        taken: dict[int, dict[str, Any]],
        inputs: Callable[[int], dict[str, Any]] | None,
        waiting: dict[tuple[int, int], Passed],
    ) -> None:
        """Ask for the messages that these actions take, unless that is done."""
        for action in actions:
            sources = [n for n in needs(action, self.axis.stages - 1) if self.axis.rank_of[n.stage] != self.axis.rank]
            if not sources or action in self.coming:
                continue
            if action.kind == BACKWARD:
                like = waiting[action.stage, action.micro_batch].returned
            else:
                if action.micro_batch not in taken:
                    taken[action.micro_batch] = inputs(action.micro_batch)
                like = self.axis.network.hidden_like(self.axis.spans[action.stage], **taken[action.micro_batch])
            rank = self.axis.rank_of[sources[0].stage]
            group = self.axis.groups[action.kind, self.axis.rank > rank]
            buffers = tuple(torch.empty(x.shape, dtype=x.dtype, device=self.axis.mesh.device) for x in like)
            tag = self._tag(action.stage, action.micro_batch)
            works = [dist.irecv(buffer, group=group, group_src=rank, tag=tag) for buffer in buffers]
            self.coming[action] = buffers, works

    def take(self, action: Action) -> tuple[Tensor, ...]:
        """The message that an action takes; empty for an action without one."""
        if action in self.kept:
            return self.kept.pop(action)
        buffers, works = self.coming.pop(action, ((), []))
        started = time.monotonic()
        for work in works:
            work.wait()
        self.axis.waited += time.monotonic() - started
        if works and self.places:
            self._let_go(action)
        return buffers

    def _let_go(self, action: Action) -> None:
        """Drop the messages that the sender of this action's message had taken before."""
        source = needs(action, self.axis.stages - 1)[-1]
        rank = self.axis.rank_of[source.stage]
        place, held = self.places[rank], []
        for entry in self.sent:
            receiver, taken_by, work, _ = entry
            if receiver == rank and place[taken_by] <= place[source]:
                work.wait()
            else:
                held.append(entry)
        self.sent = held

    def close(self) -> None:
        """Wait until the others have all that was sent."""
        for _, _, work, _ in self.sent:
            work.wait()
