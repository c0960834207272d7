"""A running mean of the weights: what it is, that nothing notices it, and where it can be used."""

from __future__ import annotations

import pytest
import torch
from running import losses, run_main, some_slow, state_of, train
from safetensors.torch import load_file
from torch import nn

from pretrain.config.optim_schema import Optim
from pretrain.errors import CheckpointError
from pretrain.huggingface.export_model import export
from pretrain.observe.metrics import read_metrics
from pretrain.optim.optimizer import OptimizerSet

EMA = "optim.ema_decay=0.8"


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor"])
def test_the_mean_follows_its_formula_and_lends_its_values(name):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = OptimizerSet(model, Optim(name=name, ema_decay=0.8))
    expected = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.randn_like(p) if step != 3 else torch.full_like(p, torch.nan)
        before = {key: tensor.clone() for key, tensor in optimizer.tensors().items()} if step else {}
        optimizer.step(0.1, torch.tensor(step != 3))
        if step == 3:
            assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.tensors().items())
            continue
        expected = {key: 0.8 * expected[key] + 0.2 * p.detach().double() for key, p in model.named_parameters()}
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    with optimizer.averaged():
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.detach().double(), expected[key], rtol=0, atol=1e-6)
            assert not torch.equal(p, weights[key])
    assert all(torch.equal(p, weights[key]) for key, p in model.named_parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_mean_is_lent_without_another_copy_of_the_weights_in_fp32(stored):
    """It took 4 bytes per weight more than the line of memory says."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(stored)
    optimizer = OptimizerSet(model, Optim(ema_decay=0.8))
    for _ in range(3):
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step(0.1)
    weight, mean = model.weight.detach().clone(), optimizer.means["weight"].clone()
    with pytest.raises(KeyError), optimizer.averaged():
        assert torch.equal(model.weight, mean.to(stored))
        assert torch.equal(optimizer.means["weight"], weight if stored == torch.float32 else mean)
        raise KeyError  # an evaluation that is abandoned
    assert torch.equal(model.weight, weight) and torch.equal(optimizer.means["weight"], mean)


LAYOUTS = {
    "fsdp, kept": ("parallel.strategy=fsdp", "parallel.reshard_after_forward=never"),
    "ddp": ("parallel.strategy=ddp",),
    "pipeline": ("parallel.strategy=fsdp", "parallel.pipeline=2"),
    "tensor": ("parallel.strategy=fsdp", "parallel.tensor=2"),
}


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, {"ddp", "pipeline", "tensor"}))
def test_it_changes_nothing_is_validated_alike_everywhere_and_can_be_exported(pool, config_file, prepared, tmp_path, layout):
    layout = LAYOUTS[layout]
    checked = (f"data.validation=[{{path: {prepared}, name: v}}]", "validation.every_steps=2", "run.steps=6", "schedule.warmup_steps=2")
    saving = ("checkpoint={every_steps: 1, keep_last: 0}", "model.family=llama")
    plain = train(pool, 1, config_file, "run.name=plain", *checked, *saving)
    alone = train(pool, 1, config_file, "run.name=alone", *checked, *saving, EMA)
    assert losses(alone) == losses(plain)
    state = state_of(alone, 6)
    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(plain, 6).items())
    found = [record["ema_validation"]["v"] for record in read_metrics(alone) if "ema_validation" in record]
    assert len(found) == 3 and found != [record["validation"]["v"] for record in read_metrics(alone) if "validation" in record]
    shared = train(pool, 2, config_file, "run.name=shared", *checked, "model.family=llama", EMA, *layout)
    other = [record["ema_validation"]["v"] for record in read_metrics(shared) if "ema_validation" in record]
    assert other == pytest.approx(found, rel=2e-6)
    # What was exported is the mean of the weights after each step.
    mean = {name: tensor.double() for name, tensor in first_weights(pool, config_file, *checked, *saving).items()}
    for step in range(1, 7):
        mean = {name: 0.8 * mean[name] + 0.2 * tensor.double() for name, tensor in model_of(alone, step).items()}
    export(alone, tmp_path / "ema", weights="ema")
    exported = load_file(tmp_path / "ema" / "model.safetensors")
    torch.testing.assert_close(exported["model.embed_tokens.weight"].double(), mean["embedding.weight"], rtol=0, atol=1e-6)
    torch.testing.assert_close(exported["model.layers.1.mlp.down_proj.weight"].double(), mean["layers.1.mlp.down.weight"], rtol=0, atol=1e-6)
    with pytest.raises(CheckpointError, match="has no running mean of its weights; train with optim.ema_decay"):
        export(plain, tmp_path / "none", weights="ema")


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_resumed_run_begins_its_mean_with_the_weights_of_the_checkpoint(pool, config_file, ranks, strategy):
    short = ("run.steps=4", "schedule={name: constant, warmup_steps: 0}", "checkpoint={every_steps: 1, keep_last: 0}", f"parallel.strategy={strategy}")
    train(pool, ranks, config_file, *short, "run.steps=2")
    for code, printed in pool.launch(ranks, run_main, str(config_file), *short, EMA):
        assert code != 0 and "optim.ema_decay was null and is 0.8" in printed
    run = train(pool, ranks, config_file, *short, EMA, "run.accept_changes=[optim.ema_decay]")
    mean = model_of(run, 2)
    for step in (3, 4):
        weights, state = model_of(run, step), state_of(run, step)
        mean = {name: 0.8 * tensor + 0.2 * weights[name] for name, tensor in mean.items()}
        for name, tensor in mean.items():
            torch.testing.assert_close(state[f"optim.ema.{name}"], tensor, rtol=1e-6, atol=1e-7)
    code, printed = pool.launch(1, run_main, str(config_file), "run.name=next", f"run.init_from={run}", "run.steps=1", "schedule.warmup_steps=0")[0]
    assert code == 0 and "step-00000004, and not with their running mean (optim.ema_decay); for that, convert_checkpoint.py" in printed


def model_of(run, step) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state_of(run, step).items() if name.startswith("model.")}


def first_weights(pool, config_file, *overrides) -> dict[str, torch.Tensor]:
    """The weights before the first step, by a run that stands still."""
    still = train(pool, 1, config_file, "run.name=still", *overrides, "run.steps=1", "schedule.warmup_steps=0", "optim.lr=1e-38")
    return model_of(still, 1)
