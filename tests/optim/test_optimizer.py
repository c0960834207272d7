"""The optimizer is torch's AdamW, with weight decay on matrices only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pretrain.config.optim_schema import AdafactorOptions, Optim
from pretrain.config.schema import Model
from pretrain.errors import ConfigError
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.optim import optimizer as optimizer_file
from pretrain.optim.adafactor import Adafactor
from pretrain.optim.guarded import Formats, GuardedOptimizer
from pretrain.optim.lion import Lion
from pretrain.optim.optimizer import OptimizerSet, Rule
from pretrain.optim.rules import count_moments, decayed
from pretrain.parallel.initialise import initialise


def decoder(tied: bool = False) -> Decoder:
    model = Decoder(complete(Model(dim=16, layers=2, heads=2, ffn_dim=24, vocab_size=40, tie_embeddings=tied), 8))
    initialise(model, 0)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_are_not_decayed_and_every_matrix_is(tied):
    decays = decayed(decoder(tied))
    plain = {name for name, decay in decays.items() if not decay}
    expected = {"embedding.weight", "norm.weight"}
    expected |= {f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attention_norm", "mlp_norm")}
    assert plain == expected
    assert decays.get("output.weight") is (None if tied else True)
    assert sum(decays.values()) == 14 + (not tied)


def test_a_bias_is_not_decayed():
    assert decayed(nn.Linear(3, 4)) == {"weight": True, "bias": False}


def test_an_optimizer_that_was_added_to_the_schema_alone_is_named():
    """It was a KeyError."""
    with pytest.raises(ConfigError, match="optim.name=adan has no line in MOMENTS of pretrain/optim/rules.py; AGENTS.md"):
        count_moments(decoder(), Optim(name="adan"))
    with pytest.raises(ConfigError, match="optim.name=adan has no line in _OPTIMIZERS of pretrain/optim/optimizer.py"):
        OptimizerSet(decoder(), Optim(name="adan"))


class CountsInPython(Lion):
    def state_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().state_of(parameter)[:1]


def test_state_that_is_no_tensor_is_named_at_the_first_step(monkeypatch):
    """It was an AttributeError of the first checkpoint, after all the steps before it."""
    monkeypatch.setitem(optimizer_file._OPTIMIZERS, "lion", lambda groups, given: CountsInPython(groups, 0.1, (0.9, 0.99), given.formats))
    optimizer = OptimizerSet(decoder(), Optim(name="lion"))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="the optimizer CountsInPython keeps its state count as int, and checkpoints hold tensors only"):
        optimizer.step(0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group(tied):
    model = decoder(tied)
    optimizer = OptimizerSet(model, Optim(weight_decay=0.3))
    groups = [group for each in optimizer.optimizers for group in each.param_groups]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.3]


def test_steps_are_those_of_the_published_algorithm():
    config = Optim(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    model = decoder()
    optimizer = OptimizerSet(model, config)
    decays = decayed(model)
    reference = {name: [p.detach().double().clone(), 0.0, 0.0] for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        lr = config.lr / step  # as a schedule says
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            weight, first, second = reference[name]
            gradient = parameter.grad.double()
            first = 0.8 * first + 0.2 * gradient
            second = 0.9 * second + 0.1 * gradient**2
            weight = weight * (1 - lr * (0.2 if decays[name] else 0.0))
            weight = weight - lr * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
            reference[name] = [weight, first, second]
        optimizer.step(lr)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), reference[name][0], rtol=1e-5, atol=1e-6)


def test_steps_are_those_of_torchs_adamw_without_fusion():
    config = Optim(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    one, other = decoder(), decoder()
    optimizer = OptimizerSet(one, config)
    decays = decayed(other)
    groups = [
        {"params": [p for n, p in other.named_parameters() if decays[n] == decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for p, q in zip(one.parameters(), other.parameters()):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step(1e-2)
        reference.step()
    for p, q in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_weight_decay_shrinks_by_the_learning_rate_times_the_decay():
    model = decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = OptimizerSet(model, Optim(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        factor = 0.95 if decayed(model)[name] else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_state_is_laid_out_as_before_the_first_step_and_changes_no_weight():
    model = decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = OptimizerSet(model, Optim(lr=0.1, weight_decay=0.5))
    assert not optimizer.has_state
    tensors = optimizer.tensors()
    assert optimizer.has_state and set(tensors) == {
        f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in before
    }
    assert not any(tensor.any() for tensor in tensors.values())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_a_set_of_two_optimizers_has_one_set_of_verbs_and_a_rate_for_each_rule(monkeypatch):
    """An optimizer whose state has no `step`, as Muon's, and a rule with half the rate: what a rule says is what is done."""

    class Momentum(GuardedOptimizer):
        moments = ("momentum_buffer",)

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    [mean] = self.state_of(parameter)
                    self.write(parameter, (parameter.data, mean), (parameter - group["lr"] * parameter.grad, mean + parameter.grad))

    monkeypatch.setitem(optimizer_file._OPTIMIZERS, "sgd", lambda groups, given: Momentum(groups, 1.0, given.formats))
    adamw = optimizer_file.rules

    def rules(model, config):
        found = adamw(model, config)
        return found | {name: Rule("sgd", 0.5, 0.0) for name in found if name.endswith("up.weight")}

    monkeypatch.setattr(optimizer_file, "rules", rules)
    model = decoder()
    optimizer = OptimizerSet(model, Optim(lr=1.0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("up.weight"):
            torch.testing.assert_close(parameter.detach(), before[name] - 0.05)
    states = optimizer.tensors()
    assert {name for name in states if name.endswith("up.weight")} == {
        f"momentum_buffer.layers.{i}.mlp.up.weight" for i in range(2)
    }
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "name, weights, moments",
    [
        ("adamw", torch.float32, torch.float32),
        ("adamw", torch.float32, torch.bfloat16),
        ("adamw", torch.bfloat16, torch.uint8),
        ("lion", torch.bfloat16, torch.bfloat16),
        ("muon", torch.bfloat16, torch.bfloat16),
        ("adafactor", torch.float32, torch.float32),
        ("adafactor", torch.bfloat16, torch.float32),
        ("schedule_free_adamw", torch.float32, torch.float32),
    ],
)
def test_a_scalar_is_updated_as_a_vector_of_one_number(name, weights, moments):
    """It was an IndexError of AdamW and Adafactor, and a ValueError where weights are in bf16."""
    ends = []
    for shape in ((), (1,)):
        draw = torch.Generator().manual_seed(1)
        network = nn.Module()
        network.scale, network.matrix = (nn.Parameter(torch.ones(size, dtype=weights)) for size in (shape, (6, 4)))
        config = Optim(name=name)
        optimizer = OptimizerSet(network, config, moments=moments)
        for number in range(4):
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.numel(), generator=draw).view(parameter.shape).to(weights)
            optimizer.clip(1.0)
            optimizer.step(1e-2, torch.tensor(True), number)
            optimizer.zero_grad()
        ends.append([network.scale.view(1), network.matrix, *(state.view(-1) for state in optimizer.tensors().values())])
        assert float(network.scale.detach()) != 1.0
    assert all(map(torch.equal, *ends))
    network.scale = nn.Parameter(torch.ones(()))
    assert count_moments(network, config) > 0


@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_adafactor_follows_its_formula_also_where_squares_are_too_small_to_be_multiplied_in_fp32(size):
    """Algorithm 4 of arXiv 1804.04235 in fp64, without its relative rate."""
    draw, options = torch.Generator().manual_seed(1), AdafactorOptions()
    weight = torch.nn.Parameter(torch.randn(24, 16, generator=draw))
    expected, rows, columns = weight.detach().double(), torch.zeros(24, 1), torch.zeros(1, 16)
    optimizer = Adafactor([{"params": [weight], "weight_decay": 0.0}], 1e-2, options, Formats(torch.float32, {weight: "w"}))
    for number in range(1, 5):
        weight.grad = size * torch.randn(24, 16, generator=draw)
        optimizer.step()
        gradient, share = weight.grad.double(), number**-options.decay
        rows = torch.lerp(rows.double(), gradient.square().mean(1, keepdim=True), share)
        columns = torch.lerp(columns.double(), gradient.square().mean(0, keepdim=True), share)
        update = gradient / (rows * columns / rows.mean()).sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()) / options.clip)
        expected = expected - 1e-2 * max(options.least_scale, float(expected.square().mean().sqrt())) * update
    assert float((weight.detach() - expected).abs().max()) < 1e-6
