"""Ranks that share the layers compute what one process computes: in fp64, where no rounding hides a difference. Their order is that of the papers."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from running import some_slow
from test_shared_models import LOSS, OWN, batch

from pretrain.config.model_schema import EncoderConfig, ExpertsConfig, Model, Norm
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config
from pretrain.equivalence.comparison import NEGLIGIBLE
from pretrain.models.families import complete
from pretrain.parallel.pipeline_order import BACKWARD, DEFERRING, FORWARD, WEIGHT, bubble, cut, needs, order

SHAPES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble_v", 2), ("dualpipev", 2)]


def orders(*sizes: tuple[int, int]) -> list[tuple[str, int, int, int]]:
    """Each schedule, with so many stages per rank, on so many ranks with so many micro-batches, if it takes them."""
    return [(*shape, *size) for shape in SHAPES for size in sizes if shape[0] != "dualpipev" or size[1] >= 2 * size[0]]



@pytest.mark.parametrize("schedule, chunks, ranks, micro_batches", orders((2, 2), (2, 6), (3, 3), (4, 8), (4, 4)))
def test_every_pass_comes_once_and_messages_arrive_in_the_order_in_which_they_are_taken(schedule, chunks, ranks, micro_batches):
    """NCCL runs the messages of two ranks in the order of their calls, so one that is overtaken would be taken for another."""
    stages = ranks * chunks
    actions = order(schedule, ranks, stages, micro_batches)
    kinds = (FORWARD, BACKWARD, WEIGHT) if schedule in DEFERRING else (FORWARD, BACKWARD)
    wanted = {(kind, s, n) for kind in kinds for s in range(stages) for n in range(micro_batches)}
    assert sorted(itertools.chain(*actions)) == sorted(wanted)
    place = {action: (rank, i) for rank, own in enumerate(actions) for i, action in enumerate(own)}
    arriving: dict[tuple, list[tuple[int, int]]] = {}
    for action in wanted:
        for source in needs(action_of(action), stages - 1):
            (there, sent), (here, taken) = place[source], place[action_of(action)]
            if there == here:
                assert sent < taken
            else:
                arriving.setdefault((action[0], there, here), []).append((sent, taken))
    for pairs in arriving.values():
        assert [taken for _, taken in sorted(pairs)] == sorted(taken for _, taken in pairs)


def action_of(values: tuple):
    from pretrain.parallel.pipeline_order import Action

    return Action(*values)


@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_is_that_of_the_papers(ranks, micro_batches):
    idle = ranks - 1
    for schedule in ("1f1b", "gpipe"):
        assert bubble(order(schedule, ranks, ranks, micro_batches)) == pytest.approx(idle / (micro_batches + idle))
    for chunks in (2, 3):
        found = bubble(order("interleaved", ranks, ranks * chunks, micro_batches))
        assert found == pytest.approx(idle / (chunks * micro_batches + idle))
    assert bubble(order("zero_bubble", ranks, ranks, micro_batches)) == pytest.approx(idle / (3 * micro_batches + idle))
    if micro_batches >= 2 * ranks:
        for schedule in ("zero_bubble_v", "dualpipev"):
            assert bubble(order(schedule, ranks, 2 * ranks, micro_batches)) == pytest.approx(idle / (6 * micro_batches + idle))


def test_1f1b_holds_as_many_passes_as_there_are_stages_left_and_gpipe_all():
    for schedule, held in (("1f1b", [4, 3, 2, 1]), ("gpipe", [12] * 4)):
        for own, most in zip(order(schedule, 4, 4, 12), held):
            running = itertools.accumulate(1 if action.kind == FORWARD else -1 for action in own)
            assert max(running) == most


@pytest.mark.parametrize("schedule, chunks, most", [("zero_bubble", 1, 4), ("zero_bubble_v", 2, 8), ("dualpipev", 2, 9)])
def test_schedules_without_bubbles_hold_no_more_than_the_first_rank_of_1f1b(schedule, chunks, most):
    """Counted to the gradients of weights, in stages: those of V shapes are half as large. dualpipev holds half a stage more."""
    change = {FORWARD: 1, BACKWARD: 0, WEIGHT: -1}
    for own in order(schedule, 4, 4 * chunks, 12):
        assert max(itertools.accumulate(change[action.kind] for action in own)) == most


def test_fewer_micro_batches_than_ranks_are_all_sent_on_first():
    assert order("1f1b", 4, 4, 2)[0] == order("gpipe", 4, 4, 2)[0]
    assert bubble(order("1f1b", 4, 4, 1)) == pytest.approx(3 / 4)


@pytest.mark.parametrize("costs, stages", [([1] * 8, 3), ([1, 1, 1, 1, 6], 2), ([5, 1, 1, 1, 1, 1, 9], 3), ([3, 1, 4, 1, 5, 9, 2, 6], 4), ([7, 7], 2)])
def test_no_other_cut_has_a_cheaper_dearest_stage(costs, stages):
    spans = cut(costs, stages)
    assert [n for span in spans for n in span] == list(range(len(costs))) and all(spans)
    ends = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))) for cuts in ends)
    assert max(sum(costs[n] for n in span) for span in spans) == best


def test_the_output_head_counts_as_layers():
    """A vocabulary of 32,000 costs as much as several layers of 256: the last stage gets fewer of them."""
    from pretrain.models import build_network
    from pretrain.parallel.strategy import layer_costs

    config = Config(model=complete(Model(family="llama", dim=256, layers=12, heads=4, ffn_dim=768, vocab_size=32000), 512))
    with torch.device("meta"):
        network = build_network(config.model)
    costs = layer_costs(network, config)
    assert sum(costs) == network.flops_per_token(config.data.sequence_length) and len(set(costs[:-1])) == 1
    assert [len(span) for span in cut(costs, 2)] == [10, 2]  # the head costs as much as 7.3 layers


# ---- messages --------------------------------------------------------------------------------------------------------------


def group_names(parallel: Parallel) -> tuple[set[str], set[tuple[int, ...]]]:
    import torch.distributed as dist

    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.parallel.pipeline import PipelineAxis

    mesh = Mesh({"pipeline": parallel.pipeline, "tensor": parallel.tensor}, distributed.start(Config(), alone=False))
    groups = PipelineAxis(Config(parallel=parallel), mesh).groups.values()
    names = {group.group_name for group in groups} | {dist.group.WORLD.group_name}
    members = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    distributed.stop()
    return names, members


@pytest.mark.parametrize("parallel", [Parallel(pipeline=2), Parallel(pipeline=2, tensor=2)])
def test_messages_of_each_kind_and_direction_have_a_group_of_their_own(pool, parallel):
    """A device mesh gave the default group four times where the pipeline had all ranks."""
    for rank, (names, members) in enumerate(pool.launch(2 * parallel.tensor, group_names, parallel)):
        assert len(names) == 5  # and the default one
        assert members == {(rank % parallel.tensor, rank % parallel.tensor + parallel.tensor)}


class Toy(torch.nn.Module):
    """Every layer multiplies a number."""

    def __init__(self, stages: int, events: list[tuple]) -> None:
        super().__init__()
        self.stages, self.events, self.weight = stages, events, torch.nn.Parameter(torch.ones(1))

    def hidden_like(self, span: range, **inputs) -> tuple[torch.Tensor, ...]:
        return (torch.empty(1, device="meta"),) if span.start else ()

    def forward(self, tokens_BT, span, hidden, with_cross_entropy):
        from pretrain.models.loss import Losses

        self.events.append(("compute",))
        x = hidden[0] * self.weight if hidden else self.weight * 1
        return Losses(x, x.detach()) if span.stop == self.stages else (x,)


class Recorder:
    """Takes the place of torch.distributed on a rank that has no others: what it calls, in order; and how much is held until it is sent."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.sent, self.most_held = rank, [], [], 0

    def isend(self, x, group, group_dst, tag):
        self.sent.append(weakref.ref(x))
        self.most_held = max(self.most_held, sum(one() is not None for one in self.sent))
        return self._post(group, (self.rank, group_dst), tag)

    def irecv(self, x, group, group_src, tag):
        return self._post(group, (group_src, self.rank), tag)

    def _post(self, group, way, tag):
        self.events.append(("post", group, way, tag))
        number = sum(event[:3] == ("post", group, way) for event in self.events) - 1
        return SimpleNamespace(wait=lambda: self.events.append(("arrived", group, way, number)))


def recorded(schedule: str, chunks: int, ranks: int, micro_batches: int) -> list[Recorder]:
    from pretrain.parallel import pipeline

    config = Config(parallel=Parallel(pipeline=ranks, pipeline_schedule=schedule, pipeline_chunks=chunks))
    found = []
    for rank in range(ranks):
        place = {"sizes": {"pipeline": ranks}, "coordinates": {"pipeline": rank}, "device": torch.device("cpu")}
        mesh = SimpleNamespace(**place, pipeline_group=lambda name: name)
        axis, recorder = pipeline.PipelineAxis(config, mesh), Recorder(rank)
        axis.spans = {stage: range(stage, stage + 1) for stage in range(axis.stages)}
        axis.network = Toy(axis.stages, recorder.events)

        def backward(last, run, recorder=recorder):
            recorder.events.append(("compute",))
            run()

        with patch.object(pipeline, "dist", recorder):
            axis.forward_backward(axis.network, micro_batches, lambda i: {"tokens_BT": torch.zeros(1, 1)}, backward, 1)
        found.append(recorder)
    return found


def waiting_graph(everyone: list[list[tuple]]) -> TopologicalSorter:
    """What waits for what on NCCL. Two ranks run the messages of a group in the order of their calls, each after what its rank had computed
    by then. The first call of a pair in a group connects them: both hosts wait in it.
    """
    graph, connected = TopologicalSorter(), set()
    for rank, events in enumerate(everyone):
        computed, last, counts, arrived = ("start", rank), {}, {}, []
        for number, event in enumerate(events):
            host = ("host", rank, number)
            graph.add(host, ("host", rank, number - 1))
            if event[0] == "compute":
                done = ("computed", rank, number)
                graph.add(done, host, computed, *arrived)
                computed, arrived = done, []
            elif event[0] == "arrived":
                arrived.append(event)
            elif event[0] == "post":
                _, group, way, _ = event
                pair = group, frozenset(way)
                if (rank, pair) not in connected:
                    connected.add((rank, pair))
                    graph.add(("connected", pair), host)
                    graph.add(("host", rank, number + 1), ("connected", pair))
                counts[group, way] = counts.get((group, way), -1) + 1
                message = ("arrived", group, way, counts[group, way])
                graph.add(message, host, computed, *([last[pair]] if pair in last else []))
                last[pair] = message
    return graph


# Steps of pairs may have one micro-batch: a rank with the last stage and the first asked for the gradient that its own message brings.
FEW = [(schedule, chunks, 3, 1) for schedule, chunks in SHAPES if schedule not in ("interleaved", "dualpipev")]


@pytest.mark.parametrize("schedule, chunks, ranks, micro_batches", orders((2, 2), (2, 6), (3, 6), (4, 4), (4, 8)) + FEW)
def test_ranks_never_wait_for_each_other_in_a_circle(schedule, chunks, ranks, micro_batches):
    events = [recorder.events for recorder in recorded(schedule, chunks, ranks, micro_batches)]
    order_of: dict[tuple, list[list[int]]] = {}
    for own in events:
        posts = [event for event in own if event[0] == "post"]
        for key in {event[1:3] for event in posts}:
            order_of.setdefault(key, []).append([tag for _, *other, tag in posts if tuple(other) == key])
    assert all(len(sides) == 2 and sides[0] == sides[1] for sides in order_of.values())  # none overtakes another
    waiting_graph(events).prepare()  # raises CycleError
    if schedule == "1f1b" and micro_batches > ranks:  # with one group for all, they would
        together = [[(event[0], "one", *event[2:]) if len(event) > 1 else event for event in own] for own in events]
        with pytest.raises(CycleError):
            waiting_graph(together).prepare()


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_what_was_sent_is_let_go_before_the_end_of_a_step(schedule, chunks):
    """The hidden states of all micro-batches, and their gradients, were held until then."""
    few, many = ([one.most_held for one in recorded(schedule, chunks, 4, count)] for count in (16, 64))
    assert few == many and max(many) <= 2 * 4 * chunks


def test_a_sum_over_stages_is_made_on_the_device_on_every_rank():
    """With `parallel.offload`, gradients of matrices are on the host and those of vectors on the device; which comes first differs by stage."""
    from pretrain.parallel import pipeline

    class OnHost:
        device = "host"

        def to(self, device, copy=False):
            return SimpleNamespace(device=device, to=lambda back: f"on the {back}")

    axis = object.__new__(pipeline.PipelineAxis)
    axis.mesh, axis.groups, places = SimpleNamespace(device="device"), {(FORWARD, False): None}, []
    with patch.object(pipeline, "dist", SimpleNamespace(all_reduce=lambda value, group: places.append(value.device))):
        assert axis.sum(OnHost()) == "on the host"
    assert places == ["device"]


# ---- gradients -----------------------------------------------------------------------------------------------------------

DEEP = {"dim": 24, "heads": 4, "ffn_dim": 40, "vocab_size": 61}
MODELS = {
    **OWN,
    "experts in some layers, tied": Model(
        family="custom", layers=4, **DEEP, tie_embeddings=True, experts=ExpertsConfig(count=4, active=2, ffn_dim=16, balance_loss=0.1, dense_layers=[0, 2])
    ),
    "learned positions, a token ahead, dropout": Model(
        family="custom", layers=4, **DEEP, norm=Norm(kind="layer"), positions="learned", predict_ahead=1, dropout=0.1, attention_dropout=0.2
    ),
    "pairs, a deep encoder, dropout": Model(
        family="transformer", layers=3, **DEEP, tie_embeddings=True, dropout=0.1, attention_dropout=0.2, norm=Norm(placement="pre"), encoder=EncoderConfig(layers=5, share_embedding=True)
    ),
}  # fmt: skip


def layers_of(model: Model) -> int:
    return model.layers + model.encoder.layers


def gradients_alone(model: Model) -> dict[str, torch.Tensor]:
    network, inputs = filled(model), batch(model)
    losses = [network(**micro, with_cross_entropy=True) for micro in cut_batch(inputs)]
    for loss in losses:
        (loss.objective_B.sum() / 7).backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
    return found | results(network, losses, inputs)


def results(network, losses: list, inputs: dict) -> dict[str, torch.Tensor]:
    found = {part: torch.cat([getattr(loss, part).detach() for loss in losses]) for part in ("objective_B", "cross_entropy_B")}
    if hasattr(network, "take_router_reports"):
        found |= {f"loads of {layer}": report.counts_E.double() for layer, report in network.take_router_reports().items()}
    return found


def cut_batch(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: x[i : i + 1] for name, x in inputs.items()} for i in range(3)]


def filled(model: Model, axes: tuple = ()) -> torch.nn.Module:
    from torch.distributed.tensor import DTensor

    from pretrain.models import build_network
    from pretrain.parallel.blocks import set_compute_format
    from pretrain.parallel.initialise import initialise

    with torch.device("meta"):
        network = build_network(model, LOSS)
    for split in axes:
        split(network)
    set_compute_format(network, torch.float64)
    network.to_empty(device="cpu")
    initialise(network, 3)
    for parameter in network.parameters():
        local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        local.mul_(6).add_(0.01)
    return network


def gradients_together(model: Model, config: Config, mesh, axes: dict) -> dict[str, torch.Tensor]:
    """Whole gradients from all ranks of this rank's pipeline, and losses and logits as the last stage has them."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from pretrain.parallel.pipeline import PipelineAxis

    pipeline = PipelineAxis(config, mesh)
    splits = [lambda network: pipeline.keep(network, [1] * layers_of(model))]
    if "tensor" in axes:
        splits.append(partial(axes["tensor"].split, **({"rows": axes["context"].rows} if "context" in axes else {})))
    if "context" in axes:
        splits.append(axes["context"].split)
    network, inputs = filled(model, tuple(splits)), batch(model)
    micro = cut_batch(inputs)
    losses = pipeline.forward_backward(network, len(micro), lambda i: micro[i], lambda last, run: run(), 7)
    if "tensor" in axes:
        axes["tensor"].sum_gradients()
    own = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
    if "context" in axes:
        for gradient in own.values():
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=axes["context"].group)
    pipeline.sum_shared_gradients()
    own = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in own.items()}
    found = results(network, losses, inputs)
    if "context" in axes:
        for part in found.values():
            dist.all_reduce(part, group=axes["context"].group)
    logits, summed = evaluated(pipeline, network, inputs, axes.get("context"))
    everywhere: list = [None] * pipeline.ranks
    dist.all_gather_object(everywhere, (own, found, logits, summed), group=pipeline.groups[FORWARD, False])
    whole = dict(everywhere[pipeline.rank_of[-1]][1])
    for gradients, others, stage_logits, stage_summed in everywhere:
        assert torch.equal(stage_logits, logits) and torch.equal(stage_summed, summed)
        for name, gradient in gradients.items():
            assert name not in whole or torch.equal(whole[name], gradient), f"copies of {name} differ"
        whole |= gradients | {name: x for name, x in others.items() if name.startswith("loads")}
    whole["norm"] = pipeline.sum(sum(g.square().sum() for name, g in own.items() if pipeline.counts(name)))
    return whole | {"logits": logits, "evaluated": summed}


@torch.no_grad()
def evaluated(pipeline, network, inputs: dict[str, torch.Tensor], context) -> tuple[torch.Tensor, torch.Tensor]:
    logits = pipeline.evaluate(network, {name: x for name, x in inputs.items() if name not in ("targets_BT", "keys_B")})
    summed = pipeline.evaluate(network, inputs | {"keys_B": None})
    return logits, summed if context is None else context.sum_losses(summed)


def differences(wanted: dict[str, Model], parallel: Parallel) -> dict[str, tuple[float, str]]:
    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.parallel.context import ContextAxis
    from pretrain.parallel.context_pairs import PairedContextAxis
    from pretrain.parallel.tensor import TensorAxis

    config = Config(parallel=parallel)
    sizes = {"pipeline": parallel.pipeline, "tensor": parallel.tensor, "context": parallel.context}
    mesh = Mesh(sizes, distributed.start(Config(), alone=False))
    found, default = {}, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch, "float32", torch.float64):
            for name, model in wanted.items():
                kinds = {"tensor": TensorAxis, "context": PairedContextAxis if model.encoder.layers else ContextAxis}
                axes = {axis: kind(mesh) for axis, kind in kinds.items() if sizes[axis] > 1}
                alone, together = gradients_alone(model), gradients_together(model, config, mesh, axes)
                alone["norm"] = sum(p.square().sum() for key, p in alone.items() if "." in key)
                with torch.no_grad():
                    network, inputs = filled(model), batch(model)
                    alone["logits"] = network(**{k: x for k, x in inputs.items() if k not in ("targets_BT", "keys_B")})
                    alone["evaluated"] = network(**inputs | {"keys_B": None})
                assert alone.keys() == together.keys(), alone.keys() ^ together.keys()
                least = NEGLIGIBLE * max(float(x.norm()) for x in alone.values())
                found[name] = max((float((together[k] - x).norm()) / max(float(x.norm()), least), k) for k, x in alone.items())
    finally:
        torch.set_default_dtype(default)
        distributed.stop()
    return found


LAYOUTS = {
    "2": Parallel(pipeline=2),
    "2, gpipe": Parallel(pipeline=2, pipeline_schedule="gpipe"),
    "2, interleaved": Parallel(pipeline=2, pipeline_schedule="interleaved"),
    "4": Parallel(pipeline=4),
    "2, zero_bubble": Parallel(pipeline=2, pipeline_schedule="zero_bubble"),
    "2, zero_bubble_v": Parallel(pipeline=2, pipeline_schedule="zero_bubble_v"),
    "2 x tensor 2": Parallel(pipeline=2, tensor=2),
    "2 x context 2": Parallel(pipeline=2, context=2),
    "2 x tensor 2, zero_bubble": Parallel(pipeline=2, tensor=2, pipeline_schedule="zero_bubble"),
}


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, ["4", "2 x tensor 2", "2 x context 2", "2 x tensor 2, zero_bubble"]))
def test_stages_compute_what_one_process_computes(pool, layout):
    from pretrain.errors import ConfigError
    from pretrain.parallel.legality import check_context, check_tensor
    from pretrain.parallel.pipeline_order import stages_of

    parallel = LAYOUTS[layout]
    wanted = {}
    for name, model in MODELS.items():
        model = complete(model, 41)
        try:
            check_context(Config(model=model, parallel=parallel))
            check_tensor(model, parallel.tensor)
        except ConfigError:
            continue
        if stages_of(parallel) <= layers_of(model):
            wanted[name] = model
    assert len(wanted) > 3
    ranks = parallel.pipeline * parallel.tensor * parallel.context
    for found in pool.launch(ranks, differences, wanted, parallel):
        worst = max(found, key=lambda name: found[name])
        assert found[worst][0] <= 1e-10, (worst, found[worst])
