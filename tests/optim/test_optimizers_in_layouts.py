"""A step of each optimizer is that of torch's, of its authors' or of the published formula in one process, from the same gradients, under every layout."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from running import some_slow, state_of, train
from schedulefree import AdamWScheduleFree
from torch import Tensor
from torch.distributed.tensor import DTensor

from pretrain.config.load import load_config

EXPERTS = "model.experts={count: 6, active: 2, ffn_dim: 24, shared: 1, scoring: sigmoid, dense_layers: [0]}"
MODEL = ("model.family=custom", "model.vocab_size=264", "model.layers=3", "model.kv_heads=2", "model.attention.bias=[query, output]", EXPERTS, "optim.clip=0.5", "optim.weight_decay=0.2")
GROUPS = "optim.groups=[{pattern: '*norm*', weight_decay: 0.3}, {pattern: 'layers.*.attention.*', lr_scale: 3.0}, {pattern: 'embedding.*', lr_scale: 0}]"
FSDP = "parallel.strategy=fsdp"
LAYOUTS = {
    "single": (1,),
    "ddp 2": (2, "parallel.strategy=ddp"),
    "ddp 3": (3, "parallel.strategy=ddp", "batch={sequences: 12, micro_sequences: 2}"),
    "ddp 4": (4, "parallel.strategy=ddp"),  # a part of the ranks has a matrix to make
    "fsdp 2": (2, FSDP),
    "fsdp 3": (3, FSDP, "batch={sequences: 12, micro_sequences: 2}"),
    "fsdp 4": (4, FSDP),
    "hsdp 2x2": (4, FSDP, "parallel.replicate=2"),
    "tensor 2": (2, FSDP, "parallel.tensor=2"),
    "fsdp 2 x tensor 2": (4, FSDP, "parallel.tensor=2"),
    "hsdp 2x1 x tensor 2": (4, FSDP, "parallel.tensor=2", "parallel.replicate=2"),
    "expert 2": (2, FSDP, "parallel.expert=2"),
    "fsdp 4, expert 2": (4, FSDP, "parallel.expert=2"),
    "hsdp 2x2, expert 2": (4, FSDP, "parallel.replicate=2", "parallel.expert=2"),
    "fsdp 2 x tensor 2, expert 2": (4, FSDP, "parallel.tensor=2", "parallel.expert=2"),
    "fsdp 2 x pipeline 2": (4, FSDP, "parallel.pipeline=2", "batch.micro_sequences=4"),
    "fsdp 2 x context 2": (4, FSDP, "parallel.context=2"),
    "offload": (2, FSDP, "parallel.offload=true"),
    # Whole experts are dealt out to the ranks that share an expert-parallel rank's: 8 leaves two to each of 4 ranks, 12 three.
    "fsdp 4, expert 2, 8 experts": (4, FSDP, "parallel.expert=2", "model.experts.count=8"),
    "fsdp 4, expert 2, 12 experts": (4, FSDP, "parallel.expert=2", "model.experts.count=12"),
}
# The parts of its fused matrices have shapes of their own: of `kv_up`, keys [4 x 4, 12] and values [4 x 12, 12].
LATENT = ("model.family=deepseek_v3", "model.vocab_size=264", "model.layers=2", "model.heads=4", "model.kv_heads=null", "optim.clip=0.5", "optim.weight_decay=0.2",
          "model.latent={kv_rank: 12, query_rank: 16, rope_dim: 4, plain_dim: 4, value_dim: 12}", "model.experts={count: 4, active: 2, ffn_dim: 24, dense_layers: [0]}")  # fmt: skip
FUSED = {"kv_up.weight": (4, 12), "kv_down.weight": (12, 4)}
"""Rows of each projection in a fused matrix, head by head."""
OPTIMIZERS = {
    "adamw": ("optim.lr=1e-2",),
    "lion": ("optim.name=lion", "optim.lr=1e-2"),
    "adafactor": ("optim.name=adafactor", "optim.lr=1e-2"),
    "muon": ("optim.name=muon", "optim.lr=1e-2", "optim.muon.polynomial=quintic"),
    "schedule_free_adamw": ("optim.name=schedule_free_adamw", "schedule.name=constant", "optim.lr=1e-2"),
}


def projections(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices in a tensor, each for itself: experts, or projections, which have the rows of all heads."""
    if tensor.dim() == 3:
        return list(tensor)
    for of_fused, rows in FUSED.items():
        if name.endswith(of_fused):
            kind = torch.tensor([number for number, count in enumerate(rows) for _ in range(count)]).repeat(len(tensor) // sum(rows))
            return [tensor[kind == number] for number in range(len(rows))]
    return [tensor]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Reference:
    """Plain tensors of one process, updated by the optimizers of torch, or of their authors, in fp64."""

    def __init__(self, parameters: dict[str, Tensor], optimizer: str) -> None:
        self.parameters = {name: torch.nn.Parameter(p.double()) for name, p in parameters.items()}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.slices: dict[str, list[torch.nn.Parameter]] = {}
        self.means: dict[str, Tensor] = {}
        self.optimizer, self.scales = optimizer, {}
        for name, p in self.parameters.items():
            decay = 0.3 if "norm" in name else 0.0 if p.dim() == 1 or name.endswith("bias") or name.startswith("embedding") else 0.2
            self.scales[name] = (0.0 if name.startswith("embedding") else 3.0 if ".attention." in name and "norm" not in name else 1.0), decay
            if optimizer == "muon" and name.startswith("layers.") and p.dim() > 1 and not name.endswith("bias"):
                self.slices[name] = [torch.nn.Parameter(m.clone()) for m in projections(name, p.detach())]
                new = torch.optim.Muon(self.slices[name], weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            elif optimizer == "lion":
                continue
            elif optimizer == "adafactor":
                new = torch.optim.Adafactor([p], eps=(1e-15, 1e-3), weight_decay=decay, foreach=False)
            elif optimizer == "schedule_free_adamw":
                new = AdamWScheduleFree([p], betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, foreach=False)
                new.train()
            else:
                new = torch.optim.AdamW([p], betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, foreach=False)
            new.name = name
            self.optimizers.append(new)

    def step(self, rate: float, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.double()
            for part, own in zip(self.slices.get(name, []), projections(name, gradient.double())):
                part.grad = own
            scale, decay = self.scales[name]
            if self.optimizer == "lion":  # algorithm 2 of the paper
                p, mean = self.parameters[name].data, self.means.get(name, 0)
                p -= rate * scale * (torch.sign(0.9 * mean + 0.1 * gradient.double()) + decay * p)
                self.means[name] = 0.95 * mean + 0.05 * gradient.double()
        with patch.object(Tensor, "bfloat16", Tensor.clone):  # torch's Muon computes in bf16
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * self.scales[optimizer.name][0]
                optimizer.step()
        for name, parts in self.slices.items():
            places = projections(name, torch.arange(self.parameters[name].numel()).view(self.parameters[name].shape))
            for place, part in zip(places, parts):
                self.parameters[name].data.view(-1)[place] = part.detach()


def differences(optimizer: str, config_file: str, *overrides: str) -> dict[str, float]:
    """The largest difference of each parameter after three steps, as a share of the reference's largest change of one."""
    from pretrain.distributed import ranks as distributed
    from pretrain.train.plan import make_plan
    from pretrain.train.run_directory import RunDirectory
    from pretrain.train.starting_point import StartingPoint
    from pretrain.train.trainer import Trainer

    config, _ = load_config(config_file, list(overrides))
    _, local_rank, world_size = distributed.launched_ranks()
    plan = make_plan(config, world_size, distributed.choose_device(config, local_rank))
    ranks = distributed.start(config, alone=plan.layout.strategy == "single")
    trainer = Trainer(plan, ranks, RunDirectory(Path(config.run.dir) / "steps"), StartingPoint())
    for each in trainer.optimizer.optimizers:
        if hasattr(each, "dtype"):
            each.dtype = torch.float64  # products that lose nothing: what is left are mistakes
    parameters = trainer.optimizer.parameters
    first = {name: whole(p) for name, p in parameters.items()}
    reference = Reference(first, optimizer)
    for step in range(3):
        trainer.strategy.forward_backward(trainer.loader.read(step * config.batch.sequences), 512)
        trainer.optimizer.clip(0.5)
        factors = [each.gradient_factor for each in trainer.optimizer.optimizers if getattr(each, "scales_gradients", False)]
        gradients = {name: whole(p.grad) * (factors[0] if factors else 1) for name, p in parameters.items()}
        rate = 0.01 * (step + 1) / 3 if optimizer == "schedule_free_adamw" else 0.01 / (step + 1)  # it has a warmup only
        reference.step(rate, gradients)
        trainer.optimizer.step(rate, torch.tensor(True))
        trainer.optimizer.zero_grad()
    found = {}
    for name, p in parameters.items():
        change = float((reference.parameters[name].detach() - first[name]).abs().max())
        found[name] = float((whole(p).double() - reference.parameters[name].detach()).abs().max()) / (change or 1.0)
    ranks.barrier("compared")
    return found


# The others work element by element, alike under every layout.
CASES = {f"{name}, {layout}": (name, layout) for name in OPTIMIZERS for layout in (LAYOUTS if name in ("muon", "adafactor") else ("single", "ddp 2", "fsdp 2 x tensor 2"))}
SLOW = {f"adafactor, {layout}" for layout in set(LAYOUTS) - {"single", "hsdp 2x2", "fsdp 2 x tensor 2, expert 2", "fsdp 4, expert 2, 8 experts"}}
SLOW |= {f"muon, {layout}" for layout in ("fsdp 2", "fsdp 4, expert 2", "fsdp 2 x tensor 2", "offload", "fsdp 3", "fsdp 4", "tensor 2", "expert 2", "hsdp 2x1 x tensor 2", "hsdp 2x2, expert 2", "fsdp 2 x context 2")}


@pytest.mark.parametrize("case", some_slow(CASES, SLOW))
def test_a_step_is_that_of_one_process(pool, config_file, case):
    optimizer, layout = CASES[case]
    world_size, *options = LAYOUTS[layout]
    for found in pool.launch(world_size, differences, optimizer, str(config_file), *MODEL, *OPTIMIZERS[optimizer], GROUPS, *options):
        assert found and max(found.values()) <= 2e-5, sorted(found.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("layout", some_slow(["single", "ddp 2", "fsdp 2", "tensor 2", "hsdp 2x2", "fsdp 2 x tensor 2", "offload"], ["single", "ddp 2", "offload"]))
def test_muon_takes_the_projections_of_a_fused_matrix_apart(pool, config_file, layout):
    world_size, *options = LAYOUTS[layout]
    for found in pool.launch(world_size, differences, "muon", str(config_file), *LATENT, *OPTIMIZERS["muon"], GROUPS, *options):
        assert {name.partition("attention.")[2] for name in found} >= set(FUSED)
        assert max(found.values()) <= 2e-5, sorted(found.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("optimizer", some_slow(["lion", "muon", "adafactor", "schedule_free_adamw"], ["lion", "muon"]))
def test_state_moves_between_layouts_and_continues(pool, config_file, optimizer):
    mean = () if optimizer == "schedule_free_adamw" else ("optim.ema_decay=0.5",)
    short = (*MODEL, *OPTIMIZERS[optimizer], *mean, "run.steps=6", "schedule={name: constant, warmup_steps: 0}", "checkpoint={every_steps: 3, keep_last: 0}")
    whole_run = train(pool, 1, config_file, "run.name=whole", *short)
    train(pool, 4, config_file, "run.name=moved", *short, *LAYOUTS["hsdp 2x2, expert 2"][1:], "run.steps=3")
    moved = train(pool, 2, config_file, "run.name=moved", *short, *LAYOUTS["ddp 2"][1:])
    one, other = state_of(whole_run, 6), state_of(moved, 6)
    assert one.keys() == other.keys() and any(name.startswith("optim.") for name in one)
    start = state_of(whole_run, 3)
    for name, tensor in one.items():
        if tensor.is_floating_point() and name.startswith(("model.", "optim.ema.", "optim.trained.")):
            change = float((tensor - start[name]).abs().max())
            assert float((tensor - other[name]).abs().max()) <= 0.05 * change + 1e-6, name
