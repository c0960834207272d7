"""The optimizer is torch's AdamW, with weight decay on matrices only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pretrain.config.schema import Model, Optim
from pretrain.models.decoder import Decoder
from pretrain.models.shape import complete
from pretrain.optim.optimizer import build_optimizer, decayed
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


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group(tied):
    model = decoder(tied)
    optimizer = build_optimizer(model, Optim(weight_decay=0.3))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.3]


def test_steps_are_those_of_the_published_algorithm():
    config = Optim(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    model = decoder()
    optimizer = build_optimizer(model, config)
    decays = decayed(model)
    reference = {name: [p.detach().double().clone(), 0.0, 0.0] for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 11):
        lr = config.lr / step  # as a schedule sets it
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            weight, first, second = reference[name]
            gradient = parameter.grad.double()
            first = 0.8 * first + 0.2 * gradient
            second = 0.9 * second + 0.1 * gradient**2
            weight = weight * (1 - lr * (0.2 if decays[name] else 0.0))
            weight = weight - lr * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
            reference[name] = [weight, first, second]
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), reference[name][0], rtol=1e-5, atol=1e-6)


def test_steps_are_those_of_torchs_adamw_without_fusion():
    config = Optim(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    one, other = decoder(), decoder()
    optimizer = build_optimizer(one, config)
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
        optimizer.step()
        reference.step()
    for p, q in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_weight_decay_shrinks_by_the_learning_rate_times_the_decay():
    model = decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if decayed(model)[name] else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)
