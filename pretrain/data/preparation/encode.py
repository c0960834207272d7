"""From texts to ids, documents end to end. Only this file makes the ids of a document."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.data.preparation.long_documents import LongTexts
from pretrain.data.shards.manifest import DTYPES, dtype_for
from pretrain.data.tokenizers.tokenizer import Tokenizer, TokenizerIdentity, identity_of, load_tokenizer
from pretrain.errors import ConfigError, DataError

FIM_SEED = 0


class Encoder:
    """A tokenizer, with the end-of-document id after each document, and fill-in-the-middle on request.

    The ids of a document depend on its text alone, not on its batch. Memory is a few times the longest text. `seconds` is the
    time spent inside the tokenizer so far.
    """

    def __init__(self, tokenizer: Tokenizer, fim_rate: float = 0.0, fim_spm_rate: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        self.seconds = 0.0
        self._end = np.array([tokenizer.eod_id], dtype=np.uint32)
        texts = LongTexts(tokenizer, self.dtype)
        self._encode = texts.encode_arrays
        if fim_rate:
            from pretrain.data.tokenizers.fill_in_middle import FillInMiddle

            self._encode = FillInMiddle(texts, fim_rate, fim_spm_rate, FIM_SEED).encode

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, lengths): the documents end to end, each closed, and the number of tokens of each with its end.

        Raises DataError for text that the vocabulary cannot express.
        """
        begin = time.perf_counter()
        encoded = self._encode(texts)
        self.seconds += time.perf_counter() - begin
        return self._joined(encoded, np.uint32)

    def check(self, documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """`encode` for documents that are ids already. Raises DataError for an id outside the vocabulary."""
        tokens, lengths = self._joined(documents, np.int64)
        size = self.tokenizer.vocab_size
        if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < size):
            wrong = tokens[(tokens < 0) | (tokens >= size)][0]
            raise DataError(f"id {wrong} is outside the tokenizer's vocabulary of {size}; give the tokenizer that made the ids")
        return tokens.astype(self.dtype), lengths

    def _joined(self, documents: Sequence[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.fromiter((len(ids) + 1 for ids in documents), dtype=np.int64, count=len(documents))
        parts: list[np.ndarray] = [self._end] * (2 * len(documents))
        parts[::2] = documents
        target = self.dtype if dtype is np.uint32 else dtype
        tokens = np.concatenate(parts, dtype=target, casting="unsafe") if parts else np.empty(0, target)
        return tokens, lengths


@functools.lru_cache(maxsize=1)
def load_encoder(path: str, expected: TokenizerIdentity, engine: str, fim_rate: float, fim_spm_rate: float) -> Encoder:
    """The encoder of this process. Raises DataError if the tokenizer at `path` is no longer the expected one."""
    tokenizer = load_tokenizer(path, engine)
    if identity_of(tokenizer) != expected:
        raise DataError(f"{path}: the tokenizer was changed during the preparation; start again with --restart")
    return Encoder(tokenizer, fim_rate, fim_spm_rate)


def check_fim_rates(fim_rate: float, fim_spm_rate: float) -> None:
    """Raise ConfigError for a rate that is not a probability."""
    for option, rate in (("--fim-rate", fim_rate), ("--fim-spm-rate", fim_spm_rate)):
        if not 0 <= rate <= 1:
            raise ConfigError(f"{option} {rate}: expected a number from 0 to 1")


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copy the tokenizer's own files to the new `directory`. Raises DataError if they cannot be written."""
    try:
        tokenizer.save(directory)
    except OSError as error:
        raise DataError(f"{directory}: cannot be written ({error.strerror})") from error
