"""Prepared data on disk: a manifest, shards of little-endian tokens with a document index, and a copy of the tokenizer.

    DIR/manifest.json        the content: dtype, vocabulary, counts, how it was made, and the sha256 of every file
    DIR/inputs.json          the names of the files that it was made from
    DIR/tokenizer/           the tokenizer that made the ids, self-contained
    DIR/shard-00000.bin      tokens, uint16 or uint32; one end-of-document token closes each document
    DIR/shard-00000.idx      uint64 per document: the position in this shard just after its end-of-document token
    DIR/shard-00000.src      two uint32 per document: its number in inputs.json, and its line or row there, from 0

Positions: a *shard position* counts tokens from the start of one file, a *stream position* from the start of shard 0. Documents
never straddle shards. Reading needs only numpy and can execute nothing: the files are raw integers and JSON.

Files are read by position and never mapped. So a truncated file or a failing disk gives an error with a name, while a mapping
would end the process with SIGBUS.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pretrain.data.shards.manifest import (
    DTYPES,
    INDEX_DTYPE,
    ORIGIN_DTYPE,
    Manifest,
    StoredFile,
    check_content,
    read_inputs,
    read_manifest,
    tokenizer_difference,
)
from pretrain.data.shards.open_files import CachedFiles, OpenFile, OpenFiles, check_size
from pretrain.errors import DataError, without_secrets
from pretrain.transfer import is_url

if TYPE_CHECKING:
    from pretrain.data.shards.remote_files import RemoteFiles
    from pretrain.data.shards.shard_cache import ShardCache

_TOKENS, _DOCUMENTS, _ORIGINS = range(3)  # the files of a shard, in the order of `Shard.stored`
_DENSE = 512  # bytes of a document index: reading up to this many is cheaper than skipping them with another call


class Holding(Protocol):
    """Files that a run reads, with a local manifest that has their hashes. `content` is equal for equal files, wherever they lie."""

    @property
    def path(self) -> Path | str: ...

    @property
    def content(self) -> str: ...

    @property
    def manifest_file(self) -> Path: ...

    @property
    def pieces_to_verify(self) -> int:
        """Into how many parts `verify` can be divided."""

    def verify(
        self, part: int = 0, parts: int = 1, hashes: bool = True, *, seen: Callable[[int], object] | None = None
    ) -> None:
        """Check the sizes of this part of the files, and with `hashes` their content. `seen`: see `sha256_of`. Raises DataError naming the
        first damaged file.
        """


class PreparedData:
    """The tokens of a prepared directory as one stream, read at random positions. Safe to share between threads and to pickle.

    Construct it with `PreparedData.open`.
    """

    def __init__(self, path: Path | str, manifest: Manifest, remote: RemoteFiles | None = None):
        self.path = path
        self._url_files = remote
        self.manifest = manifest
        self.dtype = DTYPES[manifest.dtype]
        self.vocab_size = manifest.vocab_size
        self.eod_id = manifest.eod_id
        self.tokenizer = manifest.tokenizer
        self.tokens = manifest.tokens
        self.documents = manifest.documents
        self._token_bytes = [shard.tokens * self.dtype.itemsize for shard in manifest.shards]
        self._token_starts = [0, *itertools.accumulate(shard.tokens for shard in manifest.shards)]
        self._token_starts_array = np.array(self._token_starts, dtype=np.int64)
        self._document_starts = [0, *itertools.accumulate(shard.documents for shard in manifest.shards)]
        self._files = OpenFiles(self._open) if remote is None else CachedFiles(self._open)

    @classmethod
    def open(cls, path: str | Path, cache: ShardCache | None = None, sizes: bool = True) -> PreparedData:
        """Read the manifest of the directory `path` and check that every file exists with the right size; open none yet.

        Without `sizes` only the manifest is read, and the caller looks at the files (`verify`). A thousand ranks share that work.

        `path` may be a URL that fsspec reads (s3://, gs://, hf://, https://, ...). Then the manifest and the tokenizer are
        downloaded now, and each shard when it is first read or prefetched. They are kept in `cache` (by default ShardCache(), 100
        GB). A missing shard is noticed only when it is read.

        Raises DataError, naming the file, for anything missing, empty, truncated, of another version or inconsistent. Contents
        are not hashed here; `verify` and `verify_documents` do that. Without `sizes` a wrong size is found when the file is opened.
        """
        if is_url(path):
            from pretrain.data.shards.remote_files import open_remote

            remote, manifest = open_remote(str(path), cache)
            return cls(without_secrets(str(path)), manifest, remote)
        data = cls(Path(path), read_manifest(path))
        if sizes:
            data.verify(hashes=False)
        return data

    def __reduce__(self):
        # Open files are not pickled; path and manifest are enough.
        return PreparedData, (self.path, self.manifest, self._url_files)

    @property
    def is_remote(self) -> bool:
        """Whether shards are downloaded when they are read."""
        return self._url_files is not None

    @property
    def tokenizer_path(self) -> Path:
        """The local directory with the copy of the tokenizer, for `load_tokenizer`."""
        return (self._url_files.directory if self._url_files else self.path) / "tokenizer"

    def check_tokenizer(self) -> None:
        """Raise DataError unless the copy is the tokenizer that the data were prepared with."""
        if difference := tokenizer_difference(self.tokenizer_path, self.manifest):
            raise DataError(
                f"{self.tokenizer_path} is not the tokenizer that {self.path} was prepared with: {difference}; restore it or prepare again"
            )

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token; None if any document came as ids, because the size of its text is unknown."""
        sizes = [shard.bytes for shard in self.manifest.shards]
        return sum(sizes) / self.tokens if all(sizes) else None

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the dtype and of the shards' token hashes in order. It identifies the content, wherever it lies."""
        parts = [self.manifest.dtype, *(shard.sha256 for shard in self.manifest.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def content(self) -> str:
        """A value for its tokens, documents and tokenizer. It is equal for equal data, wherever they lie."""
        return f"{self.fingerprint} {self.documents_fingerprint} {' '.join(map(str, self.tokenizer[:3]))}"

    @property
    def manifest_file(self) -> Path:
        """The local manifest.json."""
        return Path(self._url_files.directory if self._url_files else self.path) / "manifest.json"

    @functools.cached_property
    def documents_fingerprint(self) -> str:
        """sha256 of the hashes of the shards' document indices in order. Packing and pairs depend on them."""
        parts = [str(INDEX_DTYPE), *(shard.index_sha256 for shard in self.manifest.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, as a fresh int64 array.

        Finding the shard is O(log shards), and only the needed pages are read from disk. Raises IndexError outside the stream,
        and DataError if a shard has not the manifest's size or cannot be read.
        """
        if count < 0 or start < 0 or start + count > self.tokens:
            raise IndexError(f"{self.path}: tokens {start}..{start + count} are outside 0..{self.tokens}")
        return np.frombuffer(self._read(start, count), dtype=self.dtype).astype(np.int64)

    def read_joined(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The tokens of these stretches of the stream, one stretch after the other, as they are stored: read-only, of `dtype`.

        It is several times faster than `read` for short stretches, and raises the same errors.
        """
        if starts.size and not 0 <= starts.min() <= (starts + lengths).max() <= self.tokens:
            raise IndexError(f"{self.path}: tokens from {starts.min()} and {starts.max()} on are outside 0..{self.tokens}")
        shards = np.searchsorted(self._token_starts_array, starts, side="right") - 1
        firsts = (starts - self._token_starts_array[shards]) * self.dtype.itemsize
        ends, get, parts = self._token_bytes, self._files.get, []
        for number, (shard, first, size) in enumerate(
            zip(shards.tolist(), firsts.tolist(), (lengths * self.dtype.itemsize).tolist())
        ):
            if first + size <= ends[shard]:
                parts.append(get((shard, _TOKENS)).read(size, first))
            else:
                parts.append(self._read(int(starts[number]), int(lengths[number])))
        return np.frombuffer(b"".join(parts), dtype=self.dtype)

    def _read(self, start: int, count: int) -> bytes:
        """Tokens that may continue in the next shards."""
        parts, shard = [], bisect.bisect_right(self._token_starts, start) - 1
        while count:
            first = start - self._token_starts[shard]
            taken = min(count, self.manifest.shards[shard].tokens - first)
            parts.append(self._files.get((shard, _TOKENS)).read(taken * self.dtype.itemsize, first * self.dtype.itemsize))
            start, count, shard = start + taken, count - taken, shard + 1
        return b"".join(parts)

    def document_ends(self, first: int, last: int) -> np.ndarray:
        """Stream positions just after each of the documents first..last-1, int64. Raises IndexError outside."""
        if not 0 <= first <= last <= self.documents:
            raise IndexError(f"{self.path}: documents {first}..{last} are outside 0..{self.documents}")
        parts = []
        while first < last:
            shard = bisect.bisect_right(self._document_starts, first) - 1
            base, upto = self._document_starts[shard], min(last, self._document_starts[shard + 1])
            parts.append(self._shard_ends(shard, first - base, upto - base) + self._token_starts[shard])
            first = upto
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream positions (starts, ends) of these documents, in any order, int64. Raises IndexError outside."""
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= documents.min() <= documents.max() < self.documents:
            raise IndexError(f"{self.path}: documents {documents.min()} to {documents.max()} are outside 0..{self.documents}")
        starts, ends = np.empty((2, len(documents)), dtype=np.int64)
        shards = np.searchsorted(self._document_starts, documents, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            bounds = self._bounds(shard, documents[here] - self._document_starts[shard])
            starts[here], ends[here] = bounds + self._token_starts[shard]
        return starts, ends

    def _bounds(self, shard: int, local: np.ndarray) -> np.ndarray:
        """Shard positions [2, documents] of the start and end of these documents of a shard."""
        first, last = int(local.min()), int(local.max()) + 1
        if (last - first) * INDEX_DTYPE.itemsize <= _DENSE * len(local):
            ends = self._shard_ends(shard, max(first - 1, 0), last)
            ends = ends if first else np.concatenate(([0], ends))
            return np.stack([ends[local - first], ends[local - first + 1]])
        return np.stack([self._bounds(shard, local[i : i + 1])[:, 0] for i in range(len(local))], axis=1)

    def document_at(self, position: int) -> int:
        """The document that holds the token at a stream position. Raises IndexError outside."""
        if not 0 <= position < self.tokens:
            raise IndexError(f"{self.path}: token {position} is outside 0..{self.tokens}")
        shard = bisect.bisect_right(self._token_starts, position) - 1
        numbers, local = range(self.manifest.shards[shard].documents), position - self._token_starts[shard]
        found = bisect.bisect_right(numbers, local, key=lambda number: int(self._shard_ends(shard, number, number + 1)[0]))
        return self._document_starts[shard] + found

    def document_span(self, document: int) -> tuple[int, int]:
        """Stream positions [start, end) of one document, its end-of-document token included. Raises IndexError outside."""
        starts, ends = self.spans(np.array([document]))
        return int(starts[0]), int(ends[0])

    def _shard_ends(self, shard: int, first: int, last: int) -> np.ndarray:
        """Shard positions just after the documents first..last-1 of a shard, int64."""
        content = self._files.get((shard, _DOCUMENTS)).read((last - first) * INDEX_DTYPE.itemsize, first * INDEX_DTYPE.itemsize)
        return np.frombuffer(content, dtype=INDEX_DTYPE).astype(np.int64)

    def prefetch(self, start: int, count: int) -> None:
        """Download the shards that hold tokens [start, start + count) into the cache, in the background. For local data it does nothing.

        Positions outside the stream are ignored, so that a reader may look beyond its end. Returns at once.
        """
        if self._url_files is None:
            return
        start, end = max(start, 0), min(start + count, self.tokens)
        if start < end:
            first, last = (bisect.bisect_right(self._token_starts, position) - 1 for position in (start, end - 1))
            self._url_files.prefetch(
                file for shard in range(first, last + 1) for file in self.manifest.shards[shard].stored(self.dtype)[:2]
            )

    def origin(self, document: int) -> tuple[str, int]:
        """The input file of a document, by its name at the preparation, and its line or row there, from 0.

        Reads one record, and the list of inputs the first time. Raises IndexError outside the documents.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path}: document {document} is outside 0..{self.documents}")
        shard = bisect.bisect_right(self._document_starts, document) - 1
        place = (document - self._document_starts[shard]) * ORIGIN_DTYPE.itemsize
        record = np.frombuffer(self._open((shard, _ORIGINS)).read(ORIGIN_DTYPE.itemsize, place), dtype=ORIGIN_DTYPE)
        number, row = record[0].tolist()
        return self._inputs[number], row

    @functools.cached_property
    def _inputs(self) -> list[str]:
        sha256 = self.manifest.inputs_sha256
        folder = self._url_files.directory_with("inputs.json", sha256) if self._url_files is not None else self.path
        return read_inputs(folder, sha256)

    @property
    def pieces_to_verify(self) -> int:
        """The number of shards."""
        return len(self.manifest.shards)

    def verify(
        self,
        part: int = 0,
        parts: int = 1,
        hashes: bool = True,
        fetch: bool = False,
        seen: Callable[[int], object] | None = None,
    ) -> None:
        """Compare the shards i with i % parts == part (so that ranks can share the work) with their hashes, and check their documents.

        Without `hashes` only the sizes of their files are compared. Behind a URL, every file is checked when it is downloaded. So
        only the copies in the cache are hashed here, and damaged ones evicted. `fetch` downloads the rest too, which checks the
        present files. `seen` is told how many bytes were hashed, piece by piece.

        Raises DataError naming the first damaged file.
        """
        shards = range(part, len(self.manifest.shards), parts)
        if self._url_files is not None:
            if hashes:
                stored = (file for shard in shards for file in self.manifest.shards[shard].stored(self.dtype))
                self._url_files.verify(stored, fetch, seen)
            return
        for shard in shards:
            for file in self.manifest.shards[shard].stored(self.dtype):
                self._verify_local(file, hashes, seen)
            if hashes:
                self._check_documents(shard)
                self._check_end(shard)

    def verify_documents(self) -> None:
        """Hash and check the document index of every shard. Call it before anything lasting is built from them.

        Behind a URL this downloads those that are not in the cache. Raises DataError naming the first damaged one.
        """
        for shard in range(len(self.manifest.shards)):
            file = self._file(shard, _DOCUMENTS)
            if self._url_files is not None:
                self._url_files.verify([file], fetch=True)
            else:
                self._verify_local(file, hashes=True)
            self._check_documents(shard)

    def _verify_local(self, file: StoredFile, hashes: bool, seen: Callable[[int], object] | None = None) -> None:
        check_size(self._place(file.name), file.size)
        if hashes:
            check_content(self.path / file.name, file.sha256, seen)

    def _check_documents(self, shard: int) -> None:
        """Raise DataError unless the ends of a shard's documents rise up to the end of its tokens."""
        entry, before = self.manifest.shards[shard], 0
        for first in range(0, entry.documents, 1 << 20):
            ends = self._shard_ends(shard, first, min(first + (1 << 20), entry.documents))
            if (np.diff(ends, prepend=before) <= 0).any():
                raise DataError(f"{self._place(entry.index_file)}: the ends of documents do not rise; prepare the data again")
            before = int(ends[-1])
        if before != entry.tokens:
            raise DataError(
                f"{self._place(entry.index_file)}: the last document ends at token {before} of {entry.tokens}; prepare the data again"
            )

    def _check_end(self, shard: int) -> None:
        """Raise DataError unless the last document of a shard ends with the manifest's end-of-document token."""
        entry, size = self.manifest.shards[shard], self.dtype.itemsize
        last = int.from_bytes(self._files.get((shard, _TOKENS)).read(size, (entry.tokens - 1) * size), "little")
        if last != self.eod_id:
            raise DataError(
                f"{self._place(entry.file)}: ends with token {last}, but manifest.json says that documents end with {self.eod_id}; "
                "restore or re-prepare it"
            )

    def _place(self, name: str) -> str:
        return f"{str(self.path).rstrip('/')}/{name}"

    def _open(self, key: tuple[int, int]) -> OpenFile:
        file = self._file(*key)
        if self._url_files is not None:
            with self._url_files.open(file) as copy:
                return OpenFile(
                    os.dup(copy.fileno()), self._url_files.place(file.name), self._url_files.cache.path(file.sha256)
                )
        return OpenFile.at(self.path / file.name, file.size)

    def _file(self, shard: int, which: int) -> StoredFile:
        return self.manifest.shards[shard].stored(self.dtype)[which]
