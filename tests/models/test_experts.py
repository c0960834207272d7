"""The mixture of experts against its definitions: dispatch, choice, balance, and what training needs of its parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pretrain.config.model_schema import ExpertsConfig, MlpConfig, Model
from pretrain.config.optim_schema import Optim
from pretrain.conventions import IGNORED
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import ALONE
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.experts import Experts, MixtureOfExperts, Router, check_router, dispatch, router_caution
from pretrain.models.families import complete
from pretrain.models.layers import Mlp
from pretrain.optim.optimizer import OptimizerSet
from pretrain.parallel.blocks import recompute_blocks
from pretrain.parallel.initialise import initialise
from pretrain.train.balancing import ExpertLoads, move_correction


def model(layers=1, **experts) -> Model:
    switches = ExpertsConfig(**{"count": 6, "active": 2, "ffn_dim": 12, **experts})
    return complete(Model(family="custom", dim=16, layers=layers, heads=2, ffn_dim=24, vocab_size=31, experts=switches), 32)


def network(config: Model) -> nn.Module:
    built = build_network(config)
    initialise(built, seed=0)
    return built


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_mlp(experts: Experts, index: int, activation: str, gated: bool, bias: bool) -> Mlp:
    """One of the stacked experts as an MLP of its own."""
    count, width, dim = experts.up.shape
    mlp = Mlp(dim, width, activation, gated, bias)
    state = {name: value[index] for name, value in experts.state_dict().items()}
    mlp.load_state_dict({(n.replace("_bias", ".bias") if "bias" in n else f"{n}.weight"): v for n, v in state.items()})
    return mlp


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 12),
    count=st.integers(1, 5),
    choices=st.integers(1, 5),
    kind=st.sampled_from([("silu", True, False), ("silu_clamped", True, True), ("relu2", False, True), ("gelu", False, False)]),
    seed=st.integers(0, 9),
)
def test_dispatch_is_the_weighted_sum_of_each_tokens_experts_in_value_and_gradient(tokens, count, choices, kind, seed):
    choices = min(choices, count)
    experts = filled(Experts(count, 8, 6, *kind), seed).double()
    x_ND = drawn(tokens, 8, seed=seed).double().requires_grad_()
    scores = drawn(tokens, count, seed=seed + 100)
    weights_NK = drawn(tokens, choices, seed=seed + 200).double().requires_grad_()
    chosen_NK = scores.topk(choices).indices
    got = dispatch(experts, x_ND, chosen_NK, weights_NK)
    alone = [as_mlp(experts, i, *kind).double() for i in range(count)]
    rows = [sum(weights_NK[n, k] * alone[chosen_NK[n, k]](x_ND[n]) for k in range(choices)) for n in range(tokens)]
    expected = torch.stack(rows)
    assert (got - expected).abs().max() <= 1e-12
    direction = drawn(tokens, 8, seed=seed + 300).double()
    for a, b in zip(*(torch.autograd.grad(y, (x_ND, weights_NK), direction) for y in (got, expected))):
        assert (a - b).abs().max() <= 1e-12


def test_what_a_token_gets_does_not_depend_on_the_others_and_nothing_is_dropped_when_all_choose_one():
    experts = filled(Experts(4, 8, 6, "silu", True, False))
    x_ND, weights_NK = drawn(50, 8), drawn(50, 2, seed=2)
    same = torch.tensor([[2, 0]]).expand(50, 2)
    together = dispatch(experts, x_ND, same, weights_NK)
    alone = torch.cat([dispatch(experts, x_ND[i : i + 1], same[i : i + 1], weights_NK[i : i + 1]) for i in range(50)])
    assert (together - alone).abs().max() <= 1e-6
    assert (together.abs().sum(-1) > 0).all()


def test_experts_without_a_token_get_a_gradient_of_zeros():
    config = model(count=12, active=1, balance_loss=0.01)
    built = network(config)
    ids = torch.tensor([[3, 3]])
    built(ids, targets_BT=ids).sum().backward()
    block = built.layers["0"].mlp
    used = [bool(block.experts.up.grad[e].abs().sum()) for e in range(12)]
    assert 1 <= sum(used) <= 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", [{"gated": True, "bias": False}, {"gated": False, "bias": True}])
def test_no_tokens_at_all_give_nothing_and_gradients_of_zeros(kind):
    """M-D15: dispatch() of zero tokens ended in a RuntimeError; a rank of expert parallelism may have none."""
    experts = filled(Experts(4, 8, 12, "silu", **kind))
    x_ND, weights_NK = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    y_ND = dispatch(experts, x_ND, torch.zeros(0, 2, dtype=torch.long), weights_NK)
    assert y_ND.shape == (0, 8)
    y_ND.sum().backward()
    assert x_ND.grad.shape == (0, 8) and weights_NK.grad.shape == (0, 2)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in experts.parameters())
    whole = MixtureOfExperts(model(shared=1))
    initialise_values = filled(whole)
    y_BTD, report = initialise_values(torch.zeros(0, 5, 16), torch.zeros(0, 5, dtype=torch.bool))
    assert y_BTD.shape == (0, 5, 16) and report.counts_E.tolist() == [0] * 6 and report.loss_B.shape == (0,)


def test_the_balance_loss_is_k_times_that_of_deepseek_v3():
    """M-D11: equation 17 of arXiv 2412.19437 divides the shares by the number of active experts (K), ours does not."""
    for active, scoring in ((1, "softmax"), (2, "sigmoid"), (3, "softmax")):
        router = Router(model(active=active, scoring=scoring, balance_loss=1.0, normalise=False))
        logits, tokens = drawn(1, 20, 6), 20
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        chosen = scores.topk(active).indices
        found = router.report(logits, scores, chosen, torch.ones(1, tokens, dtype=torch.bool)).loss_B / tokens
        normal = scores[0] / scores[0].sum(-1, keepdim=True)
        f = torch.tensor([6 / (active * tokens) * int((chosen[0] == e).sum()) for e in range(6)])
        assert found.item() == pytest.approx(active * float((f * normal.mean(0)).sum()), rel=1e-5)


def balanced_by_hand(
    config: Model, ids: torch.Tensor, targets: torch.Tensor, shares: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of cross-entropy plus, by layer, weight x E x sum of share x mean score over the whole batch, as arXiv 2501.11873 has it."""
    plain = dataclasses.replace(config, experts=dataclasses.replace(config.experts, balance_loss=0.0))
    built, inputs = network(plain), []
    for layer in built.layers.values():
        layer.mlp.router.register_forward_pre_hook(lambda router, given: inputs.append((router, given[0])))
    loss = built(ids, targets_BT=targets).sum()
    counted = targets != IGNORED
    for (router, x), share in zip(inputs, shares):
        scores = F.linear(x, router.weight).softmax(-1)[counted]
        loss = loss + counted.sum() * config.experts.balance_loss * config.experts.count * (share * scores.mean(0)).sum()
    loss.backward()
    return {name: p.grad for name, p in built.named_parameters()}


def test_balance_over_the_global_batch_is_the_published_formula_one_step_late():
    """M-D11: shares of the whole batch (arXiv 2501.11873) beside those of each sequence."""
    config = model(layers=2, balance_loss=0.5, balance_scope="global_batch")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(31, (4, 20), generator=generator) for _ in range(2)]
    targets = [torch.where(torch.rand(4, 20, generator=generator) < 0.8, ids, IGNORED) for ids in batches]
    built = network(config)
    loads = ExpertLoads(built, config, Mesh({}, ALONE))
    # Nothing is known before the first step: even shares give no gradient, whatever the scores.
    built(batches[0], targets_BT=targets[0]).sum().backward()
    for name, gradient in balanced_by_hand(config, batches[0], targets[0], []).items():
        assert (built.get_parameter(name).grad - gradient).norm() <= 2e-5 * gradient.norm() + 1e-6, name
    loads.settle(loads.after_step(int((targets[0] != IGNORED).sum()), torch.tensor(True)))
    shares = [torch.tensor(layer) / (targets[0] != IGNORED).sum() for layer in loads.last]
    assert all(share.sum().item() == pytest.approx(2) for share in shares)
    # The next batch is pulled by what the whole one before it was sent to, in whatever parts it is computed.
    for parts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        built.zero_grad()
        for part in parts:
            built(batches[1][part], targets_BT=targets[1][part]).sum().backward()
        for name, gradient in balanced_by_hand(config, batches[1], targets[1], shares).items():
            assert (built.get_parameter(name).grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name
    # Where two steps have the same loads it is the formula itself: here the same batch, and weights that have not moved.
    restored = network(config)
    ExpertLoads(restored, config, Mesh({}, ALONE)).restore(loads.last)
    restored(batches[0], targets_BT=targets[0]).sum().backward()
    for name, gradient in balanced_by_hand(config, batches[0], targets[0], shares).items():
        assert (restored.get_parameter(name).grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_a_router_that_nothing_trains_is_refused_and_one_that_nothing_balances_is_said():
    """M-D10: both were accepted without a word."""
    with pytest.raises(
        ConfigError, match="model.experts.active=1 with model.experts.normalise=true never trains the router: a token's one weight is always 1"
    ):
        check_router(model(active=1))
    for fine in ({"active": 1, "normalise": False}, {"active": 1, "count": 1}, {"active": 2}):
        check_router(model(**fine))
    assert "nothing keeps the loads of the 6 experts even (model.experts.balance_loss=0)" in router_caution(model())
    both = router_caution(model(correction=True))
    assert "model.experts.correction_rate=0" in both and "or model.experts.correction_rate" in both
    for fine in (
        {"balance_loss": 0.01},
        {"correction": True, "correction_rate": 0.001},
        {"active": 6},
        {"count": 0, "active": 0, "ffn_dim": 0},
    ):
        assert router_caution(model(**fine)) is None
    # The reason for the refusal: the gradient of such a router is rounding.
    built = network(model(active=1))
    ids = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    built(ids, targets_BT=ids).sum().backward()
    assert (
        built.layers["0"].mlp.router.weight.grad.abs().max() < 1e-6 * built.layers["0"].attention.query.weight.grad.abs().max()
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_balance_loss_of_one_sequence_is_that_of_transformers(masked):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model(layers=2, balance_loss=0.37)
    built, ids = network(config), torch.randint(31, (1, 32), generator=torch.Generator().manual_seed(0))
    targets = ids.clone()
    if masked:
        targets[:, 20:] = IGNORED
    logits = []
    for layer in built.layers.values():
        layer.mlp.router.register_forward_pre_hook(lambda r, inputs: logits.append(F.linear(inputs[0][0], r.weight)))
    plain = F.cross_entropy(built(ids)[0], targets[0], ignore_index=IGNORED, reduction="sum")
    counted = int((targets != IGNORED).sum())
    logits.clear()
    loss = built(ids, targets_BT=targets).sum()
    expected = sum(load_balancing_loss_func((x,), 6, 2, (targets != IGNORED).long()) for x in logits)
    assert (loss - plain).item() == pytest.approx(0.37 * counted * expected.item(), rel=2e-5)


def test_auxiliary_losses_of_a_batch_are_those_of_its_sequences_one_by_one_and_gradients_too():
    config = model(balance_loss=0.5, router_z_loss=0.1, scoring="sigmoid")
    built = network(config)
    ids = torch.randint(31, (4, 20), generator=torch.Generator().manual_seed(0))
    targets = torch.where(torch.arange(20) < torch.tensor([[20], [3], [0], [11]]), ids, IGNORED)
    found = []
    for parts in ((slice(0, 4),), [slice(i, i + 1) for i in range(4)]):
        built.zero_grad()
        losses = torch.cat([built(ids[part], targets_BT=targets[part]) for part in parts])
        losses.sum().backward()
        found.append((losses, {n: p.grad.clone() for n, p in built.named_parameters()}))
    (together, gradients), (alone, other) = found
    assert together[2] == 0  # of a sequence without targets
    assert torch.allclose(together, alone, rtol=1e-6, atol=1e-5)
    assert all((gradients[n] - other[n]).norm() <= 5e-6 * other[n].norm() for n in gradients)


def test_the_z_loss_is_the_squared_logsumexp_of_the_router():
    built = network(model(router_z_loss=0.2))
    ids = torch.randint(31, (2, 10), generator=torch.Generator().manual_seed(0))
    seen = []
    built.layers["0"].mlp.router.register_forward_pre_hook(lambda r, x: seen.append(F.linear(x[0], r.weight)))
    plain = F.cross_entropy(built(ids).flatten(0, 1), ids.flatten(), reduction="none").view(2, 10).sum(1)
    with_z = built(ids, targets_BT=ids)
    assert torch.allclose(with_z - plain, 0.2 * seen[-1].logsumexp(-1).square().sum(1), atol=1e-4)


def test_recomputation_counts_and_penalises_once():
    config = model(layers=2, balance_loss=0.3)
    ids = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for recompute in (False, True):
        built = network(config)
        if recompute:
            recompute_blocks(built)
        built(ids, targets_BT=ids).sum().backward()
        reports = built.take_router_reports()
        found.append(({n: p.grad for n, p in built.named_parameters()}, [r.counts_E.tolist() for r in reports.values()]))
    assert found[0][1] == found[1][1] and [sum(counts) for counts in found[0][1]] == [2 * 32] * 2
    assert all(torch.equal(found[0][0][n], found[1][0][n]) for n in found[0][0])


def test_without_gradients_nothing_is_counted_or_added():
    built = network(model(balance_loss=10.0))
    ids = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = built(ids, targets_BT=ids)
    assert built.take_router_reports() == {}
    expected = F.cross_entropy(built(ids).flatten(0, 1), ids.flatten(), reduction="none").view(2, 16).sum(1)
    assert torch.allclose(loss, expected)


def test_a_compiled_forward_pass_has_one_version_for_all_micro_steps_of_all_steps():
    """The first micro-step of a step found no reports, and later ones found some: the whole model was compiled twice."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    built, counter = network(model(layers=2, balance_loss=0.1)), CompileCounter()
    compiled = torch.compile(built, backend=counter)
    ids = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    loads = ExpertLoads(built, built.config, Mesh({}, ALONE))
    graphs = []
    for _ in range(3):
        for _ in range(2):
            compiled(ids, targets_BT=ids).sum().backward()
            graphs.append(counter.frame_count)
        figures = loads.after_step(64, torch.tensor(True))
        assert figures["loads"].sum(1).tolist() == [2 * 2 * 32] * 2
    assert len(set(graphs)) == 1, graphs


def test_a_correction_changes_who_is_chosen_and_not_the_weights_and_is_not_trained():
    config = model(correction=True, correction_rate=0.1, scoring="sigmoid", normalise=False)
    block = filled(MixtureOfExperts(config))
    block.router.correction.data = torch.tensor([0.0, 0, 0, 0, 0, 100.0])
    chosen, weights, _ = block.router(drawn(2, 5, 16), None)
    assert (chosen == 5).any(-1).all()
    scores = F.linear(drawn(2, 5, 16), block.router.weight).sigmoid()
    assert torch.equal(weights, scores.gather(-1, chosen))
    built = network(config)
    names = {n for n, p in built.named_parameters() if not p.requires_grad}
    assert names == {"layers.0.mlp.router.correction"}
    optimized = {id(p) for p in OptimizerSet(built, Optim()).parameters.values()}
    assert not optimized & {id(p) for p in built.parameters() if not p.requires_grad}
    assert len(optimized) == len(list(built.parameters())) - 1


def test_a_correction_moves_towards_even_loads_and_not_where_the_load_is_the_mean():
    correction = torch.tensor([0.5, 0.0, 0.0, 0.0])
    move_correction(correction, torch.tensor([9, 1, 4, 2]), 0.25)
    assert correction.tolist() == [0.25, 0.25, 0.0, 0.25]


def test_corrections_even_out_a_router_that_prefers_one_expert():
    config = model(correction=True, correction_rate=0.02, scoring="sigmoid", active=1)
    block = filled(MixtureOfExperts(config))
    x_BTD = drawn(8, 64, 16) + 1.0
    shares = []
    for _ in range(200):
        _, report = block(x_BTD, torch.ones(8, 64, dtype=torch.bool))
        shares.append(report.counts_E.max().item() / report.counts_E.float().mean().item())
        move_correction(block.router.correction, report.counts_E, 0.02)
    assert shares[0] > 2 and max(shares[-20:]) < 1.3


def test_initial_values_of_experts_follow_those_of_mlps_and_choices_are_spread():
    built = build_network(model(shared=1, correction=True, router_bias=True))
    scaled = 0.02 / 2**0.5
    expected = {"experts.up": 0.02, "experts.gate": 0.02, "experts.down": scaled, "shared.down.weight": scaled}
    for name, std in expected.items():
        assert built.initial(f"layers.0.mlp.{name}") == (0.0, std)
    for name in ("router.bias", "router.correction", "experts.up_bias"):
        assert built.initial(f"layers.0.mlp.{name}") == (0.0, 0.0)


def test_biases_of_experts_are_not_decayed():
    config = complete(
        Model(family="custom", dim=16, layers=1, heads=2, ffn_dim=24, vocab_size=31, mlp=MlpConfig(bias=True),
              experts=ExpertsConfig(count=4, active=2)), 32
    )  # fmt: skip
    built = network(config)
    [optimizer] = OptimizerSet(built, Optim()).optimizers
    groups = optimizer.param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    experts = built.layers["0"].mlp.experts
    assert id(experts.up) in decayed and id(experts.up_bias) not in decayed


@pytest.mark.parametrize(
    "switches, named",
    [
        ({"active": 0}, "model.experts.active=0"),
        ({"active": 7}, "model.experts.active=7"),
        ({"groups": 4}, "model.experts.groups=4"),
        ({"groups": 6}, "model.experts.groups=6"),
        ({"groups": 2, "active_groups": 3}, "model.experts.groups=2"),
        ({"groups": 3, "active_groups": 1, "active": 3}, "model.experts.active=3"),
        ({"dense_layers": [1]}, r"model.experts.dense_layers=\[1\]"),
        ({"dense_layers": [0]}, "model.experts.dense_layers names all of model.layers=1, so no layer has experts; leave one out"),
        ({"correction_rate": 0.1}, "model.experts.correction_rate=0.1"),
        ({"count": 0}, "model.experts.active is set"),
    ],
)
def test_sizes_that_cannot_be_are_named(switches, named):
    with pytest.raises(ConfigError, match=named) as caught:
        model(**switches)
    assert "\n" not in str(caught.value)


def test_blocks_of_multi_token_prediction_have_experts_that_are_counted_and_balanced_as_well():
    from pretrain.models.shape import with_values

    built = network(with_values(model(layers=2, correction=True, balance_loss=0.1), {"predict_ahead": 1}))
    ids = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    built(ids, targets_BT=ids).sum().backward()
    reports = built.take_router_reports()
    assert list(reports) == list(built.routers()) == ["0", "1", "2"]
    assert [int(report.counts_E.sum()) for report in reports.values()] == [64] * 3
    assert all(p.grad is not None for p in built.parameters() if p.requires_grad)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_that_are_whole_on_a_rank_keep_a_token_to_as_many_ranks_as_groups(ranks):
    """With `parallel.expert`, each of `ranks` has as many neighbouring experts (docs/model_parallelism.md)."""
    config = model(layers=1, count=16, active=6, groups=4, active_groups=2)
    router = network(config).layers["0"].mlp.router
    chosen_BTK = router(torch.randn(3, 50, config.dim, generator=torch.Generator().manual_seed(1)), None)[0]
    used = torch.zeros(3, 50, ranks).scatter_(-1, chosen_BTK * ranks // 16, 1.0).sum(-1)
    assert used.max() == min(2, ranks) and chosen_BTK.unique().numel() == 16
