"""Schedule-free AdamW: its authors' numbers, and a run whose model is the mean of the weights wherever the model is read."""

from __future__ import annotations

import pytest
import torch
from running import losses, run_main, state_of, train
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch import nn

from pretrain.config.load import load_config
from pretrain.config.optim_schema import Optim
from pretrain.errors import CheckpointError, ConfigError
from pretrain.huggingface.export_model import export
from pretrain.observe.metrics import read_metrics
from pretrain.optim.optimizer import OptimizerSet
from pretrain.run import main
from pretrain.train.callbacks import Callback
from pretrain.train.resolve import resolve

OPTIMIZER = "optim={name: schedule_free_adamw, lr: 1.0e-2, betas: [0.9, 0.99]}"
SHORT = (OPTIMIZER, "model.family=llama", "run.steps=6", "schedule={name: constant, warmup_steps: 2}", "checkpoint={every_steps: 3, keep_last: 0}")


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95), (0.98, 0.95)])
def test_weights_and_their_mean_are_those_of_its_authors(betas):
    torch.manual_seed(0)
    model = nn.Linear(300, 400)  # more numbers than are updated at once
    groups = [{"params": [nn.Parameter(p.detach().double())], "weight_decay": decay} for p, decay in zip(model.parameters(), (0.1, 0.0))]
    theirs = AdamWScheduleFree(groups, lr=0.01, betas=betas, foreach=False)
    theirs.train()
    optimizer = OptimizerSet(model, Optim(name="schedule_free_adamw", lr=0.01, betas=betas, weight_decay=0.1))
    first = [p.detach().double() for p in model.parameters()]
    for step in range(12):
        rate = 0.01 * min(1.0, (step + 1) / 4)
        draws = [torch.randn_like(p) * (1 + step) for p in model.parameters()]
        for p, draw in zip(model.parameters(), draws):
            p.grad = draw.clone() if step != 5 else torch.full_like(draw, torch.nan)
        optimizer.step(rate, torch.tensor(step != 5))
        if step == 5:  # a step that is left out
            continue
        for group, draw in zip(theirs.param_groups, draws):
            group["params"][0].grad, group["lr"] = draw.double(), rate
        theirs.step()
        trained = [p.detach().clone() for p in model.parameters()]
        expected = [group["params"][0] for group in theirs.param_groups]
        for p, other, start in zip(model.parameters(), expected, first):
            assert (p.detach() - other).abs().max() <= 1e-5 * (other - start).abs().max()
        theirs.eval()
        with optimizer.averaged():
            for p, other, start in zip(model.parameters(), expected, first):
                assert (p.detach() - other).abs().max() <= 1e-5 * (other - start).abs().max()
            assert step == 0 or not any(torch.equal(p, own) for p, own in zip(model.parameters(), trained))
        theirs.train()
        assert all(torch.equal(p, own) for p, own in zip(model.parameters(), trained))


def test_changed_betas_move_neither_the_model_nor_what_steps_move():
    """z follows from y by the beta1 that y was made with. With the new one, a resumed run leapt by ten times the distance of z and x."""
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    x = z = y = model.weight.detach().double()
    square, optimizer = torch.zeros_like(x), None
    for step in range(1, 9):
        betas = (0.9, 0.99) if step <= 4 else (0.99, 0.95)
        if step in (1, 5):
            saved = optimizer.tensors() if optimizer else {}
            optimizer = OptimizerSet(model, Optim(name="schedule_free_adamw", lr=0.01, betas=betas, weight_decay=0.1))
            for name, tensor in saved.items():
                optimizer.tensors()[name].copy_(tensor)
        gradient = torch.randn_like(y)
        model.weight.grad = gradient.float()
        optimizer.step(0.01)
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        z = z - 0.01 * (gradient / ((square / (1 - betas[1] ** step)).sqrt() + 1e-8) + 0.1 * y)
        x = x + (z - x) / step
        y = (1 - betas[0]) * z + betas[0] * x
        assert (model.weight - y).abs().max() <= 1e-6 and (optimizer.tensors()["trained.weight"] - x).abs().max() <= 1e-6


def test_a_group_that_stood_still_is_averaged_from_its_first_step_on():
    model = nn.Linear(5, 5, bias=False)
    optimizer = OptimizerSet(model, Optim(name="schedule_free_adamw", lr=0.01))
    start = model.weight.detach().clone()
    for scale in (0.0, 0.0, 1.0):
        optimizer.optimizers[0].param_groups[0]["rate_scale"] = scale
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(0.01)
        assert torch.equal(model.weight, start) == (scale == 0)
    assert torch.equal(optimizer.tensors()["trained.weight"], model.weight)  # of one step, the mean is z


class Losses(Callback):
    """The loss of some tokens after each step, as a callback is given it."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def evaluate(self, run, step):
        tokens_BT = torch.arange(17)[None].repeat(4, 1)
        self.found.append(float(run.losses(tokens_BT=tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).sum()))
        return {}


def run_with_losses(config_file: str, *overrides: str) -> list[float]:
    callback = Losses()
    assert main(["--config", config_file, *overrides], callbacks=[callback]) == 0
    return callback.found


@pytest.mark.parametrize(("ranks", "layout"), [(1, "parallel.strategy=single"), (2, "parallel.strategy=fsdp")])
def test_validation_callbacks_checkpoints_and_exports_are_of_the_mean(pool, config_file, prepared, tmp_path, ranks, layout):
    checked = (f"data.validation=[{{path: {prepared}, name: v}}]", "validation.every_steps=3")
    found = pool.launch(ranks, run_with_losses, str(config_file), *SHORT, *checked, layout)
    run = config_file.parent / "runs" / "run"
    state = state_of(run, 6)
    assert not any(torch.equal(tensor, state[f"model.{name.split('.', 2)[2]}"]) for name, tensor in state.items() if name.startswith("optim.trained."))
    # Another run that begins with the checkpoint's model and leaves it as it is.
    still = ("run.steps=1", "optim.lr=1e-38", "model.family=llama", "schedule={name: constant, warmup_steps: 0}", "run.name=still")
    (others,) = pool.launch(1, run_with_losses, str(config_file), f"run.init_from={run}", *still, *checked)
    validated = [read_metrics(one)[-1]["validation"]["v"] for one in (run, run.parent / "still")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-6)
    assert [one[-1] for one in found] == pytest.approx([others[-1]] * ranks, rel=1e-6)
    with pytest.raises(CheckpointError, match="has no running mean of its weights; its weights are the mean: export them"):
        export(run, tmp_path / "none", weights="ema")
    export(run, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["model.layers.1.mlp.down_proj.weight"], state["model.layers.1.mlp.down.weight"])


def test_what_reads_the_mean_changes_nothing_and_an_interrupted_run_has_the_same_bits(pool, config_file, prepared):
    plain = train(pool, 1, config_file, "run.name=plain", *SHORT)
    looked_at = ("checkpoint={every_steps: 1, keep_last: 0, asynchronous: true}", f"data.validation=[{{path: {prepared}, name: v}}]", "validation.every_steps=1")
    watched = train(pool, 1, config_file, "run.name=watched", *SHORT, *looked_at)
    train(pool, 1, config_file, "run.name=cut", *SHORT, "run.steps=3")
    cut = train(pool, 1, config_file, "run.name=cut", *SHORT)
    for other in (watched, cut):
        assert losses(other) == losses(plain)
        one, theirs = state_of(plain, 6), state_of(other, 6)
        assert one.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in one.items())
    for code, printed in pool.launch(1, run_main, str(config_file), *SHORT, "optim.ema_decay=0.9", "run.name=no"):
        assert code != 0 and "optim.ema_decay=0.9" in printed and "optim.name" in printed


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule.name=cosine", "takes the place of schedule.name=cosine; set schedule.name=constant"),
        ("precision={compute: bf16, moments: bf16}", "in fp32; remove precision.moments"),
        ("precision={compute: bf16, master: bf16}", "in fp32; remove precision.master"),
    ],
)
def test_what_it_cannot_have_is_refused(config_file, override, said):
    with pytest.raises(ConfigError, match=said):
        resolve(load_config(config_file, [*SHORT, override])[0])
