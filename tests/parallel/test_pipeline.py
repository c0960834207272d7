"""Ranks that share the layers compute what one process computes: in fp64, where no rounding hides a difference. Their order is that of the papers."""

from __future__ import annotations

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from test_shared_models import LOSS, OWN, batch

from pretrain.config.model_schema import EncoderConfig, ExpertsConfig, Model, Norm
from pretrain.config.schema import Config, Parallel
from pretrain.models.families import complete
from pretrain.observe.equivalence import NEGLIGIBLE
from pretrain.parallel.pipeline_order import BACKWARD, FORWARD, bubble, cut, needs, order

SHAPES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize("schedule, chunks", SHAPES)
@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (2, 6), (3, 3), (4, 8), (4, 4)])
def test_every_pass_comes_once_and_messages_arrive_in_the_order_in_which_they_are_taken(schedule, chunks, ranks, micro_batches):
    """NCCL runs the messages of two ranks in the order of their calls, so one that is overtaken would be taken for another."""
    stages = ranks * chunks
    actions = order(schedule, ranks, stages, micro_batches)
    wanted = {(kind, s, n) for kind in (FORWARD, BACKWARD) for s in range(stages) for n in range(micro_batches)}
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


def test_1f1b_holds_as_many_passes_as_there_are_stages_left_and_gpipe_all():
    for schedule, held in (("1f1b", [4, 3, 2, 1]), ("gpipe", [12] * 4)):
        for own, most in zip(order(schedule, 4, 4, 12), held):
            running = itertools.accumulate(1 if action.kind == FORWARD else -1 for action in own)
            assert max(running) == most


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


# ---- gradients -----------------------------------------------------------------------------------------------------------

DEEP = {"dim": 24, "heads": 4, "ffn_dim": 40, "vocab_size": 61}
MODELS = {
    **OWN,
    "experts in some layers, tied": Model(
        family="custom", layers=4, **DEEP, tie_embeddings=True, experts=ExpertsConfig(count=4, active=2, ffn_dim=16, balance_loss=0.1, dense_layers=[0, 2])
    ),
    "learned positions, a token ahead, dropout": Model(
        family="custom", layers=4, **DEEP, norm=Norm(kind="layer"), positions="learned", predict_ahead=1, dropout=0.1
    ),
    "pairs, a deep encoder, dropout": Model(
        family="transformer", layers=3, **DEEP, tie_embeddings=True, dropout=0.1, norm=Norm(placement="pre"), encoder=EncoderConfig(layers=5, share_embedding=True)
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
    """Of all ranks of this rank's pipeline: whole gradients, and losses and logits as the last stage has them."""
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
    whole = dict(everywhere[-1][1])
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
    from pretrain.parallel.tensor import TensorAxis

    config = Config(parallel=parallel)
    sizes = {"pipeline": parallel.pipeline, "tensor": parallel.tensor, "context": parallel.context}
    mesh = Mesh(sizes, distributed.start(Config(), alone=False))
    axes = {name: kind(mesh) for name, kind in (("tensor", TensorAxis), ("context", ContextAxis)) if sizes[name] > 1}
    found, default = {}, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch, "float32", torch.float64):
            for name, model in wanted.items():
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
    "2 x tensor 2": Parallel(pipeline=2, tensor=2),
    "2 x context 2": Parallel(pipeline=2, context=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_compute_what_one_process_computes(pool, layout):
    from pretrain.errors import ConfigError
    from pretrain.parallel.layout import check_context, check_tensor
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
