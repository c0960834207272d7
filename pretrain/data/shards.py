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
from pathlib import Path

import numpy as np

from pretrain.data.manifest import DTYPES, INDEX_DTYPE, ORIGIN_DTYPE, Manifest, check_content, read_inputs, read_manifest
from pretrain.errors import DataError

_OPEN_SHARDS = 256  # every open map holds a file descriptor, and 1024 is a common limit for a process


class PreparedData:
    """The tokens of a prepared directory as one stream, read at random positions. Safe to share between threads and to pickle.

    Construct it with `PreparedData.open`.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest
        self.dtype = DTYPES[manifest.dtype]
        self.vocab_size = manifest.vocab_size
        self.eod_id = manifest.eod_id
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self.tokens = manifest.tokens
        self.documents = manifest.documents
        self._token_starts = [0, *itertools.accumulate(shard.tokens for shard in manifest.shards)]
        self._document_starts = [0, *itertools.accumulate(shard.documents for shard in manifest.shards)]
        self._map = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open_map)

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """Read the manifest of the directory `path` and check that every file is there with the right size; map nothing yet.

        Raises DataError, naming the file, for anything missing, empty, truncated, of another version or inconsistent. Contents
        are not hashed here: that is `verify`.
        """
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
        return PreparedData, (self.path, self.manifest)

    @property
    def tokenizer_path(self) -> Path:
        """The directory with the copy of the tokenizer, for `load_tokenizer`."""
        return self.path / "tokenizer"

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the dtype and of the shards' token hashes in order: the content's identity, wherever it lies."""
        parts = [self.manifest.dtype, *(shard.sha256 for shard in self.manifest.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, as a fresh int64 array.

        Finding the shard is O(log shards), and only the pages that are touched are read from disk. Raises IndexError outside
        the stream, DataError when a shard has changed size since `open`.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"{self.path}: tokens {start}..{start + count} are outside 0..{self.tokens}")
        out = np.empty(count, dtype=np.int64)
        filled = 0
        shard = bisect.bisect_right(self._token_starts, start) - 1
        while filled < count:
            first = start + filled - self._token_starts[shard]
            taken = min(count - filled, self.manifest.shards[shard].tokens - first)
            out[filled : filled + taken] = self._map(shard, False)[first : first + taken]
            filled += taken
            shard += 1
        return out

    def document_span(self, document: int) -> tuple[int, int]:
        """Stream positions [start, end) of one document, its end-of-document token included. Raises IndexError outside."""
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path}: document {document} is outside 0..{self.documents}")
        shard = bisect.bisect_right(self._document_starts, document) - 1
        ends, local = self._map(shard, True), document - self._document_starts[shard]
        base = self._token_starts[shard]
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])

    def origin(self, document: int) -> tuple[str, int]:
        """The input file a document comes from, as it was named when it was prepared, and its line or row there, from 0.

        Reads one record, and the list of inputs the first time. Raises IndexError outside the documents.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path}: document {document} is outside 0..{self.documents}")
        shard = bisect.bisect_right(self._document_starts, document) - 1
        entry = self.manifest.shards[shard]
        file = self.path / entry.origin_file
        _check_size(file, entry.documents * ORIGIN_DTYPE.itemsize)
        place = (document - self._document_starts[shard]) * ORIGIN_DTYPE.itemsize
        number, row = np.fromfile(file, ORIGIN_DTYPE, 1, offset=place)[0].tolist()
        return self._inputs[number], row

    @functools.cached_property
    def _inputs(self) -> list[str]:
        return read_inputs(self.path, self.manifest.inputs_sha256)

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Hash the shards i with i % parts == part (so that ranks can share the work) against the manifest.

        Raises DataError naming the first file whose content is not what was written.
        """
        for shard in self.manifest.shards[part::parts]:
            for name, sha256 in shard.files:
                check_content(self.path / name, sha256)

    def _open_map(self, shard: int, index: bool) -> np.ndarray:
        entry = self.manifest.shards[shard]
        name, dtype, length = (
            (entry.index_file, INDEX_DTYPE, entry.documents) if index else (entry.file, self.dtype, entry.tokens)
        )
        _check_size(self.path / name, length * dtype.itemsize)
        return np.memmap(self.path / name, dtype=dtype, mode="r", shape=(length,))


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise DataError(f"{file}: missing, though manifest.json lists it")
    size = file.stat().st_size
    if size != expected:
        what = "empty" if size == 0 else "truncated" if size < expected else "too long"
        raise DataError(f"{file}: {what}: {size} bytes where manifest.json says {expected}")
