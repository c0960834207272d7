"""Text to token ids and back: one small interface, over SentencePiece models and Hugging Face `tokenizer.json` files.

Neither library adds a begin or end token by itself: ids come from the text alone. The code that joins documents places `eod_id`
between them. Text that merely looks like a special token (`</s>`, `<|endoftext|>`) is encoded as its characters, or refused if the
tokenizer cannot do that. So a document cannot forge a document boundary. (A tokenizer exported for transformers does match such
text: see export.py.)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from pretrain.errors import DataError

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
"""File names that transformers shares."""

_LARGEST = 1 << 26  # bytes; larger files in the directory of an older tokenizer are not part of it


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of the package."""

    vocab_size: int
    """Every id is below this: the least size of an embedding table for all of them."""
    eod_id: int
    """The id that closes a document."""
    fingerprint: str
    """sha256, in hexadecimal, of the file that decides the ids. Equal fingerprints mean equal ids."""
    file: Path
    engine: Literal["library", "tiktoken"] = "library"
    """What encodes: the library that the file is made for, or tiktoken (engine.py says when that is allowed)."""

    def encode(self, text: str, origin: str = "") -> list[int]:
        """The ids of `text`, without additions. Raises DataError, naming its `origin`, for text that the vocabulary cannot express."""
        try:
            return self.encode_arrays([text])[0].tolist()
        except DataError as error:
            raise DataError(f"{origin}: {error}" if origin else str(error)) from error

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text as uint32, perhaps read-only: the fastest way, which data preparation uses."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def special_id(self, token: str) -> int | None:
        """The id of a special token, which no text can produce; None for ordinary and unknown tokens."""

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's own files into `directory`, which `load_tokenizer` then reads by itself."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; the end of a document is its `eos` piece, special tokens are its control pieces."""

    # SentencePiece writes a space as U+2581 inside pieces, so that character in a text would be decoded as a space. Its three
    # bytes, as byte pieces, survive the round trip.
    _SPACE_MARK = "\u2581"

    def __init__(self, file: Path):
        import sentencepiece

        content = read_bytes(file)
        self.file = file
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{file}: not a SentencePiece model") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        if self.eod_id < 0:
            raise DataError(f"{file}: has no end-of-document token; train the model again with an eos piece (eos_id >= 0)")
        mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in self._SPACE_MARK.encode()]
        # Not for a model that puts a space before every text, because it would put one before every part too.
        exact = self._processor.normalize("a") == "a" and all(self._processor.is_byte(piece) for piece in mark)
        self._space_mark = mark if exact else None

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        texts = list(texts)
        for text in texts:
            refuse_surrogates(text)
        encoded = self._encode(texts)
        for number, text in enumerate(texts):
            if self._SPACE_MARK in text and self._space_mark:
                encoded[number] = self._encode_with_marks(text)
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def special_id(self, token: str) -> int | None:
        piece = self._processor.piece_to_id(token)
        return piece if self._processor.is_control(piece) and self._processor.id_to_piece(piece) == token else None

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.file, directory / MODEL_NAME)

    def _encode_with_marks(self, text: str) -> list[int]:
        first, *rest = self._encode(text.split(self._SPACE_MARK))
        return first + [token for part in rest for token in (*self._space_mark, *part)]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # One thread: data preparation runs one process per core.
        return self._processor.encode(texts, out_type=int, add_bos=False, add_eos=False, num_threads=1)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; the end of a document is the `eos_token` that `tokenizer_config.json` beside it names."""

    def __init__(self, file: Path):
        import tokenizers

        content = read_bytes(file)
        self.file = file
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file}: not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read") from error
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise DataError(
                f"{file}: its model leaves out merges at random (dropout {dropout:g}), so that a text would get other ids each time; set "
                'its "dropout" to null'
            )
        # A tokenizer.json may ask for truncation or padding, which would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eod_id: int = self._find_eod()
        # An end token that was added as an ordinary one would be matched inside documents; its id stays the same.
        self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(self.eod_id)])
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._forged = self._find_forged()

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            refuse_surrogates(text)
        try:
            # "fast" leaves out the character offsets, which are not needed here.
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{self._describe_failure(texts)}; use a tokenizer trained on this text") from error
        arrays = [np.array(encoding.ids, dtype=np.uint32) for encoding in encoded]
        if self._forged and arrays and np.isin(np.concatenate(arrays), self._forged).any():
            self._refuse_forged(arrays)
        return arrays

    def _find_forged(self) -> list[int]:
        """The ids of special tokens that text can produce: a Unigram model has them among its pieces (T5's `</s>`)."""
        added = self._tokenizer.get_added_tokens_decoder()
        # The library leaves an end token as ordinary as it was if a normalizer changes its text (`<EOS>` in lower case).
        special = [(id, entry.content) for id, entry in added.items() if entry.special or id == self.eod_id]
        found = {id for id, content in special if id in self._ids_of(content)}
        model = self.specification()["model"] if found else {}
        unknown = {model.get("unk_id"), self._unknown_id()}  # other text produces it too
        return sorted((found - unknown) | ({self.eod_id} & unknown))

    def _unknown_id(self) -> int | None:
        return self._tokenizer.token_to_id(getattr(self._tokenizer.model, "unk_token", None) or "")

    def _ids_of(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # a model without an unknown token has no ids for these characters
            return []

    def _refuse_forged(self, arrays: Sequence[np.ndarray]) -> None:
        token = next(int(id) for ids in arrays for id in ids if id in self._forged)
        if token == self.eod_id == self._unknown_id():
            raise DataError(
                f"the text holds something that {self.file} lacks, and its unknown token {self._tokenizer.id_to_token(token)!r} is also the "
                f"end of a document; name another eos_token in {CONFIG_NAME}, or use a tokenizer trained on this text"
            )
        meaning = "the end of a document" if token == self.eod_id else "a special token"
        raise DataError(
            f"the text holds {self._tokenizer.id_to_token(token)!r}, which {self.file} cannot tell from {meaning}; change the text, or take "
            "the SentencePiece model of that tokenizer, if it has one"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def special_id(self, token: str) -> int | None:
        added = self._tokenizer.get_added_tokens_decoder()
        return next((id for id, entry in added.items() if entry.content == token and entry.special), None)

    def specification(self) -> dict:
        """The content of this tokenizer.json, as the library understood it."""
        return json.loads(self._tokenizer.to_str())

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.file, directory / JSON_NAME)
        shutil.copyfile(self.file.parent / CONFIG_NAME, directory / CONFIG_NAME)
        if (beside := self.file.parent / MODEL_NAME).is_file():  # it has the same pieces, with the scores that llama.cpp needs
            shutil.copyfile(beside, directory / MODEL_NAME)

    def _find_eod(self) -> int:
        config = self.file.parent / CONFIG_NAME
        remedy = f'write {{"eos_token": "..."}} naming one of its tokens into {config}'
        token = eos_token(config)
        if token is None:
            raise DataError(f"{self.file}: has no end-of-document token; {remedy}")
        eod_id = self._tokenizer.token_to_id(token)
        if eod_id is None:
            raise DataError(f"{self.file}: the end-of-document token {token!r} is not in the vocabulary; {remedy}")
        return eod_id

    def _describe_failure(self, texts: Sequence[str]) -> str:
        for character in dict.fromkeys("".join(texts)):
            try:
                self._tokenizer.encode(character, add_special_tokens=False)
            except Exception:  # `tokenizers` raises this class for every error
                return f"character {character!r} (U+{ord(character):04X}) is not in the vocabulary of {self.file}"
        return f"{self.file}: cannot encode the text"


def eos_token(config: Path) -> str | None:
    """The eos token of a tokenizer_config.json, which writes it as a string or an object; None if it names no eos token."""
    if not config.is_file():
        return None
    try:
        content: Any = json.loads(read_bytes(config))
    except ValueError as error:
        raise DataError(f"{config}: not valid JSON ({str(error).splitlines()[0]})") from error
    token = content.get("eos_token") if isinstance(content, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def refuse_surrogates(text: str) -> None:
    """Refuse half a surrogate pair (JSON can spell one: "\\ud800"). It has no UTF-8 form, and the libraries fail on it in many ways."""
    if text.isascii():  # Python knows this without looking at the characters
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"the text holds a lone surrogate U+{code:04X}, which is not valid Unicode text") from error


def read_bytes(file: Path) -> bytes:
    """The content of a file. Raises DataError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


class Vocabulary(NamedTuple):
    """The vocabulary that a network needs. `tokenizer`: the tokenizer's sha256; `place`: its path, for messages."""

    size: int
    tokenizer: str
    place: object


class TokenizerIdentity(NamedTuple):
    """The values that must be equal if token ids are to mean the same.

    `sha256`: the hash of the file that decides the ids, special tokens included. `eod_token`: the text of the token `eod_id`, if
    another file names it (tokenizer_config.json), in which base and chat releases of one model differ. It is None if the file itself
    names the token.
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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at `path`: a file, or a directory that has a `tokenizer.json` or one `*.model`.

    If a directory has both, `tokenizer.json` is used, as in transformers; if it has neither, `AutoTokenizer` reads it. Raises
    DataError if the tokenizer is missing, cannot be read, or has no end-of-document token.
    """
    if "://" in str(path):
        raise DataError(f"{path}: tokenizers are read from local disks only; copy it here first")
    path = Path(path)
    if path.is_dir() and not (path / JSON_NAME).is_file() and not any(path.glob("*.model")) and any(path.glob("*vocab*")):
        path = _converted(path)
    file = _file_of(path)
    return HuggingFaceTokenizer(file) if file.suffix == ".json" else SentencePieceTokenizer(file)


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


def copy_difference(path: str | Path, expected: TokenizerIdentity) -> str | None:
    """How the files at `path` differ from the tokenizer `expected`, as a phrase about them; None if they do not.

    No tokenizer library is needed. Raises DataError for files that cannot be read.
    """
    file = _file_of(Path(path))
    content = read_bytes(file)
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        return f"{file.name} has other content"
    if file.suffix != ".json":
        return None
    token = eos_token(file.parent / CONFIG_NAME)
    return None if token == expected.eod_token else f"{CONFIG_NAME} ends documents with {token}, not {expected.eod_token}"


def _file_of(path: Path) -> Path:
    """The file that decides the ids: `path` itself, or the one in this directory."""
    if not path.exists():
        raise DataError(f"{path}: no such tokenizer; train one with tools/train_tokenizer.py")
    if not path.is_dir():
        return path
    models = sorted(path.glob("*.model"))
    for file in (path / JSON_NAME, path / MODEL_NAME, *(models if len(models) == 1 else ())):
        if file.is_file():
            return file
    if models:
        names = ", ".join(model.name for model in models)
        raise DataError(f"{path}: several SentencePiece models ({names}); give the path of one")
    raise DataError(f"{path}: no tokenizer.json and no *.model; train one with tools/train_tokenizer.py")
