"""Text to token ids and back: one small protocol, over SentencePiece models and Hugging Face `tokenizer.json` files.

Neither back-end adds a begin or end token by itself: ids come from the text alone. The code that joins documents places `eod_id`
between them. Text that merely looks like a special token (`</s>`, `<|endoftext|>`) is encoded as its characters, so a document
cannot forge a document boundary. (A tokenizer exported for transformers does match such text: see export.py.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pretrain.data.tokenizers.library_tokenizers import (
    CONFIG_NAME,
    JSON_NAME,
    MODEL_NAME,
    Engine,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    eos_token,
    read_bytes,
)
from pretrain.errors import DataError

ADDED_NAME = "added_tokens.json"
"""A file beside a tokenizer's own files, as in transformers: special tokens that training added, with their ids."""

_LARGEST = 1 << 26  # bytes; larger files in the directory of an older tokenizer are not part of it


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of the package."""

    vocab_size: int
    """Every id is below this: the least size of an embedding table for all of them."""
    eod_id: int
    """The id that closes a document."""
    fingerprint: str
    """sha256, in hexadecimal, of the file that decides the ids. Equal fingerprints mean equal ids."""
    engine: Engine
    file: Path

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without additions. Raises DataError for text that the vocabulary cannot express."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text as uint32, perhaps read-only: the fastest way, which data preparation uses."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def special_id(self, token: str) -> int | None:
        """The id of a special token, which no text can produce; None for ordinary and unknown tokens."""

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's own files into `directory`, which `load_tokenizer` then reads by itself."""


class Vocabulary(NamedTuple):
    """The vocabulary that a network needs. `tokenizer`: the tokenizer's sha256; `place`: its path, for messages."""

    size: int
    tokenizer: str
    place: object


class TokenizerIdentity(NamedTuple):
    """The values that must be equal if token ids are to mean the same.

    `sha256`: the hash of the file that decides the ids, special tokens included. `eod_token`: the text of the token `eod_id`, if
    another file names it (tokenizer_config.json), in which base and chat releases of one model differ. It is None if the file itself
    names the token, and for data of format version 2, which did not keep it.
    """

    sha256: str
    eod_id: int
    vocab_size: int
    eod_token: str | None = None

    def difference(self, other: TokenizerIdentity) -> str | None:
        """Why ids of the two do not mean the same, as a phrase about both in this order; None if they do."""
        if self.sha256 != other.sha256:
            return "different tokenizers"
        if self.eod_id != other.eod_id:
            return f"one tokenizer but different end-of-document tokens, {self._end} and {other._end}"
        if self.vocab_size != other.vocab_size:
            return f"one tokenizer but vocabularies of {self.vocab_size} and {other.vocab_size} tokens"
        return None

    @property
    def _end(self) -> str:
        return str(self.eod_id) if self.eod_token is None else f"{self.eod_token} ({self.eod_id})"


def identity_of(tokenizer: Tokenizer) -> TokenizerIdentity:
    """The identity of a loaded tokenizer."""
    token = eos_token(tokenizer.file.parent / CONFIG_NAME) if tokenizer.file.suffix == ".json" else None
    return TokenizerIdentity(tokenizer.fingerprint, tokenizer.eod_id, tokenizer.vocab_size, token)


def load_tokenizer(path: str | Path, engine: Engine = "library") -> Tokenizer:
    """The tokenizer at `path`: a file, or a directory that has a `tokenizer.json` or one `*.model`.

    If a directory has both, `tokenizer.json` is used, as in transformers; if it has neither, `AutoTokenizer` reads it. `engine`
    "tiktoken" is for a file that `engine.choose_engine` has proven, to load it again in another process. Raises DataError if the
    tokenizer is missing, cannot be read, has no end-of-document token, or cannot be expressed by tiktoken.
    """
    if "://" in str(path):
        raise DataError(f"{path}: tokenizers are read from local disks only; copy it here first")
    path = Path(path)
    if path.is_dir() and not (path / JSON_NAME).is_file() and not any(path.glob("*.model")) and any(path.glob("*vocab*")):
        path = _converted(path)
    file = _file_of(path)
    tokenizer = HuggingFaceTokenizer(file) if file.suffix == ".json" else SentencePieceTokenizer(file)
    if engine == "library":
        return tokenizer
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(f"{file}: tiktoken cannot encode it: it is a SentencePiece model, not byte-level BPE")
    from pretrain.data.tokenizers.tiktoken_engine import TiktokenTokenizer

    return TiktokenTokenizer(tokenizer)


def _converted(directory: Path) -> Path:
    """The tokenizer.json of a directory in an older format of transformers (vocab.json and merges.txt, vocab.txt, ...).

    It is kept in the user's cache. Nothing is downloaded, and no code that comes with the tokenizer is run. Raises DataError if
    transformers cannot read the directory, or has no fast tokenizer for it.
    """
    import transformers

    from pretrain.data.shards.shard_cache import default_directory
    from pretrain.storage import staged_directory

    files = [file for file in sorted(directory.iterdir()) if file.is_file() and file.stat().st_size <= _LARGEST]
    identity = hashlib.sha256(transformers.__version__.encode())
    for file in files:
        identity.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    kept = default_directory() / "tokenizers" / identity.hexdigest()
    if not kept.is_dir():
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its many classes raise many kinds of errors
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"{directory}: no tokenizer.json, no *.model, and AutoTokenizer cannot read it ({reason}); "
                "train one with tools/train_tokenizer.py"
            ) from error
        if not loaded.is_fast:
            raise DataError(f"{directory}: {type(loaded).__name__} has no fast tokenizer; convert it to a tokenizer.json")
        try:
            with staged_directory(kept) as stage:
                loaded.save_pretrained(stage)
        except DataError:
            if not kept.is_dir():  # else another process was first and wrote the same content
                raise
    return kept / "tokenizer.json"


def tokenizer_fingerprint(path: str | Path) -> str:
    """The `fingerprint` of the tokenizer at `path`, without loading it: training needs no tokenizer library."""
    return hashlib.sha256(read_bytes(_file_of(Path(path)))).hexdigest()


def copy_difference(path: str | Path, expected: TokenizerIdentity) -> str | None:
    """How the files at `path` differ from the tokenizer `expected`, as a phrase about them; None if they do not.

    No tokenizer library is needed. Raises DataError for files that cannot be read.
    """
    file = _file_of(Path(path))
    if tokenizer_fingerprint(file) != expected.sha256:
        return f"{file.name} has other content"
    if file.suffix != ".json":
        return None
    token = eos_token(file.parent / CONFIG_NAME)
    if expected.eod_token is not None:
        return None if token == expected.eod_token else f"{CONFIG_NAME} ends documents with {token}, not {expected.eod_token}"
    # Data of format version 2 has only the id. The library may number added tokens anew, so only a clear contradiction counts.
    content = json.loads(read_bytes(file))
    vocabulary = content["model"].get("vocab") or {}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {piece[0]: id for id, piece in enumerate(vocabulary)}
    ids = {item["content"]: item["id"] for item in content.get("added_tokens") or []} | ids
    if ids.get(token) != expected.eod_id and expected.eod_id in ids.values():
        return f"{CONFIG_NAME} ends documents with {token} ({ids.get(token)}), not with token {expected.eod_id}"
    return None


def added_tokens_json(added: Sequence[str], vocab_size: int) -> str:
    """Contents of ADDED_NAME for tokens that follow the `vocab_size` tokens of a tokenizer, in the order of their ids."""
    return json.dumps({token: vocab_size + number for number, token in enumerate(added)}, indent=1) + "\n"


def read_added_tokens(tokenizer: Tokenizer) -> list[str]:
    """The special tokens that ADDED_NAME adds to a tokenizer's own, in the order of their ids. Raises DataError if an id is left out."""
    file = tokenizer.file.parent / ADDED_NAME
    if not file.is_file():
        return []
    try:
        ids = {id: token for token, id in json.loads(read_bytes(file)).items() if id >= tokenizer.vocab_size}
        return [ids[id] for id in range(tokenizer.vocab_size, tokenizer.vocab_size + len(ids))]
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise DataError(
            f"{file}: expected tokens with ids from {tokenizer.vocab_size} on, each once; restore the file"
        ) from error


def _file_of(path: Path) -> Path:
    if not path.exists():
        raise DataError(f"{path}: no such tokenizer; train one with tools/train_tokenizer.py")
    return _tokenizer_file(path) if path.is_dir() else path


def _tokenizer_file(directory: Path) -> Path:
    if (directory / JSON_NAME).is_file():
        return directory / JSON_NAME
    models = sorted(directory.glob("*.model"))
    if directory / MODEL_NAME in models:
        return directory / MODEL_NAME
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(model.name for model in models)
        raise DataError(f"{directory}: several SentencePiece models ({names}); give the path of one")
    raise DataError(f"{directory}: no tokenizer.json and no *.model; train one with tools/train_tokenizer.py")
