"""Long documents have the ids that they have as a whole, in memory that their length does not multiply."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from running import some_slow

from pretrain.data.preparation.encode import PLACES, Encoder, FillInMiddle, LongTexts
from pretrain.data.tokenizers.engine import TORTURE_TEXTS, TiktokenTokenizer, vocabulary_texts
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.tokenizer_training import SPLIT_PATTERN, train_tokenizer
from pretrain.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4o and gpt-oss split."""
FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\p{N}]+"
"""Digits in groups that are counted from the last one: a digit's group depends on all that follow."""


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MARK = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
# model, normalizer, pre-tokenizer: as published tokenizers have them.
KINDS = {
    "gpt2": ("BPE", None, BYTES | {"use_regex": True}),
    "starcoder": ("BPE", None, {"type": "Sequence", "pretokenizers": [DIGITS, BYTES | {"use_regex": True}]}),
    "llama3": ("BPE", None, {"type": "Sequence", "pretokenizers": [split(SPLIT_PATTERN), BYTES]}),
    "gpt_oss": ("BPE", None, {"type": "Sequence", "pretokenizers": [split(O200K), BYTES]}),
    "deepseek": (
        "BPE",
        None,
        {"type": "Sequence", "pretokenizers": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(r"[^\p{N}]+"), BYTES]},
    ),
    "qwen": ("BPE", {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split(SPLIT_PATTERN.replace("{1,3}", "")), BYTES]}),
    "from_the_right": ("BPE", None, {"type": "Sequence", "pretokenizers": [split(FROM_THE_RIGHT), BYTES]}),
    "superwords": ("BPE", None, {"type": "Sequence", "pretokenizers": [split(r"[^\n]+|\n+"), BYTES]}),
    "gemma": ("BPE", SPACES, None),
    "llama2": ("BPE", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}, None),
    "t5": ("Unigram", None, MARK),
    "bert": (
        "WordPiece",
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        {"type": "BertPreTokenizer"},
    ),
}


@pytest.fixture(scope="module")
def tokenizers_by_name(tmp_path_factory, trained, texts):
    """Every kind that the project trains, by every engine; SentencePiece with a space before every text; and those of KINDS."""
    root = tmp_path_factory.mktemp("published")
    found = {name: load_tokenizer(path) for name, path in trained.items()}
    found["tiktoken"] = TiktokenTokenizer(found["byte_bpe"])
    found["dummy_prefix"] = load_tokenizer(_sentencepiece(root / "dummy", texts))
    for name, (model, normalizer, pre_tokenizer) in KINDS.items():
        found[name] = load_tokenizer(_hugging_face(root / name, model, normalizer, pre_tokenizer, texts))
    return found


def _sentencepiece(folder: Path, texts: list[str]) -> Path:
    import sentencepiece

    folder.mkdir()
    with open(folder / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=450,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
    return folder


def _hugging_face(folder: Path, model: str, normalizer: dict | None, pre_tokenizer: dict | None, texts: list[str]) -> Path:
    """A tokenizer.json of these parts, trained on the texts, with an added token that is looked for in text."""
    from tokenizers import Tokenizer, models, trainers

    arguments = {"BPE": {}, "Unigram": {}, "WordPiece": {"unk_token": "[UNK]"}}[model]
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    decoder = (
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        if "ByteLevel" in str(parts)
        else None
    )
    skeleton = json.loads(Tokenizer(getattr(models, model)(**arguments)).to_str()) | parts | {"decoder": decoder}
    tokenizer = Tokenizer.from_str(json.dumps(skeleton))
    special = ["<|end|>", "[UNK]"]
    if model == "Unigram":
        trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="[UNK]", show_progress=False)
    elif model == "WordPiece":
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    else:
        alphabet = sorted(set("".join(map(chr, range(0x100, 0x144)))) | set(map(chr, range(33, 256))))
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    if pre_tokenizer is None:  # words are learnt, and then texts are not split into them
        words = json.loads(tokenizer.to_str()) | {
            "pre_tokenizer": {"type": "Split", "pattern": {"String": "▁"}, "behavior": "MergedWithNext", "invert": False}
        }
        tokenizer = Tokenizer.from_str(json.dumps(words))
    tokenizer.train_from_iterator(texts, trainer)
    if pre_tokenizer is None:
        tokenizer = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}))
    tokenizer.add_tokens(["lalala", "foo bar"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return folder


NAMES = ("bpe", "unigram", "byte_bpe", "tiktoken", "byte", "char", "dummy_prefix", *KINDS)
SLOW = {"qwen", "gpt_oss", "deepseek", "starcoder", "tiktoken", "gemma", "superwords", "from_the_right", "gpt2", "byte_bpe", "t5"}
"""Left to `bash tests/run.sh --slow`: to prove where a tokenizer cuts takes seconds."""
SPACES_WHERE = {
    "before a space": ({"gemma"}, {"superwords", "deepseek", "llama2"}),
    "at a space": ({"dummy_prefix", "llama2"}, {"gemma", "llama3"}),
}
"""Places at spaces: tokenizers that cut there, and tokenizers that do not."""
CUT_BY_ALL = ("bpe", "byte_bpe", "tiktoken", "byte", "gpt2", "starcoder", "llama3", "gpt_oss", "qwen")

words = st.sampled_from(
    ["the", "The", "lorem", "foo", "bar", "lalala", "foo bar", "x", "I'm", "don't", "été", "e\u0301", "中文", "日本語", "한국어", "हिन्दी", "😀", "👩\u200d👧",
     "1", "12", "1234567", "3.14", "٣٤", "½", "aB", "HTTPServer", "snake_case", "a,b", "(x)", "...", "--", "/*", "\u2581", "▁a", "<|end|>", "\ufeff"]
)  # fmt: skip
gaps = st.sampled_from(
    ["", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", ", ", ". ", "-"]
)
hard_texts = st.lists(st.tuples(words, gaps) | st.tuples(st.text(max_size=3), gaps), max_size=60).map(
    lambda pairs: "".join(word + gap for word, gap in pairs).encode("utf-8", "ignore").decode()
)


def same(tokenizer, long: LongTexts, text: str, with_ties: bool = False) -> bool:
    """`with_ties`: the same tokens in another order, which is equally likely, count as the same ids (`encode.py`)."""
    try:
        expected = tokenizer.encode_arrays([text])[0]
    except DataError:  # a vocabulary of characters does not have this one: neither has it cut
        with pytest.raises(DataError):
            long.encode_arrays([text])
        return True
    found = long.encode_arrays([text])[0]
    if with_ties and not np.array_equal(found, expected):
        return np.array_equal(np.sort(found), np.sort(expected)) and tokenizer.decode(found.tolist()) == tokenizer.decode(expected.tolist())
    return np.array_equal(found, expected)


UNIGRAM = {"unigram", *(name for name, (model, *_) in KINDS.items() if model == "Unigram")}


@pytest.mark.parametrize("name", some_slow(NAMES, SLOW))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=hard_texts, stretch=st.sampled_from([8, 23, 64]))
@example(text="the0;;a \n thethe\xa0lalala     ", stretch=8)
def test_a_text_in_stretches_has_the_ids_of_the_whole(tokenizers_by_name, name, text, stretch):
    """D-D5: whatever the tokenizer splits by, wherever the stretches end."""
    tokenizer = tokenizers_by_name[name]
    long = LongTexts(tokenizer, longest=stretch, stretch=stretch)
    proven = PROVEN.setdefault(name, LongTexts(tokenizer))
    long.places, long.can_splice = proven.places, proven.can_splice  # tried once
    assert same(tokenizer, long, text, with_ties=name in UNIGRAM)


PROVEN: dict[str, LongTexts] = {}


@pytest.mark.parametrize("name", some_slow(NAMES, SLOW))
def test_awkward_texts_and_runs_in_stretches_have_the_ids_of_the_whole(tokenizers_by_name, name):
    """D-D5: also where there is no place to cut."""
    tokenizer, random = tokenizers_by_name[name], Random(1)
    proven = PROVEN.setdefault(name, LongTexts(tokenizer))
    long = LongTexts(tokenizer, longest=50, stretch=50)
    long.places, long.can_splice = proven.places, proven.can_splice
    runs = ["".join(random.choices(signs, k=400)) for signs in ("ACGT", "01", "xyz", "=", "中文", " ", "Aa", "9")]
    for text in [*TORTURE_TEXTS, *runs, *(f"x{run} {run}y" for run in runs), "1234567" * 60 + "89"]:
        assert same(tokenizer, long, text), text[:80]


@pytest.mark.parametrize("name", some_slow(NAMES, SLOW))
def test_the_kinds_of_places_are_those_at_which_a_tokenizer_cuts(tokenizers_by_name, name):
    """D-D5: what is exact is found, so that long texts are cut, and what is not exact is found too."""
    proven = PROVEN.setdefault(name, LongTexts(tokenizers_by_name[name]))
    places = {place.name for place in proven.places}
    assert places
    if name in CUT_BY_ALL:
        assert places >= {place.name for place in PLACES} - {"at a space"}
    for place, (cut, whole) in SPACES_WHERE.items():
        assert place in places or name not in cut
        assert place not in places or name not in whole
    assert proven.can_splice or name not in ("bpe", "byte_bpe", "tiktoken", "byte", "gpt2", "llama3", "gpt_oss")
    assert not proven.can_splice or name not in ("unigram", "from_the_right")


def test_a_tokenizer_that_refuses_texts_of_its_own_vocabulary_takes_long_ones(t5_tokenizer):
    """T5's tokenizer.json refuses "</s>", which is among the trial texts, and so refused every long document for a text that was not in it."""
    tokenizer = load_tokenizer(t5_tokenizer)
    long, text = LongTexts(tokenizer, longest=100, stretch=50), "some words and others " * 30
    few = list(vocabulary_texts(tokenizer))[:500]
    long._trial_texts = lambda: iter([*few, "ab cd", "ef gh"])  # all take 20 s
    assert np.array_equal(long.encode_arrays([text])[0], tokenizer.encode_arrays([text])[0])
    assert "before a space" in {place.name for place in long.places}
    with pytest.raises(DataError, match="the text holds '</s>'"):
        long.encode_arrays([f"{text}</s> {text}"])


def test_long_and_short_texts_of_one_batch_keep_their_order(trained):
    tokenizer = load_tokenizer(trained["byte_bpe"])
    texts = ["short", "a long text, " * 20, "", "another " * 30]
    long = LongTexts(tokenizer, np.uint16, 60, 40)
    encoded = long.encode_arrays(texts)
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
    assert encoded[1].dtype == np.uint16  # memory of long ones


def test_the_parts_of_fill_in_the_middle_may_be_long(tmp_path, corpus):
    special = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    train_tokenizer([str(corpus)], tmp_path / "t", "byte_bpe", 400, special_tokens=special)
    tokenizer = load_tokenizer(tmp_path / "t")
    texts = ["def f(x):\n    return x\n" * 30, "x = 1, " * 50]
    expected = FillInMiddle(tokenizer, 1.0).encode(texts)
    found = FillInMiddle(LongTexts(tokenizer, longest=64, stretch=64), 1.0).encode(texts)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert (
        Encoder(tokenizer, 1.0, 0.5).encode(texts)[0].tolist()
        == np.concatenate([[*ids, tokenizer.eod_id] for ids in expected]).tolist()
    )


DRIVER = """
import re, sys
from pretrain.data.preparation.prepare import prepare
if __name__ == "__main__":
    text, tokenizer, output, engine = sys.argv[1:]
    if engine == "library":
        sys.modules["tiktoken"] = None
    print(prepare([text], tokenizer, output).splits[0].tokens)
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1000)
"""


def prepared_alone(text: Path, tokenizer: Path, output: Path, engine: str) -> tuple[int, int]:
    """Tokens, and the largest resident size of the process in MB."""
    command = [sys.executable, "-c", DRIVER, str(text), str(tokenizer), str(output), engine]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    tokens, megabytes = map(int, done.stdout.split())
    return tokens, megabytes


def test_a_line_of_megabytes_takes_no_multiple_of_its_size(trained, tmp_path):
    """D-D5: the library took 750 MB for these 4."""
    (tmp_path / "a.txt").write_text("one line of many words, again and again " * 100_000)
    tokens, megabytes = prepared_alone(tmp_path / "a.txt", trained["byte_bpe"], tmp_path / "out", "library")
    assert tokens > 1_000_000 and megabytes < 250


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["line", "letters"])
@pytest.mark.parametrize(
    "name, engine",
    [("byte_bpe", "tiktoken"), ("byte_bpe", "library"), ("bpe", "library"), ("unigram", "library"), ("byte", "library")],
)
def test_a_document_of_100_megabytes_on_one_line_takes_less_than_2_gigabytes(trained, tmp_path, name, engine, kind):
    """D-D5, with every engine; `letters` has no place to cut."""
    if (name, kind) == ("unigram", "letters"):
        pytest.skip("a unigram tokenizer has no exact way to cut a run of letters, and takes it whole")
    words = "some words of a long line, with 12 numbers and (brackets) "
    text = words * (100_000_000 // len(words)) if kind == "line" else "".join(Random(0).choices("ACGT", k=10**6)) * 100
    (tmp_path / "a.txt").write_text(text)
    tokens, megabytes = prepared_alone(tmp_path / "a.txt", trained[name], tmp_path / "out", engine)
    print(f"{name} {engine} {kind}: {tokens:,} tokens, {megabytes} MB")
    assert tokens > 10_000_000 and megabytes < 2000
