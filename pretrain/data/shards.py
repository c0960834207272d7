"""Prepared data on disk: a manifest, shards of little-endian tokens with a document index, and a copy of the tokenizer.

    DIR/manifest.json        what is here: dtype, vocabulary, counts, and the sha256 of every file
    DIR/tokenizer/           the tokenizer that made the ids, self-contained
    DIR/shard-00000.bin      tokens, uint16 or uint32; one end-of-document token closes each document
    DIR/shard-00000.idx      uint64 per document: the position in this shard just after its end-of-document token

Positions: a *shard position* counts tokens from the start of one file, a *stream position* from the start of shard 0. Documents
never straddle shards. Reading needs numpy alone and can execute nothing: the files are raw integers and JSON.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrain.data.staging import staged_directory
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError
from pretrain.storage import sha256_of

FORMAT = "pretrain-shards"
VERSION = 1
SHARD_TOKENS = 2**27
"""Default size of a shard: 268 MB at uint16, large enough to stream and small enough to hash and copy one at a time."""

_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_INDEX_DTYPE = np.dtype("<u8")
_OPEN_SHARDS = 256  # every open map holds a file descriptor, and 1024 is a common limit for a process


@dataclasses.dataclass(frozen=True)
class Shard:
    """One pair of files, as the manifest describes it."""

    file: str
    index_file: str
    documents: int
    tokens: int
    sha256: str
    index_sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json` but for its format and version."""

    dtype: str
    vocab_size: int
    eod_id: int
    tokenizer_sha256: str
    documents: int
    tokens: int
    shards: tuple[Shard, ...]


def dtype_for(vocab_size: int) -> str:
    """The narrowest token type that holds every id below `vocab_size`: `uint16` or `uint32`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


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
            self._files.append(tokens[begin : ends[last - 1]].astype(_DTYPES[self._dtype]), ends[first:last] - begin)
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
        index = (ends + self.tokens).astype(_INDEX_DTYPE)
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


class PreparedData:
    """The tokens of a prepared directory as one stream, read at random positions. Safe to share between threads and to pickle.

    Construct it with `PreparedData.open`.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest
        self.dtype = _DTYPES[manifest.dtype]
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
        for shard in manifest.shards:
            _check_size(path / shard.file, shard.tokens * _DTYPES[manifest.dtype].itemsize)
            _check_size(path / shard.index_file, shard.documents * _INDEX_DTYPE.itemsize)
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

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Hash the shards i with i % parts == part (so that ranks can share the work) against the manifest.

        Raises DataError naming the first file whose content is not what was written.
        """
        for shard in self.manifest.shards[part::parts]:
            for name, expected in ((shard.file, shard.sha256), (shard.index_file, shard.index_sha256)):
                try:
                    actual = sha256_of(self.path / name)
                except OSError as error:
                    raise DataError(f"{self.path / name}: cannot be read: {error.strerror}") from error
                if actual != expected:
                    raise DataError(
                        f"{self.path / name}: content does not match its hash in manifest.json; restore or re-prepare it"
                    )

    def _open_map(self, shard: int, index: bool) -> np.ndarray:
        entry = self.manifest.shards[shard]
        name, dtype, length = (
            (entry.index_file, _INDEX_DTYPE, entry.documents) if index else (entry.file, self.dtype, entry.tokens)
        )
        _check_size(self.path / name, length * dtype.itemsize)
        return np.memmap(self.path / name, dtype=dtype, mode="r", shape=(length,))


def read_manifest(path: str | Path) -> Manifest:
    """The checked manifest of a prepared directory. Raises DataError, naming the file and the key, for anything unexpected."""
    path = Path(path)
    file = path / "manifest.json"
    if not path.exists():
        raise DataError(f"{path}: no such directory; prepare it with tools/prepare_data.py")
    if not file.is_file():
        splits = [name for name in ("train", "validation") if (path / name / "manifest.json").is_file()]
        hint = f"did you mean {path / splits[0]}?" if splits else "is this a directory written by tools/prepare_data.py?"
        raise DataError(f"{file}: missing; {hint}")
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{file}: not a {FORMAT} manifest")
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise DataError(
            f"{file}: format version {content.get('version')!r}, this program reads {VERSION}; prepare the data again"
        )
    return _parse_manifest(file, content)


def _parse_manifest(file: Path, content: dict) -> Manifest:
    """Exact keys, exact types, and counts that add up."""
    _check_keys(file, "", content, {"format", "version", *(field.name for field in dataclasses.fields(Manifest))})
    if content["dtype"] not in tuple(_DTYPES):  # a tuple, so that an unhashable value is just not in it
        raise DataError(f"{file}: dtype must be one of {', '.join(_DTYPES)}, got {content['dtype']!r}")
    if not isinstance(content["shards"], list) or not content["shards"]:
        raise DataError(f"{file}: shards must be a non-empty list")
    for key, least in (("vocab_size", 1), ("eod_id", 0), ("documents", 1), ("tokens", 1)):
        _check_integer(file, key, content[key], least)
    _check_hash(file, "tokenizer_sha256", content["tokenizer_sha256"])
    shards = tuple(_parse_shard(file, number, entry) for number, entry in enumerate(content["shards"]))
    for key in ("documents", "tokens"):
        total = sum(getattr(shard, key) for shard in shards)
        if total != content[key]:
            raise DataError(f"{file}: {key} is {content[key]} but the shards have {total}")
    if content["eod_id"] >= content["vocab_size"]:
        raise DataError(f"{file}: eod_id {content['eod_id']} is outside the vocabulary of {content['vocab_size']}")
    if content["vocab_size"] > np.iinfo(_DTYPES[content["dtype"]]).max + 1:
        raise DataError(f"{file}: {content['dtype']} cannot hold a vocabulary of {content['vocab_size']}")
    return Manifest(
        **{key: value for key, value in content.items() if key not in ("format", "version", "shards")}, shards=shards
    )


def _parse_shard(file: Path, number: int, entry: object) -> Shard:
    place = f"shards[{number}]"
    if not isinstance(entry, dict):
        raise DataError(f"{file}: {place} must be an object, got {entry!r}")
    _check_keys(file, f"{place}.", entry, {field.name for field in dataclasses.fields(Shard)})
    for key in ("file", "index_file"):
        name = entry[key]
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise DataError(f"{file}: {place}.{key} must be a plain file name, got {name!r}")
    for key in ("documents", "tokens"):
        _check_integer(file, f"{place}.{key}", entry[key], 1)
    for key in ("sha256", "index_sha256"):
        _check_hash(file, f"{place}.{key}", entry[key])
    return Shard(**entry)


def _check_keys(file: Path, place: str, content: dict, expected: set[str]) -> None:
    for key in sorted(expected ^ content.keys()):
        raise DataError(f"{file}: {place}{key} is {'missing' if key in expected else 'not a known key'}")


def _check_integer(file: Path, key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"{file}: {key} must be an integer of at least {least}, got {value!r}")


def _check_hash(file: Path, key: str, value: object) -> None:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise DataError(f"{file}: {key} must be a sha256 in hexadecimal, got {value!r}")


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise DataError(f"{file}: missing, though manifest.json lists it")
    size = file.stat().st_size
    if size != expected:
        what = "empty" if size == 0 else "truncated" if size < expected else "too long"
        raise DataError(f"{file}: {what}: {size} bytes where manifest.json says {expected}")
