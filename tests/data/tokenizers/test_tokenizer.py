"""Text to ids and back, and the tokenizers that are trained here."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.tokenizers.export import export_tokenizer
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import sample_of, stretches_of, train_tokenizer
from pretrain.errors import ConfigError, DataError
from tools import train_tokenizer as train_tool

TYPES = ("bpe", "unigram", "byte_bpe", "byte", "char")
LOSSLESS = ("bpe", "unigram", "byte_bpe", "byte")
AWKWARD = [
    "",
    " ",
    "  leading and trailing  ",
    "\ttab\n\n\n    indented\r\n\r",
    "</s><s><unk><pad><|endoftext|>",
    "<0x41> is not A",
    "\u2581 is not a space \u2581\u2581",
    "NUL \0 inside",
    "\ufeffbyte order mark, e\u0301 is not é, \u2028 separates",
    "👩‍👩‍👧 中文 ไทย \U0010ffff",
]


@pytest.fixture(scope="module")
def loaded(trained):
    return {model_type: load_tokenizer(path) for model_type, path in trained.items()}


@pytest.mark.parametrize("model_type", LOSSLESS)
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_unchanged(loaded, model_type, text):
    assert loaded[model_type].decode(loaded[model_type].encode(text)) == text


_any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
_code_like = st.text(" \n\t\r\u2581abc_()<>/s0", max_size=60)


@pytest.mark.parametrize("model_type", LOSSLESS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_any_text | _code_like)
def test_any_text_comes_back_unchanged(loaded, model_type, text):
    tokenizer = loaded[model_type]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize("model_type", TYPES)
def test_batches_give_the_ids_of_single_texts(loaded, texts, model_type):
    tokenizer = loaded[model_type]
    arrays = tokenizer.encode_arrays([*texts[:20], "\u2581"] if model_type != "char" else texts[:20])
    assert {array.dtype for array in arrays} == {np.dtype(np.uint32)}
    assert [array.tolist() for array in arrays[:20]] == [tokenizer.encode(text) for text in texts[:20]]
    assert tokenizer.encode_arrays([]) == []


@pytest.mark.parametrize("model_type", TYPES)
def test_a_saved_tokenizer_is_self_contained(loaded, texts, tmp_path, model_type):
    loaded[model_type].save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert copy.fingerprint == loaded[model_type].fingerprint
    assert (copy.eod_id, copy.vocab_size) == (loaded[model_type].eod_id, loaded[model_type].vocab_size)
    assert [copy.encode(text) for text in texts[:5]] == [loaded[model_type].encode(text) for text in texts[:5]]


def test_fingerprint_is_the_hash_of_the_file_that_decides_the_ids(trained, loaded):
    assert loaded["bpe"].fingerprint == hashlib.sha256((trained["bpe"] / "tokenizer.model").read_bytes()).hexdigest()
    assert loaded["byte"].fingerprint == hashlib.sha256((trained["byte"] / "tokenizer.json").read_bytes()).hexdigest()
    assert len({tokenizer.fingerprint for tokenizer in loaded.values()}) == len(TYPES)


def test_byte_ids_are_the_byte_values(loaded):
    tokenizer = loaded["byte"]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode("Aé\n\0") == [0x41, 0xC3, 0xA9, 0x0A, 0x00]
    assert tokenizer.decode(range(32, 127)) == bytes(range(32, 127)).decode()
    assert tokenizer.decode([0x41, 0xFF]) == "A\ufffd"


def test_char_ids_follow_the_code_points_of_the_corpus(loaded, texts):
    characters = sorted(set("".join(texts)))
    tokenizer = loaded["char"]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (len(characters) + 1, len(characters))
    assert tokenizer.encode("".join(characters)) == list(range(len(characters)))
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts[:10])


def test_a_character_outside_the_vocabulary_is_an_error_that_names_it(loaded):
    with pytest.raises(DataError, match=r"'ß' \(U\+00DF\) is not in the vocabulary of .*tokenizer\.json"):
        loaded["char"].encode_arrays(["def", "retuß"])


@pytest.mark.parametrize("model_type", TYPES)
def test_half_a_surrogate_pair_is_an_error(loaded, model_type):
    with pytest.raises(DataError, match=r"lone surrogate U\+D800"):
        loaded[model_type].encode("a\ud800b")


def test_continuing_a_text_needs_no_space_of_its_own(loaded):
    tokenizer = loaded["bpe"]
    assert tokenizer.decode(tokenizer.encode("def re") + tokenizer.encode("turn x")) == "def return x"


def test_truncation_and_padding_in_the_file_do_not_cut_documents(trained, tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(trained["byte"] / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert list(map(load_tokenizer(tmp_path).encode, ["abcdef", "a"])) == [[97, 98, 99, 100, 101, 102], [97]]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such tokenizer"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match="no tokenizer.json and no "):
        load_tokenizer(tmp_path)


def test_damaged_files_are_named(tmp_path):
    for name in ("tokenizer.json", "other.model"):
        (tmp_path / name).write_bytes(b"not a tokenizer")
        with pytest.raises(DataError, match=f"{name}: not a "):
            load_tokenizer(tmp_path / name)


def test_several_models_in_a_directory_must_be_told_apart(trained, tmp_path):
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes((trained["bpe"] / "tokenizer.model").read_bytes())
    with pytest.raises(DataError, match="several SentencePiece models \\(a.model, b.model\\)"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "b.model").vocab_size == 500


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}, {"eos_token": "</none>"}, []])
def test_without_an_end_of_document_token_the_error_names_the_remedy(trained, tmp_path, config):
    (tmp_path / "tokenizer.json").write_bytes((trained["byte"] / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"end-of-document token.*write \{\"eos_token\".*tokenizer_config\.json"):
        load_tokenizer(tmp_path)


# Special tokens.

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_a_text_that_a_unigram_model_takes_for_its_end_token_is_refused(t5_tokenizer):
    """As in the tokenizer.json of T5, whose special tokens are pieces of the model."""
    loaded = load_tokenizer(t5_tokenizer)
    assert loaded.encode("é <unk> abc").count(2) == 2  # what nothing can express is no forged token
    for text, meaning in (("a </s> b", "the end of a document"), ("<pad>", "a special token")):
        with pytest.raises(DataError, match=rf"the text holds .* cannot tell from {meaning}; change the text"):
            loaded.encode_arrays(["abc", text])
    with pytest.raises(DataError, match=r"^file, line 3: the text holds '</s>'"):
        loaded.encode("</s>", "file, line 3")


def test_an_end_of_document_that_is_also_the_unknown_token_is_in_no_document(tmp_path):
    """Each unknown word ended a document: 1,843 lines held 6,915 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a b a") == [0, 1, 0]
    with pytest.raises(DataError, match="that .*tokenizer.json lacks, and its unknown token '</s>' is also the end of a document; name another"):
        loaded.encode("a c b")


def test_an_end_of_document_that_a_normalizer_changes_is_in_no_document(trained, tmp_path):
    """The library found an ordinary added token in text, although it was made special."""
    from tokenizers import AddedToken, Tokenizer, normalizers

    for normalizer in (normalizers.Lowercase(), normalizers.NFC()):
        tokenizer = Tokenizer.from_file(str(trained["byte_bpe"] / "tokenizer.json"))
        tokenizer.normalizer = normalizer
        tokenizer.add_tokens([AddedToken("<EOS>", normalized=True)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<EOS>"}')
        loaded = load_tokenizer(tmp_path)
        if isinstance(normalizer, normalizers.NFC):
            assert loaded.eod_id not in loaded.encode("a <EOS> b")
            continue
        for text in ("a <EOS> b", "a <eos> b"):
            with pytest.raises(DataError, match="cannot tell from the end of a document"):
                loaded.encode(text)


def test_a_model_that_leaves_out_merges_at_random_is_refused(trained, tmp_path):
    """Each preparation, and each unit of an interrupted one, would have had other ids."""
    content = json.loads((trained["byte_bpe"] / "tokenizer.json").read_text())
    for dropout in (0.3, 0.0, None):
        content["model"]["dropout"] = dropout
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_bytes((trained["byte_bpe"] / "tokenizer_config.json").read_bytes())
        if dropout:
            with pytest.raises(DataError, match=r'tokenizer.json: its model leaves out merges at random \(dropout 0.3\).* set its "dropout" to null'):
                load_tokenizer(tmp_path)
        else:
            assert load_tokenizer(tmp_path).encode("words") == load_tokenizer(trained["byte_bpe"]).encode("words")


@pytest.fixture(scope="module")
def with_special(corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("special")
    sizes = {"bpe": 503, "unigram": 403, "byte_bpe": 503, "byte": None, "char": None}
    for model_type, size in sizes.items():
        train_tokenizer([str(corpus)], root / model_type, model_type, size, special_tokens=FIM)
    return root


@pytest.mark.parametrize("model_type", TYPES)
def test_special_tokens_have_ids_that_no_text_gives(with_special, loaded, model_type):
    tokenizer = load_tokenizer(with_special / model_type)
    ids = [tokenizer.special_id(token) for token in FIM]
    assert tokenizer.vocab_size == loaded[model_type].vocab_size + 3
    assert len({*ids, tokenizer.eod_id}) == 4 and all(0 <= id < tokenizer.vocab_size for id in ids)
    if model_type != "char":
        text = "".join(FIM) + " a" + FIM[1]
        assert not set(ids) & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_id("<|none|>") is None
    assert tokenizer.special_id("a") is None
    assert loaded[model_type].special_id(FIM[0]) is None


@pytest.mark.parametrize("model_type", TYPES)
def test_special_tokens_are_special_to_transformers_after_export(with_special, texts, tmp_path, model_type):
    from transformers import AutoTokenizer

    export_tokenizer(with_special / model_type, tmp_path / "out", texts[:20])
    ours = load_tokenizer(with_special / model_type)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True, trust_remote_code=False)
    ids = [ours.special_id(token) for token in FIM]
    assert theirs.convert_tokens_to_ids(list(FIM)) == ids
    assert theirs.encode("".join(FIM), add_special_tokens=False) == ids
    assert theirs.decode([*ids, *ours.encode("def")], skip_special_tokens=True) == "def"
    again = load_tokenizer(tmp_path / "out")
    assert [again.special_id(token) for token in FIM] == ids
    assert again.encode(texts[0]) == ours.encode(texts[0])


@pytest.mark.parametrize(
    "model_type, tokens, message",
    [
        ("bpe", ["<x>", "<x>"], "--special-tokens <x>: named twice"),
        ("bpe", ["</s>"], "one that every bpe tokenizer has"),
        ("byte", ["<|endoftext|>"], "one that every byte tokenizer has"),
        ("byte_bpe", [""], "expected 3 or more visible"),
        ("byte_bpe", ["<a b>"], "expected 3 or more visible"),
        ("unigram", ["<0x41>"], "expected 3 or more visible"),
        ("char", ["<é>"], "expected 3 or more visible"),
    ],
)
def test_special_tokens_that_cannot_be_are_refused(corpus, tmp_path, model_type, tokens, message):
    with pytest.raises(ConfigError, match=message):
        train_tokenizer([str(corpus)], tmp_path / "out", model_type, 500, special_tokens=tokens)


def test_a_comma_in_a_special_token_is_part_of_it(corpus, tmp_path):
    train_tokenizer([str(corpus)], tmp_path / "out", "bpe", 500, special_tokens=["<a,b>", '<q"q>'])
    tokenizer = load_tokenizer(tmp_path / "out")
    assert None not in (tokenizer.special_id("<a,b>"), tokenizer.special_id('<q"q>'))
    assert tokenizer.special_id("<a") is None


# Training.


def test_trained_vocabularies_have_the_size_asked_for(loaded):
    assert {name: loaded[name].vocab_size for name in ("bpe", "unigram", "byte_bpe")} == {
        "bpe": 500,
        "unigram": 400,
        "byte_bpe": 500,
    }


def test_line_feeds_take_part_in_learned_pieces(loaded):
    tokenizer = loaded["bpe"]
    assert len(tokenizer.encode("):\n")) == 1
    assert len(tokenizer.encode("        ")) == 1


def test_pieces_lose_nothing_and_keep_to_the_limit():
    text = "short\n\n" + "x" * 100 + "中" * 30 + "\n    end" + "\n" * 40
    for limit in (4, 7, 16, 64):
        cut = list(stretches_of(text, limit))
        assert "".join(cut) == text
        assert max(len(piece.encode()) for piece in cut) <= limit
    assert list(stretches_of("one\ntwo\nthree", 8)) == ["one\ntwo\n", "three"]


def test_training_on_a_sample_gives_the_same_file_in_every_process(corpus, tmp_path):
    program = "import sys; from pretrain.data.tokenizers.tokenizer_training import train_tokenizer as t;"
    program += "[t([sys.argv[1]], f'{sys.argv[2]}/{m}', m, 400, sample_pieces=120) for m in ('bpe', 'unigram', 'byte_bpe')]"
    subprocess.run([sys.executable, "-c", program, corpus, tmp_path / "other"], check=True)
    files = {"bpe": "tokenizer.model", "unigram": "tokenizer.model", "byte_bpe": "tokenizer.json"}
    for model_type, file in files.items():
        train_tokenizer([str(corpus)], tmp_path / "here" / model_type, model_type, 400, sample_pieces=120)
        here, other = (tmp_path / place / model_type / file for place in ("here", "other"))
        assert here.read_bytes() == other.read_bytes()


def test_samples_are_uniform_and_no_larger_than_asked():
    assert sample_of(["a", "b"], 5) == ["a", "b"]
    sample = [int(text) for text in sample_of(map(str, range(10_000)), 1000)]
    assert len(sample) == len(set(sample)) == 1000
    assert 4700 < sum(sample) / 1000 < 5300


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "byte_bpe"])
def test_a_vocabulary_too_large_for_the_corpus_says_how_large_it_may_be(corpus, tmp_path, model_type):
    with pytest.raises(DataError, match="too large for this corpus") as caught:
        train_tokenizer([str(corpus)], tmp_path / "out", model_type, 100_000)
    largest = int(str(caught.value).split()[-1])
    assert 500 < largest < 100_000
    assert not any(tmp_path.iterdir())
    train_tokenizer([str(corpus)], tmp_path / "out", model_type, largest)
    assert load_tokenizer(tmp_path / "out").vocab_size == largest


def test_a_vocabulary_too_small_for_bytes_and_characters_says_how_large_it_must_be(corpus, tmp_path):
    with pytest.raises(DataError, match="too small for this corpus"):
        train_tokenizer([str(corpus)], tmp_path / "out", "bpe", 100)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("wordpiece", 500), "--model-type wordpiece: expected one of bpe, unigram, byte_bpe, byte, char"),
        (("bpe", None), "--vocab-size is required for --model-type bpe"),
        (("byte", 300), "a byte tokenizer has exactly 257"),
        (("byte_bpe", 256), "--vocab-size 256: bytes, end of text and special tokens alone need 257"),
        (("unigram", 0), "--vocab-size 0: expected at least 1"),
        (("byte_bpe", 10**9), "--vocab-size 1000000000: expected at most 10000000"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(corpus, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        train_tokenizer([str(corpus)], tmp_path / "out", *arguments)


def test_training_refuses_to_overwrite(trained, corpus):
    before = sorted((path.name, path.read_bytes()) for path in trained["char"].iterdir())
    with pytest.raises(DataError, match="char: already exists"):
        train_tokenizer([str(corpus)], trained["char"], "char")
    assert sorted((path.name, path.read_bytes()) for path in trained["char"].iterdir()) == before


@pytest.mark.parametrize("model_type", ["bpe", "char"])
def test_training_on_an_empty_corpus_is_an_error(tmp_path, model_type):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="corpus is empty"):
        train_tokenizer([str(tmp_path / "*.txt")], tmp_path / "out", model_type, 300)


def test_the_tool_trains_and_ends_with_one_line(corpus, tmp_path, capsys):
    out = tmp_path / "tok"
    code = train_tool.main(["--input", str(corpus), "--model-type", "bpe", "--vocab-size", "400", "--output", str(out)])
    assert code == 0
    assert capsys.readouterr().out.startswith(f"trained {out} (bpe, 400 tokens, from 216 documents in ")
    code = train_tool.main(["--input", str(corpus), "--model-type", "bpe", "--vocab-size", "400", "--output", str(out)])
    assert code == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {out}: already exists; choose another output or remove it first"
    assert train_tool.main(["--input", str(corpus), "--model-type", "bpe", "--output", str(out)]) == 2
    with pytest.raises(SystemExit):
        train_tool.main(["--model-type", "byte", "--lowercase", "--output", str(tmp_path / "bytes")])
    assert "--lowercase has no effect with --model-type byte" in capsys.readouterr().err


def test_an_end_token_added_as_an_ordinary_token_stays_text_in_a_document(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<": 0, "e": 1, ">": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_tokens(["<e>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eod_id, loaded.encode("<e>")) == (3, [0, 1, 2])


def test_a_model_that_adds_a_leading_space_adds_it_once(corpus, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.read_text(encoding="utf-8").splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=True,
        max_sentence_length=10**6,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    assert tokenizer.encode("a\u2581b") == tokenizer.encode("a b")


def test_a_tokenizer_can_learn_from_lower_case(tmp_path):
    (tmp_path / "text.txt").write_text("Ein HUND\nÜber\n", encoding="utf-8")
    train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "tokenizer", "char", text_mode="line", lowercase=True)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("ein hundüber")) == "ein hundüber"
    with pytest.raises(DataError, match="character 'E'"):
        tokenizer.encode("Ein")


SMALL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from pretrain.data.tokenizers.tokenizer_training import train_tokenizer
from pretrain.errors import run_tool
for number, model_type in enumerate(sys.argv[3:]):
    print(run_tool(lambda: train_tokenizer([sys.argv[1]], sys.argv[2] + model_type, model_type, 280 if "bpe" in model_type else None)))
"""


def test_a_file_that_finds_no_room_is_an_error_of_one_line_and_leaves_nothing_behind(tmp_path):
    """The tokenizers library's plain Exception was a traceback, and so was an error without a file name."""
    (tmp_path / "a.txt").write_text("".join(chr(0x4E00 + n) for n in range(200)) + "to be or not to be " * 50)
    output, kinds = tmp_path / "new tokenizer ", ["byte_bpe", "byte", "char"]
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path / "a.txt"), str(output), *kinds]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("learning")]
    assert errors == [f"error: {output}{kind}: File too large; make room and start the same command again" for kind in kinds]
    assert done.stdout.split() == ["1"] * 3 and [path.name for path in tmp_path.iterdir()] == ["a.txt"]
