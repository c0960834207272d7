"""`optimizer` and `fused_rows` of `optim.groups`: what only the user knows of matrices in transformers' code."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import yaml
from hf_configs import write_config
from running import largest_relative_difference, losses, run_main, train

from pretrain.config.model_schema import Model
from pretrain.config.optim_schema import MuonOptions, Optim, ParameterGroup
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.rules import check_groups, count_moments, describe, rules
from pretrain.parallel.initialise import initialise

QKV, GATE_UP, DOWN = "*query_key_value.weight", "*.experts.gate_up_proj", "*.experts.down_proj"


def hf(tmp_path, kind: str) -> torch.nn.Module:
    model = complete(Model(family="hf", hf_config=str(write_config(tmp_path / kind, kind))), 32)
    with torch.device("meta"):
        built = build_network(model)
    built.to_empty(device="cpu")
    initialise(built, 3)
    return built


def heads(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Bloom's four heads, each with the eight rows of its query, then of its key and of its value: all queries, all keys, all values."""
    return [matrix.view(4, 3, 8, 32)[:, i].reshape(32, 32) for i in range(3)]


def experts(stack: torch.Tensor) -> list[torch.Tensor]:
    """Gate and up of each expert."""
    return [part for one in stack for part in (one[:16], one[16:])]


@pytest.mark.parametrize(
    ("kind", "group", "parts"),
    [
        ("bloom", ParameterGroup(QKV, fused_rows=[8, 8, 8]), heads),
        ("qwen2_moe", ParameterGroup(GATE_UP, optimizer="muon", fused_rows=[16, 16]), experts),
        ("qwen2_moe", ParameterGroup(DOWN, optimizer="muon"), list),
    ],
)
def test_each_projection_of_transformers_takes_the_step_that_torchs_muon_takes_with_it_alone(tmp_path, kind, group, parts):
    model = hf(tmp_path, kind).double()
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
    config = Optim(name="muon", weight_decay=0.1, muon=MuonOptions(polynomial="quintic"), groups=[group])
    check_groups(model, config)
    name = next(name for name, rule in rules(model, config).items() if name.endswith(group.pattern.lstrip("*")))
    whole = model.get_parameter(name)
    expected = [torch.nn.Parameter(part.clone()) for part in parts(whole.detach())]
    for part, gradient in zip(expected, parts(whole.grad)):
        part.grad = gradient.clone()
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # torch's Muon computes in bf16
        torch.optim.Muon(expected, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    optimizers = OptimizerSet(model, config, compute=torch.float64)
    optimizers.step(0.1)
    for found, part in zip(parts(whole.detach()), expected):
        torch.testing.assert_close(found, part.detach(), atol=1e-9, rtol=0)
    kept = sum(tensor.numel() for key, tensor in optimizers.tensors().items() if not key.startswith("step."))
    assert kept == count_moments(model, config)


def test_a_group_takes_matrices_from_muon(tmp_path):
    model = hf(tmp_path, "bloom")
    config = Optim(name="muon", groups=[ParameterGroup("*.mlp.*", optimizer="adamw")])
    check_groups(model, config)
    found = rules(model, config)
    assert {name for name, rule in found.items() if rule.optimizer == "muon"} == {
        f"transformer.h.{i}.self_attention.{name}.weight" for i in (0, 1) for name in ("query_key_value", "dense")
    }
    assert describe(model, config)[-1].endswith("1 x the learning rate, by adamw")


@pytest.mark.parametrize(
    ("kind", "name", "group", "message"),
    [
        ("bloom", "adamw", ParameterGroup(QKV, optimizer="muon"), "optim.groups.0.optimizer has no effect with optim.name=adamw; remove it"),
        ("bloom", "lion", ParameterGroup(QKV, fused_rows=[8, 8]), "optim.groups.0.fused_rows has no effect with optim.name=lion; remove it"),
        ("bloom", "muon", ParameterGroup(QKV, fused_rows=[96]), r"fused_rows=\[96\] names one projection, so nothing is taken apart"),
        ("bloom", "muon", ParameterGroup(QKV, fused_rows=[32, 8]), r"fused_rows=\[32, 8\] are 40 rows, which do not divide the 96 of transformer.h.0.self"),
        ("bloom", "muon", ParameterGroup("*norm*", optimizer="muon"), r"optimizer=muon: transformer.word_embeddings_layernorm.weight is no matrix"),
        ("bloom", "muon", ParameterGroup("*.word_embeddings.*", fused_rows=[1, 1]), r"has no effect on transformer.word_embeddings.weight, which is AdamW's"),
        ("qwen2_moe", "muon", ParameterGroup(GATE_UP, fused_rows=[16, 16]), r"which is AdamW's; add optimizer: muon, or choose another pattern"),
        ("bloom", "muon", ParameterGroup(QKV, optimizer="adamw", fused_rows=[8, 8, 8]), r"which is AdamW's"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, kind, name, group, message):
    with pytest.raises(ConfigError, match=message):
        check_groups(hf(tmp_path, kind), Optim(name=name, groups=[group]))


def test_with_a_base_width_muon_takes_only_what_it_has_a_rule_for():
    model = build_network(complete(Model(dim=16, layers=1, heads=2, ffn_dim=24, vocab_size=40), 8))
    with pytest.raises(ConfigError, match="optim.base_width has no rule for output.weight under Muon"):
        check_groups(model, Optim(name="muon", base_width=8, groups=[ParameterGroup("output.weight", optimizer="muon")]))
    check_groups(model, Optim(name="muon", base_width=8, groups=[ParameterGroup("*.mlp.up.weight", lr_scale=2.0, optimizer="muon")]))


GROUPS = {
    "bloom": "[{pattern: '*query_key_value.weight', fused_rows: [8, 8, 8]}]",
    "qwen2_moe": "[{pattern: '*.gate_up_proj', optimizer: muon, fused_rows: [16, 16]}, {pattern: '*.down_proj', optimizer: muon}]",
}


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy"),
    [("qwen2_moe", 2, "fsdp"), ("bloom", 2, "fsdp"), ("bloom", 2, "ddp"), ("qwen2_moe", 3, "fsdp"), ("qwen2_moe", 2, "ddp")],
)
def test_layouts_take_the_same_steps(pool, config_file, tmp_path, kind, ranks, strategy):
    config = yaml.safe_load(config_file.read_text())
    config["model"] = {"family": "hf", "hf_config": str(write_config(tmp_path / kind, kind))}
    config_file.write_text(yaml.safe_dump(config))
    common = ("run.steps=5", "optim.name=muon", f"optim.groups={GROUPS[kind]}", "optim.lr=0.01", "schedule={name: constant, warmup_steps: 0}", "batch={sequences: 12, micro_sequences: 2}")
    single = losses(train(pool, 1, config_file, "run.name=single", *common))
    run = losses(train(pool, ranks, config_file, "run.name=other", *common, f"parallel.strategy={strategy}"))
    assert len(run) == 5 and largest_relative_difference(run, single) <= 2e-6
    plain = losses(train(pool, 1, config_file, "run.name=plain", *common[:2], *common[3:]))
    assert largest_relative_difference(plain[:1], single[:1]) == 0.0 and largest_relative_difference(plain[1:], single[1:]) > 1e-5


def test_a_resume_that_hands_a_parameter_to_another_optimizer_is_refused(pool, config_file):
    resumed = ("run.steps=4", "optim.name=muon", "schedule={name: constant, warmup_steps: 0}")
    train(pool, 1, config_file, *resumed, "run.steps=2")
    more = ("optim.groups=[{pattern: '*.attention.*', optimizer: adamw}]", "run.accept_changes=[optim.groups, run.steps]")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *resumed, *more)
    assert code == 1 and "Traceback" not in printed
    line = printed.splitlines()[-1]
    assert "has no optim.step.layers.0.attention.query.weight; that parameter had another optimizer: restore optim.groups, or start anew" in line
