"""tiktoken gives the ids of the tokenizers library, or is not used, and a line says so."""

import json
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.preparation.encode import load_encoder
from pretrain.data.tokenizers import engine as tokenizer_engine
from pretrain.data.tokenizers.engine import (
    GPT2_PATTERN,
    TORTURE_TEXTS,
    TiktokenTokenizer,
    byte_characters,
    choose_engine,
    prove,
    ranks_of,
    split_pattern,
)
from pretrain.data.tokenizers.tokenizer import identity_of, load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import SPLIT_PATTERN
from pretrain.errors import DataError

O200K_PATTERN = "|".join(  # GPT-4o's, from openai_public.py of tiktoken
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN_PATTERN = SPLIT_PATTERN.replace("{1,3}", "")


@pytest.fixture(scope="module")
def variants(trained, texts, tmp_path_factory):
    """name -> directory of a tokenizer.json in the manner of a known model."""
    root = tmp_path_factory.mktemp("variants")
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern, behavior="isolated", invert=False):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert=invert), raw])

    ways = {
        "gpt2": (whole, None),
        "llama3": (split(SPLIT_PATTERN), None),
        "o200k": (split(O200K_PATTERN, "removed", True), None),
        "qwen2": (split(QWEN_PATTERN), normalizers.NFC()),
    }
    for name, (pre_tokenizer, normalizer) in ways.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        # 3000 tokens: more than the corpus has words, so that whole pieces are tokens
        trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=byte_characters(), show_progress=False)
        tokenizer.train_from_iterator([*texts, *TORTURE_TEXTS[:80]], trainer)
        from tokenizers import decoders

        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
        if name == "qwen2":
            tokenizer.add_tokens(["<think>", "</think>", "e\u0301e"])
        write(root / name, json.loads(tokenizer.to_str()))
    content = json.loads((root / "llama3" / "tokenizer.json").read_text())
    content["model"] = every_pair(content["model"])
    write(root / "llama3", content)
    return {name: root / name for name in ways}


def every_pair(model):
    """As transformers converts tiktoken files: all pairs of known tokens that make a token, `ignore_merges`, and ids of their own."""
    vocabulary = model["vocab"]
    merges = []
    for token in vocabulary:
        pairs = [[token[:i], token[i:]] for i in range(1, len(token)) if token[:i] in vocabulary and token[i:] in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return {**model, "merges": merges, "ignore_merges": True}


def write(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return directory


def tiktoken_of(path):
    return TiktokenTokenizer(load_tokenizer(path))


def prove_alone(path):
    """The proof, which raises where `choose_engine` takes the library."""
    fast = tiktoken_of(path)
    return prove(fast, fast.library)


def lists(arrays):
    return [array.tolist() for array in arrays]


def assert_same(path, texts):
    library, fast = load_tokenizer(path), tiktoken_of(path)
    for text, expected, actual in zip(texts, library.encode_arrays(texts), fast.encode_arrays(texts), strict=True):
        assert actual.dtype == np.uint32
        assert actual.tolist() == expected.tolist(), text[:50]


NAMES = ("gpt2", "llama3", "o200k", "qwen2")


@pytest.mark.parametrize("name", NAMES)
def test_tiktoken_is_chosen_for_the_known_kinds_of_byte_level_bpe(variants, texts, capsys, name):
    tokenizer = choose_engine(variants[name], texts)
    assert tokenizer.engine == "tiktoken"
    assert "tokenizer engine: tiktoken; on " in capsys.readouterr().err
    assert_same(variants[name], [*texts, *TORTURE_TEXTS])


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=120) | st.text(
    "ab I'tsLdſK09²\u0301\u00e9\u2028\u00a0\u3000\u200d\ufeff中😀 \n\r\t=/<|>", max_size=60
)


@pytest.mark.parametrize("name", [*NAMES, "trained"])
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_texts)
def test_any_text_has_the_ids_of_the_library(engines, name, text):
    library, fast = engines[name]
    assert lists(fast.encode_arrays([text])) == [library.encode(text)]
    assert fast.decode(fast.encode(text)) == library.decode(library.encode(text))


@pytest.fixture(scope="module")
def engines(variants, trained):
    paths = {**variants, "trained": trained["byte_bpe"]}
    return {name: (load_tokenizer(path), tiktoken_of(path)) for name, path in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "trained"])
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_texts)
def test_any_text_has_the_ids_of_the_library_many_times(engines, name, text):
    """`python -m pytest -m slow tests/data/test_tokenizer_engine.py` (about 2 minutes)."""
    library, fast = engines[name]
    assert lists(fast.encode_arrays([text])) == [library.encode(text)]


def test_transformers_gives_the_ids_of_tiktoken(trained, texts):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    theirs = AutoTokenizer.from_pretrained(str(trained["byte_bpe"]), local_files_only=True, trust_remote_code=False)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    fast = choose_engine(trained["byte_bpe"], texts)
    assert fast.engine == "tiktoken"
    for text in (*texts, *TORTURE_TEXTS):
        text = text.replace("<|endoftext|>", "")  # transformers turns it into its id, which documents must not
        assert theirs.encode(text, add_special_tokens=False) == fast.encode(text)


def test_the_tokenizer_is_the_librarys_in_all_else(trained, tmp_path):
    library, fast = load_tokenizer(trained["byte_bpe"]), tiktoken_of(trained["byte_bpe"])
    for name in ("vocab_size", "eod_id", "fingerprint", "file"):
        assert getattr(fast, name) == getattr(library, name)
    assert fast.special_id("<|endoftext|>") == fast.eod_id not in fast.encode("<|endoftext|><|never|>")
    fast.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == library.fingerprint
    assert fast.encode_arrays([]) == []
    with pytest.raises(DataError, match=r"lone surrogate U\+D800"):
        fast.encode("a\ud800b")


def test_ordinary_text_is_not_left_to_the_library(variants, texts, monkeypatch):
    fast = tiktoken_of(variants["llama3"])
    batches = [[*texts[:9], ""], ["", "", *texts[:3]], [texts[0]], [""], ["a", "", "b"], list(TORTURE_TEXTS)]
    expected = [lists(fast.library.encode_arrays(batch)) for batch in batches]
    assert [lists(fast.encode_arrays(batch)) for batch in batches] == expected
    assert (fast.left_to_library, fast.failures) == (0, 0)
    fast.encode_arrays(["a", " " * 200_000, "b"])
    assert (fast.left_to_library, fast.failures) == (1, 0)


# The proof.


def test_altered_ranks_are_found_and_not_used(trained, monkeypatch, capsys):
    def swapped(specification):
        ranks, ids = ranks_of(specification)
        first, second = [token for token in ranks if len(token) > 1][:2]
        return {**ranks, first: ranks[second], second: ranks[first]}, ids

    monkeypatch.setattr(tokenizer_engine, "ranks_of", swapped)
    assert choose_engine(trained["byte_bpe"]).engine == "library"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"tokenizer engine: the tokenizers library; {trained['byte_bpe']}/tokenizer.json: tiktoken would give other"
    )
    assert "text " in line and "differs from character" in line
    with pytest.raises(DataError, match="tiktoken would give other ids: .* text [0-9]+ differs from character [0-9]+ on, near"):
        prove_alone(trained["byte_bpe"])


@pytest.mark.parametrize("position", [0, 97, 244, 256, 400, 498])
def test_any_single_wrong_id_is_found(trained, monkeypatch, position):
    def altered(specification):
        ranks, ids = ranks_of(specification)
        ids[position] = (ids[position] + 1) % 499
        return ranks, ids

    monkeypatch.setattr(tokenizer_engine, "ranks_of", altered)
    with pytest.raises(DataError, match="tiktoken would give other ids"):
        prove_alone(trained["byte_bpe"])


def test_merges_of_which_tiktoken_would_make_others_are_found(trained, tmp_path):
    content = json.loads((trained["byte_bpe"] / "tokenizer.json").read_text())
    first = {character: id for id, character in enumerate(byte_characters())}
    content["model"]["vocab"] = {**first, "ab": 256, "bc": 257, "abc": 258}
    content["model"]["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"]]  # "abc" is ab + c: no merge ever makes abc of it
    content["added_tokens"][0]["id"] = 259
    with pytest.raises(DataError, match=r"vocabulary text \d+ differs from character 0 on, near 'abc' \(\[258\], not \[256, "):
        prove_alone(write(tmp_path / "odd", content))


def test_a_difference_in_the_sample_is_named_with_its_place(trained, texts):
    library = load_tokenizer(trained["byte_bpe"])

    class Wrong:
        failures = 0

        def encode_arrays(self, batch):
            return [ids[:5] if text.startswith("the odd") else ids for text, ids in zip(batch, library.encode_arrays(batch))]

    where = len(library.decode(library.encode("the odd one out")[:5]))
    with pytest.raises(DataError, match=f"sample text 3 differs from character {where} on, near 'the odd one out'"):
        prove(Wrong(), library, [*texts[:3], "the odd one out", *texts[3:]])


def test_a_tokenizer_on_which_tiktoken_failed_is_not_proven_though_the_ids_are_right(trained, texts):
    library, fast = load_tokenizer(trained["byte_bpe"]), tiktoken_of(trained["byte_bpe"])
    fast.failures = 2
    with pytest.raises(DataError, match="tokenizer.json: tiktoken fails on 2 of [0-9,]+ texts"):
        prove(fast, library, texts)


def test_the_proof_reads_no_more_of_a_corpus_than_it_says(trained, monkeypatch):
    monkeypatch.setattr(tokenizer_engine, "SAMPLE_CHARACTERS", 1000)
    read = []
    endless = (read.append(i) or "some text " * 30 for i in range(10**9))
    choose_engine(trained["byte_bpe"], endless)
    assert len(read) == 4


# What tiktoken cannot do.


@pytest.mark.parametrize("text", [" " * 1_100_000 + "x", "a" * 500_000 + "b", "x" + "\u00a0" * 1_000_000])
def test_long_runs_neither_crash_nor_differ(trained, capfd, text):
    assert_same(trained["byte_bpe"], [text])
    assert "panicked" not in capfd.readouterr().err


class PanicException(BaseException):
    pass


class Panicking:
    def __init__(self, encoding):
        self.encoding = encoding

    def encode_to_numpy(self, text, disallowed_special):
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=disallowed_special)
        except ValueError as error:
            raise PanicException from error


@pytest.mark.parametrize("panics", [False, True])
def test_an_overflow_in_tiktoken_is_survived_with_the_same_ids(trained, monkeypatch, panics):
    text = "x" + " " * 1_000_000
    monkeypatch.setattr(tokenizer_engine, "_has_long_white_space", lambda text: False)
    fast = tiktoken_of(trained["byte_bpe"])
    with pytest.raises(ValueError, match="Max stack size exceeded"):  # else this test tests nothing
        fast._bpe.encode_to_numpy(text)
    if panics:  # as tiktoken before 0.14 did, and as its other functions still do
        fast._bpe = Panicking(fast._bpe)
    assert fast.encode(text) == load_tokenizer(trained["byte_bpe"]).encode(text)
    assert fast.encode("def") == load_tokenizer(trained["byte_bpe"]).encode("def")


def test_added_tokens_in_a_text_are_found_as_by_the_library(variants):
    fast = tiktoken_of(variants["qwen2"])
    texts = [
        "a<think>b</think>",
        "<think",
        "e\u0301e and éé",
        "éee\u0301e",
        "<|im_start|>",
        "Å\u212b \u1e9b\u0323 ＡＢＣ ゛が か\u3099",
    ]
    assert fast.encode("a<think>b") != fast.encode("a") + fast.encode("<think") + fast.encode(">b")
    assert_same(variants["qwen2"], texts)


def test_characters_taken_as_unchanged_by_nfc_are_so_beside_any_other():
    import unicodedata

    kept = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and not tokenizer_engine._CHANGED_BY_NFC.search(chr(c))]
    assert len(kept) == 0x300 + 24 + 0x5200
    assert all(unicodedata.combining(c) == 0 and unicodedata.normalize("NFC", c) == c for c in kept)
    second = {
        unicodedata.decomposition(chr(c)).split()[-1]
        for c in range(0x110000)
        if unicodedata.decomposition(chr(c))
        and not unicodedata.decomposition(chr(c)).startswith("<")
        and len(unicodedata.decomposition(chr(c)).split()) == 2
    }
    assert not second & {f"{ord(c):04X}" for c in kept}  # none is the second half of a composition


def test_both_engines_know_the_same_letters_digits_and_white_space(trained):
    """A class of characters that differs between their Unicode versions would split differently."""
    import tiktoken
    from tokenizers import Regex, pre_tokenizers

    text = "@".join(chr(c) for c in range(1, 0x20000) if not 0xD800 <= c < 0xE000)
    for name in (r"\p{L}", r"\p{N}", r"\s", r"\p{M}", r"\p{Lu}"):
        ranks = {bytes([value]): value for value in range(256)}
        encoding = tiktoken.Encoding("one", pat_str=name, mergeable_ranks=ranks, special_tokens={"<|never|>": 256})
        split = pre_tokenizers.Split(Regex(name), "removed", invert=True)
        ours = bytes(encoding.encode_to_numpy(text).astype(np.uint8)).decode()
        assert ours == "".join(piece for piece, _ in split.pre_tokenize_str(text))


@pytest.mark.parametrize("behavior, invert", [("Isolated", False), ("Removed", True)])
def test_text_that_the_pattern_leaves_out_is_encoded_by_the_library(trained, tmp_path, behavior, invert):
    content = json.loads((trained["byte_bpe"] / "tokenizer.json").read_text())
    split = content["pre_tokenizer"]["pretokenizers"][0]
    split.update(pattern={"Regex": r" ?\p{L}+|\s+"}, behavior=behavior, invert=invert)
    path = write(tmp_path / "gaps", content)
    assert_same(path, ["def x", "def f(12):", "(12)", "é 12"])
    assert choose_engine(path).engine == "tiktoken"


@pytest.mark.parametrize(
    "pattern, message",
    [
        (r"\X|[\s\S]", "tiktoken does not understand its split pattern"),  # a grapheme cluster, in Oniguruma only
        (r"(?~x)|[\s\S]", "tiktoken (fails on|does not understand)"),  # Oniguruma's absence operator makes tiktoken 0.14 panic
        (r"^ +|[\s\S]", "tiktoken would give other ids"),  # the start of every line in Oniguruma, of the text in Rust
    ],
)
def test_a_pattern_that_means_something_else_to_tiktoken_is_a_reason(trained, tmp_path, capsys, pattern, message):
    content = json.loads((trained["byte_bpe"] / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    path = write(tmp_path / "other", content)
    assert choose_engine(path).engine == "library"
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(DataError, match=message):
        prove_alone(path)


def replaced(content, **parts):
    model = {**content["model"], **parts.pop("model", {})}
    return {**content, "model": model, **parts}


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"normalizer": {"type": "Lowercase"}}, r"it has a normalizer \(Lowercase\)"),
        ({"pre_tokenizer": {**_BYTE_LEVEL, "add_prefix_space": True}}, "puts a space before every text"),
        ({"pre_tokenizer": {**_BYTE_LEVEL, "use_regex": False}}, "not one split by a regular expression"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]}}, "not one split by a regular"),
        ({"pre_tokenizer": _DIGITS}, "its pre-tokenizer is Digits, not ByteLevel"),
        ({"pre_tokenizer": None}, "its pre-tokenizer is missing, not ByteLevel"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "its model has end_of_word_suffix"),
    ],
)
def test_files_that_tiktoken_cannot_express_are_left_to_the_library(trained, tmp_path, capsys, parts, message):
    content = json.loads((trained["byte_bpe"] / "tokenizer.json").read_text())
    if "model" in parts and "end_of_word_suffix" in parts["model"]:
        content["model"]["merges"] = []
    path = write(tmp_path / "file", replaced(content, **parts))
    assert choose_engine(path).engine == "library"
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(DataError, match=f"file/tokenizer.json: tiktoken cannot encode it: .*{message}"):
        prove_alone(path)


def test_other_models_are_left_to_their_library(trained, capsys):
    with pytest.raises(DataError, match="its model is WordLevel, not BPE"):
        prove_alone(trained["char"])
    assert choose_engine(trained["bpe"]).engine == "library"
    assert capsys.readouterr().err == ""


def model_of(merges, vocabulary=(), **options):
    made = dict.fromkeys([*byte_characters(), *("".join(pair) for pair in merges), *vocabulary])
    return {"model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(made)}, "merges": merges, **options}}


def test_merges_without_one_rank_per_token_are_refused():
    assert ranks_of(model_of([["a", "b"], ["ab", "c"], ["a", "bc"]][:2]))[0][b"abc"] == 257
    with pytest.raises(DataError, match="make b'abc' with two priorities"):
        ranks_of(model_of([["a", "b"], ["b", "c"], ["ab", "c"], ["x", "y"], ["a", "bc"]]))
    missing = model_of([])
    del missing["model"]["vocab"]["é"]
    with pytest.raises(DataError, match="no token for byte 0xE9"):
        ranks_of(missing)
    with pytest.raises(DataError, match="not written in the alphabet of byte-level BPE"):
        ranks_of(model_of([["中", "文"]]))


def test_tokens_without_a_merge_count_only_as_whole_pieces():
    merges = [["a", "b"]]
    assert b"xyz" not in ranks_of(model_of(merges, ["xyz"]))[0]  # without ignore_merges no text gives it
    ranks, ids = ranks_of(model_of(merges, ["xyz"], ignore_merges=True))
    assert (ranks[b"xyz"], ids[ranks[b"xyz"]]) == (257, 257)
    with pytest.raises(DataError, match="no merge makes its token b'abx', but tiktoken would merge towards it"):
        ranks_of(model_of(merges, ["abx"], ignore_merges=True))


def test_merges_written_as_strings_are_read_too():
    pairs, strings = model_of([["a", "b"], ["ab", "c"]]), model_of([["a", "b"], ["ab", "c"]])
    strings["model"]["merges"] = ["a b", "ab c"]
    assert ranks_of(pairs)[0] == ranks_of(strings)[0]


def test_the_pattern_of_a_bare_byte_level_is_that_of_gpt2():
    assert split_pattern({"pre_tokenizer": _BYTE_LEVEL}) == GPT2_PATTERN


def test_without_tiktoken_a_line_says_what_installing_it_would_bring(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert choose_engine(trained["byte_bpe"]).engine == "library"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenizer engine: the tokenizers library") and line.endswith("pip install tiktoken")


def test_a_tiktoken_tokenizer_is_loaded_by_name_in_another_process(trained):
    path, chosen = trained["byte_bpe"], choose_engine(trained["byte_bpe"])
    assert isinstance(load_encoder(str(path), identity_of(chosen), chosen.engine, 0.0, 0.0).tokenizer, TiktokenTokenizer)
