"""Muon makes matrices orthogonal; Lion takes signs; groups are by name; and no step leaves a trace where it is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.config.attention_schema import Latent
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.config.optim_schema import MuonOptions, Optim, ParameterGroup
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.optim import muon
from pretrain.optim.exchange import begin_exchange
from pretrain.optim.guarded import Formats
from pretrain.optim.muon import Muon, coefficients, orthogonalize
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.rules import check_groups, count_moments, describe, orthogonalized, rules
from pretrain.parallel.initialise import initialise


def network(**values):
    model = build_network(complete(Model(dim=16, layers=2, heads=2, ffn_dim=24, vocab_size=40, **values), 8))
    initialise(model, 0)
    return model


MIXTURE = {"family": "custom", "experts": ExpertsConfig(count=4, active=2, ffn_dim=8, router_bias=True), "predict_ahead": 1}


# ---- the polynomial ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 3, 9]), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1e-6, 1.0, 1e6]), st.integers(0, 99))
def test_what_comes_out_is_the_nearest_orthogonal_matrix(count, rows, columns, size, seed):
    x = size * torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalize(x, coefficients(MuonOptions(iterations=20)), torch.float64)
    is_clear = values[:, -1] > 2e-3 * torch.linalg.matrix_norm(x)  # below the interval that the polynomials are made for
    torch.testing.assert_close(found[is_clear], (left @ right)[is_clear], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("polynomial", "low", "high"), [("polar_express", 0.86, 1.13), ("quintic", 0.68, 1.21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_iterations_bring_singular_values_near_one(polynomial, low, high, dtype):
    values = torch.logspace(-2, 0, 48, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(64, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(i)))[0] for i in (0, 1))
    x = (left * values) @ right.mT
    found = orthogonalize(x.float()[None], coefficients(MuonOptions(polynomial=polynomial)), dtype)[0].double()
    slack = 0.03 if dtype == torch.bfloat16 else 0.0
    assert low - slack <= float(torch.linalg.svdvals(found)[:48].min()) and float(torch.linalg.svdvals(found).max()) <= high + slack


def test_a_matrix_of_zeros_stays_one():
    """An expert that no token chose."""
    x = torch.zeros(2, 3, 4)
    x[1] = torch.randn(3, 4)
    found = orthogonalize(x, coefficients(MuonOptions()), torch.float32)
    assert not found[0].any() and found[1].isfinite().all() and found[1].any()


# ---- projections that one matrix fuses --------------------------------------------------------------------------------------

LATENT = {"family": "custom", "latent": Latent(kv_rank=12, query_rank=16, rope_dim=4, plain_dim=4, value_dim=12)}


def test_keys_of_latent_attention_move_as_much_as_values_however_small_their_gradients_are():
    """One step of torch's Muon on each projection, from gradients of very different sizes."""
    model = network(**LATENT).double()
    parameters = dict(model.named_parameters())
    up, down = (parameters[f"layers.0.attention.{name}.weight"] for name in ("kv_up", "kv_down"))
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
    is_key, is_latent = torch.tensor(2 * (4 * [True] + 12 * [False])), torch.tensor(12 * [True] + 4 * [False])  # two heads
    up.grad[is_key] *= 1e-3
    down.grad[is_latent] *= 1e-3
    before, parts = up.detach().clone(), []
    for p, rows in ((up, is_key), (up, ~is_key), (down, is_latent), (down, ~is_latent)):
        part = torch.nn.Parameter(p.detach()[rows])
        part.grad = p.grad[rows]
        parts.append((p, rows, part))
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # torch's Muon computes in bf16
        torch.optim.Muon([part for *_, part in parts], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    config = Optim(name="muon", weight_decay=0.1, muon=MuonOptions(polynomial="quintic"))
    OptimizerSet(model, config, compute=torch.float64).step(0.1)
    for p, rows, part in parts:
        torch.testing.assert_close(p[rows], part, atol=1e-9, rtol=0)
    keys, values = ((up.detach() - before)[rows].square().mean().sqrt() for rows in (is_key, ~is_key))
    assert 0.5 < float(keys / values) < 2


def test_only_muon_is_told_of_fused_rows():
    found = rules(network(**LATENT), Optim(name="muon"))
    fused = {name.partition("attention.")[2]: rule.fused_rows for name, rule in found.items() if rule.fused_rows}
    assert fused == {"kv_up.weight": (4, 12), "kv_down.weight": (12, 4)}
    assert not any(rule.fused_rows for rule in rules(network(**LATENT), Optim()).values())


# ---- which parameters, at which rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"tie_embeddings": True}, MIXTURE, {"family": "t5", "head_dim": 8}])
def test_muon_gets_the_matrices_of_blocks_and_adamw_the_rest(values):
    model = network(**values)
    found = rules(model, Optim(name="muon"))
    parameters = dict(model.named_parameters())
    outer = {"embedding.weight", "output.weight", "source_embedding.weight", "encoder_bias.table.weight", "decoder_bias.table.weight"}
    for name, rule in found.items():
        is_matrix = parameters[name].dim() > 1 and name not in outer and not name.endswith("bias")
        assert rule.optimizer == ("muon" if is_matrix else "adamw"), name
    assert {name for name, rule in found.items() if rule.optimizer == "muon"} == orthogonalized(model) != set()
    for name in ("adamw", "lion", "muon", "adafactor", "schedule_free_adamw"):
        optimizer = OptimizerSet(model, Optim(name=name))
        kept = sum(tensor.numel() for key, tensor in optimizer.tensors().items() if not key.startswith(("step.", "shares.", "nearness.")))
        assert kept == count_moments(model, Optim(name=name))


def test_the_first_group_that_matches_a_name_gives_its_rate_and_decay():
    groups = [
        ParameterGroup("layers.0.*", lr_scale=0.5),
        ParameterGroup("layers.*.mlp.*", lr_scale=2.0, weight_decay=0.3),
        ParameterGroup("*norm*", weight_decay=0.7),
    ]
    model = network()
    found = rules(model, Optim(weight_decay=0.1, groups=groups))
    assert {(rule.rate_scale, rule.weight_decay) for name, rule in found.items() if name.startswith("layers.0.")} == {(0.5, 0.1), (0.5, 0.0)}
    assert {(rule.rate_scale, rule.weight_decay) for name, rule in found.items() if name.startswith("layers.1.mlp.")} == {(2.0, 0.3)}
    assert (found["norm.weight"].rate_scale, found["norm.weight"].weight_decay) == (1.0, 0.7)
    assert (found["embedding.weight"].rate_scale, found["embedding.weight"].weight_decay) == (1.0, 0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = OptimizerSet(model, Optim(groups=[ParameterGroup("layers.0.*", lr_scale=0.0)]))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(0.1)
    assert all(torch.equal(p, before[name]) == name.startswith("layers.0.") for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.*.atention.*"], r"optim.groups.0.pattern=layers.\*.atention.\* matches no parameter that is trained; names are embedding.weight, layers"),
        (["layers.*", "layers.1.*"], r"optim.groups.1.pattern=layers.1.\* matches only parameters that an earlier group has; names are embedding.weight, norm.weight"),
        (["*", "norm.*"], r"optim.groups.1.pattern=norm.\* matches only parameters that an earlier group has; remove it"),
    ],
)  # fmt: skip
def test_a_pattern_that_does_nothing_is_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        check_groups(network(), Optim(groups=[ParameterGroup(pattern, 0.5) for pattern in patterns]))


def test_groups_that_change_nothing_or_leave_nothing_to_train_are_refused():
    model = network()
    with pytest.raises(ConfigError, match="optim.groups.1 has no effect, its parameters are updated so anyway: give it another lr_scale or weight_decay, or remove it"):
        check_groups(model, Optim(groups=[ParameterGroup("norm.*", 0.5), ParameterGroup("*")]))
    check_groups(model, Optim(groups=[ParameterGroup("norm.*"), ParameterGroup("*", 0.5)]))  # all but the norm
    with pytest.raises(ConfigError, match="every parameter lr_scale=0, so that nothing is trained"):
        check_groups(model, Optim(groups=[ParameterGroup("norm.*", 0.0), ParameterGroup("*", 0.0)]))
    check_groups(model, Optim(groups=[ParameterGroup("norm.*", 1.0, 0.1), ParameterGroup("*", 0.0)]))
    for values in ({"weight_decay": 0.0}, {"weight_decay": 0.0, "optimizer": "adamw"}):  # vectors have none anyway
        with pytest.raises(ConfigError, match="optim.groups.0 has no effect, its parameters are updated so anyway"):
            check_groups(model, Optim(name="muon", groups=[ParameterGroup("norm.*", **values)]))
    with pytest.raises(ConfigError, match="optim.groups.0 has no effect"):  # the group after it has none of its names
        check_groups(model, Optim(groups=[ParameterGroup("norm.*"), ParameterGroup("layers.*", 0.5)]))
    with pytest.raises(ConfigError, match="optim.groups.0.weight_decay=0.5 has no effect with lr_scale=0, because decay is times the rate"):
        check_groups(model, Optim(groups=[ParameterGroup("layers.*", 0.0, 0.5)]))


def test_the_documentation_says_who_updates_the_quickstart_with_muon():
    from pretrain.config.load import load_config
    from pretrain.models.families import complete

    root = Path(__file__).resolve().parents[2]
    config, _ = load_config(root / "configs" / "quickstart.yaml", ["model.vocab_size=4096", "optim.name=muon"])
    with torch.device("meta"):
        model = build_network(complete(config.model, config.data.sequence_length))
    [line] = describe(model, config.optim)
    assert f"{line}\n" in (root / "docs" / "optimizers.md").read_text()


def test_what_muon_cannot_take_in_a_network_of_another_library_is_named():
    network = torch.nn.Module()
    network.query, network.experts = torch.nn.Linear(4, 4, bias=False), torch.nn.Module()
    network.experts.gate_up = torch.nn.Parameter(torch.zeros(2, 3, 4))
    lines = describe(network, Optim(name="muon"))
    assert lines == [
        "optim    muon for 1 tensor of 16 parameters, adamw for 1 tensor of 24 parameters",
        "optim    muon leaves what has more than two dimensions to adamw: 1 tensor of 24 parameters, such as experts.gate_up",
    ]


# ---- steps that are left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor", "schedule_free_adamw"])
def test_a_refused_step_leaves_weights_and_state_as_they_are_to_the_last_bit(name):
    model = network(**MIXTURE)
    optimizer = OptimizerSet(model, Optim(name=name, lr=0.1))

    def take(value: float, taken: bool | None) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step(0.1, None if taken is None else torch.tensor(taken))

    take(1.0, True)
    everything = {**dict(model.named_parameters()), **optimizer.tensors()}
    before = {key: tensor.detach().clone() for key, tensor in everything.items()}
    for value in (float("nan"), float("inf"), 1.0):
        take(value, False)
        assert all(torch.equal(tensor, before[key]) for key, tensor in everything.items())
    take(1.0, True)
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters() if p.requires_grad)


# ---- exchanges --------------------------------------------------------------------------------------------------------------


def order_of_a_step(count: int) -> tuple[list[str], bool]:
    """What a rank does in a step of matrices that two ranks share, and whether it has what one process has."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(0)

    def named(parameters):
        return Formats(torch.float32, {parameter: str(i) for i, parameter in enumerate(parameters)})

    # Of different shapes, so that none share a batch.
    whole = [torch.randn(8 + 2 * i, 6, generator=draw) for i in range(count)]
    alone, shared = ([torch.nn.Parameter(make(w)) for w in whole] for make in (torch.clone, lambda w: distribute_tensor(w, mesh, [Shard(0)])))
    for one, other in zip(alone, shared):
        one.grad = torch.randn(one.shape, generator=draw)
        other.grad = distribute_tensor(one.grad, mesh, [Shard(0)])
    seen: list[str] = []
    travels, multiply = muon.begin_exchange, muon.orthogonalize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "begin_exchange", lambda x, mesh, shape, *rest: seen.append(f"send {shape[1] // 2 - 4}") or travels(x, mesh, shape, *rest))
        patch.setattr(muon, "orthogonalize", lambda x, *rest: seen.append(f"multiply {x.shape[1] // 2 - 4}") or multiply(x, *rest))
        Muon([{"params": shared, "weight_decay": 0.0}], 0.1, MuonOptions(), torch.float32, named(shared)).step()
    Muon([{"params": alone, "weight_decay": 0.0}], 0.1, MuonOptions(), torch.float32, named(alone)).step()
    return seen, all(torch.allclose(one, other.full_tensor(), atol=1e-6) for one, other in zip(alone, shared))


def test_matrices_travel_while_those_before_them_are_multiplied(pool):
    for seen, is_equal in pool.launch(2, order_of_a_step, 3):
        assert is_equal
        assert seen == ["send 0", "send 1", "multiply 0", "send 0", "send 2", "multiply 1", "send 1", "multiply 2", "send 2"]


def exchanged(shapes: list[tuple[int, int, int]]) -> list[str]:
    """Where an exchange between two ways of sharding is not what torch distributes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for shape in shapes:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        ways = [Shard(0), Shard(1), Shard(2), Replicate()]
        for source, target in itertools.permutations(ways, 2):
            has, wants = (distribute_tensor(whole, mesh, [way], src_data_rank=None).to_local() for way in (source, target))
            got = begin_exchange(has, mesh, torch.Size(shape), [source], [target])()
            if not torch.equal(got, wants):
                wrong.append(f"{shape} {source} {target}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_gives_each_rank_what_torch_would(pool, ranks):
    """Also where the last rank has fewer rows than the others, or none."""
    shapes = [(ranks, 4, 6), (2 * ranks, 5, 7), (ranks, 1, 3), (ranks, 7, 1)]
    assert pool.launch(ranks, exchanged, shapes) == [[]] * ranks


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has had."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        self.numbers = max(self.numbers, *(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor)), 0)
        return made


def largest_tensors() -> list[int]:
    """The largest tensor of a step of four matrices [64, 32], on a rank of 1,024 that only it believes in: with copies, and with shards too."""
    dist.init_process_group("fake", rank=0, world_size=1024, store=dist.HashStore())
    found = []
    for sizes, names, placements in (
        ((1024,), ("replicate",), None),
        ((128, 8), ("replicate", "shard"), [Replicate(), Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        own = [torch.randn(64 if placements is None else 8, 32) for _ in range(4)]
        matrices = [torch.nn.Parameter(x if placements is None else DTensor.from_local(x, mesh, placements)) for x in own]
        for one in matrices:
            one.grad = torch.ones_like(one)
        formats = Formats(torch.float32, {one: str(number) for number, one in enumerate(matrices)})
        replicas = mesh if placements is None else None
        optimizer = Muon([{"params": matrices, "weight_decay": 0.0}], 0.1, MuonOptions(), torch.float32, formats, replicas)
        with Largest() as largest:
            optimizer.step()
        found.append(largest.numbers)
    dist.destroy_process_group()
    return found


def test_a_thousand_ranks_hold_no_more_than_the_matrices(pool):
    """They were padded to one for each rank: 1,024 of [2048, 8192] are 69 GB."""
    [(copied, sharded)] = pool.launch(1, largest_tensors)
    assert copied == 4 * 64 * 32 and sharded <= 8 * 64 * 32
