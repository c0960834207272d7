"""Trains the tokenizers that ship without a download.

    bpe, unigram   SentencePiece with byte fallback; lossless to the last space
    byte_bpe       BPE over bytes, as in GPT-4 and Llama 3; lossless, and the fastest to encode
    byte           256 bytes and <|endoftext|>; id == byte value
    char           the characters of the corpus and <|endoftext|>; ids in code point order

`bpe` and `unigram` are written as tokenizer.model, the others in the Hugging Face format (tokenizer.json). Special tokens are ids
that no text produces. A program puts them between texts (see `FillInMiddle`). Everything is deterministic: the same corpus in
the same order gives the same file.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pretrain.data.preparation.documents import read_documents
from pretrain.data.preparation.inputs import find_inputs
from pretrain.data.tokenizers.engine import byte_characters
from pretrain.data.tokenizers.tokenizer import CONFIG_NAME, JSON_NAME, MODEL_NAME
from pretrain.errors import ConfigError, DataError, say
from pretrain.progress import MEGABYTE, CorpusProgress
from pretrain.storage import staged_directory
from pretrain.transfer import refuse_url

MODEL_TYPES = ("bpe", "unigram", "byte_bpe", "byte", "char")
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pieces in which byte_bpe merges: words, up to 3 digits, punctuation, white space (cl100k_base; Llama 3's tokenizer.json)."""
END_OF_TEXT = "<|endoftext|>"
BYTES = 256
MOST_IDS = 10_000_000
"""The largest vocabulary that is trained. Libraries take memory for all of it first, and end the process if they cannot."""
PIECE_BYTES = 2048  # longest stretch of text handed to SentencePiece at once
SAMPLE_PIECES = 200_000  # stretches kept of a larger corpus: at most 400 MB of text in memory
_SENTENCEPIECE_TOKENS = ("<unk>", "<s>", "</s>")
_SEED = 0  # seed of the sample
_THREADS = 16  # a constant, because unigram training rounds differently for another number of threads


@dataclass(frozen=True)
class TrainedTokenizer:
    """The outcome of `train_tokenizer`; `str()` of it is the closing line of the tool."""

    path: Path
    model_type: str
    vocab_size: int
    documents: int
    seconds: float

    def __str__(self) -> str:
        origin = f"from {self.documents:,} documents in {self.seconds:.1f} s"
        return f"trained {self.path} ({self.model_type}, {self.vocab_size:,} tokens, {origin})"


def train_tokenizer(
    inputs: Sequence[str],
    output: str | Path,
    model_type: str,
    vocab_size: int | None = None,
    *,
    text_field: str = "text",
    text_mode: str = "file",
    sample_pieces: int = SAMPLE_PIECES,
    special_tokens: Sequence[str] = (),
    lowercase: bool = False,
) -> TrainedTokenizer:
    """Train on the files that the glob patterns `inputs` match and write the tokenizer into the new directory `output`.

    `vocab_size` counts every id, those of `special_tokens` included. It is exact for bpe, unigram and byte_bpe, and an upper limit
    for char. For byte, which learns nothing and needs no input, it is None or 257 plus the special tokens. If the corpus has more
    than `sample_pieces` stretches of 2 kB, a uniform sample of these is used. `lowercase`: learn from the text in lower case, for
    data that is prepared in lower case; the tokenizer itself changes no text.

    Raises ConfigError for arguments that do not fit, DataError for the corpus; nothing is left behind then.
    """
    _check_arguments(inputs, model_type, vocab_size, sample_pieces, special_tokens)
    refuse_url("--output", output)
    output = Path(output)
    files = find_inputs(inputs) if model_type != "byte" else []
    with staged_directory(output) as directory, CorpusProgress("reading") as progress:
        documents = _counted(read_documents(files, text_field, text_mode), progress, lowercase)
        if model_type == "byte":
            size = _save_bytes(directory, special_tokens)
        elif model_type == "char":
            size = _save_characters(directory, documents, vocab_size, special_tokens)
        else:
            sample = _sample(documents, model_type, vocab_size, sample_pieces)
            save = _save_byte_bpe if model_type == "byte_bpe" else _save_sentencepiece
            size = save(directory, sample, model_type, vocab_size, special_tokens)
    return TrainedTokenizer(output, model_type, size, progress.documents, progress.seconds)


def _check_arguments(
    inputs: Sequence[str], model_type: str, vocab_size: int | None, sample_pieces: int, special_tokens: Sequence[str]
) -> None:
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"--model-type {model_type}: expected one of {', '.join(MODEL_TYPES)}")
    _check_special_tokens(special_tokens, model_type)
    smallest = BYTES + 1 + len(special_tokens)
    if model_type == "byte" and vocab_size not in (None, smallest):
        raise ConfigError(f"--vocab-size {vocab_size}: a byte tokenizer has exactly {smallest}; leave it out")
    if model_type == "byte_bpe" and vocab_size is not None and vocab_size < smallest:
        raise ConfigError(f"--vocab-size {vocab_size}: bytes, end of text and special tokens alone need {smallest}")
    if model_type in ("bpe", "unigram", "byte_bpe") and vocab_size is None:
        raise ConfigError(f"--vocab-size is required for --model-type {model_type}")
    if sample_pieces < 1:
        raise ConfigError(f"--sample-pieces {sample_pieces}: expected at least 1")
    if vocab_size is not None and not 1 <= vocab_size <= MOST_IDS:
        raise ConfigError(f"--vocab-size {vocab_size}: expected {'at least 1' if vocab_size < 1 else f'at most {MOST_IDS}'}")
    if not inputs and model_type != "byte":
        raise ConfigError(f"--input is required for --model-type {model_type}")


def _check_special_tokens(tokens: Sequence[str], model_type: str) -> None:
    taken = [*_SENTENCEPIECE_TOKENS] if model_type in ("bpe", "unigram") else [END_OF_TEXT]
    for token in tokens:
        if token in taken:
            raise ConfigError(f"--special-tokens {token}: named twice, or one that every {model_type} tokenizer has")
        # Other programs would take shorter ones for text, and <0x..> is how SentencePiece writes a byte.
        if len(token) < 3 or not token.isascii() or not token.isprintable() or " " in token or re.fullmatch("<0x..>", token):
            raise ConfigError(
                f"--special-tokens {token!r}: expected 3 or more visible ASCII characters, such as <|fim_prefix|>"
            )
        taken.append(token)


def _counted(texts: Iterator[str], progress: CorpusProgress, lowercase: bool) -> Iterator[str]:
    for text in texts:
        # JSON can spell half a surrogate pair, which has no UTF-8 form; preparation refuses it and names its line.
        data = text.encode("utf-8", "replace")
        progress.add(1, 0, len(data))
        yield data.decode().lower() if lowercase else data.decode()


def stretches_of(text: str, limit: int = PIECE_BYTES) -> Iterator[str]:
    """Cut `text` into stretches of at most `limit` bytes of UTF-8, at line ends where possible, losing nothing.

    Line feeds stay inside the stretches, so that the trainer can learn pieces with them, such as "):\\n" or "\\n\\n".
    """
    data = text.encode()
    begin = 0
    while len(data) - begin > limit:
        end = data.rfind(b"\n", begin, begin + limit) + 1
        if end <= begin:
            end = begin + limit
            while data[end] & 0xC0 == 0x80:  # not inside a character
                end -= 1
        yield data[begin:end].decode()
        begin = end
    if begin < len(data):
        yield data[begin:].decode()


def sample_of(texts: Iterable[str], limit: int) -> list[str]:
    """`limit` of the `texts`, each with the same chance, and the same ones every time (reservoir sampling, Vitter's algorithm R).

    SentencePiece samples too, but with a new seed in every process: two runs would give two tokenizers.
    """
    random = Random(_SEED)
    sample: list[str] = []
    for number, text in enumerate(texts):
        if number < limit:
            sample.append(text)
        elif (slot := random.randrange(number + 1)) < limit:
            sample[slot] = text
    return sample


def _sample(documents: Iterator[str], model_type: str, vocab_size: int, sample_pieces: int) -> list[str]:
    sample = sample_of((stretch for text in documents for stretch in stretches_of(text)), sample_pieces)
    if not sample:
        raise DataError("the corpus is empty: the input files hold no text")
    megabytes = sum(map(len, sample)) / MEGABYTE
    say(f"learning {vocab_size:,} {model_type} pieces from {megabytes:.1f} million characters", to_errors=True)
    return sample


def _save_sentencepiece(
    directory: Path, sample: list[str], model_type: str, vocab_size: int, special_tokens: Sequence[str]
) -> int:
    import sentencepiece

    try:
        with open(directory / MODEL_NAME, "wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(sample.pop() for _ in range(len(sample))),  # popped: SentencePiece makes its own copy
                model_writer=model,
                model_type=model_type,
                vocab_size=vocab_size,
                unk_id=0,
                bos_id=1,
                eos_id=2,
                pad_id=-1,
                control_symbols=list(special_tokens),
                # Lossless: no normalisation, no trimming, no added space, and bytes for characters that are not in the
                # vocabulary.
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                max_sentence_length=PIECE_BYTES,
                shuffle_input_sentence=False,
                num_threads=_THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        raise _explain(str(error), model_type, vocab_size) from error
    return vocab_size


def _explain(message: str, model_type: str, vocab_size: int) -> DataError:
    if largest := re.search(r"too high.*value <= (\d+)", message):
        return _too_large(vocab_size, model_type, largest[1])
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"--vocab-size {vocab_size} is too small for this corpus: its characters and the bytes alone need {smallest[1]}"
        )
    return DataError(f"SentencePiece could not learn a {model_type} vocabulary of {vocab_size}: {message}")


def _save_byte_bpe(directory: Path, sample: list[str], model_type: str, vocab_size: int, special_tokens: Sequence[str]) -> int:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"), bytes_as_characters]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1 - len(special_tokens), initial_alphabet=byte_characters(), show_progress=False
    )
    tokenizer.train_from_iterator((sample.pop() for _ in range(len(sample))), trainer)
    size = _save_hugging_face(directory, tokenizer, special_tokens)
    if size < vocab_size:
        raise _too_large(vocab_size, model_type, size)
    return size


def _too_large(vocab_size: int, model_type: str, largest: int | str) -> DataError:
    return DataError(
        f"--vocab-size {vocab_size} is too large for this corpus: the largest that {model_type} can learn from it is {largest}"
    )


def _save_bytes(directory: Path, special_tokens: Sequence[str]) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save_hugging_face(directory, tokenizer, special_tokens)


def _save_characters(directory: Path, documents: Iterator[str], limit: int | None, special_tokens: Sequence[str]) -> int:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    found: set[str] = set()
    for document in documents:
        found.update(document)
    characters = sorted(found)
    if not characters:
        raise DataError("the corpus is empty: the input files hold no text")
    if limit is not None and len(characters) + 1 + len(special_tokens) > limit:
        needed = f"the corpus has {len(characters)} characters, and special tokens take {1 + len(special_tokens)} ids"
        raise DataError(f"--vocab-size {limit} is too small: {needed}")
    # The unknown token is deliberately not in the vocabulary, so that an unknown character is an error and not a loss.
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _save_hugging_face(directory, tokenizer, special_tokens)


def _save_hugging_face(directory: Path, tokenizer: Any, special_tokens: Sequence[str]) -> int:
    tokenizer.add_special_tokens([END_OF_TEXT, *special_tokens])
    # Its own `save` raises a plain Exception on a full disk.
    (directory / JSON_NAME).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    if special_tokens:
        config["extra_special_tokens"] = list(special_tokens)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()
