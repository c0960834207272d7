"""Perplexity and bits per byte, and text as it comes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from hf_configs import LLAMA_LIKE
from hypothesis import given, settings
from hypothesis import strategies as st
from running import tool, train

from pretrain.checkpoint.files import complete_checkpoints
from pretrain.config.model_schema import Model, Rope
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.evaluation import follow
from pretrain.evaluation.scores import Scorer, documents_of, prepared_documents
from pretrain.evaluation.texts import TextWatch
from pretrain.huggingface import open_model as open_model_file
from pretrain.huggingface.open_model import Opened, open_model
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.observe.metrics import read_metrics
from pretrain.observe.run_story import read_story
from pretrain.parallel.initialise import initialise

LENGTH = 16


@pytest.fixture(scope="module")
def opened(byte_tokenizer) -> Opened:
    torch.manual_seed(0)
    loaded = load_tokenizer(byte_tokenizer)
    network = build_network(complete(Model(dim=32, layers=2, heads=4, ffn_dim=64, vocab_size=loaded.vocab_size), LENGTH))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Opened(network.double().eval(), loaded, [], frozenset({loaded.eod_id}))


def reference(opened: Opened, tokens: list[int]) -> float:
    """The negative log-likelihood by transformers' recipe for a text of at most the model's length: one forward pass, shifted."""
    ids = torch.tensor([[opened.tokenizer.eod_id, *tokens]])
    with torch.no_grad():
        logits = opened.network(ids[:, :-1])
    return float(torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:], reduction="sum"))


# ---- windows ------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 70), st.integers(1, LENGTH))
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_with_as_much_context_as_fits(opened, count, length):
    scorer, tokens = Scorer(opened, length), list(range(1000, 1000 + count))
    windows = list(scorer.windows(tokens))
    assert [token for _, predicted in windows for token in predicted] == tokens
    text = [opened.tokenizer.eod_id, *tokens]
    for context, predicted in windows:
        assert context and len(context) + len(predicted) <= length + 1
        joined = context + predicted
        end = text.index(predicted[-1]) + 1
        assert joined == text[end - len(joined) : end]
        assert len(joined) == min(length + 1, end)


def test_a_text_scores_as_one_forward_pass_whatever_it_is_batched_with(opened):
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 20, n).tolist() for n in (3, 16, 1, 9, 16, 5)]
    expected = sum(reference(opened, text) for text in texts)
    for rows in (1, 4, 64):
        score = Scorer(opened, rows=rows).score("x", [(text, 10.0) for text in texts])
        assert score.nats == pytest.approx(expected, rel=1e-6) and (score.documents, score.tokens, score.size) == (6, 50, 60.0)
    assert score.loss == score.nats / 50 and score.perplexity == pytest.approx(math.exp(score.nats / 50))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / 60)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_whose_rotation_depends_on_the_length_scores_alike_in_any_batch(byte_tokenizer, tmp_path, kind):
    """Padding made a short text one of a long sequence: its score was another with another --batch-size."""
    torch.manual_seed(0)
    loaded = load_tokenizer(byte_tokenizer)
    small = Model(dim=32, layers=2, heads=4, ffn_dim=64, vocab_size=loaded.vocab_size)
    if kind == "dynamic":
        model = dataclasses.replace(small, rope=Rope(scaling="dynamic", factor=8.0, original_length=4))
    else:
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
        longrope = {"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 8}
        config = LLAMA_LIKE | {"model_type": "phi3", "max_position_embeddings": 32, **longrope}
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": loaded.vocab_size}))
        model = Model(family="hf", hf_config=str(tmp_path))
    with torch.device("meta"):
        network = build_network(complete(model, LENGTH))
    initialise(network.to_empty(device="cpu"), 1)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = Opened(network.eval(), loaded, [], frozenset())
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 20, n).tolist() for n in (3, 16, 1, 9, 16, 5)]
    expected = [reference(model, text) for text in texts]
    shapes = []
    network.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    scorer = Scorer(model, LENGTH, rows=8)
    found = scorer.log_likelihoods([window for text in texts for window in scorer.windows(text)])
    assert [-value for value, _ in found] == pytest.approx(expected, rel=1e-5)
    assert shapes == [(2, 16), (1, 9), (1, 5), (1, 3), (1, 1)]


def test_windows_see_their_context(opened):
    """A long text: each window's tokens given exactly the tokens before them that fit."""
    tokens = np.random.default_rng(1).integers(0, 20, 37).tolist()
    text, expected = [opened.tokenizer.eod_id, *tokens], 0.0
    for first, end in ((1, 17), (17, 33), (33, 38)):
        ids = torch.tensor([text[max(0, end - 17) : end]])
        with torch.no_grad():
            scores = opened.network(ids[:, :-1])[0].double().log_softmax(-1)
        chosen = scores[-(end - first) :].gather(1, ids[0, -(end - first) :, None])
        expected -= float(chosen.sum())
    assert Scorer(opened).score("x", [(tokens, None)]).nats == pytest.approx(expected, rel=1e-6)


def test_the_likeliest_continuation_is_known(opened):
    context = [opened.tokenizer.eod_id, 3, 4]
    with torch.no_grad():
        best = int(opened.network(torch.tensor([context]))[0, -1].argmax())
    scorer = Scorer(opened)
    assert [greedy for _, greedy in scorer.log_likelihoods([(context, [best]), (context, [(best + 1) % 20])])] == [True, False]


def test_an_empty_continuation_is_certain_and_one_longer_than_the_model_is_refused(opened):
    """The first ended in a traceback, and of the second only the end was scored."""
    scorer, context = Scorer(opened, 4), [opened.tokenizer.eod_id]
    [empty, one] = scorer.log_likelihoods([([*context, 3, 4], []), ([*context, 3, 4], [5])])
    assert empty == (0.0, True) and one[0] < 0
    with pytest.raises(DataError, match="a text of 5 tokens is to be scored as a whole, and the model sees 4 at once"):
        scorer.log_likelihoods([(context, [3, 4]), (context, [3, 4, 5, 6, 7])])


def test_a_task_whose_answers_leave_no_room_for_questions_is_refused(opened, monkeypatch):
    """Every question was cut to its last token without a word. (The harness itself is in tests/clients.)"""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval"].simple_evaluate = sys.modules["lm_eval.tasks"].TaskManager = None
    sys.modules["lm_eval.api.model"].TemplateLM = object
    monkeypatch.delitem(sys.modules, "pretrain.evaluation.harness", raising=False)
    from pretrain.evaluation.harness import HarnessModel

    monkeypatch.delitem(sys.modules, "pretrain.evaluation.harness")

    def answers(most: int) -> list[str]:
        request = types.SimpleNamespace(args=("a b c d e f", {"max_gen_toks": most}))
        return HarnessModel(Scorer(opened)).generate_until([request])

    assert len(answers(LENGTH - 1)) == 1
    with pytest.raises(ConfigError, match="a task generates 16 tokens, and the model knows 16 positions, so no room is left"):
        answers(LENGTH)


def test_lengths_that_a_model_does_not_know_and_texts_without_tokens_are_errors(opened):
    with pytest.raises(ConfigError, match="--length 17 is not in 1..16"):
        Scorer(opened, 17)
    with pytest.raises(DataError, match="x: has no text to score"):
        Scorer(opened).score("x", [])


def test_a_token_that_the_model_has_no_row_for_is_named_with_its_text(opened, tmp_path):
    """A tokenizer with tokens beyond the vocabulary ended in an IndexError; those that no text uses are no error."""
    network = build_network(complete(Model(dim=32, layers=1, heads=4, ffn_dim=64, vocab_size=98), LENGTH))
    fewer = dataclasses.replace(opened, network=network, begin=[0])
    (tmp_path / "a.jsonl").write_text('{"text": "AB"}\n{"text": "AB\u00ff"}\n')
    ids = [opened.tokenizer.encode(text) for text in ("AB", "AB\u00ff")]
    assert max(ids[0]) < 98 <= max(ids[1])
    documents = documents_of(str(tmp_path / "a.jsonl"), fewer, "text", "file")
    assert next(documents)[0] == ids[0] and Scorer(fewer).score("x", [(ids[0], 2.0)]).tokens == len(ids[0])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: has token {max(ids[1])} .* vocabulary has 98 rows") as caught:
        next(documents)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="what stands before every text: has token 256"):
        Scorer(dataclasses.replace(fewer, begin=[]))


# ---- the tool ---------------------------------------------------------------------------------------------------------------------


def said(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_following_a_run_that_is_silent_for_long_says_so_once(tmp_path, monkeypatch):
    (tmp_path / "starts.jsonl").write_text("{}\n")
    (tmp_path / "status.json").write_text('{"state": "running", "updated": "2026-11-24T08:00:00Z"}')
    told, naps = [], iter([None, None])
    monkeypatch.setattr(follow.time, "sleep", lambda _: next(naps))
    with pytest.raises(RuntimeError, match="StopIteration"):  # the third nap
        list(follow.follow(tmp_path, lambda _: {}, ["text"], {}, 1.0, tell=told.append))
    assert len(told) == 1 and "silent since 2026-11-24T08:00:00Z" in told[0]
    (tmp_path / "status.json").write_text('{"state": "finished", "updated": "2026-11-24T08:00:00Z"}')
    assert list(follow.follow(tmp_path, lambda _: {}, ["text"], {}, 1.0, tell=told.append)) == [] and len(told) == 1



def test_a_checkpoint_that_its_run_removes_while_it_is_opened_is_left_for_the_newest_one(pool, config_file, tmp_path, monkeypatch):
    """It was refused as one without a tokenizer, and `--follow` ended."""
    run = train(pool, 1, config_file, "run.steps=4", "checkpoint={every_steps: 2, keep_last: 0}", "schedule.warmup_steps=0")
    older, newest = complete_checkpoints(run / "checkpoints")
    kept = open_model(older)
    shutil.copytree(newest, tmp_path / "kept")
    load = open_model_file.load_tokenizer

    def removed_before(path):
        if newest.is_dir():
            shutil.rmtree(newest)
        return load(path)

    monkeypatch.setattr(open_model_file, "load_tokenizer", removed_before)
    opened = open_model(run)
    expected = dict(kept.network.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in opened.network.named_parameters())
    shutil.copytree(tmp_path / "kept", newest)
    with pytest.raises(CheckpointError, match="step-00000004: does not exist"):  # one that was named
        open_model(newest)
    shutil.copytree(tmp_path / "kept", newest)
    followed = list(follow.follow(run, lambda checkpoint: open_model(checkpoint) and {"loss": 1.0}, ["text"], {}, 1.0, tell=print))
    assert [step for step, _ in followed] == [2]


def test_a_trained_model_scores_data_text_and_checkpoints_to_come(pool, config_file, prepared, tmp_path, capsys):
    """Prepared data and its text agree; --follow evaluates each checkpoint once, and the report shows it."""
    run = train(pool, 1, config_file, "run.steps=6", "checkpoint={every_steps: 2, keep_last: 0}", "schedule.warmup_steps=0")
    data = PreparedData.open(prepared)
    newest = open_model(run)
    documents = [ids for ids, _ in prepared_documents(prepared, newest)][:20]
    text = tmp_path / "texts.jsonl"
    decoded = [newest.tokenizer.decode(ids[:-1]) for ids in documents]
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in decoded))
    assert [ids for ids, _ in documents_of(str(text), newest, "text", "file")] == [ids[:-1] for ids in documents]
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: the text holds a lone surrogate"):
        list(documents_of(str(tmp_path / "bad.jsonl"), newest, "text", "file"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2: not valid JSON .*; correct it, or remove it from the input$"):
        list(documents_of(str(tmp_path / "broken.jsonl"), newest, "text", "file"))
    evaluate, tokens = tool("evaluate").main, str(20 * 200)
    assert evaluate(["--model", str(run), "--data", str(prepared), "--text", str(text), "--tokens", tokens, "--json"]) == 0
    of_text, of_data = said(capsys)
    assert of_text["documents"] == of_data["documents"] == 20 and of_data["tokens"] == of_text["tokens"] + 20
    assert of_text["bytes"] == sum(len(one.encode()) for one in decoded)
    assert of_data["bytes"] == (
        None if data.bytes_per_token is None else pytest.approx(data.bytes_per_token * of_data["tokens"])
    )
    assert of_text["loss"] < math.log(newest.tokenizer.vocab_size) and of_data["loss"] == pytest.approx(
        of_text["loss"], rel=0.1
    )
    assert evaluate(["--model", str(run), "--text", str(text), "--follow", "--json"]) == 0
    lines = said(capsys)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert (
        lines[-1][f"{text} loss"] == pytest.approx(of_text["loss"], rel=1e-6)
        and lines[0][f"{text} loss"] > lines[-1][f"{text} loss"]
    )
    assert evaluate(["--model", str(run), "--text", str(text), "--follow", "--json"]) == 0 and said(capsys) == []
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 3
    # Other options give other results.
    for options in (["--tokens", "300"], ["--dtype", "bf16", "--tokens", "300"]):
        for steps in ([2, 4, 6], []):
            assert evaluate(["--model", str(run), "--text", str(text), *options, "--follow", "--json"]) == 0
            assert [line["step"] for line in said(capsys)] == steps
    # Another text is another evaluation of the same checkpoints, and both stand in the story of the run.
    assert evaluate(["--model", str(run), "--data", str(prepared), "--tokens", tokens, "--follow", "--json"]) == 0
    assert [line["step"] for line in said(capsys)] == [2, 4, 6]
    [record] = [record for record in read_story(run).records if record["step"] == 6]
    assert {f"{text} loss", f"{prepared} loss"} <= record["evaluation"].keys()


def test_the_validation_of_a_run_is_found_again(pool, config_file, prepared):
    """The loss of validation in the loop is that of windows of the stream, each predicted after its own first token."""
    validation = (f"data.validation=[{{name: v, path: {prepared}}}]", "validation.sequences=0", "data.boundary_loss=true")
    run = train(pool, 1, config_file, "run.steps=3", "schedule.warmup_steps=0", *validation)
    opened, data = open_model(run), PreparedData.open(prepared)
    parts = (data.read(first, 33).tolist() for first in range(0, data.tokens - 32, 32))
    scores = Scorer(opened, 32, rows=64).log_likelihoods([(part[:1], part[1:]) for part in parts])
    in_loop = read_metrics(run)[-1]["validation"]["v"]
    assert -sum(value for value, _ in scores) / (32 * len(scores)) == pytest.approx(in_loop, rel=1e-6)


def test_another_tokenizer_than_the_data_s_is_an_error(pool, config_file, prepared, tmp_path, capsys):
    run = train(pool, 1, config_file, "run.steps=1", "schedule.warmup_steps=0")
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"tokenizer_sha256": "0" * 64}))
    assert tool("evaluate").main(["--model", str(run), "--data", str(copy)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to evaluate on"),
        (["--text", "x", "--shots", "2"], "--shots has no effect without --tasks"),
        (["--text", "x", "--batch-size", "0"], "--batch-size 0 is not above 0"),
        (["--data", "d", "--text-field", "foo"], "--text-field has no effect without --text"),
        (["--data", "d", "--documents", "line"], "--documents has no effect without --text"),
    ],
)
def test_options_without_effect_are_refused(capsys, words, says):
    with pytest.raises(SystemExit):
        tool("evaluate").main(["--model", "m", *words])
    assert says in capsys.readouterr().err


# ---- text as it comes -------------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size = 256

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", "replace")


@given(st.text("abé€𝄞 \n", max_size=30), st.lists(st.text("abé\n", min_size=1, max_size=3), max_size=2))
@settings(max_examples=200, deadline=None)
def test_what_is_shown_is_the_text_before_the_first_stop_and_no_piece_is_taken_back(text, stops):
    shown: list[str] = []
    watch = TextWatch(Bytes(), stops, lambda row, piece: shown.append(piece))
    tokens: list[int] = []
    for byte in text.encode():
        tokens.append(byte)
        if watch(0, tokens):
            break
    final = watch.finish(0, tokens)
    first = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    # A stop string that ends earlier is seen first, even if another one begins before it.
    assert "".join(shown) == final and text.startswith(final) and not any(stop in final for stop in stops)
    assert final == text[:first] or any(stop in text for stop in stops)


def test_generation_ends_at_a_stop_string_and_streams_what_it_prints_at_the_end(opened, tmp_path, pool, config_file, capsys):
    run = train(pool, 1, config_file, "run.steps=1", "schedule.warmup_steps=0")
    generate = tool("generate").main
    words = ["--model", str(run), "--prompt", "ab", "--max-tokens", "24", "--seed", "3"]
    assert generate(words) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    assert generate([*words, "--stream"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == whole
    stop = whole[10:12]
    assert generate([*words, "--stop", stop]) == 0
    assert capsys.readouterr().out.rstrip("\n") == whole[: whole.index(stop, 2)]
    with pytest.raises(SystemExit):
        generate([*words, "--stream", "--num-samples", "2"])
