"""A mixture of experts computes the same in every layout: gradients, loads, corrections; and continues exactly."""

from __future__ import annotations

import pytest
import torch
import yaml
from running import gradients, largest_gradient_difference, largest_relative_difference, losses, run_main, state_of, train

from pretrain.observe.metrics import read_metrics

GRADIENT_TOLERANCE, METRIC_TOLERANCE = 5e-6, 2e-6
EXPERTS = {"count": 6, "active": 2, "ffn_dim": 24, "shared": 1, "balance_loss": 0.1, "router_z_loss": 0.01, "scoring": "sigmoid",
           "correction": True, "correction_rate": 0.05, "dense_layers": [0], "groups": 3, "active_groups": 2, "scale": 1.5}  # fmt: skip
LATENT = {"kv_rank": 16, "query_rank": 12, "rope_dim": 4, "plain_dim": 8, "value_dim": 8}
LAYOUTS = {
    "other micro-batch": (1, "batch.micro_sequences=16"),
    "recomputation": (1, "parallel.activation_checkpointing=full"),
    "ddp on 2": (2, "parallel.strategy=ddp", "batch.micro_sequences=8"),
    "ddp on 2, every, recomputation": (
        2, "parallel.strategy=ddp", "parallel.grad_sync=every", "parallel.activation_checkpointing=full"
    ),
    "fsdp on 2": (2, "parallel.strategy=fsdp", "batch.micro_sequences=4"),
    "fsdp on 2, recomputation": (2, "parallel.strategy=fsdp", "parallel.activation_checkpointing=full"),
    "fsdp on 4": (4, "parallel.strategy=fsdp", "batch.micro_sequences=4"),
    "hsdp 2x2": (4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.shard=2"),
    "context 2": (2, "parallel.strategy=fsdp", "parallel.context=2"),
    "fsdp 2 x context 2, recomputation": (
        4, "parallel.strategy=fsdp", "parallel.context=2", "parallel.activation_checkpointing=full"
    ),
    "pipeline 2": (2, "parallel.strategy=fsdp", "parallel.pipeline=2"),
    "fsdp 2 x pipeline 2, recomputation": (
        4, "parallel.strategy=fsdp", "parallel.pipeline=2", "parallel.activation_checkpointing=full"
    ),
    "tensor 2": (2, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "fsdp 2 x tensor 2, recomputation": (
        4, "parallel.strategy=fsdp", "parallel.tensor=2", "parallel.activation_checkpointing=full"
    ),
    "expert 2": (2, "parallel.strategy=fsdp", "parallel.expert=2"),
    "expert 2, compiled": (2, "parallel.strategy=fsdp", "parallel.expert=2", "parallel.compile=blocks"),
    "fsdp 4, expert 2, recomputation": (
        4, "parallel.strategy=fsdp", "parallel.expert=2", "parallel.activation_checkpointing=full", "batch.micro_sequences=4"
    ),
    "hsdp 2x2, expert 2, last": (
        4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.expert=2", "parallel.grad_sync=last"
    ),
    "hsdp 2x2, expert 2, all-reduced once, last block kept, ahead": (
        4, "parallel.strategy=fsdp", "parallel.replicate=2", "parallel.expert=2", "parallel.reshard_after_forward=last_block_kept",
        "parallel.prefetch=1",
    ),
    "fsdp 2 x tensor 2, expert 2, selective": (
        4, "parallel.strategy=fsdp", "parallel.tensor=2", "parallel.expert=2", "parallel.activation_checkpointing=selective"
    ),
    "fsdp 2 x pipeline 2, expert 2": (4, "parallel.strategy=fsdp", "parallel.pipeline=2", "parallel.expert=2"),
    "fsdp 2 x context 2, expert 2, kept": (
        4, "parallel.strategy=fsdp", "parallel.context=2", "parallel.expert=2", "parallel.reshard_after_forward=never",
        "parallel.prefetch=2",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def experts_file(tmp_path_factory, prepared):
    """A small configuration with latent attention and, in its second layer, experts with all that could go wrong."""
    path = tmp_path_factory.mktemp("experts")
    config = {
        "run": {"dir": str(path / "runs"), "steps": 5, "seed": 7},
        "model": {"family": "custom", "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "latent": LATENT, "experts": EXPERTS},
        "data": {"sequence_length": 32, "sources": [{"path": str(prepared)}]},
        "batch": {"sequences": 16, "micro_sequences": 2},
        "optim": {"lr": 3e-3},
        "schedule": {"name": "constant", "warmup_steps": 1},
        "parallel": {"timeout_seconds": 60},
        "log": {"every_steps": 1, "tensorboard": False, "gradients_at": [1]},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path / "config.yaml"


@pytest.fixture(scope="module")
def single(pool, experts_file):
    """The run of one process."""
    return train(pool, 1, experts_file, "run.name=single")


def loads(run):
    return [record["experts"] for record in read_metrics(run)]


# The others with `-m slow`: python -m pytest tests/train/test_experts_in_layouts.py -m slow
QUICK = {
    "pipeline 2", "other micro-batch", "ddp on 2, every, recomputation", "fsdp on 2",
    "fsdp 4, expert 2, recomputation",
}  # fmt: skip


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS])
def test_a_layout_computes_what_one_process_computes(pool, experts_file, single, layout):
    world_size, *overrides = LAYOUTS[layout]
    run = train(pool, world_size, experts_file, f"run.name={list(LAYOUTS).index(layout)}", *overrides)
    assert largest_gradient_difference(gradients(run), gradients(single)) <= GRADIENT_TOLERANCE
    assert largest_relative_difference(losses(run), losses(single)) <= METRIC_TOLERANCE
    assert loads(run) == loads(single)
    assert corrections(run) == corrections(single)
    routers = [[record["router_loss"] for record in read_metrics(r)] for r in (run, single)]
    assert largest_relative_difference(*routers) <= METRIC_TOLERANCE


def corrections(run):
    from pretrain.huggingface.open_model import read_checkpoint

    _, weights, _ = read_checkpoint(run)
    return weights["layers.1.mlp.router.correction"].tolist()


def test_every_target_token_is_counted_once_per_active_expert_and_corrections_move_by_whole_rates(single):
    run = single
    for record, before in zip(read_metrics(run), [{"tokens": 0}, *read_metrics(run)]):
        assert list(record["experts"]) == ["1"] and len(record["experts"]["1"]) == 6
        assert sum(record["experts"]["1"]) == 2 * (record["tokens"] - before["tokens"])
        assert record["expert_load"]["1"] == pytest.approx(max(record["experts"]["1"]) / (sum(record["experts"]["1"]) / 6))
    expected = torch.zeros(6)
    for counts in (torch.tensor(record["experts"]["1"]) for record in read_metrics(run)):
        expected += 0.05 * (counts.float().mean() - counts).sign()
    assert corrections(run) == expected.tolist() and expected.abs().max() > 0


def test_counts_are_summed_between_reports(pool, experts_file, single):
    rare = train(pool, 1, experts_file, "run.name=rare", "log.every_steps=3")
    summed = torch.tensor([counts["1"] for counts in loads(single)])
    assert loads(rare)[1]["1"] == summed[1:3].sum(0).tolist()  # reports of steps 1, 3 and 5
    assert loads(rare)[2]["1"] == summed[3:].sum(0).tolist()


def test_a_run_with_corrections_resumes_exactly_and_goes_on_under_another_layout(pool, experts_file, single):
    train(pool, 1, experts_file, "run.name=parts", "run.steps=2")
    parts = train(pool, 1, experts_file, "run.name=parts")
    assert losses(parts) == losses(single) and corrections(parts) == corrections(single)
    train(pool, 2, experts_file, "run.name=moved", "parallel.strategy=fsdp", "run.steps=2")
    moved = train(pool, 1, experts_file, "run.name=moved")
    assert corrections(moved) == corrections(single)
    assert largest_relative_difference(losses(moved), losses(single)) <= METRIC_TOLERANCE


def test_experts_that_ranks_share_load_and_resume_under_any_layout_in_every_bit(pool, experts_file, single):
    """FSDP2 over 2 ranks of 2 experts' shares, then over 1 of 2 and tensor-parallel, then one process."""
    fsdp, tensor = ("parallel.strategy=fsdp", "parallel.expert=2"), "parallel.tensor=2"
    runs = [train(pool, 4, experts_file, "run.name=shared", "run.steps=2", *fsdp)]
    for name, ranks, layout in (("again", 4, (*fsdp, tensor)), ("alone", 1, ())):
        start = f"run.resume={runs[-1] / 'checkpoints' / 'step-00000002'}"
        runs.append(train(pool, ranks, experts_file, f"run.name={name}", "run.steps=2", start, *layout))
    states = [state_of(run, 2) for run in runs]
    assert any(".experts." in name for name in states[0])
    for state in states[1:]:
        assert state.keys() == states[0].keys() and all(torch.equal(state[name], x) for name, x in states[0].items())
    moved = train(pool, 2, experts_file, "run.name=alone", *fsdp)
    assert corrections(moved) == corrections(single)
    assert largest_relative_difference([*losses(runs[0]), *losses(moved)], losses(single)) <= METRIC_TOLERANCE


GLOBAL = ("model.experts.balance_scope=global_batch", "model.experts.balance_loss=1", "model.experts.correction=false",
          "model.experts.correction_rate=0", "log.gradients_at=[3]")  # fmt: skip
# Ranks that share matrices or positions round elsewhere, and two steps of AdamW amplify that.
SLOWLY = "optim.lr=3e-4"


@pytest.fixture(scope="module")
def single_global(pool, experts_file):
    """The run of one process that balances over the global batch."""
    return train(pool, 1, experts_file, "run.name=single-global", *GLOBAL)


QUICK_GLOBAL = {"ddp on 2"}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in QUICK_GLOBAL else pytest.mark.slow) for n in LAYOUTS])
def test_balance_over_the_global_batch_is_the_same_in_every_layout(pool, experts_file, single, single_global, layout):
    """M-D11: the shares are those of the whole step before, which every layout counts alike."""
    world_size, *overrides = LAYOUTS[layout]
    alone = single_global
    if "context" in layout or "tensor" in layout:
        overrides.append(SLOWLY)
        alone = train(pool, 1, experts_file, f"run.name=slow-{list(LAYOUTS).index(layout)}", *GLOBAL, SLOWLY)
    run = train(pool, world_size, experts_file, f"run.name=global-{list(LAYOUTS).index(layout)}", *GLOBAL, *overrides)
    assert largest_gradient_difference(gradients(run, 3), gradients(alone, 3)) <= GRADIENT_TOLERANCE
    assert largest_relative_difference(losses(run), losses(alone)) <= METRIC_TOLERANCE
    assert loads(run) == loads(alone) != loads(single)


def test_balance_over_the_global_batch_goes_on_after_a_resume_as_if_there_had_been_none(pool, experts_file, single_global):
    train(
        pool, 2, experts_file, "run.name=global-parts", *GLOBAL, "log.gradients_at=[]", "run.steps=2", "parallel.strategy=fsdp"
    )
    parts = train(pool, 1, experts_file, "run.name=global-parts", *GLOBAL)
    assert largest_gradient_difference(gradients(parts, 3), gradients(single_global, 3)) <= GRADIENT_TOLERANCE
    assert loads(parts) == loads(single_global)


def test_a_start_says_what_balances_nothing_and_refuses_what_trains_nothing(experts_file):
    """M-D10: a mixture of experts without any balancing was trained without a word."""
    still = ("model.experts.correction_rate=0", "model.experts.balance_loss=0", "model.experts.router_z_loss=0")
    code, printed = run_main(str(experts_file), *still, "--check", "checkpoint.export_check=false")
    assert code == 0 and "caution  nothing keeps the loads of the 6 experts even (model.experts.balance_loss=0 and" in printed
    code, printed = run_main(str(experts_file), "--check", "checkpoint.export_check=false")
    assert code == 0 and "caution" not in printed
    code, printed = run_main(str(experts_file), *still, "model.experts.active=1", "--check")
    assert code == 2 and "model.experts.active=1 with model.experts.normalise=true" in printed
    code, printed = run_main(str(experts_file), *still, "model.experts.balance_scope=global_batch", "--check")
    assert code == 2 and "model.experts.balance_scope=global_batch has no effect with model.experts.balance_loss=0.0" in printed


def test_validation_loss_is_plain_cross_entropy(pool, experts_file, prepared):
    validating = (f"data.validation=[{{path: {prepared}, name: held_out}}]", "validation.sequences=13", "optim.lr=1e-12")
    still = ("model.experts.correction_rate=0", "run.steps=1")
    runs = [
        train(pool, 1, experts_file, f"run.name=weight-{weight}", f"model.experts.balance_loss={weight}", *validating, *still)
        for weight in (0, 5)
    ]
    one, other = (read_metrics(run)[-1] for run in runs)
    assert one["validation"]["held_out"] == pytest.approx(other["validation"]["held_out"], abs=1e-6)
    assert other["router_loss"] > 5 and other["objective"] - other["loss"] == pytest.approx(other["router_loss"], rel=1e-4)
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert [counts["1"] for counts in loads(runs[0])] == [counts["1"] for counts in loads(runs[1])]  # none of validation


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_in_bf16_the_gradient_is_the_same_in_every_bit(pool, experts_file, strategy):
    options = ("precision.compute=bf16", "batch.micro_sequences=8", "run.steps=1")
    single = train(pool, 1, experts_file, f"run.name=bf16-for-{strategy}", *options)
    run = train(pool, 2, experts_file, f"run.name=bf16-{strategy}", f"parallel.strategy={strategy}", *options)
    assert largest_gradient_difference(gradients(run), gradients(single)) == 0.0
    assert loads(run) == loads(single)
