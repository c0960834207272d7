"""Runs of `family: hf`: the same mathematics in every layout, checkpoints under transformers' names, resuming without the file."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import yaml
from hf_configs import write_config
from running import (
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_directory,
    run_main,
    traced,
    train,
)

from pretrain.checkpoint.files import complete_checkpoints
from pretrain.checkpoint.payload import Payload
from pretrain.config.load import load_config

GRADIENT_TOLERANCE, METRIC_TOLERANCE = 5e-6, 2e-6


@pytest.fixture
def hf_config_file(config_file, tmp_path):
    """The small configuration with a model of transformers'; `model.hf_config` is given by the tests."""
    config = yaml.safe_load(config_file.read_text())
    config["model"] = {"family": "hf"}
    config["run"]["steps"] = 6
    config_file.write_text(yaml.safe_dump(config))
    return config_file


def of(tmp_path, kind: str) -> str:
    return f"model.hf_config={write_config(tmp_path / kind, kind)}"


LAYOUTS = {
    "ddp on 2": (2, "parallel.strategy=ddp"),
    "fsdp on 2": (2, "parallel.strategy=fsdp"),
    "fsdp on 3, recomputation": (
        3,
        "parallel.strategy=fsdp",
        "batch.sequences=24",
        "batch.micro_sequences=8",
        "parallel.activation_checkpointing=full",
    ),
    "hsdp 2x2, weights kept": (
        4,
        "parallel.strategy=fsdp",
        "parallel.replicate=2",
        "parallel.shard=2",
        "parallel.reshard_after_forward=never",
    ),
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("ddp on 2", "granite"),
        pytest.param("fsdp on 2", "falcon", marks=pytest.mark.slow),
        # The others with `-m slow`: python -m pytest tests/train/test_hf_runs.py -m slow
        # State spaces, experts, and a buffer that is saved.
        pytest.param("fsdp on 3, recomputation", "nemotron_h", marks=pytest.mark.slow),
        pytest.param("fsdp on 2", "granite", marks=pytest.mark.slow),
        pytest.param("hsdp 2x2, weights kept", "granite", marks=pytest.mark.slow),
        pytest.param("fsdp on 3, recomputation", "granite", marks=pytest.mark.slow),
        pytest.param("ddp on 2", "falcon", marks=pytest.mark.slow),
        *(
            pytest.param(layout, kind, marks=pytest.mark.slow)
            for kind in ("qwen3_next", "zamba2", "mamba2", "deepseek_v4", "glm4_moe", "gemma4_text", "kimi_linear", "apertus")
            for layout in ("ddp on 2", "fsdp on 3, recomputation")
        ),
    ],
)
def test_a_layout_computes_what_one_process_computes(pool, hf_config_file, tmp_path, layout, kind):
    world_size, *overrides = LAYOUTS[layout]
    common = (of(tmp_path, kind), "log.gradients_at=[1]", *(o for o in overrides if o.startswith("batch.")))
    single = train(pool, 1, hf_config_file, "run.name=single", *common)
    run = train(pool, world_size, hf_config_file, "run.name=other", *common, *overrides)
    assert largest_gradient_difference(gradients(run), gradients(single)) <= GRADIENT_TOLERANCE
    assert len(losses(run)) == 6 and largest_relative_difference(losses(run), losses(single)) <= METRIC_TOLERANCE
    assert losses(single)[-1] < losses(single)[0]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the compiler of torch 2.11 cuts blocks of transformers at their casts")
@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("strategy, what", [("single", "model"), ("ddp", "model"), ("fsdp", "blocks")])
@pytest.mark.parametrize("kind", ["granite", "nemotron_h"])
def test_what_is_compiled_computes_the_same(pool, hf_config_file, tmp_path, kind, strategy, what, recomputed):
    """python -m pytest tests/train/test_hf_runs.py -m slow -k compiled"""
    common = (of(tmp_path, kind), "log.gradients_at=[1]", "run.steps=3", "schedule.warmup_steps=1")
    single = train(pool, 1, hf_config_file, "run.name=single", *common)
    overrides = (f"parallel.strategy={strategy}", f"parallel.compile={what}", f"parallel.activation_checkpointing={recomputed}")
    ranks = 1 if strategy == "single" else 2
    results = pool.launch(ranks, traced, str(hf_config_file), "run.name=compiled", *common, *overrides)
    assert [code for code, _ in results] == [0] * ranks, results[0][1]
    assert "graph break" not in results[0][1] and "compiled " in results[0][1]
    run = run_directory(hf_config_file, "run.name=compiled")
    assert largest_gradient_difference(gradients(run), gradients(single)) <= GRADIENT_TOLERANCE
    assert largest_relative_difference(losses(run), losses(single)) <= METRIC_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("granite", "fsdp"),
        ("bloom", "ddp"),
        pytest.param("bloom", "fsdp", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "fsdp", marks=pytest.mark.slow),
        *(
            pytest.param(kind, "fsdp", marks=pytest.mark.slow)
            for kind in (
                "qwen3_next",
                "nemotron_h",
                "zamba2",
                "mamba2",
                "deepseek_v4",
                "glm4_moe",
                "gemma4_text",
                "kimi_linear",
                "apertus",
            )
        ),
    ],
)
def test_in_bf16_the_gradient_is_the_same_in_every_bit(pool, hf_config_file, tmp_path, strategy, kind):
    bf16 = (
        of(tmp_path, kind),
        "precision.compute=bf16",
        "log.gradients_at=[1]",
        "run.steps=2",
        "schedule.warmup_steps=1",
        "batch.micro_sequences=8",
    )
    single = train(pool, 1, hf_config_file, "run.name=single", *bf16)
    run = train(pool, 2, hf_config_file, "run.name=other", f"parallel.strategy={strategy}", *bf16)
    difference = largest_gradient_difference(gradients(run), gradients(single))
    assert difference == 0.0


@pytest.mark.parametrize("kind", ["stablelm", pytest.param("gpt_bigcode", marks=pytest.mark.slow)])
def test_a_run_goes_on_without_the_file_and_under_another_layout(pool, hf_config_file, tmp_path, kind):
    given = of(tmp_path, kind)
    whole = train(pool, 1, hf_config_file, "run.name=whole", given)
    half = train(pool, 2, hf_config_file, "run.name=half", given, "parallel.strategy=fsdp", "checkpoint.every_steps=3")
    names = {n.removeprefix("model.") for n in Payload(complete_checkpoints(half / "checkpoints")[0]).read_all("model.")}
    import transformers

    model = load_config(half / "config.yaml")[0].model
    assert model.hf_config.startswith("{") and dataclasses.is_dataclass(model)
    fields = transformers.AutoConfig.from_pretrained(tmp_path / kind)
    theirs = transformers.AutoModelForCausalLM.from_config(fields)
    assert names == {name for name, _ in theirs.named_parameters()}
    (tmp_path / kind / "config.json").unlink()
    start = complete_checkpoints(half / "checkpoints")[0]
    (hf_config_file.parent / "resumed.yaml").write_text((half / "config.yaml").read_text())
    resumed = train(
        pool, 1, hf_config_file.parent / "resumed.yaml", "run.name=resumed", f"run.resume={start}", "parallel.strategy=single"
    )
    assert largest_relative_difference(losses(resumed), losses(whole)[3:]) <= METRIC_TOLERANCE
    for name, weight in Payload(complete_checkpoints(whole / "checkpoints")[-1]).read_all("model.").items():
        other = Payload(complete_checkpoints(resumed / "checkpoints")[-1]).read_all("model.")[name]
        assert torch.allclose(weight, other, rtol=1e-4, atol=1e-5), name


def test_another_configuration_is_another_run_and_says_where(hf_config_file, tmp_path):
    assert run_main(str(hf_config_file), of(tmp_path, "granite"))[0] == 0
    write_config(tmp_path / "granite", "granite", residual_multiplier=0.25)
    code, printed = run_main(str(hf_config_file), f"model.hf_config={tmp_path / 'granite'}", "run.steps=7")
    assert code == 1
    assert "model.hf_config.residual_multiplier was 0.5 and is 0.25" in printed


@pytest.mark.parametrize(
    "layout",
    [["parallel.strategy=single"], ["parallel.strategy=ddp"], ["parallel.strategy=ddp", "batch.micro_sequences=1"], ["parallel.strategy=fsdp"]],
)
def test_weights_without_a_gradient_are_named_at_the_first_step(pool, hf_config_file, tmp_path, layout):
    """M-D6: DeepSeek-V4's compressors see nothing of sequences shorter than their stretch; the run went on until its first save."""
    folder = write_config(tmp_path / "v4", "deepseek_v4", compress_rates={"heavily_compressed_attention": 64})
    ranks = 1 if layout == ["parallel.strategy=single"] else 2
    for code, printed in pool.launch(
        ranks, run_main, str(hf_config_file), f"model.hf_config={folder}", "run.name=short", *layout
    ):
        assert code == 1 and "Traceback" not in printed
        assert "compressor.position_bias gets no gradient on sequences of 32 tokens (8 parameters in all)" in printed


def test_masks_of_documents_are_refused(hf_config_file, tmp_path):
    code, printed = run_main(str(hf_config_file), of(tmp_path, "granite"), "data.document_mask=true", "--check")
    assert code != 0 and "data.document_mask=true: models of model.family=hf take no document masks" in printed


def test_the_check_describes_the_model_and_says_that_dropout_is_not_applied(hf_config_file, tmp_path):
    import transformers

    code, printed = run_main(str(hf_config_file), of(tmp_path, "gpt_bigcode"), "--check")
    assert code == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "gpt_bigcode")
    parameters = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert f"hf, {parameters:,} parameters: 2 layers of 32, 4 heads, vocabulary 257" in printed
    assert "GPTBigCodeForCausalLM of transformers; its dropout is not applied" in printed


@pytest.mark.slow  # as tests/train/test_continuation.py and test_export_check.py see by default
def test_training_other_families_imports_no_transformers(config_file):
    program = (
        "import sys; from pretrain.run import main; "
        f"assert main(['--config', {str(config_file)!r}, 'run.steps=2', 'schedule.warmup_steps=1']) == 0; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ, capture_output=True)
