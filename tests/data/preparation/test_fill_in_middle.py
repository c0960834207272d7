"""Fill-in-the-middle: the parts make the document again, at the rates asked for, whatever surrounds the document."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.preparation.encode import MINIMUM_CHARACTERS, SENTINELS, FillInMiddle
from pretrain.data.preparation.preparation_plan import Settings
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import ConfigError, DataError

TYPES = ("bpe", "unigram", "byte_bpe", "byte")


@pytest.fixture(scope="module")
def tokenizers(corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("fim")
    for model_type in TYPES:
        size = None if model_type == "byte" else 503
        train_tokenizer([str(corpus)], root / model_type, model_type, size and size - 100, special_tokens=SENTINELS)
    return {model_type: load_tokenizer(root / model_type) for model_type in TYPES}


def parts_of(tokenizer, ids):
    """The texts after the three sentinels, which have to stand in the order of the paper; None without sentinels."""
    before_prefix, before_suffix, before_middle = (tokenizer.special_id(token) for token in SENTINELS)
    ids = ids.tolist()
    if before_prefix not in ids:
        assert before_suffix not in ids and before_middle not in ids
        return None
    assert ids[0] == before_prefix
    assert [ids.count(id) for id in (before_prefix, before_suffix, before_middle)] == [1, 1, 1]
    suffix_at, middle_at = ids.index(before_suffix), ids.index(before_middle)
    assert 1 <= suffix_at < middle_at
    return [tokenizer.decode(part) for part in (ids[1:suffix_at], ids[suffix_at + 1 : middle_at], ids[middle_at + 1 :])]


_documents = st.text(st.characters(exclude_categories=["Cs"]), min_size=MINIMUM_CHARACTERS, max_size=80)


@pytest.mark.parametrize("model_type", TYPES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=_documents | st.text(" \n\tabc<|fim_prefix|>\u2581", min_size=MINIMUM_CHARACTERS, max_size=60))
def test_the_parts_of_both_layouts_make_the_document(tokenizers, model_type, document):
    tokenizer = tokenizers[model_type]
    (psm,) = FillInMiddle(tokenizer, 1.0, 0.0).encode([document])
    prefix, suffix, middle = parts_of(tokenizer, psm)
    assert prefix + middle + suffix == document
    (spm,) = FillInMiddle(tokenizer, 1.0, 1.0).encode([document])
    empty, suffix_of_spm, prefix_and_middle = parts_of(tokenizer, spm)
    assert (empty, suffix_of_spm, prefix_and_middle) == ("", suffix, prefix + middle)
    assert sorted(psm.tolist()) == sorted(spm.tolist())  # the same cuts, encoded apart in both


@pytest.mark.parametrize("model_type", TYPES)
def test_documents_that_are_left_alone_have_the_ids_of_the_tokenizer(tokenizers, texts, model_type):
    tokenizer = tokenizers[model_type]
    untouched = FillInMiddle(tokenizer, 0.0).encode(texts)
    assert [ids.tolist() for ids in untouched] == [tokenizer.encode(text) for text in texts]
    mixed = FillInMiddle(tokenizer, 0.5).encode(texts)
    plain = [ids.tolist() for ids in mixed if parts_of(tokenizer, ids) is None]
    assert 60 < len(plain) < 156
    assert {tuple(ids) for ids in plain} <= {tuple(ids) for ids in map(tokenizer.encode, texts)}
    assert {ids.dtype for ids in mixed} == {np.dtype(np.uint32)}


def test_short_documents_are_left_alone(tokenizers):
    fill = FillInMiddle(tokenizers["byte"], 1.0)
    short, long = "x" * (MINIMUM_CHARACTERS - 1), "x" * MINIMUM_CHARACTERS
    assert [len(ids) for ids in fill.encode(["", short, long])] == [0, len(short), len(long) + 3]


def test_rates_and_cuts_are_what_was_asked_for(tokenizers):
    tokenizer, number, length = tokenizers["byte"], 4000, 20
    documents = [f"{i:0{length}d}" for i in range(number)]
    encoded = FillInMiddle(tokenizer, 0.7, 0.3).encode(documents)
    parts = [parts_of(tokenizer, ids) for ids in encoded]
    done = [part for part in parts if part is not None]
    spm = [ids for ids in encoded if ids[0] == 257 and ids[1] == 258]
    psm = [part for ids, part in zip(encoded, parts) if part is not None and not (ids[0] == 257 and ids[1] == 258)]
    deviations = 5
    assert abs(len(done) - 0.7 * number) < deviations * (0.7 * 0.3 * number) ** 0.5
    # PSM with an empty prefix looks like SPM: when either of the two places is the first of 21.
    looks_spm = 0.3 + 0.7 * (1 - (20 / 21) ** 2)
    assert abs(len(spm) - looks_spm * len(done)) < deviations * (looks_spm * (1 - looks_spm) * len(done)) ** 0.5
    begins = np.bincount([len(prefix) for prefix, _, _ in psm], minlength=length + 1)
    # The smaller of two uniform places on 0..20 is k with probability (2 (20 - k) + 1) / 441.
    expected = np.array([2 * (length - k) + 1 for k in range(1, length + 1)]) / (length + 1) ** 2
    expected *= len(psm) / expected.sum()
    chi_squared = (((begins[1:] - expected) ** 2) / expected).sum()
    assert chi_squared < 19 + 6 * (2 * 19) ** 0.5


def test_a_document_is_treated_alike_wherever_it_stands_and_a_larger_rate_only_adds(tokenizers, texts):
    tokenizer = tokenizers["byte_bpe"]
    together = FillInMiddle(tokenizer, 0.5).encode(texts)
    fill = FillInMiddle(tokenizer, 0.5)
    apart = [fill.encode([text])[0] for text in reversed(texts)][::-1]
    assert all((a == b).all() for a, b in zip(together, apart, strict=True))
    more = FillInMiddle(tokenizer, 0.8).encode(texts)
    assert all((a == b).all() for a, b in zip(together, more, strict=True) if parts_of(tokenizer, a) is not None)


def test_text_that_looks_like_a_sentinel_stays_text(tokenizers):
    tokenizer = tokenizers["byte_bpe"]
    document = "<|fim_prefix|><|fim_suffix|><|fim_middle|>" * 3
    for rate in (0.0, 1.0):
        (ids,) = FillInMiddle(tokenizer, rate).encode([document])
        sentinels = {tokenizer.special_id(token) for token in SENTINELS}
        assert sum(id in sentinels for id in ids.tolist()) == 3 * rate


def test_missing_sentinels_are_named_with_the_remedy(trained):
    message = r"tokenizer\.model: has no special token <\|fim_prefix\|> .*tools/train_tokenizer.py --special-tokens"
    with pytest.raises(DataError, match=message) as caught:
        FillInMiddle(load_tokenizer(trained["bpe"]), 0.5)
    assert "\n" not in str(caught.value)


def test_an_added_token_that_text_can_forge_is_no_sentinel(tokenizers, tmp_path):
    content = (tokenizers["byte"].file).read_text()
    first, rest = content.split('"content": "<|fim_middle|>"')
    (tmp_path / "tokenizer.json").write_text(
        first + '"content": "<|fim_middle|>"' + re.sub('"special": true', '"special": false', rest, count=1)
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(DataError, match=r"no special token <\|fim_middle\|>"):
        FillInMiddle(load_tokenizer(tmp_path), 0.5)


@pytest.mark.parametrize("rates", [(1.1, 0.5), (-0.1, 0.5), (0.5, 2.0), (float("nan"), 0.5)])
def test_rates_out_of_range_are_refused(rates):
    with pytest.raises(ConfigError, match="--fim-(spm-)?rate .*: expected a number from 0 to 1"):
        Settings(fim_rate=rates[0], fim_spm_rate=rates[1]).check()


def test_half_a_surrogate_pair_is_an_error(tokenizers):
    with pytest.raises(DataError, match="lone surrogate"):
        FillInMiddle(tokenizers["byte"], 0.5).encode(["\ud800" * 20])


def test_a_tokenizer_that_adds_a_leading_space_is_refused(corpus, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.read_text(encoding="utf-8").splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=500,
        byte_fallback=True,
        add_dummy_prefix=True,
        control_symbols=list(SENTINELS),
        max_sentence_length=10**6,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="puts a space before every text"):
        FillInMiddle(load_tokenizer(tmp_path / "tokenizer.model"), 0.5)
