"""Prepared data on disk: a manifest, shards of little-endian tokens with a document index, and a copy of the tokenizer.

    DIR/manifest.json        what is here: dtype, vocabulary, counts, how it was made, and the sha256 of every file
    DIR/inputs.json          the names of the files it was made from
    DIR/tokenizer/           the tokenizer that made the ids, self-contained
    DIR/shard-00000.bin      tokens, uint16 or uint32; one end-of-document token closes each document
    DIR/shard-00000.idx      uint64 per document: the position in this shard just after its end-of-document token
    DIR/shard-00000.src      two uint32 per document: its number in inputs.json, and its line or row there, from 0

Positions: a *shard position* counts tokens from the start of one file, a *stream position* from the start of shard 0. Documents
never straddle shards. Reading needs numpy alone and can execute nothing: the files are raw integers and JSON.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.data.remote.transfer import is_url, shown
from pretrain.data.shards.manifest import DTYPES, INDEX_DTYPE, ORIGIN_DTYPE, Manifest, check_content, read_inputs, read_manifest
from pretrain.errors import DataError

if TYPE_CHECKING:
    from pretrain.data.remote.cache import ShardCache
    from pretrain.data.remote.files import RemoteFile, RemoteFiles

_OPEN_SHARDS = 256  # every open map holds a file descriptor, and 1024 is a common limit for a process


class PreparedData:
    """The tokens of a prepared directory as one stream, read at random positions. Safe to share between threads and to pickle.

    Construct it with `PreparedData.open`.
    """

    def __init__(self, path: Path | str, manifest: Manifest, remote: RemoteFiles | None = None):
        self.path = path
        self._remote = remote
        self.manifest = manifest
        self.dtype = DTYPES[manifest.dtype]
        self.vocab_size = manifest.vocab_size
        self.eod_id = manifest.eod_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self.tokens = manifest.tokens
        self.documents = manifest.documents
        self._token_starts = [0, *itertools.accumulate(shard.tokens for shard in manifest.shards)]
        self._token_starts_array = np.array(self._token_starts, dtype=np.int64)
        self._document_starts = [0, *itertools.accumulate(shard.documents for shard in manifest.shards)]
        if remote is None:
            self._map = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open_map)
        else:
            self._map = remote.maps(self._open_map, self._remote_file, _OPEN_SHARDS)

    @classmethod
    def open(cls, path: str | Path, cache: ShardCache | None = None) -> PreparedData:
        """Read the manifest of the directory `path` and check that every file is there with the right size; map nothing yet.

        `path` may be a URL that fsspec reads (s3://, gs://, hf://, https://, ...): the manifest and the tokenizer are fetched now,
        each shard when it is first read or prefetched, and kept in `cache` (by default ShardCache(), 100 GB). Whether the shards
        are there is then seen when they are read.

        Raises DataError, naming the file, for anything missing, empty, truncated, of another version or inconsistent. Contents
        are not hashed here: that is `verify`.
        """
        if is_url(path):
            from pretrain.data.remote.files import open_remote

            remote, manifest = open_remote(str(path), cache)
            return cls(shown(str(path)), manifest, remote)
        path = Path(path)
        manifest = read_manifest(path)
        with os.scandir(path) as entries:  # one listing, because 10^4 shards are 3 * 10^4 files
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        itemsize = DTYPES[manifest.dtype].itemsize
        for shard in manifest.shards:
            for name, size in (
                (shard.file, shard.tokens * itemsize),
                (shard.index_file, shard.documents * INDEX_DTYPE.itemsize),
                (shard.origin_file, shard.documents * ORIGIN_DTYPE.itemsize),
            ):
                if sizes.get(name) != size:
                    _check_size(path / name, size)
        return cls(path, manifest)

    def __reduce__(self):
        # A pickled memmap would carry the shard's whole content to every data worker; path and manifest are enough.
        return PreparedData, (self.path, self.manifest, self._remote)

    @property
    def is_remote(self) -> bool:
        """Whether shards are fetched when they are read."""
        return self._remote is not None

    @property
    def tokenizer_path(self) -> Path:
        """The local directory with the copy of the tokenizer, for `load_tokenizer`."""
        return (self._remote.directory if self._remote else self.path) / "tokenizer"

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the dtype and of the shards' token hashes in order: the content's identity, wherever it lies."""
        parts = [self.manifest.dtype, *(shard.sha256 for shard in self.manifest.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, as a fresh int64 array; see `read_into`."""
        if count < 0:
            raise IndexError(f"{self.path}: a stretch of {count} tokens")
        out = np.empty(count, dtype=np.int64)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens of the stream from `start` on.

        Finding the shard is O(log shards), and only the pages that are touched are read from disk. Raises IndexError outside
        the stream, DataError when a shard has changed size since `open`.
        """
        count = len(out)
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"{self.path}: tokens {start}..{start + count} are outside 0..{self.tokens}")
        filled = 0
        shard = bisect.bisect_right(self._token_starts, start) - 1
        while filled < count:
            first = start + filled - self._token_starts[shard]
            taken = min(count - filled, self.manifest.shards[shard].tokens - first)
            out[filled : filled + taken] = self._map(shard, False)[first : first + taken]
            filled += taken
            shard += 1

    def read_each(self, starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        """`read_into` for each of many stretches, several times faster where these are short."""
        if starts.size and not 0 <= starts.min() <= starts.max() < self.tokens:
            raise IndexError(f"{self.path}: tokens from {starts.min()} and {starts.max()} on are outside 0..{self.tokens}")
        shards = np.searchsorted(self._token_starts_array, starts, side="right") - 1
        firsts = starts - self._token_starts_array[shards]
        for start, shard, first, out in zip(starts.tolist(), shards.tolist(), firsts.tolist(), outs):
            tokens, last = self._map(shard, False), first + len(out)
            if last <= len(tokens):
                out[:] = tokens[first:last]
            else:
                self.read_into(start, out)

    def document_ends(self, first: int, last: int) -> np.ndarray:
        """Stream positions just after each of the documents first..last-1, int64. Raises IndexError outside."""
        if not 0 <= first <= last <= self.documents:
            raise IndexError(f"{self.path}: documents {first}..{last} are outside 0..{self.documents}")
        parts = []
        while first < last:
            shard = bisect.bisect_right(self._document_starts, first) - 1
            base, upto = self._document_starts[shard], min(last, self._document_starts[shard + 1])
            ends = self._map(shard, True)[first - base : upto - base].astype(np.int64)
            parts.append(ends + self._token_starts[shard])
            first = upto
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream positions (starts, ends) of these documents, in any order, int64. Raises IndexError outside."""
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= documents.min() <= documents.max() < self.documents:
            raise IndexError(f"{self.path}: documents {documents.min()} to {documents.max()} are outside 0..{self.documents}")
        starts, ends = np.empty((2, len(documents)), dtype=np.int64)
        shards = np.searchsorted(self._document_starts, documents, side="right") - 1
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            local, index = documents[here] - self._document_starts[shard], self._map(int(shard), True)
            ends[here] = index[local].astype(np.int64)
            starts[here] = np.where(local > 0, index[np.maximum(local - 1, 0)].astype(np.int64), 0)
            starts[here] += self._token_starts[shard]
            ends[here] += self._token_starts[shard]
        return starts, ends

    def document_at(self, position: int) -> int:
        """The document that holds the token at a stream position. Raises IndexError outside."""
        if not 0 <= position < self.tokens:
            raise IndexError(f"{self.path}: token {position} is outside 0..{self.tokens}")
        shard = bisect.bisect_right(self._token_starts, position) - 1
        local = INDEX_DTYPE.type(position - self._token_starts[shard])
        return self._document_starts[shard] + int(np.searchsorted(self._map(shard, True), local, side="right"))

    def document_span(self, document: int) -> tuple[int, int]:
        """Stream positions [start, end) of one document, its end-of-document token included. Raises IndexError outside."""
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path}: document {document} is outside 0..{self.documents}")
        shard = bisect.bisect_right(self._document_starts, document) - 1
        ends, local = self._map(shard, True), document - self._document_starts[shard]
        base = self._token_starts[shard]
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])

    def prefetch(self, start: int, count: int) -> None:
        """Bring the shards that hold tokens [start, start + count) into the cache, in the background. Local data: nothing to do.

        Positions outside the stream are left out, so that a reader may look ahead of its end. Returns at once.
        """
        if self._remote is None:
            return
        start, end = max(start, 0), min(start + count, self.tokens)
        if start < end:
            first, last = (bisect.bisect_right(self._token_starts, position) - 1 for position in (start, end - 1))
            self._remote.prefetch(file for shard in range(first, last + 1) for file in self._remote_files(shard)[:2])

    def origin(self, document: int) -> tuple[str, int]:
        """The input file a document comes from, as it was named when it was prepared, and its line or row there, from 0.

        Reads one record, and the list of inputs the first time. Raises IndexError outside the documents.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path}: document {document} is outside 0..{self.documents}")
        shard = bisect.bisect_right(self._document_starts, document) - 1
        entry = self.manifest.shards[shard]
        place = (document - self._document_starts[shard]) * ORIGIN_DTYPE.itemsize
        if self._remote is not None:
            with self._remote.open(self._remote_files(shard)[2]) as file:
                record = np.fromfile(file, ORIGIN_DTYPE, 1, offset=place)
        else:
            _check_size(self.path / entry.origin_file, entry.documents * ORIGIN_DTYPE.itemsize)
            record = np.fromfile(self.path / entry.origin_file, ORIGIN_DTYPE, 1, offset=place)
        number, row = record[0].tolist()
        return self._inputs[number], row

    @functools.cached_property
    def _inputs(self) -> list[str]:
        sha256 = self.manifest.inputs_sha256
        folder = self._remote.directory_with("inputs.json", sha256) if self._remote is not None else self.path
        return read_inputs(folder, sha256)

    def verify(self, part: int = 0, parts: int = 1, fetch: bool = False) -> None:
        """Hash the shards i with i % parts == part (so that ranks can share the work) against the manifest.

        Behind a URL, every file is checked when it is fetched, so only the copies in the cache are hashed here, and damaged ones
        dropped; `fetch` brings the rest too, which checks what lies there now.

        Raises DataError naming the first file whose content is not what was written.
        """
        if self._remote is not None:
            shards = range(part, len(self.manifest.shards), parts)
            self._remote.verify((file for shard in shards for file in self._remote_files(shard)), fetch)
            return
        for shard in self.manifest.shards[part::parts]:
            for name, sha256 in shard.files:
                check_content(self.path / name, sha256)

    def _open_map(self, shard: int, index: bool) -> np.ndarray:
        entry = self.manifest.shards[shard]
        name, dtype, length = (
            (entry.index_file, INDEX_DTYPE, entry.documents) if index else (entry.file, self.dtype, entry.tokens)
        )
        if self._remote is not None:
            with self._remote.open(self._remote_file(shard, index)) as file:
                return np.memmap(file, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)
        _check_size(self.path / name, length * dtype.itemsize)
        # As a plain array: a memmap's own slicing costs a microsecond, which is as much as reading 500 tokens.
        return np.memmap(self.path / name, dtype=dtype, mode="r", shape=(length,)).view(np.ndarray)

    def _remote_file(self, shard: int, index: bool) -> RemoteFile:
        return self._remote_files(shard)[index]

    def _remote_files(self, shard: int) -> list[RemoteFile]:
        """Tokens, document index, origins."""
        from pretrain.data.remote.files import RemoteFile

        entry = self.manifest.shards[shard]
        return [
            RemoteFile(entry.file, entry.tokens * self.dtype.itemsize, entry.sha256),
            RemoteFile(entry.index_file, entry.documents * INDEX_DTYPE.itemsize, entry.index_sha256),
            RemoteFile(entry.origin_file, entry.documents * ORIGIN_DTYPE.itemsize, entry.origin_sha256),
        ]


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise DataError(f"{file}: missing, though manifest.json lists it")
    size = file.stat().st_size
    if size != expected:
        what = "empty" if size == 0 else "truncated" if size < expected else "too long"
        raise DataError(f"{file}: {what}: {size} bytes where manifest.json says {expected}")
