"""Writing a prepared directory, shard by shard; `shards` describes the format."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrain.data.manifest import DTYPES, FORMAT, INDEX_DTYPE, VERSION, Manifest, Shard, dtype_for
from pretrain.data.staging import staged_directory
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError

SHARD_TOKENS = 2**27
"""Default size of a shard: 268 MB at uint16, large enough to stream and small enough to hash and copy one at a time."""


class ShardWriter:
    """Writes one prepared directory, with no more of it in memory than the documents being added.

    `ShardWriter.create` makes one. `documents`, `tokens` and `shards` say what has been written so far; `shards` is complete
    when the block of `create` has ended.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
        self.documents = 0
        self.tokens = 0
        self.shards: list[Shard] = []
        self._directory = directory
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = dtype_for(tokenizer.vocab_size)
        self._files: _ShardFiles | None = None

    @classmethod
    @contextlib.contextmanager
    def create(cls, output: str | Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> Iterator[ShardWriter]:
        """A writer for the new directory `output`, which appears, complete, when the block ends without an error.

        A shard is closed before the document that would take it beyond `shard_tokens`; a longer document has one to itself.
        Raises DataError when `output` exists and is not empty, and when the block ends without a single document.
        """
        output = Path(output)
        with staged_directory(output) as directory:
            writer = cls(directory, tokenizer, shard_tokens)
            try:
                yield writer
                if not writer.documents:
                    raise DataError(f"{output}: no documents to write")
                writer._finish()
            finally:
                writer._close_shard()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents laid end to end in `tokens`; `lengths` counts the tokens of each with its end-of-document token.

        Raises ValueError for documents that are not closed and for ids outside the vocabulary.
        """
        tokens, ends = np.asarray(tokens), np.cumsum(lengths, dtype=np.int64)
        self._check(tokens, np.asarray(lengths), ends)
        first = begin = 0
        while first < len(ends):
            room = self._shard_tokens - (self._files.tokens if self._files else 0)
            last = int(np.searchsorted(ends, begin + room, side="right"))
            if last <= first and self._files:
                self._close_shard()
                continue
            last = max(last, first + 1)
            if self._files is None:
                self._files = _ShardFiles(self._directory, len(self.shards))
            self._files.append(tokens[begin : ends[last - 1]].astype(DTYPES[self._dtype]), ends[first:last] - begin)
            first, begin = last, int(ends[last - 1])
        self.documents += len(ends)
        self.tokens += len(tokens)

    def _check(self, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        if len(tokens) != (ends[-1] if len(ends) else 0) or (lengths < 1).any():
            raise ValueError(f"lengths of documents must be positive and sum to {len(tokens)}")
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self._tokenizer.vocab_size):
            raise ValueError(f"token ids must lie in 0..{self._tokenizer.vocab_size - 1}")
        if (tokens[ends - 1] != self._tokenizer.eod_id).any():
            raise ValueError(f"every document must end with the end-of-document token {self._tokenizer.eod_id}")

    def _close_shard(self) -> None:
        if self._files:
            self.shards.append(self._files.close())
            self._files = None

    def _finish(self) -> None:
        self._close_shard()
        self._tokenizer.save(self._directory / "tokenizer")
        manifest = Manifest(
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            eod_id=self._tokenizer.eod_id,
            tokenizer_sha256=self._tokenizer.fingerprint,
            documents=self.documents,
            tokens=self.tokens,
            shards=tuple(self.shards),
        )
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
        (self._directory / "manifest.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _ShardFiles:
    """The two files of the shard being written, hashed as they grow."""

    def __init__(self, directory: Path, number: int) -> None:
        self.documents = 0
        self.tokens = 0
        self._names = (f"shard-{number:05d}.bin", f"shard-{number:05d}.idx")
        self._files = [open(directory / name, "xb") for name in self._names]
        self._hashes = [hashlib.sha256() for _ in self._names]

    def append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """`ends` count from the first of `tokens`."""
        index = (ends + self.tokens).astype(INDEX_DTYPE)
        for file, digest, array in zip(self._files, self._hashes, (tokens, index)):
            content = array.tobytes()
            file.write(content)
            digest.update(content)
        self.documents += len(ends)
        self.tokens += len(tokens)

    def close(self) -> Shard:
        for file in self._files:
            file.close()
        return Shard(*self._names, self.documents, self.tokens, *(digest.hexdigest() for digest in self._hashes))
