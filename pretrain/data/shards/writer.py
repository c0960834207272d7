"""Writing a prepared directory, shard by shard; reader.py describes the format."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrain.data.shards.manifest import DTYPES, INDEX_DTYPE, ORIGIN_DTYPE, Shard, dtype_for, write_manifest
from pretrain.data.tokenizers.tokenizer import Tokenizer, identity_of
from pretrain.errors import DataError
from pretrain.storage import staged_directory

SHARD_TOKENS = 2**27
"""Default size of a shard: 268 MB at uint16, large enough to stream and small enough to hash and copy one at a time."""

_NO_INPUT = "(no file)"
_BUFFER = 1 << 20


def cut_into_shards(lengths: np.ndarray, filled: int, shard_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """Runs (first, last, opens) of documents that go into one shard each; `opens`: the run begins a new shard.

    `lengths` are the tokens of each document, `filled` the tokens already in the open shard. A shard is closed before the
    document that would take it beyond `shard_tokens`; a longer document has a shard to itself.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    first = begin = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, begin + shard_tokens - filled, side="right"))
        opens = not filled or last <= first
        if opens:
            last = max(int(np.searchsorted(ends, begin + shard_tokens, side="right")), first + 1)
            filled = 0
        yield first, last, opens
        filled += int(ends[last - 1]) - begin
        first, begin = last, int(ends[last - 1])


class ShardFiles:
    """The three files of a shard during writing, hashed as they grow."""

    def __init__(self, directory: Path, number: int, dtype: np.dtype) -> None:
        self.tokens = 0
        self._documents = self._bytes = self._longest = 0
        self._of_text = True  # every document; a document of ids has a size of 0
        self._dtype = dtype
        self._names = [f"shard-{number:05d}{suffix}" for suffix in (".bin", ".idx", ".src")]
        self._files = [open(directory / name, "xb", buffering=_BUFFER) for name in self._names]
        self._hashes = [hashlib.sha256() for _ in self._names]

    def append(self, tokens: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, origins: np.ndarray) -> None:
        """Append documents, end to end in `tokens`: with the tokens, the bytes of text and the `ORIGIN_DTYPE` record of each."""
        index = (np.cumsum(lengths, dtype=np.int64) + self.tokens).astype(INDEX_DTYPE)
        arrays = (tokens.astype(self._dtype, copy=False), index, origins.astype(ORIGIN_DTYPE, copy=False))
        for file, digest, array in zip(self._files, self._hashes, arrays):
            content = memoryview(np.ascontiguousarray(array).view(np.uint8))
            file.write(content)
            digest.update(content)
        self.tokens += len(tokens)
        self._documents += len(lengths)
        self._bytes += int(np.sum(sizes))
        self._of_text = self._of_text and bool(np.all(sizes))
        self._longest = max(self._longest, int(np.max(lengths)))

    def finish(self) -> Shard:
        """Flush the files to the disk. Return the manifest's entry for the shard."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # so that a later check of the hash reads the disk and not the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        # The bytes of some documents beside the tokens of all would be taken for bytes per token.
        counts = (self._documents, self.tokens, self._bytes if self._of_text else 0, self._longest)
        return Shard(*self._names, *counts, *(digest.hexdigest() for digest in self._hashes))

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk: writing has reported that
                file.close()


class ShardWriter:
    """Writes one prepared directory from documents in memory; use `prepare` for larger corpora.

    `ShardWriter.create` makes one. `documents`, `tokens` and `shards` count what has been written so far; `shards` is complete
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
        self._files: ShardFiles | None = None

    @classmethod
    @contextlib.contextmanager
    def create(cls, output: str | Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> Iterator[ShardWriter]:
        """A writer for the new directory `output`, which appears, complete, when the block ends without an error.

        Raises DataError if `output` exists and is not empty, or if the block ends without a single document.
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
                if writer._files:
                    writer._files.close()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents, end to end in `tokens`; `lengths` are the tokens of each with its end-of-document token.

        Raises ValueError for documents that are not closed and for ids outside the vocabulary.
        """
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        self._check(tokens, lengths, starts[1:])
        for first, last, opens in cut_into_shards(lengths, self._files.tokens if self._files else 0, self._shard_tokens):
            if opens:
                self._close_shard()
                self._files = ShardFiles(self._directory, len(self.shards), DTYPES[self._dtype])
            origins = np.zeros(last - first, ORIGIN_DTYPE)
            origins["row"] = np.arange(self.documents + first, self.documents + last)
            part = tokens[starts[first] : starts[last]].astype(DTYPES[self._dtype])
            self._files.append(part, lengths[first:last], np.zeros(last - first), origins)
        self.documents += len(lengths)
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
            self.shards.append(self._files.finish())
            self._files = None

    def _finish(self) -> None:
        self._close_shard()
        self._tokenizer.save(self._directory / "tokenizer")
        write_manifest(self._directory, identity_of(self._tokenizer), self.shards, [_NO_INPUT], preparation={})
