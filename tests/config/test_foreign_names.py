"""Names of other tools are answered with ours: a key, or how the thing is derived here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run_main

from pretrain.config.foreign import ANSWERS
from pretrain.config.keys import keys_of
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.run import main

ROOT = Path(__file__).resolve().parents[2]
KEYS = {key.path for key in keys_of(Config())}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_answer_names_keys_that_exist_and_a_name_of_ours_leads_to_its_key(name):
    keys = re.findall(
        r"\b(?:run|model|data|batch|optim|loss|schedule|parallel|precision|checkpoint|validation|log)\.[a-z_.]*[a-z]", ANSWERS[name]
    )
    pages = re.findall(r"\bdocs/\w+\.md", ANSWERS[name])
    assert keys or pages
    assert set(keys) <= KEYS and all((ROOT / page).is_file() for page in pages)
    assert {path for path in KEYS if path.rpartition(".")[2] == name} <= set(keys) and name not in Config.__dataclass_fields__


def test_accumulation_is_answered_with_how_it_is_derived():
    for written in (
        "gradient_accumulation_steps=4",
        "train.gradient_accumulation_steps=4",
        "batch.accumulation=4",
        "batch.grad_accum=4",
    ):
        message = refused(written)
        assert message.startswith(f"command line: unknown key {written.partition('=')[0]}; accumulation is derived")
        assert "batch.sequences / (batch.micro_sequences x data-parallel ranks)" in message


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("precision=bf16-mixed", "the key for that is precision.compute; bfloat16 is written bf16"),
        ("precision=bf16-true", "the key for that is precision.compute; write bf16, and precision.master=bf16"),
        ("optim=adamw_torch", "the key for that is optim.name; AdamW is written adamw"),
        ("data=corpus", "prepared data is listed in data.sources: [{path: DIR}]"),
        ("data.sources=[corpus]", "write {path: corpus}"),
        ("run=mine", "the name of a run is run.name"),
        ("run=auto", "the name of a run is run.name"),
        ("optim=none", "the optimizer is optim.name"),
        ("data.text=corpus.txt", "the key for that is data.text.input"),
        ("checkpoint.load_step=5", "it is run.resume here"),
        ("checkpoint.initial_load_path=x", "run.init_from is a checkpoint"),
        ("data_seed=5", "it is data.seed here"),
        ("training.seed=5", "it is run.seed here"),
        ("num_nodes=2", "the launcher decides how many processes there are"),
        ("metrics.enable_wandb=true", "it is log.wandb.project here"),
        ("per_device_train_batch_size=8", "batch.micro_sequences"),
        ("optim.learning_rate=1e-3", "it is optim.lr here"),
        ("max_steps=10", "it is run.steps here"),
        ("num_train_epochs=3", "set run.steps"),
        ("bf16=true", "precision.compute"),
        ("precision.fp16=true", "fp16 is not supported, because it needs loss scaling; set precision.compute=bf16"),
        ("schedule.warmup_ratio=0.1", "set schedule.warmup_steps to the ratio x run.steps"),
        ("optim.max_grad_norm=1.0", "it is optim.clip here"),
        ("training.block_size=128", "it is data.sequence_length here"),
        ("parallel.tensor_parallel_size=2", "it is parallel.tensor here"),
        ("parallel.expert_parallel_degree=2", "it is parallel.expert here"),
        ("parallel.pp_size=2", "it is parallel.pipeline here"),
        ("batch_size=12", "it is batch.micro_sequences here if it counts samples per rank"),
        ("lr_decay_iters=1000", "cosine and linear fall until run.steps here"),
        ("eval_iters=200", "it is validation.sequences here"),
        ("dataset=openwebtext", "prepared data is listed in data.sources"),
        ("init_from=resume", "a run that has checkpoints continues by itself"),
        ("optimizer.lr=1e-3", "unknown key optimizer.lr; the nearest valid name is optim.lr"),
        ("optimizer.init_args.lr=1e-3", "unknown key optimizer.init_args.lr; the nearest valid name is optim.lr"),
        ("optimizer.name=AdamW", "unknown key optimizer; it is optim.name here"),
        ("lr_scheduler.warmup_steps=9", "the nearest valid name is schedule.warmup_steps"),
        ("train.tie_embeddings=true", "the nearest valid name is model.tie_embeddings"),
        ("training.steps=9", "it is run.steps here"),
        ("eval.max_iters=9", "it is validation.sequences here"),
        ("validation.steps=9", "it is validation.sequences here"),
        ("model.name=llama3", "its kind is model.family"),
    ],
)
def test_a_name_of_another_tool_is_answered_wherever_it_is_written(written, answer):
    assert answer in refused(written)


def test_an_option_of_another_tool_is_answered_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--config", "configs/quickstart.yaml", "--learning_rate", "1e-3", "--gradient-accumulation-steps=4"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "settings are given as key=value, e.g. optim.lr=1e-3" in said
    assert "--learning_rate: it is optim.lr here" in said and "--gradient-accumulation-steps: accumulation is derived" in said


def test_names_of_our_own_keep_their_nearest_name():
    assert refused("optim.lrr=1") == "command line: unknown key optim.lrr; the nearest valid name is optim.lr"


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("precision.compute=fp16", "expected one of fp32, bf16, auto; fp16 is not supported, because it needs loss scaling"),
        ("precision.compute=bfloat16", "bfloat16 is written bf16"),
        ("parallel.strategy=hsdp", "HSDP is strategy fsdp with parallel.replicate and parallel.shard above 1"),
        ("optim.name=adamw_torch", "AdamW is written adamw"),
        ("run.device=mps", "Apple's GPUs are not supported; write cpu"),
        ("run.device=cuda:0", "CUDA_VISIBLE_DEVICES=0 in the environment chooses one"),
        ("optim.clip=none", "0 does not clip"),
        ("precision.compute=fp8", "products in fp8 are precision.fp8=tensorwise, with precision.compute=bf16"),
    ],
)
def test_a_value_of_another_tool_is_answered(written, advice):
    assert advice in refused(written)


@pytest.mark.parametrize("word", ["no", "Never", "latest", "false"])
def test_a_word_for_not_resuming_is_no_path(word):
    """run.resume=no continued a run that had checkpoints: it was the path of another one, which only a run without any starts from."""
    assert "run.resume=" in refused(f"run.resume={word}")
    assert load_config(None, [f"run.resume=./{word}"])[0].run.resume == f"./{word}"


@pytest.mark.parametrize("word", ["latest", "last", "true"])
def test_a_word_that_is_no_path_is_answered_before_anything_starts(pool, config_file, word):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", f"run.resume={word}")
    assert code == 2 and f"run.resume={word}" in printed and "; a run goes on from its newest checkpoint by auto, the default" in printed
