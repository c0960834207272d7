"""With optim.base_width a wide model is drawn and updated so that its outputs move as those of a narrow one."""

from __future__ import annotations

import pytest
import torch
from running import largest_relative_difference, losses, run_main, train

from pretrain.config.model_schema import EncoderConfig, ExpertsConfig, Model
from pretrain.config.optim_schema import Optim, ParameterGroup
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.models.width import initial_scales
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.rules import rules
from pretrain.parallel.initialise import initialise


def network(dim: int, **values):
    return build_network(complete(Model(dim=dim, layers=3, heads=dim // 16, ffn_dim=4 * dim, vocab_size=64, **values), 32))


RATES = {"adamw": 1e-2, "lion": 3e-3, "muon": 1e-2, "schedule_free_adamw": 1e-2}


def movement(dim: int, base: int | None, name: str) -> tuple[float, float, float]:
    """Standard deviation of the logits at first, of what five steps change of them, and of what they change of the last block's outputs."""
    model = network(dim)
    initialise(model, 0, initial_scales(model, base))
    optimizer = OptimizerSet(model, Optim(name=name, base_width=base, weight_decay=0.0))
    tokens_BT = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(1))
    features_BTD = []
    model.layers["2"].register_forward_hook(lambda module, given, made: features_BTD.append(made[0].detach()))
    with torch.no_grad():
        before = model(tokens_BT=tokens_BT[:, :-1])
    for number in range(5):
        (model(tokens_BT=tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).sum() / 256).backward()
        optimizer.step(RATES[name], number=number)
        optimizer.zero_grad()
    with torch.no_grad():
        change = model(tokens_BT=tokens_BT[:, :-1]) - before
    return float(before.std()), float(change.std()), float((features_BTD[-1] - features_BTD[0]).std())


@pytest.mark.parametrize("name", RATES)
def test_outputs_move_as_much_at_every_width(name):
    """The coordinate check of the paper (appendix D.1). Without scaling they move twice as much at four times the width."""
    (first, narrow, _), *others = (movement(width, 64, name) for width in (64, 128, 256))
    assert all(0.6 * narrow < change < 1.3 * narrow for _, change, _ in others)
    assert others[-1][0] < 0.6 * first  # and the first guess is nearer to none
    assert movement(256, None, name)[1] > 2 * narrow


def test_what_muon_changes_of_features_is_the_same_at_every_width():
    """By 1 / sqrt(m). Unscaled it grew by 69% at four times the width; by 1 / m, as Adam's matrices have it, it would shrink by 13%."""
    narrow, wide = movement(64, 64, "muon")[2], movement(256, 64, "muon")[2]
    assert wide == pytest.approx(narrow, rel=0.05)
    assert movement(256, None, "muon")[2] > 1.4 * narrow


def test_initial_values_rates_and_decays_are_those_of_the_table():
    values = {"family": "custom", "experts": ExpertsConfig(count=4, active=2, ffn_dim=64)}
    model, base = network(128, **values), network(32, **values)
    group = ParameterGroup("layers.0.attention.*", lr_scale=3.0, weight_decay=0.5)
    found = rules(model, Optim(base_width=32, weight_decay=0.1, groups=[group]))
    plain = rules(model, Optim(weight_decay=0.1, groups=[group]))
    scales = initial_scales(model, 32)
    seen = set()
    for name, p in model.named_parameters():
        if p.dim() < 2 or name == "embedding.weight" or name.endswith("bias"):
            factors = 1.0, 1.0
        elif name == "output.weight" or "router" in name:
            factors = 1 / 4, 1 / 4
        else:
            factors = 1 / 2, 1 / 4
        seen.add(factors)
        assert scales.get(name, 1.0) == factors[0], name
        assert found[name].rate_scale == plain[name].rate_scale * factors[1], name
        assert found[name].weight_decay == pytest.approx(plain[name].weight_decay / factors[1]), name
    assert len(seen) == 3
    initialise(model, 0, scales)
    drawn = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert drawn["layers.0.attention.query.weight"] == pytest.approx(0.01, rel=0.05)
    assert drawn["output.weight"] == pytest.approx(0.005, rel=0.05)
    assert drawn["embedding.weight"] == pytest.approx(0.02, rel=0.05)
    muon, unscaled = (rules(model, Optim(name="muon", weight_decay=0.1, groups=[group], **more)) for more in ({"base_width": 32}, {}))
    for name, rule in muon.items():
        inner = rule.optimizer == "muon" and "router" not in name
        scale = 1 / 2 if inner else found[name].rate_scale / plain[name].rate_scale
        assert rule.rate_scale == unscaled[name].rate_scale * scale, name
        assert rule.weight_decay == pytest.approx(unscaled[name].weight_decay / scale), name
    assert {rule.optimizer for rule in muon.values()} == {"muon", "adamw"}
    # At the base width nothing changes.
    assert set(initial_scales(base, 32).values()) == {1.0}
    assert rules(base, Optim(base_width=32)) == rules(base, Optim())


def test_tables_of_positions_are_tables():
    """T5's biases are looked up: nothing that they read grows with the width."""
    model = network(128, family="t5", head_dim=16, encoder=EncoderConfig(layers=2), tie_embeddings=False)
    scales, found = initial_scales(model, 32), rules(model, Optim(base_width=32))
    tables = [name for name, _ in model.named_parameters() if "bias.table" in name]
    assert len(tables) == 2 and not scales.keys() & set(tables) and all(found[name].rate_scale == 1.0 for name in tables)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layouts_train_alike(pool, config_file, name):
    options = ("run.steps=8", "optim.base_width=8", "model.vocab_size=264", f"optim.name={name}")
    alone = train(pool, 1, config_file, "run.name=alone", *options)
    shared = train(pool, 2, config_file, "run.name=shared", *options, "parallel={strategy: fsdp, tensor: 2}")
    assert largest_relative_difference(losses(shared), losses(alone)) < 2e-6
    other = train(pool, 1, config_file, "run.name=other", *options, "optim.base_width=32")
    assert abs(losses(other)[-1] - losses(alone)[-1]) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.tie_embeddings=true"], "optim.base_width=8: model.tie_embeddings=true makes one table of two that are scaled differently"),
        (["model.family=gemma3", "model.tie_embeddings=false"], "optim.base_width=8: model.embedding_multiplier=5.656854249492381 makes updates of embeddings grow"),
        (["optim.name=adafactor"], "optim.base_width=8 has no effect with optim.name=adafactor"),
    ],
)
def test_what_does_not_scale_is_refused(pool, config_file, options, message):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "optim.base_width=8", *options)
    assert code == 2 and message in printed, printed


def test_a_check_says_the_factor(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "optim.base_width=8")
    assert code == 0 and "width    4 times optim.base_width=8" in printed
