"""Pipeline parallelism: ranks share the layers. Each has one stage or several, and passes hidden states on and their gradients back.

    forward       what the stage before returned --layers--> to the rank of the stage after
    backward      the gradient of what was sent --autograd--> the gradient of what came in, to the rank of the stage before

All ranks of a pipeline are given the same micro-batches. So only hidden states travel: tokens, targets, masks and dropout are at hand everywhere.
Their order is that of `pipeline_order.py`. Only the last stage computes a loss.

A table that several stages use (tied ones; the embedding, where further tokens are predicted; the biases of positions of an encoder-decoder) is a
parameter on each of their ranks. Their gradients are added after the last micro-batch, so that all copies stay equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.config.schema import Config
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.shards import local
from pretrain.models.loss import Losses
from pretrain.parallel.pipeline_order import (
    BACKWARD,
    DEFERRING,
    FORWARD,
    WEIGHT,
    Action,
    cut,
    needs,
    order,
    places,
    share_layers,
    stage_ranks,
    stages_of,
)
from pretrain.parallel.weight_gradients import WeightGradients


class PipelineAxis:
    """The stages of a network on the ranks of the mesh's axis `pipeline`."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.mesh, self.schedule = mesh, config.parallel.pipeline_schedule
        self.ranks, self.rank = mesh.sizes["pipeline"], mesh.coordinates["pipeline"]
        self.stages = stages_of(config.parallel)
        self.rank_of = stage_ranks(self.schedule, self.ranks, self.stages)
        self.weights = WeightGradients() if self.schedule in DEFERRING else None
        self.waited = 0.0
        """Seconds that this rank waited for messages. On a GPU the host does not wait for them."""
        # NCCL runs the messages of two ranks in the order of their calls. So every direction has a group of its own.
        self.groups = {
            (kind, up): mesh.pipeline_group(f"{kind} {'up' if up else 'down'}")
            for kind in (FORWARD, BACKWARD)
            for up in (False, True)
        }

    def keep(self, network: nn.Module, costs: list[float]) -> None:
        """Leave this rank's stages of a network that is on the meta device. `costs`: of each layer."""
        self.spans = cut(costs, self.stages)
        by_rank, self.holders = share_layers(network, self.spans, self.rank_of)
        self.network = network.keep(by_rank[self.rank])
        if self.weights is not None:
            self.weights.split(self.network)

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter. Other ranks may hold a copy of it."""
        return self.holders[name][0] == self.rank

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of this pipeline."""
        # On the device on all ranks: with `parallel.offload` the first parameter of some is on the host.
        together = value.to(self.mesh.device, copy=True)
        dist.all_reduce(together, group=self.groups[FORWARD, False])
        return together.to(value.device)

    # ---- a step -------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        call: Callable[..., Any],
        micro_batches: int,
        inputs: Callable[[int], dict[str, Any]],
        backward: Callable[[bool, Callable[[], None]], None],
        target_tokens: int,
    ) -> list[Losses]:
        """Compute the gradients of a step. Return the losses of each micro-batch, zeros on ranks without the last stage.

        `call` is the network's forward; `inputs` gives a micro-batch; `backward(last, run)` runs a backward pass, `last`: of its stage.
        """
        schedule = self.schedule, self.ranks, self.stages, micro_batches
        own = order(*schedule)[self.rank]
        waiting: dict[tuple[int, int], Passed] = {}
        losses: dict[int, Losses] = {}
        mail = Mail(self, places(*schedule))
        taken: dict[int, dict[str, Any]] = {}
        for place, action in enumerate(own):
            kind, stage, number = action
            if kind == WEIGHT:
                backward(False, lambda s=stage, n=number: self.weights.compute(s, n))
                continue
            if number not in taken:
                taken[number] = inputs(number)
            following = next((later for later in own[place + 1 :] if later.kind != WEIGHT), action)
            # What follows on the same micro-batch needs what this action sends. Asked for before, NCCL would wait for it to connect.
            mail.expect([action] if following.micro_batch == number else [action, following], taken, inputs, waiting)
            if kind == FORWARD:
                waiting[stage, number] = passed = self._forward(call, stage, taken[number], mail.take(action))
                if isinstance(passed.returned, Losses):
                    objective_B, cross_entropy_B = passed.returned
                    losses[number] = Losses(objective_B.detach(), cross_entropy_B)
                    waiting[stage, number] = Passed(passed.taken, (objective_B.sum() / target_tokens,))
                else:
                    mail.send(FORWARD, stage + 1, number, passed.returned)
            else:
                passed, gradients = waiting.pop((stage, number)), mail.take(action)
                if self.weights is not None:
                    self.weights.passing = stage, number
                backward(number == micro_batches - 1, lambda p=passed, g=gradients: _run_backward(p.returned, g))
                mail.send(BACKWARD, stage - 1, number, [_gradient(x) for x in passed.taken])
        mail.close()
        zeros = [torch.zeros(len(taken[i]["tokens_BT"]), device=self.mesh.device) for i in range(micro_batches)]
        return [losses.get(number, Losses(none_B, none_B)) for number, none_B in enumerate(zeros)]

    def _forward(self, call: Callable[..., Any], stage: int, inputs: dict[str, Any], taken: tuple[Tensor, ...]) -> Passed:
        for x in taken:
            x.requires_grad_(torch.is_grad_enabled())
        training = {"with_cross_entropy": True} if torch.is_grad_enabled() else {}
        return Passed(taken, call(**inputs, **training, span=self.spans[stage], hidden=taken))

    def sum_shared_gradients(self) -> None:
        """Add the gradients of parameters that several ranks of the pipeline hold."""
        own = dict(self.network.named_parameters())
        for name, ranks in self.holders.items():
            if len(ranks) > 1 and self.rank in ranks:
                self._sum_over(ranks, local(own[name].grad))

    def _sum_over(self, ranks: list[int], gradient: Tensor) -> None:
        down, up = self.groups[FORWARD, False], self.groups[FORWARD, True]
        mail = gradient.contiguous()
        if self.rank != ranks[0]:
            dist.send(mail, group=up, group_dst=ranks[0])
            dist.recv(mail, group=down, group_src=ranks[0])
        else:
            for rank in ranks[1:]:
                other = torch.empty_like(mail)
                dist.recv(other, group=up, group_src=rank)
                mail += other
            for rank in ranks[1:]:
                dist.send(mail, group=down, group_dst=rank)
        gradient.copy_(mail)

    # ---- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, call: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
        """The result of the last stage, on all ranks of the pipeline."""
        mail, last = Mail(self, []), self.stages - 1
        result = None
        for stage in (stage for stage in range(self.stages) if self.rank_of[stage] == self.rank):
            action = Action(FORWARD, stage, 0)
            mail.expect([action], {0: inputs}, None, {})
            result = self._forward(call, stage, inputs, mail.take(action)).returned
            if stage < last:
                mail.send(FORWARD, stage + 1, 0, result)
        mail.close()
        return self._from_last(result, self.rank_of[last])

    def _from_last(self, result: Tensor, source: int) -> Tensor:
        """The result on the rank `source`. How large it is, that rank says: losses [B] or logits [B, T, V]."""
        group = self.groups[BACKWARD, False]
        shape = torch.zeros(4, dtype=torch.int64, device=self.mesh.device)
        if self.rank == source:
            shape[: result.dim() + 1] = torch.tensor([result.dim(), *result.shape])
        dist.broadcast(shape, group=group, group_src=source)
        dims, *sizes = shape.tolist()
        if self.rank != source:
            dtype = torch.float32 if dims == 1 else self.network.compute_dtype
            result = torch.empty(sizes[:dims], dtype=dtype, device=self.mesh.device)
        dist.broadcast(result.contiguous() if self.rank == source else result, group=group, group_src=source)
        return result


def _run_backward(returned: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    if not gradients:
        returned[0].backward()
        return
    pairs = [(x, gradient) for x, gradient in zip(returned, gradients) if x.requires_grad]  # losses of routers may be constants
    torch.autograd.backward(*zip(*pairs))


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


# ---- messages ----------------------------------------------------------------------------------------------------------


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

    def __init__(self, axis: PipelineAxis, places: list[dict[Action, int]]) -> None:
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
