"""Scores of translations against sacrebleu's own numbers and a plain edit distance."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_files import split_of
from running import tool

from pretrain.config.model_schema import EncoderConfig, Model
from pretrain.config.schema import Config, Translation
from pretrain.data.pairs.prepared_pairs import PreparedPairs, prepare_pairs
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import Ranks
from pretrain.errors import DataError, GenerationError
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.models.generate import Search
from pretrain.parallel.initialise import initialise
from pretrain.train import translation
from pretrain.train.translation import edit_distance, error_rate, score

HYPOTHESES = ["the dog bit the man .", "it was not a surprise .", "the man had just bitten him ."]
REFERENCES = ["the dog bit the man .", "it was not unexpected .", "the man bit him first ."]


def plain_distance(one, other) -> int:
    """Wagner and Fischer, JACM 1974."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


@given(st.text("abcä ", max_size=80), st.text("abcä ", max_size=80))
@settings(deadline=None)
def test_the_edit_distance_is_the_plain_one(one, other):
    assert edit_distance(list(one), list(other)) == plain_distance(one, other) == edit_distance(list(other), list(one))


def test_the_edit_distance_counts_what_is_known():
    assert edit_distance(list("kitten"), list("sitting")) == 3
    assert edit_distance([], ["a"]) == 1 and edit_distance(["a"], []) == 1 and edit_distance([], []) == 0


def test_error_rates_are_of_the_whole_corpus():
    assert error_rate([["a", "b"], ["c"]], [["a", "x", "y"], ["c", "d", "e"]]) == pytest.approx(100 * 4 / 6)
    assert error_rate([["a", "b"]], [["c"]]) == 200.0
    assert error_rate([[]], [[]]) == 0.0


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_that_has_diverged_translates_nothing(tmp_path, monkeypatch, byte_tokenizer, beam):
    """Greedy search wrote token 0 up to the limit, and a beam ended in an IndexError, also in a validation while a run trains."""
    tokenizer = load_tokenizer(byte_tokenizer)
    sizes = Model(family="transformer", dim=16, layers=1, heads=2, vocab_size=257)
    network = build_network(complete(dataclasses.replace(sizes, encoder=EncoderConfig(vocab_size=257)), 32))
    initialise(network, 0)
    with torch.no_grad():
        next(parameter for name, parameter in network.named_parameters() if name.endswith("down.weight"))[0, 0] = torch.nan
    monkeypatch.setattr(translation, "open_translator", lambda path: (network, tokenizer, tokenizer))
    (tmp_path / "in").write_text("ab\ncd\n")
    with pytest.raises(GenerationError, match=f"{tmp_path}/in: the model's logits are no numbers") as caught:
        translation.translate_file(tmp_path, str(tmp_path / "in"), None, Search(beam), False)
    assert "\n" not in str(caught.value)
    call = translation.numbers_only(network)
    sources = [np.array([5, 256]), np.array([6, 7, 256])]
    found = translation.translate_sources(call, sources, 1, 256, 256, Search(beam, max_extra=2), Ranks(0, 0, 1, torch.device("cpu")))
    assert len(found) == 2


def test_a_token_without_a_row_is_named_with_its_line(tmp_path, monkeypatch, byte_tokenizer):
    """It was an IndexError of torch."""
    tokenizer, rows = load_tokenizer(byte_tokenizer), {"source": 257, "target": 257}  # 256 bytes and the end

    def opened(path):
        sizes = Model(family="transformer", dim=16, layers=1, heads=2, vocab_size=rows["target"])
        model = complete(dataclasses.replace(sizes, encoder=EncoderConfig(vocab_size=rows["source"])), 32)
        network = build_network(model)
        initialise(network, 0)
        return network, tokenizer, tokenizer

    class Larger(type(tokenizer)):
        def encode_arrays(self, texts):
            return [np.where(ids == ord("z"), 300, ids) for ids in super().encode_arrays(texts)]

    monkeypatch.setattr(translation, "open_translator", opened)
    tokenizer.__class__ = Larger
    (tmp_path / "in").write_text("ab\n\nxyz\n")
    says = "of the tokenizer, but the model's vocabulary has"
    with pytest.raises(DataError, match=rf"{tmp_path}/in, line 3: has token 300 {says} 257 rows; change the text"):
        translation.translate_file(tmp_path, str(tmp_path / "in"), None, Search(), False)
    rows["source"] = 301
    assert len(translation.translate_file(tmp_path, str(tmp_path / "in"), None, Search(max_extra=1), False)[0]) == 3
    rows["target"] = 100
    with pytest.raises(DataError, match=f"the end of a translation: has token 256 {says} 100 rows"):
        translation.translate_file(tmp_path, str(tmp_path / "in"), None, Search(), False)


def test_scores_are_those_of_sacrebleus_functions():
    import sacrebleu

    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert scores.wer == pytest.approx(100 * (0 + 2 + 4) / 17)
    letters = sum(plain_distance(*pair) for pair in zip(HYPOTHESES, REFERENCES))
    assert scores.cer == pytest.approx(100 * letters / sum(map(len, REFERENCES)))
    assert "tok:13a" in scores.signature and "case:mixed" in scores.signature


def test_scores_ignore_case_when_asked():
    shouted = [text.upper() for text in REFERENCES]
    perfect = score(shouted, REFERENCES, lowercase=True)
    assert (round(perfect.bleu, 6), round(perfect.chrf, 6), perfect.cer, perfect.wer) == (100, 100, 0, 0)
    assert "case:lc" in perfect.signature
    assert score(shouted, REFERENCES).wer > 80


@pytest.mark.parametrize(("samples", "shown"), [(0, []), (2, ["a", "b"]), (5, ["a", "b", "c"])])
def test_a_translation_is_logged_once(tmp_path, byte_tokenizer, monkeypatch, caplog, samples, shown):
    """With a single pair, `samples: 5` logged the same lines five times."""
    pytest.importorskip("sacrebleu")
    prepare_pairs(tmp_path / "pairs", split_of(tmp_path, "x", ["a", "b", "c"], ["d", "e", "f"]), None, byte_tokenizer)
    pairs, config = PreparedPairs.open(tmp_path / "pairs"), Config()
    config.validation.translation.samples = samples
    monkeypatch.setattr(translation, "translate_sources", lambda call, sources, *_: [source.tolist() for source in sources])
    caplog.set_level("INFO")
    translation.translate_and_score(None, pairs, config, Ranks(0, 0, 1, torch.device("cpu")), (0, 1), None)
    said = [record.message.split() for record in caplog.records if record.name == translation.__name__]
    assert [words[1] for words in said if words[0] == "source"] == shown


def test_a_missing_package_is_named(monkeypatch):
    import sys

    from pretrain.errors import ConfigError

    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match=r'run pip install -c constraints.txt -e "\.\[translation\]"$'):
        score(HYPOTHESES, REFERENCES)
    monkeypatch.setattr(translation, "open_translator", lambda path: pytest.fail("a model was opened first"))
    with pytest.raises(ConfigError, match="BLEU and chrF need sacrebleu"):
        translation.translate_file(Path("m"), "in", "reference", Search(), False)


@pytest.fixture
def translated(tmp_path, monkeypatch) -> list[str]:
    """Options of tools/translate.py, which takes each line for its own translation."""
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("a\nb\n")

    def echo(model, source, reference, search, lowercase):
        return Path(source).read_text().split(), Path(reference).read_text().split() if reference else None

    monkeypatch.setattr(translation, "translate_file", echo)
    return ["--model", "m", "--input", "in"]


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("in", "in: already exists; choose another output or remove it first"),
        (".", ".: already exists"),
        ("in/out", "in/out: cannot be created: Not a directory"),
        ("x" * 300, "cannot be created: File name too long"),
    ],
)
def test_a_place_for_translations_is_judged_first_and_keeps_what_it_has(translated, monkeypatch, capsys, output, says):
    """The input was replaced without a word, and other places were found bad after all the work."""
    monkeypatch.setattr(translation, "translate_file", lambda *_: pytest.fail("it translated first"))
    assert tool("translate").main([*translated, "--output", output]) == 1
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and said.count("\n") == 1
    assert Path("in").read_text() == "a\nb\n" and os.listdir() == ["in"]


def test_translations_are_written_before_they_are_scored(translated, monkeypatch, capsys):
    def failing(*_):
        raise DataError("no score")

    monkeypatch.setattr(translation, "score", failing)
    assert tool("translate").main([*translated, "--reference", "in", "--output", "new/out"]) == 1
    assert Path("new/out").read_text() == "a\nb\n" and "no score" in capsys.readouterr().err


def test_scores_as_json_follow_the_translations(translated, capsys):
    pytest.importorskip("sacrebleu")
    assert tool("translate").main([*translated, "--reference", "in", "--json"]) == 0
    *lines, scores = capsys.readouterr().out.splitlines()
    assert lines == ["a", "b"] and json.loads(scores)["cer"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_ratio", "nan"), ("max_ratio", "inf"), ("beam", "1000000"), ("length_penalty", "400"), ("length_penalty", "nan"), ("max_extra", "0")],
)
def test_options_of_a_search_have_the_ranges_of_the_configuration(capsys, name, value):
    """They ended in tracebacks."""
    [key] = [field for field in dataclasses.fields(Translation) if field.name == name]
    with pytest.raises(SystemExit):
        tool("translate").main(["--model", "m", "--input", "in", f"--{name.replace('_', '-')}", value])
    assert f"{value} is not in {key.metadata['ge']}..{key.metadata['le']}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--beam", "x"], "argument --beam: invalid int value: 'x'"),
        (["--length-penalty", "2"], "--length-penalty has no effect with --beam 1"),
    ],
)
def test_options_of_a_search_without_a_meaning_are_refused(capsys, options, says):
    with pytest.raises(SystemExit):
        tool("translate").main(["--model", "m", "--input", "in", *options])
    assert says in capsys.readouterr().err
