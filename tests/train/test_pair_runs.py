"""An encoder-decoder under the trainer: the same gradients in every layout, dropout included; exact resume; validation by translation."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from pair_files import sentences, split_of
from running import (
    cut_after,
    gradients,
    largest_gradient_difference,
    largest_relative_difference,
    losses,
    run_main,
    run_main_with,
    state_of,
    tool,
    train,
)

from pretrain.data.pairs.prepared_pairs import prepare_pairs
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.observe.metrics import read_metrics

GRADIENT_TOLERANCE, METRIC_TOLERANCE = 5e-6, 2e-6


@pytest.fixture(scope="module")
def reversed_pairs(tmp_path_factory, byte_tokenizer):
    """Words, and the same spelled backwards: 600 to train on and 40 others."""
    folder = tmp_path_factory.mktemp("reversed")
    splits = []
    for name, count, seed in (("train", 600, 0), ("validation", 40, 9)):
        sources = sentences(count, seed, longest=12)
        splits.append(split_of(folder, name, sources, [s[::-1] for s in sources]))
    prepare_pairs(folder / "pairs", *splits, byte_tokenizer)
    return folder / "pairs"


@pytest.fixture
def pair_config(tmp_path, reversed_pairs):
    """2 + 2 layers of 32, about 20 pairs per step, with dropout and label smoothing."""
    config = {
        "run": {"name": "run", "dir": str(tmp_path / "runs"), "steps": 6, "seed": 7},
        "model": {"family": "transformer", "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "dropout": 0.2, "attention_dropout": 0.2, "init_std": 0.1,
                  "encoder": {"share_embedding": True}},
        "data": {"pairs": str(reversed_pairs / "train"), "validation": [{"path": str(reversed_pairs / "validation")}]},
        "batch": {"tokens": 400},
        "loss": {"label_smoothing": 0.1},
        "optim": {"lr": 3e-3},
        "schedule": {"name": "inverse_sqrt", "warmup_steps": 3},
        "parallel": {"timeout_seconds": 60, "strategy": "single"},
        "log": {"every_steps": 1, "tensorboard": False},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


DDP, FSDP = "parallel.strategy=ddp", "parallel.strategy=fsdp"
OWN = ("model.encoder.share_embedding=false", "model.tie_embeddings=false")
LAYOUTS = {
    "single, accumulation": (1, "batch.micro_tokens=100"),
    "single, recomputation": (1, "parallel.activation_checkpointing=full"),
    "ddp on 3, accumulation": (3, DDP, "batch.micro_tokens=60"),
    "ddp on 4, more ranks than pairs": (4, DDP, "batch.tokens=50"),
    "fsdp on 3, accumulation": (3, FSDP, "batch.micro_tokens=60"),
    "fsdp on 4, more ranks than pairs": (4, FSDP, "batch.tokens=50"),
    "fsdp on 2, a table for each side and a head": (2, FSDP, *OWN),
    "fsdp on 2, a table for each side": (2, FSDP, "model.encoder.share_embedding=false"),
    "fsdp on 2, one table and a head": (2, FSDP, "model.tie_embeddings=false"),
    "fsdp on 2, post-norm, recomputation": (2, FSDP, "model.norm.placement=post", "parallel.activation_checkpointing=full"),
    "fsdp on 2, pre-norm with a head": (2, FSDP, "model.norm.placement=pre", *OWN),
    "tensor 2": (2, FSDP, "parallel.tensor=2"),
    "tensor 4, a table for each side, post-norm": (
        4, FSDP, "parallel.tensor=4", "model.encoder.share_embedding=false", "model.norm.placement=post", "batch.micro_tokens=60"
    ),
    "fsdp 2 x tensor 2, more ranks than pairs": (4, FSDP, "parallel.tensor=2", "batch.tokens=50", *OWN),
    "pipeline 2": (2, FSDP, "parallel.pipeline=2", "batch.micro_tokens=60"),
    "fsdp 2 x pipeline 2, more ranks than pairs, recomputation": (
        4, FSDP, "parallel.pipeline=2", "batch.tokens=50", "parallel.activation_checkpointing=full", *OWN
    ),
    "pipeline 4, a table for each side, post-norm": (
        4, FSDP, "parallel.pipeline=4", "model.encoder.share_embedding=false", "model.norm.placement=post", "batch.micro_tokens=60"
    ),
    "context 4, post-norm": (4, FSDP, "parallel.context=4", "model.norm.placement=post", "batch.micro_tokens=60"),
    "context 2 x pipeline 2, post-norm, recomputation": (
        4, FSDP, "parallel.context=2", "parallel.pipeline=2", "model.norm.placement=post", "batch.micro_tokens=60",
        "parallel.activation_checkpointing=full",
    ),
    "context 2 x tensor 2, a table for each side": (4, FSDP, "parallel.context=2", "parallel.tensor=2", *OWN),
    "hsdp 2x2": (4, FSDP, "parallel.replicate=2", "parallel.shard=2"),
}  # fmt: skip


# The others with `-m slow`: python -m pytest tests/train/test_pair_runs.py -m slow
QUICK = {
    "single, accumulation",
    "ddp on 3, accumulation",
    "fsdp on 4, more ranks than pairs",
    "fsdp on 2, post-norm, recomputation",
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS])
def test_a_layout_computes_what_one_process_computes(pool, trained_run, pair_config, layout):
    world_size, *overrides = LAYOUTS[layout]
    shared = [o for o in overrides if o.startswith(("model.", "batch.tokens"))] + ["log.gradients_at=[1]", "run.steps=3"]
    single = trained_run(1, pair_config, "run.name=single", *shared)
    run = train(pool, world_size, pair_config, "run.name=other", *shared, *overrides)
    # A key's bias changes no attention weight: its gradient is rounding, and has no size to be relative to.
    ours, theirs = ({n: g for n, g in gradients(r).items() if not n.endswith("key.bias")} for r in (run, single))
    assert len(ours) > 40 and largest_gradient_difference(ours, theirs) <= GRADIENT_TOLERANCE
    assert largest_relative_difference(losses(run), losses(single)) <= METRIC_TOLERANCE
    records = [read_metrics(r) for r in (run, single)]
    assert [r["batch"] for r in records[0]] == [r["batch"] for r in records[1]]
    assert [r["tokens"] for r in records[0]] == [r["tokens"] for r in records[1]]
    validation = [r[-1]["validation"]["pairs"] for r in records]
    assert validation[0] == pytest.approx(validation[1], rel=1e-5)


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_in_bf16_gradients_are_close_to_those_of_fp32(pool, trained_run, pair_config, strategy):
    options = ("log.gradients_at=[1]", "run.steps=3")
    fp32 = trained_run(1, pair_config, "run.name=fp32", *options)
    bf16 = train(pool, 2, pair_config, "run.name=bf16", "precision.compute=bf16", strategy, *options)
    ours, theirs = ({n: g for n, g in gradients(r).items() if not n.endswith("key.bias")} for r in (bf16, fp32))
    assert 1e-4 < largest_gradient_difference(ours, theirs) < 0.2


@pytest.mark.parametrize(("before", "after", "exact"), [
    ((2, DDP), (3, FSDP), False),
    pytest.param((1,), (1,), True, marks=pytest.mark.slow), pytest.param((2, FSDP), (2, FSDP), True, marks=pytest.mark.slow),
    pytest.param((2, DDP), (2, DDP), True, marks=pytest.mark.slow), pytest.param((4, FSDP), (1,), False, marks=pytest.mark.slow),
])  # fmt: skip
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(pool, pair_config, before, after, exact):
    # An epoch is 9 steps: the second one is entered after the interruption.
    options = (
        "run.deterministic=true",
        "checkpoint.every_steps=7",
        "checkpoint.keep_last=0",
        "run.steps=14",
        "batch.tokens=1500",
    )
    whole = train(pool, before[0], pair_config, "run.name=whole", *options, *before[1:])
    parts = cut_after(whole, 7)
    train(pool, after[0], pair_config, "run.name=parts", *options, *after[1:])
    ends = [json.loads((r / "checkpoints" / "step-00000014" / "state.json").read_text()) for r in (whole, parts)]
    assert ends[0]["samples"] == ends[1]["samples"] > 600
    batches = [[r["batch"] for r in read_metrics(run)] for run in (whole, parts)]
    assert batches[1] == batches[0][7:]
    if exact:
        assert losses(parts) == losses(whole)[7:]
        one, other = state_of(whole, 14), state_of(parts, 14)
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    else:
        assert largest_relative_difference(losses(parts), losses(whole)[7:]) <= 1e-4


def test_another_batch_size_another_seed_or_other_pairs_make_another_run(pool, pair_config, tmp_path, byte_tokenizer):
    """Another order has no batch that begins where the run is, so consent cannot help."""
    few = ("run.steps=4", "schedule.warmup_steps=1")
    train(pool, 1, pair_config, "run.steps=2", few[1])
    sources = sentences(40, 1, longest=12)
    split = split_of(tmp_path, "other", sources, sources)
    prepare_pairs(tmp_path / "other_pairs", split, split, byte_tokenizer)
    for changed, named in (
        ("batch.tokens=500", "data.batch_tokens was 400 and is 500"),
        ("run.seed=8", "data.seed was 7 and is 8"),
        (f"data.pairs={tmp_path}/other_pairs/train", "data.sources.0 was "),
    ):
        for accepted in ([], ["run.accept_changes=[run.seed, data.seed, data.sources]"]):
            [(code, printed)] = pool.launch(1, run_main, str(pair_config), *few, changed, *accepted)
            assert code == 1 and f"holds another run: {named}" in printed and "if you mean it" not in printed


@pytest.mark.parametrize(("overrides", "message"), [
    (["batch.tokens=null"], "batch.tokens is missing"),
    (["batch.tokens=10"], "batch.tokens=10 is less than the longest source"),
    (["batch.micro_tokens=10"], "batch.micro_tokens=10 is less than the longest source"),
    (["batch.sequences=8"], "batch.sequences=8 has no effect with data.pairs"),
    (["data.sequence_length=64"], "data.sequence_length=64 has no effect with data.pairs"),
    (["model.family=llama"], "data.pairs needs an encoder-decoder, but model.family=llama is decoder-only"),
    (["data.sources=[{path: x}]"], "data.sources and data.pairs both name the training data; keep one"),
    (["data.validation=[]", "validation.translation.every_steps=2"], "validation.translation.every_steps=2 has no effect without data.validation"),
    (["data.validation=[]", "validation.every_steps=2"], "validation.every_steps=2 has no effect without data.validation"),
    (["model.vocab_size=100"], "model.vocab_size=100 is below the 257 tokens"),
    (["model.norm.placement=sandwich"], "is not built for an encoder-decoder"),
    (["data.pairs=absent"], "absent/pairs.json: missing"),
    (["data.workers=0", "loss.label_smoothing=1"], "loss.label_smoothing"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(pair_config, overrides, message):
    code, printed = run_main(str(pair_config), *overrides)
    assert code in (1, 2) and message in printed and printed.count("\n") == 1


def test_a_decoder_alone_refuses_what_is_about_pairs(config_file):
    for override, message in (
        ("batch.tokens=400", "batch.tokens=400 has no effect without data.pairs"), ("model.family=transformer", "is trained on sentence pairs or on spans; set data.pairs"),
        ("validation.translation.every_steps=3", "has no effect without data.pairs"),
    ):  # fmt: skip
        code, printed = run_main(str(config_file), override)
        assert code == 2 and message in printed


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Strings of 1 to 4 digits and their reverse: 4,000 to train on, 100 to be translated."""
    folder, random = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    splits = []
    for name, count in (("train", 4000), ("validation", 100)):
        sources = ["".join(random.choice(list("0123456789"), random.integers(1, 5))) for _ in range(count)]
        splits.append(split_of(folder, name, sources, [s[::-1] for s in sources]))
    train_tokenizer([str(folder / "train.source")], folder / "tokenizer", "char", text_mode="line")
    prepare_pairs(folder / "pairs", *splits, folder / "tokenizer")
    return folder


LEARN = (
    "run.steps=300", "batch.tokens=800", "loss.label_smoothing=0.0", "optim={lr: 8e-3, betas: [0.9, 0.98], weight_decay: 0.0}",
    "schedule={name: cosine, warmup_steps: 60, min_ratio: 0.01}", "log.every_steps=100",
    "validation.translation={every_steps: 300, samples: 2}",
    "model={family: transformer, dim: 48, layers: 1, heads: 4, ffn_dim: 96, init_std: 0.14, encoder: {share_embedding: false}, tie_embeddings: false, "
    "dropout: 0.0, norm: {placement: pre}}",
)  # fmt: skip


def test_a_small_model_learns_to_reverse_digits_exactly_and_the_tools_agree(pool, pair_config, digits, tmp_path, capsys):
    data = f"data={{pairs: {digits}/pairs/train, validation: [{{path: {digits}/pairs/validation}}]}}"
    run = train(pool, 1, pair_config, *LEARN, data)
    scores = read_metrics(run)[-1]["translation"]["pairs"]
    assert scores["cer"] == scores["wer"] == 0 and scores["chrf"] == pytest.approx(100)
    log = (run / "logs" / "rank-0.log").read_text()
    assert len(re.findall("hypothesis ", log)) == 2 == len(re.findall("reference  ", log))
    words = ["--model", run, "--input", digits / "validation.source", "--reference", digits / "validation.target"]
    assert tool("translate").main([str(w) for w in [*words, "--json"]]) == 0
    *translations, found = capsys.readouterr().out.splitlines()
    assert translations == (digits / "validation.target").read_text().splitlines()
    from_tool = json.loads(found)
    assert {n: from_tool[n] for n in scores} == pytest.approx(scores)
    assert tool("translate").main([str(w) for w in [*words, "--beam", "3", "--output", tmp_path / "out"]]) == 0
    assert "WER 0.00" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == (digits / "validation.target").read_text()
    (tmp_path / "in").write_text("12\n\n340\n")
    assert tool("translate").main(["--model", str(run), "--input", str(tmp_path / "in")]) == 0
    assert capsys.readouterr().out == "21\n\n043\n"
    (tmp_path / "bad").write_bytes(b"12\n3a\n\xff\n")
    assert tool("translate").main(["--model", str(run), "--input", str(tmp_path / "bad")]) == 1
    assert f"error: {tmp_path / 'bad'}, line 3: not valid UTF-8" in capsys.readouterr().err
    (tmp_path / "bad").write_text("12\n3a\n")
    assert tool("translate").main(["--model", str(run), "--input", str(tmp_path / "bad")]) == 1
    assert f"error: {tmp_path / 'bad'}, line 2: character 'a'" in capsys.readouterr().err
    refused = {
        "generate": (["--model", run, "--prompt", "a", "--max-tokens", 3], "is an encoder-decoder; use tools/translate.py"),
        "convert_checkpoint": (["to-hf", "--checkpoint", run, "--output", tmp_path / "hf"], "model.family=transformer is no model of transformers'"),
        "inspect_data": (["--run", run, "--step", 1], "reads sentence pairs (data.pairs), which inspection does not show"),
        "translate": ([*words[:4], "--reference", tmp_path / "in"], "in has 3 lines, but"),
    }  # fmt: skip
    for name, (arguments, message) in refused.items():
        assert tool(name).main([str(w) for w in arguments]) in (1, 2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def run_in_chunks_of_7(config_file: str, *overrides: str) -> tuple[int, str]:
    from pretrain.train import translation

    return run_main_with(translation, "CHUNK", 7, config_file, *overrides)


@pytest.mark.parametrize(
    "layout", [(2, DDP), pytest.param((4, FSDP, "parallel.tensor=2"), marks=pytest.mark.slow), pytest.param((2, FSDP, "parallel.pipeline=2"), marks=pytest.mark.slow), (2, FSDP, "parallel={pipeline: 2, pipeline_schedule: zero_bubble_v}"), pytest.param((3, FSDP), marks=pytest.mark.slow)]
)
def test_translations_are_the_same_at_any_world_size(pool, pair_config, layout):
    options = ("run.steps=8", "validation.translation={every_steps: 4, beam: 2, sequences: 30}")
    found = []
    for name, world, *overrides in (("one", 1), ("other", *layout)):
        for code, printed in pool.launch(world, run_in_chunks_of_7, str(pair_config), f"run.name={name}", *options, *overrides):
            assert code == 0, printed
        found.append([r["translation"] for r in read_metrics(pair_config.parent / "runs" / name) if "translation" in r])
    assert len(found[0]) == 2 and found[0] == found[1]


def stopped_while_translating(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run whose last rank gets SIGTERM when it has made the first token of the second translation."""
    import os
    import signal
    from unittest.mock import patch

    from pretrain.models import generate
    from pretrain.train.stop import StopPoll

    greedy, calls = generate._greedy, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return greedy(*arguments)

    with patch.object(StopPoll, "SECONDS", 0.0):  # this translation takes less than a second
        return run_main_with(generate, "_greedy", interrupted, config_file, *overrides)


@pytest.mark.parametrize("strategy", [FSDP, pytest.param(DDP, marks=pytest.mark.slow)])
def test_a_stop_within_a_translation_is_honoured_by_all_ranks(pool, pair_config, strategy):
    """T-D2: a request to stop was looked at between steps only."""
    options = ("run.steps=8", "validation.translation={every_steps: 2}", "checkpoint.every_steps=100", strategy)
    results = pool.launch(2, stopped_while_translating, str(pair_config), *options)
    run = pair_config.parent / "runs" / "run"
    assert [code for code, _ in results] == [0, 0], results
    assert "asked to stop: the translation of step 4 was abandoned" in results[0][1]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["checkpoint"]) == ("preempted", 4, "step-00000004")
    records = {record["step"]: record for record in read_metrics(run)}
    assert "translation" in records[2] and "translation" not in records[4]
