"""From documents to ids, end to end. Only this file makes the ids of a document.

    text ──cut where the tokenizer cuts anyway──▶ stretches of 262,144 characters ──▶ ids of each, joined

A library takes 17 (tiktoken) to 130 (tokenizers) times the size of a text while it encodes it. So a long text is cut, at places where
the ids on both sides are those of the whole. One such place is between a word and the space after it, where almost every tokenizer
begins a new piece. Each kind of place is tried when a tokenizer's first long text comes. The trial cuts hundreds of awkward texts,
every text of the vocabulary that has such a place, and thousands of random texts. A kind that changes a single id is not used. No token
crosses a place of a remaining kind: such a BPE token would be in the vocabulary, and so in the trial.

A text without any such place (a long run of letters, of one character) is spliced, if a trial shows that this is exact. The tokens of a
stretch, up to one near its end, are followed by those of the next stretch, which begins there. The ids of BPE are right as soon as every
two neighbours are (van Antwerpen and Neubeck, "So many tokens, so little time", 2024). So the next stretch must begin with the tokens
that the first one had there. If neither way is exact, the text is encoded whole.

SentencePiece's unigram adds up scores in 32 bits over a whole text. Beyond a million characters its own ids suffer from that, and the
ids of the stretches are better. Up to there both are equal, but for ties. Two orders of the same tokens are equally likely: of a token of four
spaces and one of a single space, say. The rounding of these sums decides which one is taken.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice, product
from random import Random
from typing import NamedTuple

import numpy as np

from pretrain.data.preparation.documents import Content
from pretrain.data.shards.manifest import DTYPES, dtype_for
from pretrain.data.tokenizers.engine import TORTURE_TEXTS, TiktokenTokenizer, batches_of, vocabulary_texts
from pretrain.data.tokenizers.tokenizer import Tokenizer, TokenizerIdentity, identity_of, load_tokenizer, refuse_surrogates
from pretrain.errors import DataError


class Encoder:
    """A tokenizer, with the end-of-document id after each document, and fill-in-the-middle on request.

    The ids of a document depend on its text alone, not on its batch. Memory is a few times the longest text.
    """

    def __init__(self, tokenizer: Tokenizer, fim_rate: float = 0.0, fim_spm_rate: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        self._end = np.array([tokenizer.eod_id], dtype=self.dtype)
        texts = LongTexts(tokenizer, self.dtype)
        self._encode = FillInMiddle(texts, fim_rate, fim_spm_rate).encode if fim_rate else texts.encode_arrays

    def encode(self, documents: Sequence[Content]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, lengths): the documents end to end, each closed, and the number of tokens of each with its end.

        Raises DataError for text that the vocabulary cannot express, and for an id outside the vocabulary.
        """
        parts: list[np.ndarray] = []
        for is_text, run in groupby(documents, lambda document: isinstance(document, str)):
            for ids in self._encode(list(run)) if is_text else map(self._checked, run):
                parts += [ids, self._end]
        lengths = np.fromiter((len(ids) + 1 for ids in parts[::2]), dtype=np.int64, count=len(documents))
        tokens = np.concatenate(parts, dtype=self.dtype, casting="unsafe") if parts else np.empty(0, self.dtype)
        return tokens, lengths

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        size = self.tokenizer.vocab_size
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < size):
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise DataError(f"id {wrong} is outside the tokenizer's vocabulary of {size}; give the tokenizer that made the ids")
        return ids


@functools.lru_cache(maxsize=1)
def load_encoder(path: str, expected: TokenizerIdentity, engine: str, fim_rate: float, fim_spm_rate: float) -> Encoder:
    """The encoder of this process. Raises DataError if the tokenizer at `path` is no longer the expected one."""
    library = load_tokenizer(path)
    if identity_of(library) != expected:
        raise DataError(f"{path}: the tokenizer was changed during the preparation; start again with --restart")
    return Encoder(TiktokenTokenizer(library) if engine == "tiktoken" else library, fim_rate, fim_spm_rate)


# ---- long texts --------------------------------------------------------------------------------------------------------

LONGEST = 1 << 20
"""Characters of the longest text that is encoded whole."""
STRETCH = 1 << 18
"""Characters, about, of the stretches that a longer text is cut into."""
_SEARCHED = 1 << 14  # characters at the end of a stretch in which a place is looked for first
_MARGIN = 64  # characters around a place without added tokens, and tokens that must agree where stretches are spliced
_ATTEMPTS = 32

_LETTERS = "A-Za-z"
_SIGNS = f"{_LETTERS}0-9\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3"


class CutPlace(NamedTuple):
    """A kind of place. A match is left out between two stretches: the space that the tokenizer puts before every text, or nothing."""

    name: str
    pattern: re.Pattern[str]


PLACES = (
    CutPlace("before a space", re.compile(r"(?<=\S)(?= \S)")),
    CutPlace("at a space", re.compile(r"(?<=\S) (?=\S)")),
    CutPlace("before the end of a line", re.compile(f"(?<=[{_SIGNS}])(?=\n)")),
    CutPlace("before punctuation", re.compile(f"(?<=[{_SIGNS}])(?=[,.;:!?)\\]}}>，。、；：！？）】」』])")),
    CutPlace("between a letter and a digit", re.compile(f"(?<=[{_LETTERS}])(?=[0-9])|(?<=[0-9])(?=[{_LETTERS}])")),
)


class LongTexts:
    """A tokenizer for the preparation, whose `encode_arrays` takes texts of any length. `dtype`: the type of the ids of long texts."""

    def __init__(
        self, tokenizer: Tokenizer, dtype: np.dtype | type = np.uint32, longest: int = LONGEST, stretch: int = STRETCH
    ) -> None:
        self._tokenizer, self._dtype, self._longest, self._stretch = tokenizer, dtype, longest, stretch
        self._known: dict[str, bool] = {}
        self.file, self.encode = tokenizer.file, tokenizer.encode
        self.decode, self.special_id = tokenizer.decode, tokenizer.special_id

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`tokenizer.encode_arrays`, with the same ids."""
        if all(len(text) <= self._longest for text in texts):
            return self._tokenizer.encode_arrays(texts)
        return [self._encode_long(text) if len(text) > self._longest else self._ids(text) for text in texts]

    def _ids(self, text: str) -> np.ndarray:
        return self._tokenizer.encode_arrays([text])[0]

    def _encode_long(self, text: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        begin, size = 0, self._stretch
        while len(text) - begin > size:
            end, after = self._place(text, begin, begin + size) or (begin, begin)
            if after > begin:
                parts.append(self._ids(text[begin:end]).astype(self._dtype))
            elif spliced := self._spliced(text, begin, begin + size):
                ids, after = spliced
                parts.append(ids.astype(self._dtype))
            else:  # a longer stretch may have a place
                size *= 2
                continue
            begin, size = after, self._stretch
        parts.append(self._ids(text[begin:]).astype(self._dtype))
        return np.concatenate(parts)

    def _place(self, text: str, begin: int, end: int) -> tuple[int, int] | None:
        """The last place in [begin, end) where a text can be cut: the end of the left part, and the beginning of the right one."""
        for first in (max(begin + 1, end - _SEARCHED), begin + 1):
            for place in self.places:
                for match in reversed(list(place.pattern.finditer(text, first, end))):
                    if not self._is_near_added(text, match.start()):
                        return match.span()
        return None

    def _is_near_added(self, text: str, position: int) -> bool:
        """Whether an added token is near. It may take white space or words around it into account."""
        return bool(self._added and self._added.search(text[max(position - _MARGIN, 0) : position + _MARGIN]))

    def _spliced(self, text: str, begin: int, end: int) -> tuple[np.ndarray, int] | None:
        """Ids of a stretch up to a place near its end, and that place. The ids after it do not depend on those before."""
        if not self.can_splice:
            return None
        ids = self._ids(text[begin:end])
        for count in range(len(ids) * 7 // 8, max(len(ids) * 7 // 8 - _ATTEMPTS, 0), -1):
            head = self._tokenizer.decode(ids[:count].tolist())
            place = begin + len(head)
            if not head or not text.startswith(head, begin) or not self._may_splice_at(text, begin, place):
                continue
            if np.array_equal(self._ids(text[place:end]), ids[count:]) and self._goes_on(text, place, ids[count:]):
                return ids[:count], place
        return None

    def _may_splice_at(self, text: str, begin: int, place: int) -> bool:
        if self._is_near_added(text, place):
            return False
        if not text[place : place + 1].isnumeric():
            return True
        # Digits come in groups, counted from the first one; 12 is a multiple of every size in use.
        first = place
        while first > begin and text[first - 1].isnumeric():
            first -= 1
        return (place - first) % 12 == 0

    def _goes_on(self, text: str, place: int, expected: np.ndarray) -> bool:
        """Whether the stretch at `place` begins with the same tokens that were there before."""
        first = min(_MARGIN, len(expected) // 2)
        return first > 0 and np.array_equal(self._ids(text[place : place + self._stretch])[:first], expected[:first])

    # The trials: each is made once.

    @functools.cached_property
    def places(self) -> tuple[CutPlace, ...]:
        """The kinds of places at which cutting changes no id."""
        return tuple(place for place in PLACES if self._is_exact(place))

    @functools.cached_property
    def can_splice(self) -> bool:
        """Whether splicing changes no id."""
        small = LongTexts(self._tokenizer, longest=64, stretch=64)
        small.places, small.can_splice = (), True
        texts = [text for text in _runs() if self._can_express(text)]
        return all(np.array_equal(small._encode_long(text), self._ids(text)) for text in texts)

    @functools.cached_property
    def _added(self) -> re.Pattern[str] | None:
        """A pattern of the tokens that the library looks for in text before anything else."""
        specification = getattr(getattr(self._tokenizer, "library", self._tokenizer), "specification", None)
        added = [] if specification is None else specification()["added_tokens"]
        contents = sorted(item["content"] for item in added if not item["special"] and item["content"])
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    def _is_exact(self, place: CutPlace) -> bool:
        random, tried = Random(0), False
        texts = (text for text in self._trial_texts() if place.pattern.search(text) and self._can_express(text))
        for batch in batches_of(texts):
            cuts = [random.choice(list(place.pattern.finditer(text))) for text in batch]
            whole = self._unless_refused(batch)
            left = self._unless_refused([text[: cut.start()] for text, cut in zip(batch, cuts)])
            right = self._unless_refused([text[cut.end() :] for text, cut in zip(batch, cuts)])
            trials = [trial for trial in zip(whole, left, right) if not any(ids is None for ids in trial)]
            if any(not np.array_equal(ids, np.concatenate(parts)) for ids, *parts in trials):
                return False
            tried = tried or bool(trials)
        return tried

    def _unless_refused(self, texts: list[str]) -> list[np.ndarray | None]:
        """The ids of each text; None for one that the tokenizer refuses, such as a piece of the vocabulary that is a special token."""
        try:
            return list(self._tokenizer.encode_arrays(texts))
        except DataError:
            half = len(texts) // 2
            return [*self._unless_refused(texts[:half]), *self._unless_refused(texts[half:])] if half else [None]

    def _can_express(self, text: str) -> bool:
        """Whether the vocabulary has every character of a text."""
        for character in set(text) - self._known.keys():
            try:
                self._tokenizer.encode_arrays([character])
                self._known[character] = True
            except DataError:
                self._known[character] = False
        return all(map(self._known.get, text))

    def _trial_texts(self) -> Iterator[str]:
        """Awkward texts, all texts of the vocabulary, every neighbourhood of a place, and random words."""
        texts = chain(_neighbourhoods(), TORTURE_TEXTS, vocabulary_texts(self._tokenizer))
        return (text for text in texts if self._added is None or not self._added.search(text))


def _neighbourhoods() -> Iterator[str]:
    """Texts with two characters of every kind before and after each kind of place."""
    kinds = ("a", "Z", "é", "中", "1", " ", "\n", "\t", ".", "'", "s", "-", "\u0301", "👍")
    for first, second, third, fourth in product(kinds, repeat=4):
        yield f"{first}{second} {third}{fourth}"
        yield f"{first}{second}{third}{fourth}"


def _runs() -> Iterator[str]:
    """Texts without a place to cut."""
    random = Random(0)
    for signs in "a|ab|ACGT|abcdefghij|xyXY|0|0123456789|=|-=| |\n| \n|é|中文字|👍|\u0301a".split("|"):
        for length in (70, 331, 1000):
            yield "x" + "".join(random.choices(signs, k=length)) + "y"
    yield "1" * 500 + "234" * 100
    yield "ab" * 300 + "ba" * 300


# ---- fill-in-the-middle ------------------------------------------------------------------------------------------------

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_KEY = bytes(8)  # part of the definition of what is chosen and cut
MINIMUM_CHARACTERS = 10
"""Shorter documents are not changed: nothing can be learnt from filling them."""


class FillInMiddle:
    """Encodes documents like `tokenizer.encode_arrays`, but rearranges a share `rate` of them, and of these `spm_rate` as SPM.

    A document is cut at two characters, and its parts change places. So a left-to-right model learns to write the text between two
    given texts (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv:2207.14255). Two layouts:

        PSM   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
        SPM   <|fim_prefix|> <|fim_suffix|> suffix <|fim_middle|> prefix middle

    SPM is the paper's variant 2 (appendix D), which StarCoder and Code Llama use. The three parts are encoded separately in both, so
    a cut is a token boundary. This is done to whole documents, before they are joined and split into samples. A document that is
    longer than a sample is split like any other, so a sample may hold one part without the others.

    The choice of documents, cuts and layouts depends only on the text of each document. It does not depend on other documents,
    their order, the number of processes or `rate`, so a larger rate only adds documents.

    Raises DataError if the tokenizer lacks one of the SENTINELS, which stand before prefix, suffix and middle.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float, spm_rate: float = 0.5) -> None:
        self._tokenizer = tokenizer
        self._rate, self._spm_rate = int(rate * 2**64), int(spm_rate * 2**64)
        self._sentinels = [np.array([_sentinel(tokenizer, token)], dtype=np.uint32) for token in SENTINELS]
        ids = tokenizer.encode("def")
        if tokenizer.decode([*ids, *ids]) != tokenizer.decode(ids) * 2:
            raise DataError(
                f"{tokenizer.file}: puts a space before every text, so the joined parts would differ from the document;"
                " train a tokenizer without one (tools/train_tokenizer.py)"
            )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, rearranged or not, as uint32, without an end-of-document token."""
        plans = [self._cut(text) for text in texts]
        encoded = iter(self._tokenizer.encode_arrays([part for parts, _ in plans for part in parts]))
        return [next(encoded) if len(parts) == 1 else self._arrange(is_spm, *islice(encoded, 3)) for parts, is_spm in plans]

    def _cut(self, text: str) -> tuple[list[str], bool]:
        """Prefix, middle and suffix, or the whole of a document that stays as it is; and whether the layout is SPM."""
        refuse_surrogates(text)
        if len(text) < MINIMUM_CHARACTERS:
            return [text], False
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=_KEY, person=b"fill-in-middle").digest()
        chosen, spm, one, other = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
        if chosen >= self._rate:
            return [text], False
        # Both uniform over the len + 1 places between characters, the two ends included, as in the paper.
        begin, end = sorted(place * (len(text) + 1) >> 64 for place in (one, other))
        return [text[:begin], text[begin:end], text[end:]], spm < self._spm_rate

    def _arrange(self, is_spm: bool, prefix: np.ndarray, middle: np.ndarray, suffix: np.ndarray) -> np.ndarray:
        before_prefix, before_suffix, before_middle = self._sentinels
        if is_spm:
            return np.concatenate([before_prefix, before_suffix, suffix, before_middle, prefix, middle])
        return np.concatenate([before_prefix, prefix, before_suffix, suffix, before_middle, middle])


def _sentinel(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.special_id(token)
    if id is None:
        raise DataError(
            f"{tokenizer.file}: has no special token {token} for fill-in-the-middle; train it with tools/train_tokenizer.py"
            f" --special-tokens '{token}' ..., or, where tokenizer.json has it as an ordinary added token, make it \"special\": true"
        )
    return id
