"""The manifest of a prepared directory: its content, how it was made, and the sha256 of every file and of itself.

It is plain JSON, and every key is checked. Version 2 had no seal, no plan and no list of invalid rows, and version 3 no hash of
tokenizer_config.json; both are read as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, TokenizerIdentity, copy_difference
from pretrain.errors import DataError, without_secrets
from pretrain.storage import exists, sealed_json, sha256_of, unsealed
from pretrain.transfer import is_url

FORMAT = "pretrain-shards"
VERSION = 4
INPUTS_NAME = "inputs.json"
INVALID_NAME = "invalid.jsonl"
SPLITS = ("train", "validation")
"""The prepared directories in an output that has a validation split."""

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<u8")
ORIGIN_DTYPE = np.dtype([("input", "<u4"), ("row", "<u4")])
"""The origin of a document: the number of its input file, and the line or row there, from 0."""

Scalar = str | int | float | bool | None
_HASH = re.compile("[0-9a-f]{64}")


class StoredFile(NamedTuple):
    """A file that the manifest describes: its size in bytes and its content."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """Three files, as the manifest describes them.

    `bytes`: the size of the documents' text as UTF-8, 0 if any document came as ids; `longest`: the tokens of the longest
    document.
    """

    file: str
    index_file: str
    origin_file: str
    documents: int
    tokens: int
    bytes: int
    longest: int
    sha256: str
    index_sha256: str
    origin_sha256: str

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(name, sha256) of each file."""
        return (self.file, self.sha256), (self.index_file, self.index_sha256), (self.origin_file, self.origin_sha256)

    def stored(self, dtype: np.dtype) -> tuple[StoredFile, StoredFile, StoredFile]:
        """Tokens, document index and origins; tokens are stored as `dtype`."""
        sizes = self.tokens * dtype.itemsize, self.documents * INDEX_DTYPE.itemsize, self.documents * ORIGIN_DTYPE.itemsize
        return tuple(StoredFile(name, size, sha256) for (name, sha256), size in zip(self.files, sizes))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All of `manifest.json` except its format and version.

    `preparation` says how the data were made (options and counts). It is for people and decides nothing. `plan_sha256` names the
    inputs and options, so that the same command finds its work done; None without a plan. `eod_token`: see TokenizerIdentity.
    `invalid_sha256`: the hash of the list of rows that were left out, if it exists. `tokenizer_config_sha256`: that of the file beside the
    tokenizer, if it exists and the version is not older; exports take it along.
    """

    dtype: str
    vocab_size: int
    eod_id: int
    tokenizer_sha256: str
    documents: int
    tokens: int
    inputs_sha256: str
    preparation: dict[str, Scalar]
    shards: tuple[Shard, ...]
    eod_token: str | None = None
    plan_sha256: str | None = None
    invalid_sha256: str | None = None
    tokenizer_config_sha256: str | None = None

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return TokenizerIdentity(self.tokenizer_sha256, self.eod_id, self.vocab_size, self.eod_token)


_SHARD_KEYS = {field.name for field in dataclasses.fields(Shard)}


def tokenizer_config_sha256(tokenizer: Path) -> str | None:
    """The hash of tokenizer_config.json in a tokenizer's directory. None without such a file."""
    file = tokenizer / CONFIG_NAME
    return sha256_of(file) if file.is_file() else None


def tokenizer_difference(tokenizer: Path, manifest: Manifest) -> str | None:
    """How the directory `tokenizer` differs from the one that the data were prepared with, as a phrase; None if it does not."""
    if difference := copy_difference(tokenizer, manifest.tokenizer):
        return difference
    if manifest.tokenizer_config_sha256 not in (None, tokenizer_config_sha256(tokenizer)):
        return f"{CONFIG_NAME} has other content"
    return None


def dtype_for(vocab_size: int) -> str:
    """The narrowest token type that holds every id below `vocab_size`: `uint16` or `uint32`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def directory_name(path: str | Path) -> str:
    """The name of a prepared directory for people: the last part of its path, or the part before it for a split."""
    path = Path(without_secrets(str(path)) if is_url(path) else path)
    return path.parent.name if path.name in SPLITS and path.parent.name else path.name


def splits_with(directory: Path, file: str) -> list[Path]:
    """The splits in a directory that have this file."""
    return [directory / name for name in SPLITS if (directory / name / file).is_file()]


def read_manifest(path: str | Path) -> Manifest:
    """The checked manifest of a prepared directory. Raises DataError, naming the file and the key, for anything unexpected."""
    path = Path(path)
    file = path / "manifest.json"
    if not exists(path):
        raise DataError(f"{path}: no such directory; prepare it with tools/prepare_data.py")
    if not file.is_file():
        splits = splits_with(path, "manifest.json")
        hint = f"did you mean {splits[0]}?" if splits else "is this a directory written by tools/prepare_data.py?"
        raise DataError(f"{file}: missing; {hint}")
    return _parse_manifest(file, read_described(file, FORMAT, VERSION, "prepare the data again"))


def read_described(file: Path, format_name: str, version: int, remedy: str) -> dict[str, Any]:
    """The JSON object in `file`, of this format and version, with a seal (`storage.sealed_json`).

    Raises DataError, naming the file, for anything else.
    """
    text = file.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict) or content.get("format") != format_name:
        raise DataError(f"{file}: not a {format_name} manifest")
    if type(content.get("version")) is not int or content["version"] != version:
        raise DataError(f"{file}: format version {content.get('version')!r}, this program reads {version}; {remedy}")
    try:
        return unsealed(text)
    except ValueError as error:
        raise DataError(f"{file}: {error}; restore it, or {remedy}") from error


_NULLABLE = {"plan_sha256", "invalid_sha256", "tokenizer_config_sha256"}
"""Hashes of what may not be there."""
_LEAST = {"vocab_size": 1, "eod_id": 0, "documents": 1, "tokens": 1, "bytes": 0, "longest": 1}
"""The smallest value of each integer."""


def _parse_manifest(file: Path, content: dict) -> Manifest:
    """Check keys, types, and that counts add up."""
    keys = {"format", "version", *(field.name for field in dataclasses.fields(Manifest))}
    _check_entry(file, "", content, keys)
    _check_values(file, content)
    if not isinstance(content["shards"], list) or not content["shards"]:
        raise DataError(f"{file}: shards must be a non-empty list")
    for number, entry in enumerate(content["shards"]):
        if not isinstance(entry, dict):
            raise DataError(f"{file}: shards[{number}] must be an object, got {entry!r}")
        _check_entry(file, f"shards[{number}].", entry, _SHARD_KEYS)
    shards = tuple(Shard(**entry) for entry in content["shards"])
    for key in ("documents", "tokens"):
        total = sum(getattr(shard, key) for shard in shards)
        if total != content[key]:
            raise DataError(f"{file}: {key} is {content[key]} but the shards have {total}")
    return Manifest(
        **{key: value for key, value in content.items() if key not in ("format", "version", "shards")}, shards=shards
    )


def _check_values(file: Path, content: dict) -> None:
    if content["dtype"] not in tuple(DTYPES):  # a tuple, because an unhashable value would fail in a set
        raise DataError(f"{file}: dtype must be one of {', '.join(DTYPES)}, got {content['dtype']!r}")
    if content["eod_id"] >= content["vocab_size"]:
        raise DataError(f"{file}: eod_id {content['eod_id']} is outside the vocabulary of {content['vocab_size']}")
    if content["vocab_size"] > np.iinfo(DTYPES[content["dtype"]]).max + 1:
        raise DataError(f"{file}: {content['dtype']} cannot hold a vocabulary of {content['vocab_size']}")
    if not isinstance(content["eod_token"], (str, type(None))):
        raise DataError(f"{file}: eod_token must be a string or null, got {content['eod_token']!r}")
    if not isinstance(content["preparation"], dict):
        raise DataError(f"{file}: preparation must be an object, got {content['preparation']!r}")
    for key, value in content["preparation"].items():
        if not isinstance(value, (str, int, float, type(None))):
            raise DataError(f"{file}: preparation.{key} must be a single value, got {value!r}")


def _check_entry(file: Path, place: str, content: dict, expected: set[str]) -> None:
    """Raise DataError unless these are the keys, and integers, hashes and names of files have possible values."""
    for key in sorted(expected ^ content.keys()):
        raise DataError(f"{file}: {place}{key} is {'missing' if key in expected else 'not a known key'}")
    for key, value in content.items():
        wanted = None
        if key in _LEAST:
            if not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[key]:
                wanted = f"an integer of at least {_LEAST[key]}"
        elif key.endswith("sha256"):
            if not (isinstance(value, str) and _HASH.fullmatch(value) or value is None and key in _NULLABLE):
                wanted = "a sha256 in hexadecimal"
        elif key.endswith("file"):
            if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
                wanted = "a plain file name"
        if wanted is not None:
            raise DataError(f"{file}: {place}{key} must be {wanted}, got {value!r}")


def write_manifest(
    directory: Path,
    tokenizer: TokenizerIdentity,
    shards: Sequence[Shard],
    inputs: Sequence[str],
    preparation: dict[str, Scalar],
    plan_sha256: str | None = None,
    invalid: Sequence[tuple[str, str]] = (),
) -> Manifest:
    """Write inputs.json, invalid.jsonl and manifest.json beside the shards and the tokenizer in `directory`. `inputs`: names of files."""
    names = (json.dumps(list(inputs), indent=0) + "\n").encode()
    (directory / INPUTS_NAME).write_bytes(names)
    manifest = Manifest(
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        tokenizer_sha256=tokenizer.sha256,
        eod_token=tokenizer.eod_token,
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        inputs_sha256=hashlib.sha256(names).hexdigest(),
        preparation=preparation,
        shards=tuple(shards),
        plan_sha256=plan_sha256,
        invalid_sha256=write_invalid(directory, invalid),
        tokenizer_config_sha256=tokenizer_config_sha256(directory / "tokenizer"),
    )
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    (directory / "manifest.json").write_text(sealed_json(content), encoding="utf-8")
    return manifest


def write_invalid(directory: Path, rows: Sequence[tuple[str, str]]) -> str | None:
    """Write the rows that were left out, (where, why) each, to `directory`/invalid.jsonl. Return its sha256, None without such rows."""
    if not rows:
        return None
    content = "".join(json.dumps({"where": where, "why": why}) + "\n" for where, why in rows).encode()
    (directory / INVALID_NAME).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def read_inputs(directory: Path, sha256: str) -> list[str]:
    """The names in `directory`/inputs.json. Raises DataError unless it is the file with this sha256."""
    check_content(directory / INPUTS_NAME, sha256)
    return json.loads((directory / INPUTS_NAME).read_bytes())


def check_content(file: Path, sha256: str, seen: Callable[[int], object] | None = None) -> None:
    """Raise DataError, naming `file`, unless it has the content that the manifest gives. `seen`: see `sha256_of`."""
    try:
        actual = sha256_of(file, seen)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    if actual != sha256:
        raise DataError(f"{file}: content does not match its hash in manifest.json; restore or re-prepare it")
