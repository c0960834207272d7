"""Which engine encodes the corpus: tiktoken if it provably gives the ids of the tokenizer's own library, else the library.

The choice is made once, in the process that starts the work, on a sample of the corpus. Other processes get it by name:

    tokenizer = choose_engine(path, sample)                     # one line on stderr says what was chosen, and why
    same_one = TiktokenTokenizer(load_tokenizer(path))          # in a worker, if tokenizer.engine is "tiktoken"

tiktoken encodes byte-level BPE. It merges by the rank of the *result*, `tokenizers` by the rank of the *pair*. The two agree for
vocabularies from BPE training, and for those that list all pairs of a token one after the other. Other files are refused here by
their content. Then a proof on text shows that the ids are the same.

Single documents that tiktoken might not encode exactly are left to the library:

- documents with an added token that the library finds inside text, or that an NFC normaliser might change;
- documents with a run of white space so long that tiktoken's regular expression overflows its stack;
- documents in which the split pattern does not match every character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pretrain.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pretrain.errors import DataError, say

SAMPLE_CHARACTERS = 8 << 20
"""How many characters of a corpus the proof reads."""
_BATCH_CHARACTERS = 1 << 18
_RANDOM_TEXTS, _RANDOM_TOKENS = 4000, 16

_CODE = 'def f(x: int = 0x1F) -> str:\r\n\treturn f"{x!r:>{10}}"  # it\'s 3.14e-10\n\n\n\n        if a!=b and(c<=d):pass\n'
TORTURE_TEXTS = (
    "",
    " ",
    "\n",
    "a",
    _CODE,
    _CODE.replace("\n", "\r"),
    *(" " * n + "x" for n in range(1, 40)),
    *(
        "x" + end * n + "y"
        for end in ("\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b")
        for n in range(1, 9)
    ),
    *("1234567890123"[:n] for n in range(1, 14)),
    "1,234,567.89 ٣٤٥ ໑໒໓ ½ ² Ⅷ 一二三 𝟘𝟙",
    "I'm you're he'll they've it's don't I'd I'M YOU'RE HE'LL '' ''s 'sS 'tt ’s 'ſ 'K o'clock's'll",
    "e\u0301 é n\u0303\u0323 \u1e9b\u0323 \u0301alone A\u030a \u212b ﬁ \u0e01\u0e33\u0e19 हिन्दी தமிழ் \u1112\u1161\u11ab 한",
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word\ufeffmark\u00adsoft \u202eright\u202c",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇩🇪 👍🏽 ☃\ufe0f 😀😀😀 \U0001f9d1\U0001f3ff",
    "\ud7ff\ue000\ufdd0\ufffd\ufffe\uffff\U00010000\U0010ffff\x00\x01\x1b[0m\x7f\x80\x9f",
    "<|endoftext|><|fim_prefix|></s><s><unk><pad>[INST]<|im_start|>user\n<think></think><0x41><|never|> <|never|>x",
    "Straße ΑΒΓαβγ ПриветМир ǅ ʰ العربية עברית 中文文本 日本語カタカナ ไทย ქართული CamelCaseHTTPServer snake_case_ALLCAPS iPhone",
    "http://user@example.org:8080/a/b?c=d&e=%20#f \\d+\\s*(?!\\S) $x^2$ //----==== ###!!!???...,,,;;; @@ -1,2 +3,4 @@\n+++ b/c\n",
    "a" * 3000,
    "ab" * 1500,
    "=" * 3000,
    " " * 3000,
    "\n" * 3000,
    " \n\t" * 1000,
    "中" * 3000,
    "9" * 3000,
)
"""Texts on which encoders are known to differ: Unicode, white space, digits, contractions, marks, fake special tokens, long runs."""


def choose_engine(path: str | Path, sample: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer at `path` with the fastest engine that gives its ids. The proof includes the first 8M characters of `sample`.

    Says on stderr, in one line, what it chose and why.
    """
    library = load_tokenizer(path)
    if not isinstance(library, HuggingFaceTokenizer):
        return library
    try:
        fast = TiktokenTokenizer(library)
        count = prove(fast, library, sample)
    except ImportError:
        _say("the tokenizers library; for byte-level BPE, tiktoken is several times faster: pip install tiktoken")
        return library
    except DataError as error:
        _say(f"the tokenizers library; {error}")
        return library
    exceptions = f", which encodes {fast.left_to_library:,} of them itself" if fast.left_to_library else ""
    _say(f"tiktoken; on {count:,} texts its ids are those of the tokenizers library{exceptions}")
    return fast


def _say(line: str) -> None:
    say(f"tokenizer engine: {line}", to_errors=True)


def prove(fast: TiktokenTokenizer, library: Tokenizer, sample: Iterable[str] = ()) -> int:
    """Compare the ids of `fast` with the library's, and return the number of texts. Raises DataError naming the first difference.

    The texts are `TORTURE_TEXTS`, each token of the vocabulary, random sequences of tokens, and up to 8M characters of `sample`.
    """
    parts = {"awkward text": TORTURE_TEXTS, "vocabulary text": vocabulary_texts(library), "sample text": _first(sample)}
    count = 0
    for kind, texts in parts.items():
        number = 0
        for batch in batches_of(texts):
            for text, expected, actual in zip(batch, library.encode_arrays(batch), fast.encode_arrays(batch)):
                if expected.tolist() != actual.tolist():
                    where = _describe(library, text, expected.tolist(), actual.tolist())
                    raise DataError(f"{library.file}: tiktoken would give other ids: {kind} {number} {where}")
                number += 1
        count += number
    if fast.failures:
        raise DataError(f"{library.file}: tiktoken fails on {fast.failures:,} of {count:,} texts")
    return count


def _describe(library: Tokenizer, text: str, expected: list[int], actual: list[int]) -> str:
    same = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
    position = len(library.decode(expected[:same]))
    around = text[max(position - 10, 0) : position + 20]
    return f"differs from character {position} on, near {around!r} ({actual[same : same + 3]}, not {expected[same : same + 3]})"


def vocabulary_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each token, then random sequences of tokens. A merge that one engine does not make shows here first."""
    tokens = [tokenizer.decode([id]) for id in range(tokenizer.vocab_size)]
    tokens = [token for token in tokens if "\ufffd" not in token]
    random = Random(0)
    sequences = ("".join(random.choices(tokens, k=_RANDOM_TOKENS)) for _ in range(_RANDOM_TEXTS if tokens else 0))
    return chain(tokens, sequences)


def _first(sample: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for text in sample:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def batches_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, about 256k characters at a time."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---- tiktoken ----------------------------------------------------------------------------------------------------------

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of `ByteLevel(use_regex=True)` (GPT-2's encoder.py)."""

# Without a special token tiktoken searches for the empty string at every byte, which costs 40 % of its speed. This token is never
# allowed, so a text with it is ordinary text.
_NEVER = "<|never|>"
_NONE, _ZERO = np.empty(0, dtype=np.uint32), np.zeros(1, dtype=np.uint32)
# A run of white space as long as 97 strides holds 96 sampled positions in a row; the overflow was seen between 400,000 and 1,000,000.
_STRIDE = 1024
_LONG_WHITE_SPACE = re.compile(r"\s{96}")
# Characters that NFC never changes, whatever their neighbours: up to the first combining mark, dashes and quotes, Han.
_CHANGED_BY_NFC = re.compile("[^\\x00-\\u02ff\\u2010-\\u2027\\u4e00-\\u9fff]")


class TiktokenTokenizer(Tokenizer):
    """A `HuggingFaceTokenizer` whose texts tiktoken encodes; the library does everything else.

    Raises DataError with the reason if tiktoken cannot express the file, ImportError without tiktoken.
    """

    engine = "tiktoken"

    def __init__(self, library: HuggingFaceTokenizer) -> None:
        self.library = library
        self.left_to_library = 0
        """The number of texts so far that the library encoded."""
        self.failures = 0
        """The number of these that made tiktoken fail."""
        self.file: Path = library.file
        self.vocab_size, self.eod_id, self.fingerprint = library.vocab_size, library.eod_id, library.fingerprint
        self.decode, self.save, self.special_id = library.decode, library.save, library.special_id
        specification = library.specification()
        try:
            ranks, ids = ranks_of(specification)
            self._bpe = _encoding(split_pattern(specification), ranks)
            self._needs_library = _exceptions(specification)
        except DataError as error:
            raise DataError(f"{self.file}: tiktoken cannot encode it: {error}") from error
        # tiktoken before 0.11 does not ask whether _NEVER is allowed: with a length of 0 such a text goes to the library.
        self._ids = np.append(ids, np.uint32(0))
        self._lengths = np.array([*map(len, ranks), 0], dtype=np.uint32)

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        ranks = [self._ranks(text) for text in texts]
        # One look-up in the tables serves all texts. With short texts that saves a quarter of the time.
        joined = np.concatenate([*ranks, _ZERO])
        ids, lengths = self._ids.take(joined), self._lengths.take(joined)
        lengths[-1] = 0  # the extra text only keeps every begin inside, as `reduceat` needs
        ends = np.cumsum([0, *map(len, ranks)])
        covered = np.add.reduceat(lengths, ends[:-1]).tolist() if ranks else []
        encoded = []
        for text, size, begin, end in zip(texts, covered, ends.tolist(), ends[1:].tolist()):
            if begin < end and size == _utf8_size(text):
                encoded.append(ids[begin:end])
            else:  # left to the library, or the split pattern left something out, or an empty text
                self.left_to_library += bool(text)
                encoded.append(self.library.encode_arrays([text])[0])
        return encoded

    def _ranks(self, text: str) -> np.ndarray:
        """The merge order of each token; nothing for a text that the library must encode."""
        for needs_library in self._needs_library:
            if needs_library(text):
                return _NONE
        try:
            return self._bpe.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:  # tiktoken may panic, and a Rust panic derives from BaseException
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            self.failures += 1
            return _NONE


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _encoding(pattern: str, ranks: dict[bytes, int]) -> Any:
    import tiktoken

    try:
        return tiktoken.Encoding("pretrain", pat_str=pattern, mergeable_ranks=ranks, special_tokens={_NEVER: len(ranks)})
    except ValueError as error:  # the two libraries have different regular expressions
        raise DataError(f"tiktoken does not understand its split pattern ({str(error).splitlines()[0]})") from error


def ranks_of(specification: dict) -> tuple[dict[bytes, int], np.ndarray]:
    """The bytes of each token -> merge order, and the table from merge order to id (uint32), of a parsed tokenizer.json.

    Raises DataError if one rank per token cannot express the merges.
    """
    model = specification["model"]
    if model["type"] != "BPE":
        raise DataError(f"its model is {model['type']}, not BPE")
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise DataError(f"its model has {option} {model[option]!r}")
    known = _token_bytes(model["vocab"])
    if missing := [value for value in range(256) if bytes([value]) not in known]:
        raise DataError(f"its vocabulary has no token for byte 0x{missing[0]:02X}, so it is not byte-level BPE")
    ranks = {bytes([value]): value for value in range(256)}
    previous = b""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge  # files from before 2024 have strings
        token = _bytes_of(left) + _bytes_of(right)
        if token in ranks and token != previous:
            raise DataError(f"its merges make {token!r} with two priorities")
        ranks.setdefault(token, len(ranks))
        previous = token
    if model.get("ignore_merges"):
        _add_whole_pieces(ranks, known)
    return ranks, np.array([known[token] for token in ranks], dtype=np.uint32)


def _add_whole_pieces(ranks: dict[bytes, int], known: dict[bytes, int]) -> None:
    """Add tokens that no merge makes. With `ignore_merges` such a token stands for a piece of text that equals it.

    tiktoken looks up whole pieces first too, but it would also merge towards such a token, unless no two tokens make it.
    """
    merged = set(ranks)
    for token in known:
        if token in merged:
            continue
        if any(token[:cut] in merged and token[cut:] in merged for cut in range(1, len(token))):
            raise DataError(f"no merge makes its token {token!r}, but tiktoken would merge towards it")
        ranks[token] = len(ranks)


def split_pattern(specification: dict) -> str:
    """The regular expression that cuts text into pieces, from a parsed tokenizer.json. Raises DataError if it has none."""
    outer = specification["pre_tokenizer"] or {"type": "missing"}
    *before, byte_level = outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]
    if byte_level["type"] != "ByteLevel":
        raise DataError(f"its pre-tokenizer is {byte_level['type']}, not ByteLevel")
    if byte_level["add_prefix_space"]:
        raise DataError("its pre-tokenizer puts a space before every text")
    if not before and byte_level["use_regex"]:
        return GPT2_PATTERN
    if len(before) == 1 and before[0]["type"] == "Split" and not byte_level["use_regex"]:
        split = before[0]
        # Both keep every match as a piece. They differ in the text between matches: `encode_arrays` gives such texts to the library.
        usual = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        if usual and "Regex" in split["pattern"]:
            return split["pattern"]["Regex"]
    raise DataError("its pre-tokenizer is not one split by a regular expression")


def _exceptions(specification: dict) -> list[Callable[[str], object]]:
    """Tests of a text. If any of them is true, the library encodes the text."""
    tests: list[Callable[[str], object]] = [_has_long_white_space]
    normalizer = specification["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise DataError(f"it has a normalizer ({normalizer['type']})")
    if normalizer is not None:
        tests.append(lambda text: not text.isascii() and _CHANGED_BY_NFC.search(text))
    # Tokens that are not special are found inside text, by rules of their own (surrounding space, single words).
    added = {token["content"] for token in specification["added_tokens"] if not token["special"] and token["content"]}
    added |= {unicodedata.normalize("NFC", content) for content in added}
    if added:
        tests.append(re.compile("|".join(map(re.escape, sorted(added)))).search)
    return tests


def _has_long_white_space(text: str) -> bool:
    return len(text) > 96 * _STRIDE and _LONG_WHITE_SPACE.search(text[::_STRIDE]) is not None


def byte_characters() -> list[str]:
    """How byte-level BPE writes each byte as a visible character, by byte value (GPT-2's table)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_in = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


_BYTE_OF = {character: value for value, character in enumerate(byte_characters())}


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError as error:
        raise DataError(f"its token {token!r} is not written in the alphabet of byte-level BPE") from error


def _token_bytes(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Bytes -> id. Tokens outside the alphabet of byte-level BPE are left out, because no text produces them."""
    return {_bytes_of(token): id for token, id in vocabulary.items() if _BYTE_OF.keys() >= set(token)}
