"""Which engine encodes the corpus: tiktoken if it provably gives the ids of the tokenizer's own library, else the library.

The choice is made once, in the process that starts the work, on a sample of the corpus. Other processes get it by name:

    tokenizer = choose_engine(path, sample)                     # one line on stderr says what was chosen, and why
    same_one = load_tokenizer(path, tokenizer.engine)           # in a worker
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from random import Random
from typing import Literal

from pretrain.data.tokenizers.tiktoken_engine import TiktokenTokenizer
from pretrain.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, DataError

ENGINES = ("auto", "tiktoken", "library")
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


def choose_engine(
    path: str | Path, sample: Iterable[str] = (), engine: Literal["auto", "tiktoken", "library"] = "auto"
) -> Tokenizer:
    """The tokenizer at `path` with the fastest engine that gives its ids. The proof includes the first 8M characters of `sample`.

    `engine` "library" needs no proof. "tiktoken" raises DataError if "auto" would choose the library, and ConfigError if tiktoken
    is not installed. "auto" says on stderr, in one line, what it chose and why.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: expected one of {', '.join(ENGINES)}")
    library = load_tokenizer(path)
    if engine == "library":
        return library
    if not isinstance(library, HuggingFaceTokenizer):
        return library if engine == "auto" else load_tokenizer(path, engine)  # this raises the reason
    try:
        fast = TiktokenTokenizer(library)
        count = prove(fast, library, sample)
    except ImportError as error:
        if engine == "tiktoken":
            raise ConfigError("--engine tiktoken: tiktoken is not installed; pip install tiktoken") from error
        _say("the tokenizers library; for byte-level BPE, tiktoken is several times faster: pip install tiktoken")
        return library
    except DataError as error:
        if engine == "tiktoken":
            raise
        _say(f"the tokenizers library; {error}")
        return library
    exceptions = f", to which {fast.left_to_library:,} of them were left" if fast.left_to_library else ""
    _say(f"tiktoken, with the ids of the tokenizers library on {count:,} texts{exceptions}")
    return fast


def _say(line: str) -> None:
    print(f"tokenizer engine: {line}", file=sys.stderr, flush=True)


def prove(fast: TiktokenTokenizer, library: Tokenizer, sample: Iterable[str] = ()) -> int:
    """Compare the ids of `fast` with the library's, and return the number of texts. Raises DataError naming the first difference.

    The texts are `TORTURE_TEXTS`, each token of the vocabulary, random sequences of tokens, and up to 8M characters of `sample`.
    """
    parts = {"awkward text": TORTURE_TEXTS, "vocabulary text": vocabulary_texts(library), "sample text": _first(sample)}
    count = 0
    for kind, texts in parts.items():
        number = 0
        for batch in _batches(texts):
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


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
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
