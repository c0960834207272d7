"""T5 trained on corrupted spans under the trainer: the same gradients in every layout, exact and elastic resume, export and import."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from running import (
    cut_after,
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_main,
    state_of,
    tool,
    train,
    write_prepared,
)

from pretrain.observe.metrics import read_metrics

GRADIENT_TOLERANCE, METRIC_TOLERANCE = 5e-6, 2e-6


@pytest.fixture
def span_config(tmp_path, config_file, prepared):
    """2 + 2 layers of 32, samples of 40 tokens of which 6 are lost in 3 spans, with dropout."""
    config = yaml.safe_load(config_file.read_text())
    config["model"] = {"family": "t5", "dim": 32, "layers": 2, "heads": 4, "head_dim": 8, "ffn_dim": 64, "dropout": 0.1}
    config["data"] = {
        "sequence_length": 40, "sources": [{"path": str(prepared)}], "validation": [{"path": str(prepared)}], "objective": "span_corruption",
        "span_corruption": {"mean_span_length": 2.0, "sentinels": 4},
    }  # fmt: skip
    config["validation"] = {"sequences": 10}
    config["run"]["steps"], config["schedule"]["warmup_steps"] = 4, 2
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


DDP, FSDP = "parallel.strategy=ddp", "parallel.strategy=fsdp"
V11 = ("model.mlp={activation: gelu_tanh, gated: true}", "model.tie_embeddings=false")
LAYOUTS = {
    "single, whole batch": (1, "batch.micro_sequences=16"),
    "single, recomputation": (1, "parallel.activation_checkpointing=full"),
    "ddp on 2, version 1.1": (2, DDP, *V11),
    "ddp on 4": (4, DDP),
    "fsdp on 2, version 1.1, recomputation": (2, FSDP, *V11, "parallel.activation_checkpointing=full"),
    "fsdp on 4": (4, FSDP),
    "fsdp 2 x tensor 2": (4, FSDP, "parallel.tensor=2"),
    "tensor 2, version 1.1, recomputation": (2, FSDP, *V11, "parallel.tensor=2", "parallel.activation_checkpointing=full"),
    "pipeline 2": (2, FSDP, "parallel.pipeline=2", "batch.micro_sequences=2"),
    "tensor 2 x pipeline 2, version 1.1": (4, FSDP, *V11, "parallel.tensor=2", "parallel.pipeline=2", "batch.micro_sequences=2"),
    "hsdp 2x2": (4, FSDP, "parallel.replicate=2", "parallel.shard=2"),
}  # fmt: skip
# The others with `-m slow`: python -m pytest tests/train/test_span_runs.py -m slow
QUICK = {"single, whole batch", "ddp on 2, version 1.1", "fsdp on 2, version 1.1, recomputation"}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS])
def test_a_layout_computes_what_one_process_computes(pool, trained_run, span_config, layout):
    world_size, *overrides = LAYOUTS[layout]
    shared = [o for o in overrides if o.startswith("model.")] + ["log.gradients_at=[1]"]
    single = trained_run(1, span_config, "run.name=single", "parallel.strategy=single", *shared)
    run = train(pool, world_size, span_config, "run.name=other", *shared, *overrides)
    ours, theirs = gradients(run), gradients(single)
    assert {"encoder_bias.table.weight", "decoder_bias.table.weight"} <= set(ours)
    assert all(g.norm() > 0 for g in ours.values())
    assert largest_gradient_difference(ours, theirs) <= GRADIENT_TOLERANCE
    assert largest_relative_difference(losses(run), losses(single)) <= METRIC_TOLERANCE
    records = [read_metrics(r) for r in (run, single)]
    assert [r["batch"] for r in records[0]] == [r["batch"] for r in records[1]]
    assert records[0][-1]["tokens"] == 4 * 16 * 10  # 6 tokens that were lost, 3 sentinels, the end
    validation = [next(iter(r[-1]["validation"].values())) for r in records]
    assert validation[0] == pytest.approx(validation[1], rel=2e-6)


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        pytest.param((1,), (1,), True, marks=pytest.mark.slow),
        ((2, FSDP), (2, FSDP), True),
        pytest.param((4, FSDP), (2, DDP), False, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(pool, span_config, before, after, exact):
    options = ("run.deterministic=true", "checkpoint.every_steps=3", "checkpoint.keep_last=0", "run.steps=6")
    whole = train(pool, before[0], span_config, "run.name=whole", *options, *before[1:])
    parts = cut_after(whole, 3)
    train(pool, after[0], span_config, "run.name=parts", *options, *after[1:])
    batches = [[r["batch"] for r in read_metrics(run)] for run in (whole, parts)]
    assert batches[1] == batches[0][3:]
    if exact:
        assert losses(parts) == losses(whole)[3:]
        one, other = state_of(whole, 6), state_of(parts, 6)
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    else:
        assert largest_relative_difference(losses(parts), losses(whole)[3:]) <= 1e-5


@pytest.mark.parametrize(("overrides", "message"), [
    (["data.span_corruption={noise_density: 0.3, mean_span_length: 4}"], "data.objective.noise was 6 and is 12 (the model would learn another task than in the steps before)"),
    (["data.span_corruption.sentinels=5", "model.vocab_size=270"], "data.objective.first_sentinel was 260 and is 261"),
    (["data.seed=8"], "data.seed was 7 and is 8"),
])  # fmt: skip
def test_another_objective_makes_another_run(pool, span_config, overrides, message):
    train(pool, 1, span_config, "run.steps=5", "model.vocab_size=270")
    code, printed = run_main(str(span_config), "run.steps=6", "model.vocab_size=270", *overrides)
    assert code == 1 and message in printed


@pytest.mark.parametrize(("overrides", "message"), [
    (["model.family=llama", "model.dropout=0"], "data.objective=span_corruption needs an encoder-decoder, but model.family=llama is decoder-only"),
    (["model.family=transformer", "model.head_dim=null", "model.encoder.share_embedding=false"], "set model.encoder.share_embedding=true"),
    (["data.packing=best_fit"], "data.packing=best_fit does not go with data.objective=span_corruption; remove data.packing"),
    (["data.document_mask=true"], "data.document_mask=true does not go with data.objective=span_corruption"),
    (["data.boundary_loss=false"], "data.boundary_loss=false does not go with data.objective=span_corruption"),
    (["data.objective=next_token"], " has no effect with data.objective=next_token; set data.objective=span_corruption"),
    (["data.objective=next_token", "data.span_corruption={mean_span_length: 3.0, sentinels: 100}"], "is trained on sentence pairs or on spans"),
    (["data.span_corruption.sentinels=2"], "data.span_corruption.sentinels=2: data.sequence_length=40 makes 3 spans"),
    (["data.span_corruption.first_sentinel=2"], "4 sentinels that count down from there reach below 0"),
    (["data.span_corruption={noise_density: 0.9, mean_span_length: 1}"], "leave no token between the spans"),
    (["data.span_corruption.noise_density=1"], "data.span_corruption.noise_density=1"),
    (["model.vocab_size=257"], "model.vocab_size=257 is below the 261"),
    (["model.encoder.decoder_start_id=999"], "model.encoder.decoder_start_id=999 is no token of model.vocab_size=261"),
    (["data.objective=spans"], "data.objective=spans"),
    (["batch.tokens=100"], "batch.tokens=100 has no effect without data.pairs"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(span_config, overrides, message):
    code, printed = run_main(str(span_config), *overrides)
    assert code in (1, 2) and message in printed and printed.count("\n") == 1


@pytest.mark.slow
def test_check_says_what_the_task_is_and_tries_the_export_with_the_sentinels(span_config):
    code, printed = run_main(str(span_config), "--check", "checkpoint.export_check=true")
    assert code == 0, printed
    assert "span corruption: of 40 tokens 6 are taken out in 3 spans; sources of 38 tokens, targets of 10" in printed
    assert "tensors and the tokenizer are what transformers' T5ForConditionalGeneration expects" in printed
    assert "2 + 2 layers of 32" in printed and "vocabulary 261" in printed


def test_a_run_is_exported_generates_in_transformers_and_comes_back_for_another_run(pool, span_config, tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    run = train(pool, 2, span_config, FSDP, *V11)
    added = json.loads((run / "checkpoints" / "step-00000004" / "tokenizer" / "added_tokens.json").read_text())
    assert added == {"<extra_id_3>": 257, "<extra_id_2>": 258, "<extra_id_1>": 259, "<extra_id_0>": 260}
    convert = tool("convert_checkpoint").main
    assert convert(["to-hf", "--checkpoint", str(run), "--output", str(tmp_path / "hf"), "--verify"]) == 0
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    eod = model.config.eos_token_id
    assert (model.config.decoder_start_token_id, model.config.pad_token_id) == (eod, eod)
    # The sentinels of training are the tokens that T5 has for spans.
    assert tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(4)]) == [260, 259, 258, 257]
    inputs = tokenizer("ab<extra_id_0>cd<extra_id_1>", return_tensors="pt").input_ids
    assert inputs.tolist() == [[97, 98, 260, 99, 100, 259]]
    assert model.generate(inputs, max_new_tokens=4).shape[0] == 1
    labels = torch.tensor([[5, 6, -100]])
    assert torch.isfinite(model(inputs, labels=labels).loss)
    assert convert(["from-hf", "--model", str(tmp_path / "hf"), "--output", str(tmp_path / "imported"), "--verify"]) == 0
    # The exported tokenizer has the sentinels, so data that is prepared with it says where they are.
    data = write_prepared(tmp_path / "data", tmp_path / "imported" / "tokenizer", 0, 300)
    own = (f"data.sources=[{{path: {data}}}]", f"data.validation=[{{path: {data}}}]", "data.span_corruption.first_sentinel=260")
    again = train(
        pool,
        2,
        span_config,
        DDP,
        *V11,
        *own,
        "run.name=again",
        f"run.init_from={tmp_path / 'imported'}",
        f"model.encoder.decoder_start_id={eod}",
    )
    assert losses(again)[0] < losses(run)[0]
    record = json.loads((tmp_path / "hf" / "pretrain_export.json").read_text())
    assert record["family"] == "t5" and record["max_logit_difference"] <= 1e-5


@pytest.fixture
def hub(tmp_path):
    """T5 1.1 as the hub has it, in small: Unigram pieces with padding and end first, sentinels after them, spare rows, a head of its own."""
    from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("\u2581", -2.0),
        *((c, -3.0) for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    tokenizer = T5Tokenizer(vocab=[*pieces, *((f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1))], extra_ids=100)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<extra_id_0>", "<extra_id_99>"]) == [0, 1, 129, 30]
    config = T5Config(
        vocab_size=160, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(160, 32) * 0.1)
    model.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.slow
def test_a_t5_of_the_hub_goes_on_with_its_own_tokenizer_and_sentinels(pool, span_config, hub, tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    convert = tool("convert_checkpoint").main
    assert convert(["from-hf", "--model", str(hub), "--output", str(tmp_path / "start"), "--verify"]) == 0
    data = write_prepared(tmp_path / "data", tmp_path / "start" / "tokenizer", 0, 300)
    options = (
        *V11, f"data.sources=[{{path: {data}}}]", f"data.validation=[{{path: {data}}}]", "data.span_corruption.first_sentinel=129",
        "model.vocab_size=160", "model.encoder.decoder_start_id=0", f"run.init_from={tmp_path / 'start'}",
    )  # fmt: skip
    run = train(pool, 2, span_config, FSDP, *options)
    assert convert(["to-hf", "--checkpoint", str(run), "--output", str(tmp_path / "out"), "--verify"]) == 0
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (model.config.decoder_start_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, 0)
    assert tokenizer("ab <extra_id_1>").input_ids == AutoTokenizer.from_pretrained(hub)("ab <extra_id_1>").input_ids
    code, printed = run_main(
        str(span_config), *options, "run.name=other", "data.span_corruption.first_sentinel=null", "checkpoint.export_check=true"
    )
    assert code == 1 and "the tokenizer has <extra_id_" in printed and "set data.span_corruption.first_sentinel" in printed


def test_the_loss_of_a_run_is_that_of_transformers_on_the_same_spans(pool, span_config, hub, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    from pretrain.config.load import load_config
    from pretrain.train.plan import make_plan

    tool("convert_checkpoint").main(["from-hf", "--model", str(hub), "--output", str(tmp_path / "start")])
    data = write_prepared(tmp_path / "data", tmp_path / "start" / "tokenizer", 0, 300)
    options = (
        *V11, f"data.sources=[{{path: {data}}}]", "data.validation=[]", "validation.sequences=64", "data.span_corruption.first_sentinel=129", "model.vocab_size=160",
        "model.encoder.decoder_start_id=0", f"run.init_from={tmp_path / 'start'}", "model.dropout=0",
    )  # fmt: skip
    run = train(pool, 1, span_config, *options)
    plan = make_plan(load_config(span_config, list(options))[0], 1, torch.device("cpu"))
    batch = plan.data.loader(0, 1).read(0)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(hub).eval()
    with torch.no_grad():
        # transformers shifts the labels itself.
        expected = theirs(batch.inputs["source_BS"], labels=batch.inputs["targets_BT"]).loss
    assert losses(run)[0] == pytest.approx(float(expected), rel=1e-6)


def test_inspection_shows_what_a_run_takes_out(pool, span_config, capsys):
    from pretrain.config.load import load_config
    from pretrain.train.plan import make_plan

    run = train(pool, 2, span_config, DDP)
    inspect = tool("inspect_data").main
    assert inspect(["--run", str(run), "--step", "3", "--samples", "0", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert step["digest_matches"] and step["objective"] == "span_corruption" and step["taken_out"] == 16 * 6
    # Three spans have a sentinel each. That makes the run's own count.
    assert step["target_tokens"] == 16 * (6 + 3 + 1) == read_metrics(run)[0]["tokens"]
    plan = make_plan(load_config(span_config)[0], 1, torch.device("cpu"))
    batch = plan.data.loader(0, 1).read(32)
    for sample, target in zip(step["shown"], batch.inputs["targets_BT"].tolist(), strict=True):
        assert [token for token in sample["targets"] if token is not None] == [token for token in target[:-1] if token < 257]
    assert inspect(["--run", str(run), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "160 carry a loss: 96 of 640 tokens, taken out in spans, their sentinels, and ends" in printed
    assert "taken out: tokens " in printed


def test_a_preset_of_512_positions_takes_the_568_tokens_that_make_sources_of_512(prepared, capsys):
    preset = Path(__file__).resolve().parents[2] / "configs" / "models" / "t5-v1.1-small.yaml"
    options = [f"data.sources=[{{path: {prepared}}}]", "data.objective=span_corruption", "checkpoint.export_check=false"]
    code, printed = run_main(str(preset), "--check", *options, "data.sequence_length=568")
    assert code == 0 and "sources of 512 tokens, targets of 114" in printed
    code, printed = run_main(str(preset), "--check", *options, "data.sequence_length=569")
    assert code == 2 and "model.max_sequence_length=512 is below" in printed


def write_rising(path, tokenizer):
    """A document of 40,000 letters, each one after the letter before it."""
    from pretrain.data.shards.writer import ShardWriter
    from pretrain.data.tokenizers.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    with ShardWriter.create(path, loaded, 100_000) as writer:
        writer.add(np.append(np.arange(40_000) % 26 + 97, loaded.eod_id), np.array([40_001]))
    return path


@pytest.mark.slow
def test_a_small_model_learns_to_fill_in_what_the_rest_determines(pool, tmp_path, byte_tokenizer):
    """Letters that rise by one, from any letter on: what was taken out follows from its neighbours."""
    from pretrain.config.load import load_config
    from pretrain.huggingface.open_model import open_translator
    from pretrain.models.generate import Search, translate
    from pretrain.train.plan import make_plan

    data = write_rising(tmp_path / "rising", byte_tokenizer)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"name": "run", "dir": str(tmp_path / "runs"), "steps": 200, "seed": 3},
        "model": {"family": "t5", "dim": 64, "layers": 2, "heads": 4, "ffn_dim": 128},
        "data": {"sequence_length": 20, "sources": [{"path": str(data)}], "objective": "span_corruption",
                 "span_corruption": {"mean_span_length": 2.0, "sentinels": 4, "noise_density": 0.2}},
        "batch": {"sequences": 64, "micro_sequences": 64},
        "optim": {"lr": 5e-3, "weight_decay": 0.0},
        "schedule": {"warmup_steps": 25},
        "checkpoint": {"export_check": False},
        "log": {"every_steps": 25, "tensorboard": False},
    }))  # fmt: skip
    run = train(pool, 1, config)
    assert losses(run)[0] > 4 and losses(run)[-1] < 0.1
    plan = make_plan(load_config(config)[0], 1, torch.device("cpu"))
    later = plan.data.loader(0, 1).read(10**6)
    network, tokenizer, _ = open_translator(run)
    sources, targets = later.inputs["source_BS"], later.inputs["targets_BT"].tolist()
    end = tokenizer.eod_id
    found = translate(network, sources, torch.full((64,), sources.shape[1]), 2, end, end, Search())
    assert sum(row == target[:-1] for row, target in zip(found, targets)) >= 60
