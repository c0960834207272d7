"""The two libraries behind `Tokenizer`: SentencePiece for its models, Hugging Face's `tokenizers` for `tokenizer.json` files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pretrain.errors import DataError

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
"""File names that transformers shares."""
Engine = Literal["library", "tiktoken"]
"""The engines: the library that the file is made for, or tiktoken (engine.py says when that is allowed)."""


class SentencePieceTokenizer:
    """A SentencePiece model; the end of a document is its `eos` piece, special tokens are its control pieces."""

    engine: Engine = "library"

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

        content = read_bytes(file)
        self.file = file
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file}: not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read") from error
        # A tokenizer.json may ask for truncation or padding, which would silently cut documents.
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
            # "fast" leaves out the character offsets, which are not needed here.
            return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{self._describe_failure(texts)}; use a tokenizer trained on this text") from error

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


def byte_characters() -> list[str]:
    """How byte-level BPE writes each byte as a visible character, by byte value (GPT-2's table)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_in = {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


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
