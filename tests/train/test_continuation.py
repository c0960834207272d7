"""Where a run may start from and what it leaves behind, beyond the plain resume of test_resume.py."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from running import (
    cut_after,
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_directory,
    run_main,
    run_main_with,
    some_slow,
    traced,
    train,
)

from pretrain.checkpoint.payload import Payload
from pretrain.distributed.launcher import launched_ranks
from pretrain.errors import CheckpointError
from pretrain.observe.metrics import read_metrics
from pretrain.optim.lion import Lion
from pretrain.train.continuation import Continuation


def refusal(pool, config_file, *overrides, ranks=1) -> str:
    code, printed = pool.launch(ranks, run_main, str(config_file), *overrides)[0]
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert code in (1, 2) and len(lines) == 1, printed
    return lines[0]


@pytest.mark.parametrize("options", [
    ("model.tie_embeddings=true", "precision.compute=bf16"),
    pytest.param(("precision.compute=bf16",), marks=pytest.mark.slow),
    pytest.param(("parallel.reshard_after_forward=never",), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_sharded_run_that_validates_where_it_saves_can_be_resumed(pool, config_file, prepared, options):
    # A forward pass without backward leaves weights gathered; what is saved must be the sharded ones all the same.
    shared = (f"data.validation=[{{path: {prepared}, name: v}}]", "validation.every_steps=5", "checkpoint.every_steps=5",
              "parallel.strategy=fsdp", "run.deterministic=true", *options)  # fmt: skip
    straight = train(pool, 2, config_file, "run.name=straight", *shared)
    names = Payload(straight / "checkpoints" / "step-00000020").names()
    weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    assert weights == {name.removeprefix("optim.exp_avg.") for name in names if name.startswith("optim.exp_avg.")}
    parts = cut_after(straight, 15)
    train(pool, 2, config_file, "run.name=parts", *shared)
    assert losses(parts) == losses(straight)[15:]


def test_weights_of_another_network_are_refused_though_every_shape_fits(pool, trained_run, config_file):
    first = trained_run(1, config_file, "run.name=first", "run.steps=5", "schedule.warmup_steps=0")
    line = refusal(pool, config_file, "run.name=second", f"run.init_from={first}", "model.rope.theta=77")
    assert "model.rope.theta was 10000.0 and is 77.0" in line


LION_STEP = Lion.step


def step_that_creates_state(optimizer: Lion) -> None:
    LION_STEP(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            optimizer.state[parameter].setdefault("seen", torch.ones_like(parameter))


def test_state_that_only_a_step_creates_is_not_lost_in_silence(pool, config_file):
    overrides = "optim.name=lion", "run.steps=4", "schedule.warmup_steps=0", "checkpoint.every_steps=2"
    step = (Lion, "step", step_that_creates_state)
    code, printed = pool.launch(1, run_main_with, *step, str(config_file), *overrides)[0]
    assert code == 0, printed
    cut_after(run_directory(config_file), 2)
    code, printed = pool.launch(1, run_main_with, *step, str(config_file), "run.name=parts", *overrides)[0]
    assert code == 1 and "which the optimizer does not create before its first step" in printed, printed
    assert "has optim.seen." in printed and printed.count("error: ") == 1


def test_weights_of_another_tokenizer_are_refused(pool, trained_run, config_file):
    first = trained_run(1, config_file, "run.name=first", "run.steps=5", "schedule.warmup_steps=0")
    checkpoint = first / "checkpoints" / "step-00000005"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    tokenizer = checkpoint / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    from pretrain.checkpoint.files import describe_file

    manifest["files"]["tokenizer/tokenizer.json"] = describe_file(tokenizer)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "trained with another tokenizer" in refusal(pool, config_file, "run.name=second", f"run.init_from={first}")


def test_checkpoints_without_manifests_are_no_reason_to_start_afresh(pool, config_file):
    options = ("checkpoint.every_steps=10", "checkpoint.keep_last=0")
    run = train(pool, 1, config_file, *options)
    (run / "checkpoints" / "step-00000020" / "manifest.json").unlink()
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *options)
    assert (
        code == 0 and "step-00000020 has no manifest.json and is passed over" in printed and "step-00000010: step 10" in printed
    )
    for checkpoint in (run / "checkpoints").glob("step-*"):
        (checkpoint / "manifest.json").unlink()
    assert "there is no complete checkpoint: a partial copy?" in refusal(pool, config_file, *options)


def test_a_run_that_was_started_from_a_path_continues_from_its_own_checkpoints(pool, trained_run, config_file):
    first = trained_run(1, config_file, "run.name=first", "checkpoint.every_steps=5", "checkpoint.keep_last=0")
    from_five = f"run.resume={first / 'checkpoints' / 'step-00000005'}"
    second = train(pool, 1, config_file, "run.name=second", from_five, "checkpoint.every_steps=5")
    assert [r["step"] for r in read_metrics(second)] == list(range(6, 21))
    [(code, printed)] = pool.launch(
        1, run_main, str(config_file), "run.name=second", from_five, "run.steps=25", "run.accept_changes=[run.steps]"
    )
    assert code == 0 and "has checkpoints of its own" in printed and "second/checkpoints/step-00000020: step 20" in printed


def test_a_refused_start_changes_nothing_in_the_run_it_was_refused_by(pool, trained_run, config_file):
    run = trained_run(1, config_file)
    before = {name: (run / name).read_text() for name in ("status.json", "config.yaml", "identity.json", "metrics.jsonl")}
    refusal(pool, config_file, "run.resume=never", "optim.lr=0.123")
    refusal(pool, config_file, "run.steps=10")
    refusal(pool, config_file, "model.dim=64")
    assert before == {name: (run / name).read_text() for name in before}


def test_fewer_steps_than_the_checkpoint_has_is_an_error(pool, trained_run, config_file):
    trained_run(1, config_file)
    assert "run.steps=10 is below the step 20" in refusal(pool, config_file, "run.steps=10")


def test_a_checkpoint_with_weights_only_names_the_key_that_takes_it(pool, trained_run, config_file, tmp_path):
    from pretrain.huggingface.export_model import export
    from pretrain.huggingface.import_model import import_model

    run = trained_run(1, config_file)
    export(run, tmp_path / "exported")
    import_model(tmp_path / "exported", tmp_path / "imported")
    line = refusal(pool, config_file, "run.name=second", f"run.resume={tmp_path / 'imported'}")
    assert "has weights only and cannot be resumed; use run.init_from=" in line
    second = train(pool, 1, config_file, "run.name=second", f"run.init_from={tmp_path / 'imported'}")
    assert losses(second)[0] < losses(run)[0] - 0.3


def read_badly_on_rank_1(config_file: str, *overrides: str) -> tuple[int, str]:
    import os

    from pretrain.data.training_data import Loader
    from pretrain.errors import DataError

    read, calls = Loader.read, []

    def failing(self, consumed):
        calls.append(consumed)
        if os.environ["RANK"] == "1" and len(calls) == 5:
            raise DataError("shard-00001.bin: truncated")
        return read(self, consumed)

    return run_main_with(Loader, "read", failing, config_file, *overrides)


def test_data_that_fails_on_one_rank_ends_all_ranks_with_its_name(pool, config_file):
    results = pool.launch(2, read_badly_on_rank_1, str(config_file), "parallel.strategy=ddp")
    run = config_file.parent / "runs" / "run"
    assert all(code == 1 and "rank 1: shard-00001.bin: truncated" in printed for code, printed in results)
    assert "rank 1: shard-00001.bin: truncated" in json.loads((run / "status.json").read_text())["reason"]


def fail_without_room_for_the_status(config_file: str, *overrides: str) -> tuple[int, str]:
    from pretrain.train import run_directory

    replace = run_directory.replace_text

    def failing(path, text, durable=True):
        if '"failed"' in text:
            raise OSError(28, "No space left on device")
        replace(path, text, durable)

    return run_main_with(run_directory, "replace_text", failing, config_file, *overrides)


def test_a_failure_that_cannot_be_recorded_is_still_the_one_that_is_printed(pool, config_file):
    overrides = ("optim.lr=1e30", "schedule.warmup_steps=0")
    [(code, printed)] = pool.launch(1, fail_without_room_for_the_status, str(config_file), *overrides)
    assert code == 1 and "error: step 2: loss nan" in printed and "status.json: cannot be written: No space left" in printed
    assert "status.json: could not be written to the end" in printed


def test_a_checkpoint_that_is_gone_is_not_said_to_stay_good(tmp_path):
    last = tmp_path / "step-00000002"

    def explained() -> str:
        with pytest.raises(CheckpointError) as caught, Continuation._explained(SimpleNamespace(last=last), 4):
            raise CheckpointError("no room")
        return str(caught.value)

    assert explained() == f"checkpoint of step 4 could not be saved: no room; {last} cannot be found"
    last.mkdir()
    (last / "manifest.json").touch()
    assert explained() == f"checkpoint of step 4 could not be saved: no room; {last} stays good"


def test_offloaded_state_computes_the_same(pool, config_file):
    options = ("log.gradients_at=[1]", "run.steps=5")
    single = train(pool, 1, config_file, "run.name=single", *options)
    offloaded = train(pool, 2, config_file, "run.name=offloaded", "parallel.strategy=fsdp", "parallel.offload=true", *options)
    assert largest_gradient_difference(gradients(offloaded), gradients(single)) <= 5e-6
    assert largest_relative_difference(losses(offloaded), losses(single)) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy, what", [*((s, "blocks") for s in ("single", "ddp", "fsdp")), ("single", "model"), ("ddp", "model")])
def test_what_is_compiled_computes_the_same_and_is_counted(pool, config_file, prepared, tmp_path, strategy, what):
    # Validation is compiled anew: without gradients, and once more for a batch that is not full.
    options = ("log.gradients_at=[1]", "run.steps=5", "schedule.warmup_steps=1", "validation.sequences=13",
               f"data.validation=[{{path: {prepared}, name: held_out}}]")  # fmt: skip
    single = train(pool, 1, config_file, "run.name=single", *options)
    ranks, found = 1 if strategy == "single" else 2, []
    for name in ("compiled", "again"):
        results = pool.launch(ranks, compile_anew, str(tmp_path / "cache"), str(config_file), f"run.name={name}",
                              f"parallel.strategy={strategy}", f"parallel.compile={what}", *options)  # fmt: skip
        assert [code for code, _ in results] == [0] * ranks, results[0][1]
        compiled = run_directory(config_file, f"run.name={name}")
        found.append([record["compiled"] for record in read_metrics(compiled) if "compiled" in record])
        assert f"compiled {found[-1][0]['functions']:.0f} functions in" in results[0][1]
    first, second = ({name: sum(record[name] for record in records) for name in records[0]} for records in found)
    # A whole model has ten: the network and its head, each with and without gradients; what follows the loss in both; and four passes of the loss.
    assert first["functions"] == second["functions"] <= (10 if what == "model" else 8) and 1 <= first["again"] == second["again"] < first["functions"]
    assert (first["graph_breaks"] > 0) == (what == "model")  # the fused loss is left out
    assert not first["from_cache"] and second["from_cache"] and second["seconds"] < first["seconds"]
    assert largest_gradient_difference(gradients(compiled), gradients(single)) <= 5e-6
    assert largest_relative_difference(losses(compiled), losses(single)) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_what_is_compiled_and_recomputed_computes_the_same(pool, config_file, tmp_path, what):
    options = ("log.gradients_at=[1]", "run.steps=4", "schedule.warmup_steps=1", "parallel.strategy=single")
    plain = train(pool, 1, config_file, "run.name=plain", *options)
    compiled = (f"parallel.compile={what}", "parallel.activation_checkpointing=full")
    [(code, printed)] = pool.launch(1, compile_anew, str(tmp_path / "cache"), str(config_file), "run.name=compiled", *options, *compiled)
    assert code == 0, printed
    both = run_directory(config_file, "run.name=compiled")
    assert largest_gradient_difference(gradients(both), gradients(plain)) <= 5e-6
    assert largest_relative_difference(losses(both), losses(plain)) <= 2e-6


EXPERTS = ("model.family=qwen3_moe", "model.experts={count: 4, active: 2, ffn_dim: 32, balance_loss: 0.01}")
LATENT = ("model.family=deepseek_v3", "model.latent={kv_rank: 8, rope_dim: 8, plain_dim: 8, value_dim: 8}", "model.kv_heads=null",
          "model.experts={count: 4, active: 2, ffn_dim: 32, dense_layers: [0]}")  # fmt: skip
LINEAR = ("model.family=qwen3_5", "model.vocab_size=264", "model.linear_attention={pattern: [true, false], key_heads: 4, key_dim: 8}")
SHARED = {
    "tensor": ("parallel.tensor=2",),
    "context": ("parallel.context=2",),
    "tensor, experts": ("parallel.tensor=2", *EXPERTS),
    "context, experts": ("parallel.context=2", *EXPERTS),
    "context, experts, selective": ("parallel.context=2", "parallel.activation_checkpointing=selective", *EXPERTS),
    "expert": ("parallel.expert=2", *EXPERTS),
    "tensor, recomputed": ("parallel.tensor=2", "parallel.activation_checkpointing=full"),
    "context, recomputed": ("parallel.context=2", "parallel.activation_checkpointing=full"),
    "context, selective": ("parallel.context=2", "parallel.activation_checkpointing=selective"),
    "tensor, experts, recomputed": ("parallel.tensor=2", "parallel.activation_checkpointing=full", *EXPERTS),
    "expert, recomputed": ("parallel.expert=2", "parallel.activation_checkpointing=full", *EXPERTS),
    "expert, latent, recomputed": ("parallel.expert=2", "parallel.activation_checkpointing=full", *LATENT),
    "tensor, linear attention": ("parallel.tensor=2", *LINEAR),
    "context, linear attention": ("parallel.context=2", *LINEAR),
    "context, linear attention, selective": ("parallel.context=2", "parallel.activation_checkpointing=selective", *LINEAR),
    "tensor, linear attention, recomputed": ("parallel.tensor=2", "parallel.activation_checkpointing=full", *LINEAR),
}


QUICK = {"tensor", "context, selective", "expert, recomputed"}


@pytest.mark.parametrize("case", some_slow(SHARED, SHARED.keys() - QUICK))
def test_blocks_that_ranks_share_compute_the_same_compiled(pool, config_file, case):
    """Compiled by torch 2.11, tensor-parallel blocks had no gradients at all, and nothing said so."""
    options = ("log.gradients_at=[1]", "run.steps=3", "schedule.warmup_steps=1", "parallel.strategy=fsdp", *SHARED[case])
    plain = train(pool, 2, config_file, "run.name=plain", *options)
    results = pool.launch(2, traced, str(config_file), "run.name=traced", "parallel.compile=blocks", *options)
    assert [code for code, _ in results] == [0, 0], results[0][1]
    compiled = run_directory(config_file, "run.name=traced")
    assert largest_gradient_difference(gradients(compiled), gradients(plain)) <= 5e-6
    assert largest_relative_difference(losses(compiled), losses(plain)) <= 2e-6


@pytest.mark.slow  # minutes; python -m pytest tests/train/test_continuation.py -m slow -k inductor
@pytest.mark.parametrize("case", [*SHARED, "ddp", "ddp, experts, recomputed", "fsdp", "pipeline"])
def test_what_inductor_compiles_computes_the_same(pool, config_file, case):
    """Down to machine code. Gradients of a router were wrong there where context-parallel ranks gathered a mask, and right by the backend aot_eager."""
    others = {
        "ddp": ("parallel.strategy=ddp",),
        "ddp, experts, recomputed": ("parallel.strategy=ddp", "parallel.activation_checkpointing=full", *EXPERTS),
        "fsdp": (),
        "pipeline": ("parallel.pipeline=2",),
    }
    options = ("log.gradients_at=[1]", "run.steps=3", "schedule.warmup_steps=1", "parallel.strategy=fsdp", *(SHARED | others)[case])
    plain = train(pool, 2, config_file, "run.name=plain", *options)
    compiled = train(pool, 2, config_file, "run.name=compiled", "parallel.compile=blocks", *options)
    assert largest_gradient_difference(gradients(compiled), gradients(plain)) <= 5e-6
    assert largest_relative_difference(losses(compiled), losses(plain)) <= 2e-6


@pytest.mark.slow  # a minute; python -m pytest tests/train/test_continuation.py -m slow -k arrives
@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_compiled_code_that_computes_before_a_collective_arrives_is_refused_or_none(pool, config_file, scope):
    """Inductor of torch 2.13 makes such code here. Gradients were infinite, or off by a quarter."""
    losses_of_routers = f"model.experts={{count: 4, active: 2, ffn_dim: 32, balance_loss: 0.01, balance_scope: {scope}, router_z_loss: 0.001}}"
    options = ("log.gradients_at=[1]", "run.steps=1", "schedule.warmup_steps=0", "parallel.strategy=fsdp", "model.family=custom", losses_of_routers,
               "parallel.context=2", "parallel.activation_checkpointing=selective")  # fmt: skip
    plain = train(pool, 2, config_file, "run.name=plain", *options)
    code, printed = pool.launch(2, run_main, str(config_file), "run.name=compiled", "parallel.compile=blocks", *options)[0]
    if code:
        assert "would use the result of reduce_scatter_tensor before that has arrived); set parallel.compile=none" in printed
    else:
        compiled = run_directory(config_file, "run.name=compiled")
        assert largest_gradient_difference(gradients(compiled), gradients(plain)) <= 5e-6


def test_small_buckets_of_ddp_go_with_compiled_blocks(pool, config_file):
    """torch's compiler cut each block at the buckets, and refused those below 1 MiB with a traceback."""
    options = ("log.gradients_at=[1]", "run.steps=2", "schedule.warmup_steps=1", "parallel.strategy=ddp", "parallel.ddp.bucket_mb=0.02")
    plain = train(pool, 2, config_file, "run.name=plain", *options)
    results = pool.launch(2, traced, str(config_file), "run.name=traced", "parallel.compile=blocks", *options)
    assert [code for code, _ in results] == [0, 0], results[0][1]
    compiled = run_directory(config_file, "run.name=traced")
    assert largest_gradient_difference(gradients(compiled), gradients(plain)) <= 5e-6
    code, printed = pool.launch(2, traced, str(config_file), "run.name=whole", "parallel.compile=model", *options)[0]
    assert code == 2 and "parallel.ddp.bucket_mb=0.02 with parallel.compile=model" in printed and "raise it, or" in printed


def compile_anew(cache: str, config_file: str, *overrides: str) -> tuple[int, str]:
    """A run of a process that has compiled nothing yet. Each rank has a cache of its own, or a late one finds what another has compiled."""
    from unittest.mock import patch

    torch._dynamo.reset()
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{cache}/{launched_ranks()[0]}"):
        return run_main(config_file, *overrides)


def imported_after_training(config_file: str) -> list[str]:
    import subprocess

    code = (
        "import sys, pretrain\nassert 'torch' not in sys.modules\n"
        f"from pretrain.run import main\nargs = ['--config', {config_file!r}, 'run.steps=5', 'schedule.warmup_steps=0']\n"
        "assert main([*args, '--check']) == 0\n"
        "import pretrain.huggingface.open_model, pretrain.models.generate, pretrain.evaluation.scores\n"
        "assert 'torch._dynamo' not in sys.modules, 'a tool that compiles nothing would take seconds longer to start'\n"
        "assert main(args) == 0\n"
        "print('imported', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def test_training_needs_no_tokenizer_and_no_hub_library(config_file):
    imported = imported_after_training(str(config_file))
    assert "torch" in imported
    for library in ("datasets", "transformers", "tokenizers", "sentencepiece", "tensorboard", "huggingface_hub", "accelerate"):
        assert library not in imported, library
