"""Text to token ids and back: one small protocol, over SentencePiece models and Hugging Face `tokenizer.json` files.

Neither back-end ever adds a begin or end token by itself: ids come from the text alone, and whoever joins documents
places `eod_id` between them. Text that merely looks like a special token (`</s>`, `<|endoftext|>`) is encoded as the characters it
consists of, so a document cannot forge a document boundary. (A tokenizer exported for transformers does match such text: see
`tokenizer_export`.)
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
Engine = Literal["library", "tiktoken"]
"""What encodes: the library that the file is made for, or tiktoken (`tokenizer_engine` says when that may be)."""


class Tokenizer(Protocol):
    """What the rest of the package knows of a tokenizer."""

    vocab_size: int
    """Every id is below this: the least size of an embedding table that serves them all."""
    eod_id: int
    """The id that closes a document."""
    fingerprint: str
    """sha256, in hexadecimal, of the file that decides the ids. Equal fingerprints mean equal ids."""
    engine: Engine
    file: Path

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added. Raises DataError for text that the vocabulary cannot express."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text as uint32, which may be read-only: the fastest way, and the one that data preparation takes."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def special_id(self, token: str) -> int | None:
        """The id of a special token, one that no text can produce; None for ordinary and unknown tokens."""

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's own files into `directory`, which `load_tokenizer` then reads by itself."""


class Vocabulary(NamedTuple):
    """Token ids that a network needs. `tokenizer`: its sha256; `place`: where it lies, for messages."""

    size: int
    tokenizer: str
    place: object


class TokenizerIdentity(NamedTuple):
    """What must be equal where token ids are to mean the same.

    `sha256`: of the file that decides the ids, special tokens included; `eod_token`: the text of the token `eod_id` where a file beside
    it names the token (tokenizer_config.json), which base and chat releases of one model do differently; None where the file itself
    does, and for data of format version 2, which did not keep it.
    """

    sha256: str
    eod_id: int
    vocab_size: int
    eod_token: str | None = None

    def difference(self, other: TokenizerIdentity) -> str | None:
        """What keeps ids of the two from meaning the same, as a phrase about both in this order; None where nothing does."""
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
    token = _eos_token(tokenizer.file.parent / CONFIG_NAME) if tokenizer.file.suffix == ".json" else None
    return TokenizerIdentity(tokenizer.fingerprint, tokenizer.eod_id, tokenizer.vocab_size, token)


def load_tokenizer(path: str | Path, engine: Engine = "library") -> Tokenizer:
    """The tokenizer at `path`: a file, or a directory that has a `tokenizer.json` or one `*.model`.

    A directory with both gives `tokenizer.json`, as in transformers; one with neither is what `AutoTokenizer` makes of it. `engine` "tiktoken" is for those who had it proven by
    `tokenizer_engine.choose_engine`, and load the same file again in another process. Raises DataError when there is none, when it
    cannot be read, when it has no end-of-document token, or when tiktoken cannot express it.
    """
    if "://" in str(path):
        raise DataError(f"{path}: tokenizers are read from local disks only; copy it here first")
    path = Path(path)
    if path.is_dir() and not (path / JSON_NAME).is_file() and not any(path.glob("*.model")) and any(path.glob("*vocab*")):
        from pretrain.data.tokenizers.auto import converted

        path = converted(path)
    file = _file_of(path)
    tokenizer = HuggingFaceTokenizer(file) if file.suffix == ".json" else SentencePieceTokenizer(file)
    if engine == "library":
        return tokenizer
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(f"{file}: tiktoken cannot encode it: it is a SentencePiece model, not byte-level BPE")
    from pretrain.data.tokenizers.tiktoken_engine import TiktokenTokenizer

    return TiktokenTokenizer(tokenizer)


def tokenizer_fingerprint(path: str | Path) -> str:
    """The `fingerprint` of the tokenizer at `path`, without loading it: training needs no tokenizer library."""
    return hashlib.sha256(_read(_file_of(Path(path)))).hexdigest()


def copy_difference(path: str | Path, expected: TokenizerIdentity) -> str | None:
    """What makes the files at `path` another tokenizer than `expected`, as a phrase about them; None where nothing does.

    No tokenizer library is needed. Raises DataError for files that cannot be read.
    """
    file = _file_of(Path(path))
    if tokenizer_fingerprint(file) != expected.sha256:
        return f"{file.name} has other content"
    if file.suffix != ".json":
        return None
    token = _eos_token(file.parent / CONFIG_NAME)
    if expected.eod_token is not None:
        return None if token == expected.eod_token else f"{CONFIG_NAME} ends documents with {token}, not {expected.eod_token}"
    # Data of format version 2 has kept the id alone. The library may number added tokens anew, so only a clear contradiction counts.
    content = json.loads(_read(file))
    vocabulary = content["model"].get("vocab") or {}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {piece[0]: id for id, piece in enumerate(vocabulary)}
    ids = {item["content"]: item["id"] for item in content.get("added_tokens") or []} | ids
    if ids.get(token) != expected.eod_id and expected.eod_id in ids.values():
        return f"{CONFIG_NAME} ends documents with {token} ({ids.get(token)}), not with token {expected.eod_id}"
    return None


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


class SentencePieceTokenizer:
    """A SentencePiece model; the end of a document is its `eos` piece, special tokens are its control pieces."""

    engine: Engine = "library"

    # SentencePiece writes a space as U+2581 inside pieces, so that character in a text would come back as a space. Its three
    # bytes, as byte pieces, come back as they were.
    _SPACE_MARK = "\u2581"

    def __init__(self, file: Path):
        import sentencepiece

        content = _read(file)
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
        # Not for a model that puts a space before every text: it would put one before every part too.
        exact = self._processor.normalize("a") == "a" and all(self._processor.is_byte(piece) for piece in mark)
        self._space_mark = mark if exact else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encode_arrays(texts)]

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


class HuggingFaceTokenizer:
    """A `tokenizer.json`; the end of a document is the `eos_token` that `tokenizer_config.json` beside it names."""

    engine: Engine = "library"

    def __init__(self, file: Path):
        import tokenizers

        content = _read(file)
        self.file = file
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file}: not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read") from error
        # A tokenizer.json may ask for truncation or padding, which would cut documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eod_id: int = self._find_eod()
        # An end token that was added as an ordinary one would be matched inside documents; its id stays the same.
        self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(self.eod_id)])
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encode(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        for text in texts:
            refuse_surrogates(text)
        try:
            # "fast" leaves out the character offsets, which nobody reads here.
            return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{self._describe_failure(texts)}; use a tokenizer trained on this text") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def special_id(self, token: str) -> int | None:
        added = self._tokenizer.get_added_tokens_decoder()
        return next((id for id, entry in added.items() if entry.content == token and entry.special), None)

    def specification(self) -> dict:
        """What a tokenizer.json holds, as the library understood this one."""
        return json.loads(self._tokenizer.to_str())

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.file, directory / JSON_NAME)
        shutil.copyfile(self.file.parent / CONFIG_NAME, directory / CONFIG_NAME)
        if (beside := self.file.parent / MODEL_NAME).is_file():  # the same pieces with the scores that llama.cpp needs
            shutil.copyfile(beside, directory / MODEL_NAME)

    def _find_eod(self) -> int:
        config = self.file.parent / CONFIG_NAME
        remedy = f'write {{"eos_token": "..."}} naming one of its tokens into {config}'
        token = _eos_token(config)
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
            except Exception:  # what `tokenizers` raises, whatever went wrong
                return f"character {character!r} (U+{ord(character):04X}) is not in the vocabulary of {self.file}"
        return f"{self.file}: cannot encode the text"


def _eos_token(config: Path) -> str | None:
    """The eos token of a tokenizer_config.json, which is written as a string or as an object; None when it names none."""
    if not config.is_file():
        return None
    try:
        content: Any = json.loads(_read(config))
    except ValueError as error:
        raise DataError(f"{config}: not valid JSON ({str(error).splitlines()[0]})") from error
    token = content.get("eos_token") if isinstance(content, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def byte_characters() -> list[str]:
    """How byte-level BPE writes each byte as a visible character, by byte value (GPT-2's table)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_in = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


def refuse_surrogates(text: str) -> None:
    """Half a surrogate pair (JSON can spell one: "\\ud800") has no UTF-8 form, and the libraries fail on it in many ways."""
    if text.isascii():  # known without looking at the characters
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"the text holds a lone surrogate U+{code:04X}, which is not valid Unicode text") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
