"""Ranks that share matrices, positions or experts compute what one process computes: in fp64, where no rounding hides a difference, for every family."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from launch_pool import LIMIT_SECONDS

from pretrain.config.attention_schema import AttentionConfig, Latent, LinearAttentionConfig, Relative, Rope
from pretrain.config.model_schema import EncoderConfig, ExpertsConfig, MlpConfig, Model, Norm
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config, Loss
from pretrain.conventions import IGNORED, sample_keys
from pretrain.equivalence.comparison import NEGLIGIBLE
from pretrain.errors import ConfigError
from pretrain.models.attention import Attention
from pretrain.models.families import complete
from pretrain.parallel.collectives import extend
from pretrain.parallel.legality import check_context, check_expert, check_tensor
from pretrain.parallel.ring import RingAxis, RingMask, RingQueries
from pretrain.parallel.tensor_modules import OwnHeads

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from parity import ALL, cases  # noqa: E402

SMALL = {"dim": 24, "layers": 2, "heads": 4, "ffn_dim": 40, "vocab_size": 61}
EXPERTS = ExpertsConfig(
    count=6, active=2, ffn_dim=24, shared=1, shared_gate=True, balance_loss=0.1, router_z_loss=0.01, scoring="sigmoid", correction=True, correction_rate=0.05,
    dense_layers=[0], groups=3, active_groups=2, scale=1.5,
)  # fmt: skip
OWN = {
    "experts, latent attention, tokens further ahead, dropout": Model(
        family="custom", **SMALL, experts=EXPERTS, predict_ahead=2, dropout=0.2, latent=Latent(kv_rank=16, query_rank=12, rope_dim=4, plain_dim=8, value_dim=8)
    ),
    "experts with biases and without gates": Model(
        family="custom", **SMALL, experts=ExpertsConfig(count=4, active=2, ffn_dim=16, router_bias=True), mlp=MlpConfig(bias=True, gated=False)
    ),
    "one key head, sinks, a window, soft-caps, tied": Model(
        family="custom", **SMALL, kv_heads=1, attention=AttentionConfig(sinks=True, window=7, soft_cap=5.0, bias=["query", "key", "value", "output"]),
        logit_soft_cap=3.0, tie_embeddings=True, embedding_multiplier=5.66,
    ),
    "two key heads, sinks, a window, a token ahead": Model(
        family="custom", **SMALL, kv_heads=2, attention=AttentionConfig(sinks=True, window=9), predict_ahead=1
    ),
    "normed queries and keys of all heads, one key head": Model(family="custom", **SMALL, kv_heads=1, norm=Norm(qk="full", placement="reordered")),
    "layer norms, learned positions, parallel residual": Model(
        family="custom", **SMALL, norm=Norm(kind="layer"), positions="learned", parallel_residual=True, dropout=0.1,
        attention=AttentionConfig(bias=["query", "value", "output"]), mlp=MlpConfig(gated=False, activation="gelu", bias=True), rope=Rope(),
    ),
    "two key heads, a window, weights of attention dropped": Model(
        family="custom", **SMALL, kv_heads=2, attention=AttentionConfig(window=9), attention_dropout=0.3, predict_ahead=1
    ),
    "latent attention, its weights dropped": Model(
        family="custom", **SMALL, attention_dropout=0.3, latent=Latent(kv_rank=16, query_rank=12, rope_dim=4, plain_dim=8, value_dim=8)
    ),
    "linear attention, normed before; gated attention, normed after, a window": Model(
        family="custom", **SMALL | {"layers": 3}, kv_heads=2, attention=AttentionConfig(output_gate=True, window=9), norm=Norm(placement="reordered"),
        linear_attention=LinearAttentionConfig(
            pattern=[True, False, True], key_heads=4, value_heads=8, key_dim=5, value_dim=7, norm_placement="pre", norm_eps=1e-3
        ),
    ),
    "linear attention and latent attention, experts, a token ahead": Model(
        family="custom", **SMALL, experts=EXPERTS, predict_ahead=1, dropout=0.2, mlp=MlpConfig(bias=True), norm=Norm(placement="sandwich"),
        latent=Latent(kv_rank=16, query_rank=12, rope_dim=4, plain_dim=8, value_dim=8),
        linear_attention=LinearAttentionConfig(pattern=[False, True], key_heads=4, negative_eigenvalues=True, kernel=3),
    ),
    "Mamba 2, one key head": Model(
        family="custom", **SMALL | {"layers": 3}, kv_heads=2, residual_multiplier=0.3,
        linear_attention=LinearAttentionConfig(kind="mamba2", pattern=[True, False, True], value_heads=8, key_dim=5, value_dim=7, norm_eps=1e-3),
    ),
    "Mamba 2, two key heads, experts, a token ahead": Model(
        family="custom", **SMALL, experts=EXPERTS, predict_ahead=1, dropout=0.2, mlp=MlpConfig(bias=True),
        linear_attention=LinearAttentionConfig(kind="mamba2", pattern=[False, True], key_heads=2, value_heads=8, key_dim=6, value_dim=4, kernel=3),
    ),
    "pairs, pre-norm, tables of their own, dropout": Model(
        family="transformer", **SMALL, tie_embeddings=False, dropout=0.2, attention_dropout=0.3, norm=Norm(placement="pre"),
        encoder=EncoderConfig(layers=2, share_embedding=False, vocab_size=53),
    ),
    "pairs, post-norm, one table": Model(family="transformer", **SMALL, norm=Norm(placement="post"), encoder=EncoderConfig(layers=1, share_embedding=True)),
    "T5": Model(family="t5", **SMALL, encoder=EncoderConfig(layers=2, share_embedding=True), relative=Relative(buckets=8, max_distance=20)),
    # With weights this wide, a disturbance of 2e-16 in them changes gradients of T5 by 2e-11, and by 6e-12 to 1e-8 where weights of attention are
    # dropped, as the scale of scores and the rate are. With these two it is 1.6e-11 at most in four tries on a Zen 4.
    "T5, weights of attention dropped": Model(
        family="t5", **SMALL, attention=AttentionConfig(query_scalar=1296.0), attention_dropout=0.1, encoder=EncoderConfig(layers=2, share_embedding=True), relative=Relative(buckets=8, max_distance=20)
    ),
}  # fmt: skip
ROUNDING, ZERO_SHARE = 1e-14, 1e-4
"""Shares of the largest gradient: below the first one a gradient is rounding of fp64, and may differ by 1e-10 of the second."""
LOSS = Loss(z_loss=1e-2, label_smoothing=0.1)


def models(kind: str, ranks: int, every_family: bool) -> dict[str, Model]:
    """The cases that so many ranks of an axis can share."""
    found = {name: complete(model, 41) for name, model in OWN.items()}
    if every_family:
        found |= {f"{family}: {name}": cases(family)[name] for family, name in ALL}
    return {name: model for name, model in found.items() if is_legal(model, kind, ranks)}


def sizes_of(kind: str, ranks: int) -> dict[str, int]:
    if kind == "expert":  # whose ranks have other samples
        return {"shard": ranks, "expert": ranks}
    several = {"both": {"context": 2, "tensor": 2}, "all": {"context": 2, "tensor": 2, "expert": 2}, "ring": {"context": ranks}, "ring and tensor": {"context": 2, "tensor": 2}}
    return several.get(kind, {kind: ranks})


def is_legal(model: Model, kind: str, ranks: int) -> bool:
    try:
        sizes = sizes_of(kind, ranks)
        check_tensor(model, sizes.get("tensor", 1))
        method = "ring" if kind.startswith("ring") else "allgather"
        check_context(Config(model=model, parallel=Parallel(**sizes, context_method=method)))
        check_expert(model, sizes.get("expert", 1))
    except ConfigError:
        return False
    return True


def batch(model: Model) -> dict[str, torch.Tensor]:
    """Four sequences of a length that no number of ranks divides; targets that carry no loss; documents."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.vocab_size, (4, 42), generator=generator)
    targets = ids[:, 1:].clone()
    targets[1, 5:20] = IGNORED
    inputs = {"tokens_BT": ids[:, :-1], "targets_BT": targets, "keys_B": torch.from_numpy(sample_keys(0, np.arange(4)))}
    if model.encoder.layers:
        inputs["source_BS"] = torch.randint(model.encoder.vocab_size or model.vocab_size, (4, 23), generator=generator)
        inputs["source_lengths_B"] = torch.tensor([23, 7, 12, 20])
    elif not model.mlp.bias:  # without documents as well
        inputs["documents_BT"] = (torch.rand(4, 41, generator=generator) < 0.1).cumsum(dim=1)
    return inputs


def split_network(model: Model, mesh, context_method: str = "allgather") -> tuple:
    """A network with weights, and its tensor axis; None where it is whole."""
    from torch.distributed.tensor import DTensor

    from pretrain.models import build_network
    from pretrain.parallel.blocks import set_compute_format
    from pretrain.parallel.context import ContextAxis
    from pretrain.parallel.context_pairs import PairedContextAxis
    from pretrain.parallel.expert import ExpertAxis
    from pretrain.parallel.initialise import initialise
    from pretrain.parallel.ring import RingAxis
    from pretrain.parallel.tensor import TensorAxis

    with torch.device("meta"):
        network = build_network(model, LOSS)
    of_context = {"ring": RingAxis, "allgather": PairedContextAxis if model.encoder.layers else ContextAxis}[context_method]
    kinds = {"tensor": TensorAxis, "context": of_context, "expert": ExpertAxis}
    tensor, context, expert = (kinds[a](mesh) if mesh and mesh.sizes[a] > 1 else None for a in kinds)
    if tensor is not None:
        tensor.split(network, *([context.rows] if context else []))
    for axis in (context, expert):
        if axis is not None:
            axis.split(network)
    set_compute_format(network, torch.float64)
    network.to_empty(device="cpu")
    initialise(network, 3)
    for parameter in network.parameters():  # wide enough that every part matters, and of one value on all ranks
        local = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        local.mul_(6).add_(0.01)
    return network, tensor


def values_and_gradients(model: Model, mesh=None, context_method: str = "allgather") -> dict[str, torch.Tensor]:
    """Losses, logits, what routers counted and every whole gradient."""
    from torch.distributed.tensor import DTensor

    network, tensor = split_network(model, mesh, context_method)
    every, own = batch(model), slice(None)
    if mesh is not None and mesh.data_size > 1:
        own = slice(mesh.data_rank * 4 // mesh.data_size, (mesh.data_rank + 1) * 4 // mesh.data_size)
    inputs = {name: x[own] for name, x in every.items()}
    losses = network(**inputs, with_cross_entropy=True)
    losses.objective_B.sum().backward()
    if tensor is not None:
        tensor.sum_gradients()
    found = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    if hasattr(network, "take_router_reports"):
        found |= {f"loads of {layer}": report.counts_E.double() for layer, report in network.take_router_reports().items()}
    for name, values in (("objective", losses.objective_B.detach()), ("cross-entropy", losses.cross_entropy_B)):
        found[name] = values.new_zeros(4)
        found[name][own] = values
    if mesh is not None and mesh.data_size * mesh.sizes["context"] > 1:
        for name, part in found.items():  # a data axis adds these up
            if mesh.sizes["expert"] == 1 or ".experts." not in name:  # whose gradients are those of their whole group
                torch.distributed.all_reduce(part, group=mesh.gradient_group())
    assert min(float(g.norm()) for g in found.values()) > 0
    with torch.no_grad():
        logits = network(**{name: x for name, x in every.items() if name not in ("targets_BT", "keys_B")})
    return found | {"logits": logits}


def differences(kind: str, wanted: dict[str, Model]) -> dict[str, tuple[float, str]]:
    """By case: the largest relative difference between all ranks together and one process, and where it is."""
    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh

    _, _, world_size = distributed.launched_ranks()
    mesh = Mesh(sizes_of(kind, world_size), distributed.start(Config(), alone=False))

    found = {}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch, "float32", torch.float64):
            for name, model in wanted.items():
                alone, together = values_and_gradients(model), values_and_gradients(model, mesh, "ring" if kind.startswith("ring") else "allgather")
                assert alone.keys() == together.keys()
                largest = max(float(x.norm()) for x in alone.values())
                # A gradient that is zero but for rounding, as of a bias of keys, which moves all scores alike, is held against more: 1e-10 of
                # the usual share would be less than half a unit in the last place of what cancels.
                least = {k: (ZERO_SHARE if x.norm() < ROUNDING * largest else NEGLIGIBLE) * largest for k, x in alone.items()}
                gaps = ((float((together[k] - x).norm()) / max(float(x.norm()), least[k]), k) for k, x in alone.items())
                found[name] = max(gaps)
    finally:
        torch.set_default_dtype(default)
        distributed.stop()
    return found


# Every case of every family with `-m slow`: python -m pytest tests/parallel/test_shared_models.py -m slow
LONG = (pytest.mark.slow, pytest.mark.timeout(1200))
SIZES = [(2, False), (4, False), pytest.param(2, True, marks=LONG), pytest.param(4, True, marks=LONG)]


@pytest.mark.parametrize("kind", ["tensor", "context", "ring", "ring and tensor", "both", "expert", "all"])
@pytest.mark.parametrize("ranks, every_family", SIZES)
def test_ranks_that_share_a_model_compute_what_one_process_computes(pool, kind, ranks, every_family, monkeypatch):
    monkeypatch.setattr("launch_pool.LIMIT_SECONDS", 1200 if every_family else LIMIT_SECONDS)  # over 100 models
    if kind in ("both", "all", "ring and tensor") and ranks == 2:
        pytest.skip("two axes need four ranks")
    wanted = models(kind, ranks, every_family)
    with_experts = "expert" in sizes_of(kind, ranks)
    assert len(wanted) > ((20 if every_family else 0) if with_experts else (100 if every_family else 3))
    for found in pool.launch(ranks, differences, kind, wanted):
        assert found.keys() == wanted.keys()
        worst = max(found, key=lambda name: found[name])
        assert found[worst][0] <= 1e-10, (worst, found[worst])


class RingOfOne:
    """What the ring asks of the axis `context`, with this rank alone on it."""

    rank, size, parts = 0, 1, RingAxis.parts


@pytest.mark.parametrize("own, used", [(slice(0, 2), slice(0, 1)), (slice(2, 4), slice(0, 1)), (slice(6, 8), slice(1, 2))])
def test_tensor_ranks_that_share_key_heads_take_their_own_round_the_ring(own, used):
    """Four ranks with both of two key heads at hand: query heads met the keys of another head. A sink of each of all heads did not fit."""
    attention = Attention.__new__(Attention)
    torch.nn.Module.__init__(attention)
    attention.watch_scores = None
    q_BHTG, k_BKTG, v_BKTG = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    arguments = q_BHTG, k_BKTG, v_BKTG, None, 0.25, 0.0, torch.randn(8)
    extend(attention, OwnHeads, own_heads=own, used_keys=used)
    expected = attention.attend(*arguments)
    extend(attention, RingQueries, context=RingOfOne())
    found = attention.attend(*arguments[:3], RingMask(None, 0, 4), *arguments[4:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def cost_of_forward(kind: str, model: Model, length: int) -> list[tuple[int, int]]:
    """The bytes of activations that autograd keeps on this rank for backward, and FLOPs: on its own, and sharing with the others."""
    from torch.distributed.tensor import DTensor
    from torch.utils.flop_counter import FlopCounterMode

    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.models import build_network
    from pretrain.parallel.context import ContextAxis
    from pretrain.parallel.initialise import initialise
    from pretrain.parallel.tensor import TensorAxis

    _, _, world_size = distributed.launched_ranks()
    mesh = Mesh({kind: world_size}, distributed.start(Config(), alone=False))
    found = []
    for axis in (None, {"tensor": TensorAxis, "context": ContextAxis}[kind](mesh)):
        with torch.device("meta"):
            network = build_network(model)
        if axis is not None:
            axis.split(network)
        network.to_empty(device="cpu")
        initialise(network, 0)
        ids = torch.arange(4 * (length + 1)).view(4, -1) % model.vocab_size
        weights = {(p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr() for p in network.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(x: torch.Tensor, kept=kept) -> torch.Tensor:
            storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = network(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:])
        assert loss.requires_grad
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:])
        found.append((sum(s.nbytes() for place, s in kept.items() if place not in weights), counter.get_total_flops()))
    distributed.stop()
    return found


@pytest.mark.parametrize("kind", ["tensor", "context"])
def test_ranks_share_activations_and_work_evenly(pool, kind):
    """What backward needs of gathered tensors is whole on every rank: inputs of sublayers, or keys and values."""
    model = complete(Model(family="llama", dim=128, layers=4, heads=4, kv_heads=1, ffn_dim=512, vocab_size=8000), 512)
    costs = pool.launch(4, cost_of_forward, kind, model, 512)
    for (kept, work), (kept_together, work_together) in costs:
        assert 0.2 * kept < kept_together < 0.4 * kept
        # One process multiplies all queries with all keys; under `context` the later keys of a stretch are left out.
        assert 0.2 * work < work_together < 0.27 * work
    assert len({work for _, (_, work) in costs}) == 1


def masks_of_forward(model: Model, length: int) -> tuple[int, int, int]:
    """The bytes that autograd keeps on this rank for backward without documents and with them, and the most elements of a mask that is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.models import build_network
    from pretrain.parallel.context import ContextAxis
    from pretrain.parallel.initialise import initialise

    class LargestMask(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if (
                isinstance(result, torch.Tensor)
                and result.dim() > 1
                and result.shape[-1] > length // 8
                and result.dtype == torch.bool
            ):
                self.elements = max(self.elements, result.numel())
            return result

    _, _, world_size = distributed.launched_ranks()
    axis = ContextAxis(Mesh({"context": world_size}, distributed.start(Config(), alone=False)))
    with torch.device("meta"):
        network = build_network(model)
    axis.split(network)
    network.to_empty(device="cpu")
    initialise(network, 0)
    ids = torch.arange(length + 1)[None] % model.vocab_size
    bytes_kept = []
    for documents in ({}, {"documents_BT": (torch.arange(length) // 100)[None]}):
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(x: torch.Tensor, kept=kept) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), LargestMask() as made:
            network(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:], **documents)
        bytes_kept.append(sum(storage.nbytes() for storage in kept.values()))
    distributed.stop()
    return *bytes_kept, made.elements


def test_ranks_make_their_rows_of_a_mask_once_for_all_layers(pool):
    """Every rank made the whole mask of documents, T x T, and each layer kept its own copy of the rank's rows."""
    length = 512
    model = complete(Model(family="llama", dim=32, layers=4, heads=4, kv_heads=1, ffn_dim=64, vocab_size=100), length)
    for plain, masked, elements in pool.launch(4, masks_of_forward, model, length):
        assert masked <= 1.02 * plain  # which has a mask of that size too
        assert 0 < elements <= length // 8 * length


def graphs_of_blocks(model: Model, length: int) -> list[set[str]]:
    """The operators of every graph that is compiled of the network's blocks on this rank."""
    from pretrain.distributed import ranks as distributed
    from pretrain.distributed.mesh import Mesh
    from pretrain.models import build_network
    from pretrain.parallel.blocks import compile_blocks
    from pretrain.parallel.context import ContextAxis
    from pretrain.parallel.initialise import initialise

    _, _, world_size = distributed.launched_ranks()
    axis = ContextAxis(Mesh({"context": world_size}, distributed.start(Config(), alone=False)))
    with torch.device("meta"):
        network = build_network(model)
    axis.split(network)
    graphs: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(
            {str(node.target) for module in graph.modules() for node in getattr(module, "graph", torch.fx.Graph()).nodes}
        )
        return graph.forward

    torch._dynamo.reset()
    compile_blocks(network, backend)
    network.to_empty(device="cpu")
    initialise(network, 0)
    ids = torch.arange(length + 1)[None] % model.vocab_size
    network(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:])
    distributed.stop()
    return graphs


def test_compiled_blocks_are_one_graph_that_makes_no_mask(pool):
    """The compiler ignored the cache of causal masks, and said so on every rank: every layer made its own."""
    model = complete(Model(family="llama", dim=32, layers=3, heads=4, kv_heads=1, ffn_dim=64, vocab_size=100), 32)
    for graphs in pool.launch(2, graphs_of_blocks, model, 32):
        [operators] = graphs
        assert any("scaled_dot_product_attention" in name for name in operators)
        assert not any("arange" in name or "masked_fill" in name for name in operators)
