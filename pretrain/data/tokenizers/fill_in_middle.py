"""Fill-in-the-middle (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv:2207.14255).

A document is cut at two characters, and its parts change places. So a left-to-right model learns to write the text between two
given texts. There are two layouts, both from the paper:

    PSM   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
    SPM   <|fim_prefix|> <|fim_suffix|> suffix <|fim_middle|> prefix middle

SPM is the paper's variant 2 (appendix D), which StarCoder and Code Llama use. The three parts are encoded separately in both, so a
cut is a token boundary. This is done to whole documents, before they are joined and split into samples. A document that is longer
than a sample is split like any other, so a sample may hold one part without the others.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from pretrain.data.tokenizers.library_tokenizers import refuse_surrogates
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError, DataError

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MINIMUM_CHARACTERS = 10
"""Shorter documents are not changed: nothing can be learnt from filling them."""


class FillInMiddle:
    """Encodes documents like `tokenizer.encode_arrays`, but rearranges a share `rate` of them, and of these `spm_rate` as SPM.

    The choice of documents, cuts and layouts depends only on `seed` and the text of each document. It does not depend on other
    documents, their order, the number of processes or `rate`, so a larger rate only adds documents. `tokens` are the special
    tokens before prefix, suffix and middle.

    Raises ConfigError for a rate outside [0, 1], DataError if the tokenizer lacks one of the special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rate: float,
        spm_rate: float = 0.5,
        seed: int = 0,
        tokens: tuple[str, str, str] = SENTINELS,
    ) -> None:
        for name, value in (("rate", rate), ("SPM rate", spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"fill-in-the-middle: {name} {value}: expected a number in [0, 1]")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"fill-in-the-middle: seed {seed}: expected a number in [0, 2**64)")
        self._tokenizer = tokenizer
        self._rate, self._spm_rate = int(rate * 2**64), int(spm_rate * 2**64)
        self._seed = seed.to_bytes(8, "little")
        self._sentinels = [np.array([_sentinel(tokenizer, token)], dtype=np.uint32) for token in tokens]
        if len({int(ids[0]) for ids in self._sentinels}) < 3:
            raise ConfigError(f"fill-in-the-middle: the tokens {', '.join(tokens)} are not three different ones")
        ids = tokenizer.encode("def") if rate else []
        if tokenizer.decode([*ids, *ids]) != tokenizer.decode(ids) * 2:
            raise DataError(
                f"{tokenizer.file}: puts a space before every text, so the joined parts would differ from the document;"
                " train a tokenizer without one (tools/train_tokenizer.py)"
            )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, rearranged or not, as uint32, without an end-of-document token."""
        plans = [self._cut(text) for text in texts]
        parts = [part for text, plan in zip(texts, plans) for part in _parts(text, plan)]
        encoded = iter(self._tokenizer.encode_arrays(parts))
        return [next(encoded) if plan is None else self._arrange(plan[2], *(next(encoded) for _ in range(3))) for plan in plans]

    def _cut(self, text: str) -> tuple[int, int, bool] | None:
        """The begin and end of the middle, and whether the layout is SPM; None for a document that stays as it is."""
        refuse_surrogates(text)
        if len(text) < MINIMUM_CHARACTERS:
            return None
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=self._seed, person=b"fill-in-middle").digest()
        chosen, spm, one, other = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
        if chosen >= self._rate:
            return None
        # Both uniform over the len + 1 places between characters, the two ends included, as in the paper.
        begin, end = sorted(place * (len(text) + 1) >> 64 for place in (one, other))
        return begin, end, spm < self._spm_rate

    def _arrange(self, spm: bool, prefix: np.ndarray, middle: np.ndarray, suffix: np.ndarray) -> np.ndarray:
        before_prefix, before_suffix, before_middle = self._sentinels
        if spm:
            return np.concatenate([before_prefix, before_suffix, suffix, before_middle, prefix, middle])
        return np.concatenate([before_prefix, prefix, before_suffix, suffix, before_middle, middle])


def _parts(text: str, plan: tuple[int, int, bool] | None) -> list[str]:
    if plan is None:
        return [text]
    begin, end, _ = plan
    return [text[:begin], text[begin:end], text[end:]]


def _sentinel(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.special_id(token)
    if id is None:
        raise DataError(
            f"{tokenizer.file}: has no special token {token} for fill-in-the-middle; train it with tools/train_tokenizer.py"
            f" --special-tokens '{token}' ..., or, where tokenizer.json has it as an ordinary added token, make it \"special\": true"
        )
    return id
