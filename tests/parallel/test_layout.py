"""A layout follows from the configuration and the number of processes, or is refused with what would be legal."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrain.config.attention_schema import LinearAttentionConfig
from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Batch, Config
from pretrain.distributed.launcher import expected_world_size
from pretrain.distributed.mesh import Mesh
from pretrain.distributed.ranks import Ranks
from pretrain.errors import ConfigError, LaunchError
from pretrain.models.families import complete
from pretrain.models.linear_attention import GatedDeltaNet
from pretrain.parallel import ddp
from pretrain.parallel.explain import explain_ranks, explain_strategy
from pretrain.parallel.layout import Layout, plan_layout, take_rest
from pretrain.parallel.legality import check_backend, check_context, check_options, check_tensor
from pretrain.parallel.tensor_modules import Shared, share_of_heads
from pretrain.train.resolve import resolve

GB = 10**9


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides))[0]


def plan(world_size: int, *overrides: str, parameters: int = 10**6, memory: int | None = None) -> Layout:
    return plan_layout(config("batch={sequences: 48, micro_sequences: 2}", *overrides), world_size, parameters, memory)


def refused(kind: type[Exception], world_size: int, *overrides: str) -> str:
    with pytest.raises(kind) as caught:
        plan(world_size, *overrides)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "world_size, overrides, expected, name",
    [
        (1, ["parallel.strategy=single"], Layout("single", 1, 1, 24), "single"),
        (1, [], Layout("single", 1, 1, 24), "single"),
        (2, [], Layout("ddp", 2, 1, 12), "ddp 2"),
        (2, ["parallel.strategy=ddp"], Layout("ddp", 2, 1, 12), "ddp 2"),
        (4, ["parallel.strategy=ddp", "parallel.replicate=4"], Layout("ddp", 4, 1, 6), "ddp 4"),
        (1, ["parallel.strategy=ddp", "parallel.replicate=1"], Layout("ddp", 1, 1, 24), "ddp 1"),
        (4, ["parallel.strategy=fsdp"], Layout("fsdp", 1, 4, 6), "fsdp 4"),
        (1, ["parallel.strategy=fsdp", "parallel.shard=1"], Layout("fsdp", 1, 1, 24), "fsdp 1"),
        (4, ["parallel.strategy=fsdp", "parallel.replicate=2"], Layout("fsdp", 2, 2, 6), "hsdp 2x2"),
        (8, ["parallel.strategy=fsdp", "parallel.shard=2"], Layout("fsdp", 4, 2, 3), "hsdp 4x2"),
        (8, ["parallel={strategy: fsdp, replicate: 2, shard: 4}"], Layout("fsdp", 2, 4, 3), "hsdp 2x4"),
        (4, ["parallel={strategy: fsdp, replicate: 4, shard: 1}"], Layout("fsdp", 4, 1, 6), "fsdp 4 (replicated)"),
        (2, ["parallel.tensor=2"], Layout("fsdp", 1, 1, 24, 2), "fsdp 1 x tensor 2"),
        (4, ["parallel.pipeline=2"], Layout("fsdp", 1, 2, 12, pipeline=2, bubble=pytest.approx(1 / 13)), "fsdp 2 x pipeline 2"),
        (8, ["parallel.tensor=2", "parallel.strategy=fsdp"], Layout("fsdp", 1, 4, 6, 2), "fsdp 4 x tensor 2"),
        (8, ["parallel={replicate: 2, tensor: 2}"], Layout("fsdp", 2, 2, 6, 2), "hsdp 2x2 x tensor 2"),
        (4, ["parallel={replicate: 2, shard: 1, tensor: 2}"], Layout("fsdp", 2, 1, 12, 2), "fsdp 2 (replicated) x tensor 2"),
        (4, ["parallel.expert=2"], Layout("fsdp", 1, 4, 6, expert=2), "fsdp 4, expert 2"),
        (8, ["parallel={replicate: 2, shard: 2, tensor: 2, expert: 2}"], Layout("fsdp", 2, 2, 6, 2, expert=2), "hsdp 2x2 x tensor 2, expert 2"),
    ],
)
def test_axes_and_micro_steps_follow_from_the_configuration(world_size, overrides, expected, name):
    layout = plan(world_size, *overrides)
    assert layout == expected
    assert layout.name == name
    assert layout.data_size * layout.tensor * layout.pipeline == world_size


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_a_legal_batch_falls_into_equal_micro_steps(replicate, shard, micro_sequences, micro_steps):
    world_size = replicate * shard
    assume(world_size > 1)
    asked = Config(
        parallel=Parallel(strategy="fsdp", replicate=replicate, shard=shard),
        batch=Batch(sequences=world_size * micro_sequences * micro_steps, micro_sequences=micro_sequences),
    )
    layout = plan_layout(asked, world_size, 1, None)
    assert (layout.replicate, layout.shard, layout.micro_steps) == (replicate, shard, micro_steps)


# ---- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, parameters, memory, strategy",
    [
        (1, 10**12, 80 * GB, "single"),
        (4, 10**12, None, "ddp"),
        (4, 2 * 10**9, 80 * GB, "ddp"),  # 16 bytes each are 32 GB, 40% of the memory
        (4, 2 * 10**9 + 1, 80 * GB, "fsdp"),
    ],
)
def test_auto_replicates_what_fits_and_shards_what_does_not(world_size, parameters, memory, strategy):
    assert plan(world_size, parameters=parameters, memory=memory).strategy == strategy


def test_auto_takes_the_axes_that_are_given():
    assert plan(4, "parallel={replicate: 2, shard: 2}", parameters=10**10, memory=80 * GB) == Layout("fsdp", 2, 2, 6)
    assert plan(4, "parallel.replicate=4") == Layout("ddp", 4, 1, 6)


@pytest.mark.parametrize(
    "world_size, overrides, said",
    [
        (1, [], None),
        (2, ["parallel.strategy=fsdp"], None),
        (2, ["parallel.strategy=ddp"], "DDP makes 2 replicas, each with the whole state"),
        (2, [], "DDP makes 2 replicas.* fit in 40% .*; chosen by auto"),
        (4, ["parallel.tensor=2"], r"FSDP2 shards the state: the configuration spreads weights \(shard 2, tensor 2\); chosen by auto"),
        (4, ["parallel={strategy: fsdp, replicate: 2}"], r"FSDP2 makes 2 replicas \(HSDP\): .* spread \(shard 2\), and DDP takes whole models"),
        (2, ["parallel={strategy: fsdp, replicate: 2}"], r"FSDP2 makes 2 replicas \(HSDP\): DDP needs strategy ddp"),
    ],
)
def test_the_choice_between_ddp_and_fsdp2_is_said(world_size, overrides, said):
    found = explain_strategy(config(*overrides), plan(world_size, *overrides))
    assert found is None if said is None else re.fullmatch(f"{said}.*", found)


@pytest.mark.parametrize(
    "world_size, overrides, layout",
    [
        (4, ["parallel.tensor=-1"], Layout("fsdp", 1, 1, 6, tensor=4)),
        (8, ["parallel={strategy: fsdp, shard: 2, context: -1}"], Layout("fsdp", 1, 2, 6, context=4)),
        (8, ["parallel={shard: 2, tensor: 2, pipeline: -1}", "model.layers=4"], Layout("fsdp", 1, 2, 6, 2, pipeline=2, bubble=1 / 7)),
        (1, ["parallel.tensor=-1"], Layout("single", 1, 1, 6)),
        (8, ["parallel={replicate: 2, expert: -1}"], Layout("fsdp", 2, 4, 6, expert=4)),
        (8, ["parallel={shard: 2, tensor: 2, context: -1, expert: -1}"], Layout("fsdp", 1, 2, 6, 2, context=2, expert=4)),
        (1, ["parallel.expert=-1"], Layout("single", 1, 1, 6)),
    ],
)
def test_minus_one_takes_the_processes_that_other_axes_leave(world_size, overrides, layout):
    given = config("batch={sequences: 48, micro_sequences: 2}", *overrides)
    found = plan_layout(take_rest(given, world_size), world_size, 10**6, None)
    assert dataclasses.replace(found, micro_steps=6, bubble=layout.bubble) == layout


def test_minus_one_that_takes_nothing_whole_is_refused():
    with pytest.raises(LaunchError, match="parallel.tensor=-1: 5 processes do not divide by parallel.shard=2; start 4 or 6: torchrun"):
        take_rest(config("parallel={shard: 2, tensor: -1}"), 5)
    with pytest.raises(ConfigError, match="parallel.tensor=-1 and parallel.pipeline=-1: one axis takes the rest; give the other a number"):
        take_rest(config("parallel={pipeline: -1, tensor: -1}"), 4)


def test_auto_says_what_does_not_fit():
    assert "more than 40% of a GPU's memory; chosen by auto" in explain_strategy(config(), plan(4, parameters=10**10, memory=80 * GB))


def test_auto_counts_the_running_mean_of_the_weights():
    """e14: it said 16 bytes per parameter beside 20 in the line of memory, and took DDP for a state that does not fit."""
    mean = "optim.ema_decay=0.99"
    assert "it takes 16 bytes per parameter" in explain_strategy(config(), plan(2))
    assert "it takes 20 bytes per parameter" in explain_strategy(config(mean), plan(2, mean))
    of_two = {"parameters": 18 * 10**8, "memory": 80 * GB}  # 28.8 and 36 GB
    assert plan(2, **of_two).strategy == "ddp" and plan(2, mean, **of_two).strategy == "fsdp"


def test_auto_with_a_shard_axis_shards():
    assert plan(4, "parallel.shard=4") == Layout("fsdp", 1, 4, 6)
    assert plan(4, "parallel={replicate: 2, shard: 2}") == Layout("fsdp", 2, 2, 6)


def test_auto_does_not_train_alone_where_several_processes_are_asked_for():
    message = refused(LaunchError, 1, "parallel.replicate=2")
    assert message.startswith("parallel.strategy=ddp (the choice of auto), parallel.replicate=2, parallel.shard=null expects 2")
    assert "1 started" in message
    assert "start 2" in refused(LaunchError, 1, "parallel.shard=2")


# ---- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy, axis", [("ddp", "replicate"), ("fsdp", "shard")])
def test_a_parallel_strategy_with_one_process_names_the_command(monkeypatch, strategy, axis):
    monkeypatch.setattr("sys.argv", ["pretrain/run.py", "--config", "a b.yaml", f"parallel.strategy={strategy}"])
    message = refused(LaunchError, 1, f"parallel.strategy={strategy}")
    assert f"parallel.strategy={strategy} expects several processes, 1 started" in message
    assert f"torchrun --nproc-per-node 2 pretrain/run.py --config 'a b.yaml' parallel.strategy={strategy} " in message
    assert "--multi_gpu" in message
    assert f"or parallel.{axis}=1" in message


@pytest.mark.parametrize("strategy, remedy", [("auto", ""), ("fsdp", " and parallel.strategy=single")])
def test_one_process_for_several_expert_ranks_is_told_what_one_process_can_take(strategy, remedy):
    experts = ["model={family: mixtral, experts: {count: 4, active: 2}}"]
    message = refused(LaunchError, 1, *experts, f"parallel={{strategy: {strategy}, expert: 4}}")
    assert message.startswith(f"parallel.strategy=fsdp{' (the choice of auto)' if strategy == 'auto' else ''} expects several processes")
    assert "torchrun --nproc-per-node 4 " in message and message.endswith(f"For one process, set parallel.expert=1{remedy}")
    assert plan(1, *experts, "parallel.strategy=single" if remedy else "parallel.strategy=auto").strategy == "single"


def test_single_with_several_processes_is_refused():
    message = refused(LaunchError, 4, "parallel.strategy=single")
    assert "parallel.strategy=single runs in one process, but 4 were started" in message
    assert "python pretrain/run.py" in message and "ddp, fsdp or auto" in message


@pytest.mark.parametrize(
    "world_size, axes, wanted",
    [
        (4, "strategy: fsdp, replicate: 2, shard: 4", 8),
        (4, "strategy: fsdp, replicate: 2, shard: 1", 2),
        (2, "strategy: ddp, replicate: 4", 4),
        (1, "strategy: ddp, replicate: 2", 2),
        (1, "strategy: fsdp, replicate: 2, shard: 2", 4),
        (4, "strategy: fsdp, replicate: 1, shard: 4, tensor: 2", 8),
    ],
)
def test_axes_that_do_not_multiply_to_the_processes_are_refused(world_size, axes, wanted):
    message = refused(LaunchError, world_size, f"parallel={{{axes}}}")
    for name, value in config(f"parallel={{{axes}}}").parallel.__dict__.items():
        if name in ("strategy", "replicate", "shard") or (name == "tensor" and value > 1):
            assert f"parallel.{name}={'null' if value is None else value}" in message
    assert f"expects {wanted} processes, {world_size} started" in message
    assert f"torchrun --nproc-per-node {wanted} " in message


@pytest.mark.parametrize(
    "world_size, axis, near",
    [
        (6, "replicate=4", "4 or 8"),
        (6, "shard=4", "4 or 8"),
        (1, "shard=2", "2"),
        (3, "replicate=8", "8"),
        (6, "tensor=4", "4 or 8"),
    ],
)
def test_an_axis_that_does_not_divide_the_processes_is_answered_with_numbers_that_do(world_size, axis, near):
    message = refused(LaunchError, world_size, "parallel.strategy=fsdp", f"parallel.{axis}")
    assert f"parallel.{axis}" in message
    given = axis.split("=")[1]
    assert f"{world_size} processes do not divide by {given}; start {near}: torchrun --nproc-per-node {given} " in message


@pytest.mark.parametrize(
    "overrides, keys",
    [
        (["parallel={strategy: ddp, shard: 2}"], ["parallel.strategy=ddp cannot shard", "parallel.shard=2", "strategy=fsdp"]),
        (["parallel={strategy: single, shard: 2}"], ["parallel.strategy=single cannot shard", "parallel.shard=2"]),
        (["parallel={strategy: single, replicate: 2}"], ["parallel.strategy=single cannot replicate", "parallel.replicate=2"]),
    ],
)
def test_options_that_a_strategy_cannot_honour_are_refused(overrides, keys):
    message = refused(ConfigError, 2, *overrides)
    assert all(key in message for key in keys)


def test_options_of_ddp_reach_torch(monkeypatch):
    """Nothing but memory and speed shows them: they are looked at where torch takes them."""
    taken = {}
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **options: taken.update(options) or Mock())
    for options, expected in (("{}", (25.0, True)), ("{bucket_mb: 0.5, gradient_as_bucket_view: false}", (0.5, False))):
        chosen = config("batch={sequences: 48, micro_sequences: 2}", f"parallel={{strategy: ddp, ddp: {options}}}")
        ranks = Ranks(0, 0, 2, torch.device("cpu"))
        ddp.DataParallel(chosen, Mesh({"replicate": 2}, ranks)).place(torch.nn.Linear(2, 2), lambda model: None)
        assert (taken["bucket_cap_mb"], taken["gradient_as_bucket_view"]) == expected


def test_options_of_fsdp_are_taken_by_fsdp():
    assert plan(2, "parallel={strategy: fsdp, offload: true, reshard_after_forward: never}").strategy == "fsdp"


@pytest.mark.parametrize(
    "overrides, processes",
    [
        (["parallel.strategy=single"], 1),
        (["parallel={strategy: ddp, replicate: 3}"], 3),
        (["parallel={strategy: fsdp, replicate: 2, shard: 4}"], 8),
        (["parallel={replicate: 2, shard: 4}"], 8),
        (["parallel.strategy=ddp"], 2),
        (["parallel.strategy=fsdp"], 2),
        (["parallel={strategy: fsdp, replicate: 2}"], 2),
        (["parallel={strategy: fsdp, shard: 1}"], 1),
        (["parallel={expert: 4, context: 2}"], 4),
        (["parallel={expert: 4, replicate: 2, tensor: 2}"], 16),
        ([], None),
    ],
)
def test_a_configuration_says_how_many_processes_it_needs_at_least(overrides, processes):
    assert expected_world_size(config(*overrides)) == processes


# ---- batch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, sequences, micro, near",
    [
        (2, 10, 3, "nearest legal batch.sequences: 6 or 12; nearest legal batch.micro_sequences: 1"),
        (1, 10, 4, "nearest legal batch.sequences: 8 or 12; nearest legal batch.micro_sequences: 5"),
        (4, 2, 1, "nearest legal batch.sequences: 4"),
        (1, 4, 16, "nearest legal batch.sequences: 16; nearest legal batch.micro_sequences: 4"),
        (2, 36, 8, "nearest legal batch.sequences: 32 or 48; nearest legal batch.micro_sequences: 9"),
    ],
)
def test_a_batch_that_does_not_divide_is_answered_with_the_nearest_that_do(world_size, sequences, micro, near):
    message = refused(ConfigError, world_size, f"batch={{sequences: {sequences}, micro_sequences: {micro}}}")
    assert message == (
        f"batch.sequences={sequences} is not divisible by batch.micro_sequences={micro} times {world_size} "
        f"data-parallel ranks; {near}"
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6))
def test_what_is_proposed_for_a_batch_is_legal(sequences, micro, world_size):
    def layout(sequences, micro):
        asked = Config(batch=Batch(sequences=sequences, micro_sequences=micro))
        return plan_layout(asked, world_size, 1, None)

    if sequences % (micro * world_size) == 0:
        assert layout(sequences, micro).micro_steps * micro * world_size == sequences
        return
    with pytest.raises(ConfigError) as caught:
        layout(sequences, micro)
    *_, remedies = str(caught.value).partition("ranks; ")
    for remedy in remedies.split("; "):
        what, _, values = remedy.removeprefix("nearest legal batch.").partition(": ")
        for value in values.split(" or "):
            layout(**{"sequences": sequences, "micro": micro, what.removesuffix("_sequences"): int(value)})


# ---- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, keys",
    [
        (
            ["parallel={strategy: fsdp, tensor: 2, expert: 2, activation_checkpointing: selective, compile: blocks}"],
            ["activation_checkpointing=selective", "parallel.compile=blocks", "parallel.tensor=2 and parallel.expert=2"],
        ),
        (["run={init_from: x, resume: required}"], ["run.init_from=x", "run.resume=required", "keep one"]),
        (["run={init_from: x, resume: runs/y}"], ["run.init_from=x", "run.resume=runs/y"]),
    ],
)
def test_values_that_cannot_go_together_are_refused_with_both_keys(overrides, keys):
    with pytest.raises(ConfigError) as caught:
        check_options(config("run.steps=10", *overrides))
    assert all(key in str(caught.value) for key in keys)
    with pytest.raises(ConfigError):
        plan_layout(config("run.steps=10", *overrides), 1, 1, None)


@pytest.mark.parametrize(
    "overrides",
    [
        ["run={init_from: x, resume: never}"],
    ],
)
def test_values_at_the_limit_are_taken(overrides):
    check_options(config("run.steps=10", *overrides))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.tensor=3"], "parallel.tensor=3: model.heads=4 does not divide by it; use 2 or 4, or change that key"),
        (["parallel.tensor=4", "model.ffn_dim=70"], "parallel.tensor=4: model.ffn_dim=70 does not divide by it; use 2, or change that key"),
        (["parallel.tensor=4", "model.heads=12", "model.kv_heads=6", "model.dim=96", "model.ffn_dim=96"], "parallel.tensor=4: model.kv_heads=6 is neither a multiple nor a divisor of it; use 3 or 6, or change that key"),
        (["parallel.tensor=4", "model.vocab_size=5"], "parallel.tensor=4: model.vocab_size=5 is too small, the last rank would have no row of the table; use 2, or change that key"),
        (["parallel.tensor=2", "parallel.strategy=ddp"], "parallel.tensor=2 has no effect with parallel.strategy=ddp; set parallel.strategy=fsdp, or set parallel.tensor=1, its default"),
        (["parallel.tensor=2", "parallel.compile=blocks", "parallel.activation_memory_budget=0.5"], "parallel.activation_memory_budget=0.5 does not work with parallel.tensor=2: torch's compiler cannot weigh their collectives; use parallel.activation_checkpointing=full"),
        (["parallel.tensor=2", "parallel.strategy=single"], "parallel.tensor=2 has no effect with parallel.strategy=single; set parallel.strategy=fsdp, or set parallel.tensor=1, its default"),
    ],
)  # fmt: skip
def test_matrices_that_ranks_cannot_share_are_refused_with_the_nearest_numbers_that_can(config_file, overrides, message):
    written, _ = load_config(config_file, ["parallel.strategy=fsdp", *overrides])
    with pytest.raises(ConfigError) as raised:
        resolve(written)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "overrides, message, other",
    [
        (["parallel.tensor=2", "model.predict_ahead=1"], "parallel.context=2: model.predict_ahead=1 shifts sequences, which parallel.tensor=2 cuts as well", "parallel.tensor=1"),
        (["data.sequence_length=3"], "parallel.context=2: 2 x 2 stretches of data.sequence_length=3 tokens are empty", "data.sequence_length=4 or more"),
        (["model.attention_backend=flex", "data.document_mask=true"], "parallel.context=2: model.attention_backend=flex needs whole masks", "model.attention_backend=sdpa"),
    ],
)  # fmt: skip
def test_sequences_that_ranks_cannot_share_are_refused(config_file, overrides, message, other):
    written, _ = load_config(config_file, ["parallel.strategy=fsdp", "parallel.context=2", *overrides])
    with pytest.raises(ConfigError) as raised:
        resolve(written)
    assert str(raised.value) == f"{message}; set parallel.context=1, or {other}"


@pytest.mark.parametrize("axis", ["pipeline", "expert"])
def test_a_budget_of_compiled_activations_goes_with_ranks_that_share_no_products(axis):
    """Refused for pipelines, whose messages go between blocks. Tried on two ranks: gradients within 5e-6 of one process."""
    given = config(f"parallel={{strategy: fsdp, {axis}: 2, compile: blocks, activation_memory_budget: 0.5}}", "model={family: mixtral, layers: 2, experts: {count: 4, active: 2}}")
    assert resolve(given).parallel.activation_memory_budget == 0.5


def test_pairs_under_context_parallelism_are_gathered_and_not_decoded():
    pairs = ("model={family: transformer, encoder: {layers: 2}}", "data={pairs: x, validation: [{path: x}]}", "batch.tokens=1000")
    resolve(config("parallel={strategy: fsdp, context: 2}", *pairs))
    with pytest.raises(ConfigError, match="context_method=ring: pairs of sequences .* are gathered; use allgather"):
        resolve(config("parallel={strategy: fsdp, context: 2, context_method: ring}", *pairs))
    with pytest.raises(ConfigError, match="parallel.context=2: validation.translation.every_steps=5 decodes with a cache"):
        resolve(config("parallel={strategy: fsdp, context: 2}", *pairs, "validation.translation.every_steps=5"))


def test_a_ring_is_not_compiled_and_needs_ranks(config_file):
    written, _ = load_config(config_file, ["parallel={strategy: fsdp, context: 2, context_method: ring, compile: blocks}"])
    with pytest.raises(ConfigError, match="parallel.context_method=ring: torch's compiler cannot trace .*; use allgather, or set parallel.compile=none"):
        resolve(written)
    written, _ = load_config(config_file, ["parallel={strategy: fsdp, context: 2, context_method: ring}", "model.attention_dropout=0.1"])
    with pytest.raises(ConfigError, match="parallel.context_method=ring: its kernels drop no weights, as model.attention_dropout=0.1 asks; use allgather"):
        resolve(written)
    written, _ = load_config(config_file, ["parallel={strategy: fsdp, context_method: ring}"])
    with pytest.raises(ConfigError, match="parallel.context_method=ring has no effect with parallel.context=1"):
        resolve(written)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["model.layers=1"], "parallel.pipeline=2: 2 stages need as many layers, but the model has 1; set parallel.pipeline=1, or more layers"),
        (["model.layers=4", "parallel.pipeline=6"], "parallel.pipeline=6: 6 stages need as many layers, but the model has 4; use at most parallel.pipeline=4, or more layers"),
        (["model.layers=5", "parallel.pipeline_schedule=interleaved", "parallel.pipeline_chunks=3"], "parallel.pipeline=2, parallel.pipeline_chunks=3: 6 stages need as many layers, but the model has 5; use parallel.pipeline_schedule=1f1b or parallel.pipeline_chunks=2, or more layers"),
        (["parallel.strategy=ddp"], "parallel.pipeline=2 has no effect with parallel.strategy=ddp; set parallel.strategy=fsdp, or set parallel.pipeline=1, its default"),
        (["parallel.pipeline_chunks=2", "parallel.pipeline_schedule=gpipe"], None),
        (["model.layers=3", "parallel.pipeline_schedule=zero_bubble_v"], "parallel.pipeline=2, parallel.pipeline_schedule=zero_bubble_v: 4 stages need as many layers, but the model has 3; use parallel.pipeline_schedule=zero_bubble, or more layers"),
        (["parallel.compile=blocks", "parallel.pipeline_schedule=zero_bubble"], "parallel.pipeline_schedule=zero_bubble computes the gradients of weights apart, which parallel.compile=blocks joins with the others; set parallel.compile=none, or use 1f1b or interleaved"),
        (["parallel.grad_sync=every", "parallel.pipeline_schedule=zero_bubble"], "parallel.pipeline_schedule=zero_bubble has gradients of weights after the last micro-batch only, so parallel.grad_sync=every cannot be; use last or auto"),
        (["parallel.pipeline_chunks=3"], "parallel.pipeline_chunks=3 has no effect with parallel.pipeline_schedule=1f1b; set parallel.pipeline_schedule=interleaved, or set parallel.pipeline_chunks=2, its default"),
    ],
)  # fmt: skip
def test_layers_that_ranks_cannot_share_are_refused_with_the_nearest_numbers_that_can(config_file, overrides, message):
    written, _ = load_config(config_file, ["parallel={strategy: fsdp, pipeline: 2}", *overrides])
    if message is None:
        resolve(written)
        return
    with pytest.raises(ConfigError) as raised:
        resolve(written)
    assert str(raised.value).removeprefix("command line: ") == message


def test_steps_of_pairs_are_not_dealt_out_in_rounds():
    pairs = ("model={family: transformer, encoder: {layers: 2}}", "data.pairs=x", "batch.tokens=1000")
    for schedule in ("interleaved", "dualpipev"):
        with pytest.raises(ConfigError, match="steps of pairs differ in their number of micro-batches.*use 1f1b"):
            resolve(config(f"parallel={{strategy: fsdp, pipeline: 2, pipeline_schedule: {schedule}}}", *pairs))
    for schedule in ("1f1b", "zero_bubble", "zero_bubble_v"):
        resolve(config(f"parallel={{strategy: fsdp, pipeline: 2, pipeline_schedule: {schedule}}}", *pairs))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["batch.micro_sequences=24"], "parallel.pipeline=4: batch.sequences=48 has 2 micro-batches of 24 samples, and the 4 stages need at least as many; use batch.sequences=96, or change batch.micro_sequences=24"),
        (["batch.ramp=[{until_tokens: 9999, sequences: 4}]"], "parallel.pipeline=4: batch.ramp.0.sequences=4 has 2 micro-batches of 2 samples, and the 4 stages need at least as many; use batch.ramp.0.sequences=8, or change batch.micro_sequences=2"),
        (["parallel.pipeline_schedule=interleaved", "batch.sequences=18"], "parallel.pipeline=4: batch.sequences=18 has 9 micro-batches of 2 samples, and schedule interleaved cannot deal them out; use batch.sequences=20, or change batch.micro_sequences=2"),
        (["model.layers=8", "parallel.pipeline_schedule=dualpipev", "batch.sequences=12"], "parallel.pipeline=4: batch.sequences=12 has 6 micro-batches of 2 samples, and the 8 stages need at least as many; use batch.sequences=16, or change batch.micro_sequences=2"),
        (["model.layers=8", "parallel.pipeline_schedule=zero_bubble_v", "batch.sequences=6"], "parallel.pipeline=4: batch.sequences=6 has 3 micro-batches of 2 samples, and the 4 ranks need at least as many; use batch.sequences=8, or change batch.micro_sequences=2"),
    ],
)  # fmt: skip
def test_steps_that_a_pipeline_cannot_take_are_refused_with_the_next_size_that_it_can(overrides, message):
    assert refused(ConfigError, 4, "parallel={strategy: fsdp, pipeline: 4}", *overrides) == message


WITH_EXPERTS = ("model.family=custom", "model.experts={count: 6, active: 2, ffn_dim: 24}", "model.ffn_dim=40")


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "parallel.expert=4: the model has no experts; set parallel.expert=1, or model.experts.count"),
        ([*WITH_EXPERTS, "model.experts.dense_layers=[1]", "model.sublayers=[mixer, both]"], "parallel.expert=4: model.experts.dense_layers names every layer with an MLP, so none has experts; set parallel.expert=1"),
        (WITH_EXPERTS, "parallel.expert=4: model.experts.count=6 does not divide by it; use 3 or 6, or change that key"),
        ([*WITH_EXPERTS, "parallel.expert=9"], "parallel.expert=9: model.experts.count=6 does not divide by it; use 6, or change that key"),
        (["parallel.strategy=ddp"], "parallel.expert=4 has no effect with parallel.strategy=ddp; set parallel.strategy=fsdp, or set parallel.expert=1, its default"),
    ],
)  # fmt: skip
def test_experts_that_ranks_cannot_share_are_refused_with_the_nearest_numbers_that_can(config_file, overrides, message):
    written, _ = load_config(config_file, ["parallel={strategy: fsdp, expert: 4}", *overrides])
    with pytest.raises(ConfigError) as raised:
        resolve(written)
    assert str(raised.value).removeprefix("command line: ") == message


def test_expert_groups_divide_the_ranks_that_share_weights():
    given = ("parallel.strategy=fsdp", "parallel.expert=4", "model.experts.count=16")
    message = refused(ConfigError, 6, *given, "parallel.context=2")
    assert message == (
        "parallel.expert=4: the 6 ranks that share weights (parallel.shard=3 x parallel.context=2) do not divide by it; use 2, or another "
        "parallel.shard"
    )
    assert "parallel.shard=1 x parallel.context=1) do not divide by it; use 1, " in refused(ConfigError, 4, *given, "parallel.shard=1")
    assert plan(4, *given, "parallel.context=4").expert == plan(8, *given, "parallel.replicate=2").expert == 4


@pytest.mark.parametrize("axis", ["tensor", "context", "expert", "pipeline"])
def test_models_of_transformers_are_not_shared(tmp_path, axis):
    from hf_configs import write_config

    family = [
        f"model={{family: hf, hf_config: {write_config(tmp_path, 'stablelm')}}}",
        "parallel.strategy=fsdp",
        "data.sequence_length=32",
    ]
    with pytest.raises(ConfigError, match=f"parallel.{axis}=2: models of model.family=hf are code of transformers"):
        resolve(load_config(None, [*family, f"parallel.{axis}=2"])[0])


def test_an_explanation_gives_every_token_of_a_step_and_every_head_to_someone():
    """From the table alone: replicas have other samples, stages other layers, context ranks other positions, tensor ranks other heads."""
    given = config(
        "batch={sequences: 48, micro_sequences: 2}", "model.heads=4", "data.sequence_length=50",
        "parallel={strategy: fsdp, pipeline: 2, replicate: 2, shard: 2, context: 2, tensor: 2}", "model.layers=4",
    )  # fmt: skip
    head, *rows = explain_ranks(plan_layout(given, 32, 10**6, None), given, [1, 1, 1, 1])
    assert head.split() == "rank pipeline replicate shard context tensor samples of a step layers positions query heads weights".split()
    covered = set()
    for number, row in enumerate(rows):
        rank, *_, samples, layers, positions, heads, weights = (cell for cell in re.split(r"\s{2,}", row.strip()))
        assert int(rank) == number and weights == "1/16"
        for stretch in positions.split(", "):
            whole = [range(int(a), int(b) + 1) for a, b in (cell.split("-") for cell in (samples, layers, stretch, heads))]
            new = set(itertools.product(*whole))
            assert not new & covered
            covered |= new
    assert len(rows) == 32 and len(covered) == 48 * 4 * 50 * 4


def test_an_explanation_gives_every_head_of_linear_attention_to_a_tensor_and_context_rank():
    sizes = "linear_attention: {pattern: [true, false], key_heads: 4, value_heads: 8}"
    given = config("batch={sequences: 48, micro_sequences: 2}", f"model={{family: custom, layers: 2, heads: 4, {sizes}}}", "parallel={strategy: fsdp, tensor: 2, context: 2}")
    head, *rows = explain_ranks(plan_layout(given, 8, 10**6, None), given, [1, 1])
    column = re.split(r"\s{2,}", head.strip()).index("heads of linear attention")
    # Of tensor rank t and context rank c: value heads 4 t + 2 c and the next, which is what the modules keep.
    group = lambda rank: SimpleNamespace(rank=lambda: rank, size=lambda: 2)  # noqa: E731
    own = lambda tensor, context: share_of_heads(GatedDeltaNet, share_of_heads(GatedDeltaNet, {"decay_bias": torch.arange(8)}, 4, group(tensor)), 2, group(context))  # noqa: E731
    kept = [own(tensor, context)["decay_bias"].tolist() for context in range(2) for tensor in range(2)]
    cells = [f"{part[0]}-{part[-1]}" for part in kept] * 2
    assert [re.split(r"\s{2,}", row.strip())[column] for row in rows] == cells


def test_an_explanation_gives_every_expert_to_one_rank_of_each_group_of_neighbours():
    given = config("batch={sequences: 48, micro_sequences: 2}", "model={heads: 4, experts: {count: 6}}", "parallel={strategy: fsdp, expert: 3}")
    head, *rows = explain_ranks(plan_layout(given, 6, 10**6, None), given, [1] * given.model.layers)
    column = [re.split(r"\s{2,}", line.strip()).index("experts") for line in (head,)][0]
    assert [re.split(r"\s{2,}", row.strip())[column] for row in rows] == ["0-1", "2-3", "4-5"] * 2


def test_a_table_that_can_be_sharded_in_no_way_is_refused():
    odd = ["parallel={strategy: fsdp, tensor: 2}", "batch.sequences=48", "model.vocab_size=61", "model.dim=32"]
    message = "model.vocab_size=61 does not divide by parallel.tensor=2, nor model.dim=32 by the 3 ranks that share weights; use model.vocab_size=62"
    assert message in refused(ConfigError, 6, *odd)
    assert plan(8, *odd).shard == 4 and plan(4, *odd).shard == 2 and plan(6, *odd, "model.vocab_size=62").shard == 3


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_minus_one_takes_the_rest(axis):
    other = {"replicate": "shard", "shard": "replicate"}[axis]
    options = ["parallel.strategy=fsdp", f"parallel.{other}=2", "parallel.tensor=2"]
    assert plan(16, *options, f"parallel.{axis}=-1") == plan(16, *options) == plan(16, *options, f"parallel.{axis}=4")
    for value in (0, -2):
        with pytest.raises(ConfigError, match="must be at least 1"):
            config(f"parallel.{axis}={value}")


@pytest.mark.parametrize(
    "strategy, options, named",
    [
        ("fsdp", [], "parallel.strategy=fsdp"),
        ("fsdp", ["parallel.tensor=2"], "parallel.strategy=fsdp"),
        ("ddp", ["optim.name=muon"], "optim.name=muon"),
    ],
)
def test_gloo_is_refused_where_it_would_gather_tensors_of_a_gpu(strategy, options, named):
    """Seen on an H200: the first gather ends the process by signal 11."""
    given = config("parallel.backend=gloo", *options)
    with pytest.raises(ConfigError, match=f"parallel.backend=gloo does not work with {named} on GPUs"):
        check_backend(given, strategy, on_gpu=True)
    check_backend(given, strategy, on_gpu=False)
    check_backend(config(*options), strategy, on_gpu=True)


def test_gloo_takes_ddp_on_a_gpu():
    check_backend(config("parallel.backend=gloo"), "ddp", on_gpu=True)


def test_what_an_older_compiler_cannot_do_is_refused():
    """torch 2.11's ended with an assertion of its own where tensor-parallel blocks have experts."""
    given = config("parallel={strategy: fsdp, tensor: 2, compile: blocks}", "model.experts={count: 4}")
    with patch("torch.__version__", torch.torch_version.TorchVersion("2.11.0+cu130")), pytest.raises(ConfigError, match="install torch 2.13, or set parallel.compile=none"):
        check_options(given)
    with patch("torch.__version__", torch.torch_version.TorchVersion("2.13.0")):
        check_options(given)


def test_the_loss_of_a_shared_router_is_no_view():
    """FSDP2 would warn of a block that returns one."""
    loss_B = torch.ones(3, requires_grad=True)
    shared_B = Shared.apply(loss_B, 4)
    shared_B.sum().backward()
    assert shared_B._base is None and torch.equal(loss_B.grad, torch.full((3,), 0.25))


@pytest.mark.parametrize(
    ("heads", "tensor", "context", "message"),
    [
        ((4, 8), 2, 2, None),
        ((1, 8), 4, 2, None),  # a single key head is on every rank
        ((2, 8), 2, 4, None),  # as is the one that tensor ranks leave
        ((4, 8), 8, 1, "parallel.tensor=8: model.linear_attention.key_heads=4 does not divide by it"),
        ((1, 6), 4, 1, "parallel.tensor=4: model.linear_attention.value_heads=6 does not divide by it"),
        ((4, 8), 1, 8, "parallel.context=8: model.linear_attention.key_heads=4 does not divide by it; set parallel.context=1, or"),
        ((4, 8), 2, 4, "parallel.context=4: model.linear_attention.key_heads=4 / parallel.tensor=2 does not divide by it"),
        ((1, 8), 2, 8, "parallel.context=8: model.linear_attention.value_heads=8 / parallel.tensor=2 does not divide by it"),
    ],
)
def test_heads_of_linear_attention_are_shared_or_refused_by_name(heads, tensor, context, message):
    sizes = LinearAttentionConfig(kind="mamba2", pattern=[True, False], key_heads=heads[0], value_heads=heads[1])
    model = complete(Model(family="custom", dim=64, layers=2, heads=8, ffn_dim=64, vocab_size=64, linear_attention=sizes), 64)

    said = ""
    try:
        check_tensor(model, tensor)
        check_context(Config(model=model, parallel=Parallel(tensor=tensor, context=context)))
    except ConfigError as error:
        said = str(error)
    assert said == "" if message is None else message in said
