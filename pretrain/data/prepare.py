"""Text -> tokens -> shards.

    files, sorted --read, one process--> batches --tokenize, N processes--> results, in order --write, one process--> shards

The order of documents is that of the sorted files and of the rows in them, whatever the number of processes, and the
writer's cuts depend on that order only: the output is the same byte for byte for any number of workers. Memory is a few
batches per worker, plus the largest document.

A document goes to the validation split when the hash of its text, read as a number in [0, 1), is below the fraction.
Nothing else decides: adding data never moves a document, duplicates land on the same side, and a larger fraction only
adds to validation.
"""

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from pretrain.data.documents import TEXT_MODES, Document, find_inputs, read_documents
from pretrain.data.progress import CorpusProgress
from pretrain.data.shard_writer import SHARD_TOKENS, ShardWriter
from pretrain.data.staging import staged_directory
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, DataError

BATCH_CHARACTERS = 1 << 19
BATCH_DOCUMENTS = 4096
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class PreparedSplit:
    """What one prepared directory holds."""

    path: Path
    documents: int
    tokens: int
    shards: int

    def __str__(self) -> str:
        shards = f"{self.shards:,} shard" + "s" * (self.shards != 1)
        return f"{self.path} ({self.documents:,} documents, {self.tokens:,} tokens, {shards})"


@dataclass(frozen=True)
class Preparation:
    """The outcome of `prepare`; `str()` of it is the closing line of the tool."""

    splits: tuple[PreparedSplit, ...]
    empty_documents: int
    seconds: float
    megabytes_per_second: float

    def __str__(self) -> str:
        where = " and ".join(str(split) for split in self.splits)
        rate = f"{self.seconds:.1f} s, {self.megabytes_per_second:.1f} MB/s"
        return f"prepared {where}; {self.empty_documents} empty documents skipped; {rate}"


@dataclass(frozen=True)
class EncodedBatch:
    """Per split: documents end to end, each closed, and their lengths. `bytes`: size of the text as UTF-8."""

    splits: tuple[tuple[np.ndarray, np.ndarray], ...]
    documents: int
    tokens: int
    bytes: int


def prepare(
    inputs: Sequence[str],
    tokenizer: str | Path,
    output: str | Path,
    *,
    text_field: str = "text",
    text_mode: str = "file",
    validation_fraction: float = 0.0,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
) -> Preparation:
    """Tokenize the files that the glob patterns `inputs` match into the prepared directory `output`.

    With a `validation_fraction` above 0, `output` holds two prepared directories, `train` and `validation`, which appear
    together. See `read_documents` for `text_field` and `text_mode`, `ShardWriter` for `shard_tokens`. With `workers`
    above 1 the tokenizer runs in that many spawned processes, so the calling script needs a main guard.

    Raises ConfigError for an argument out of range, DataError for anything wrong with the files; nothing is left behind.
    """
    _check_arguments(text_mode, validation_fraction, workers, shard_tokens)
    files = find_inputs(inputs)
    encode = _Encoder(str(tokenizer), validation_fraction)
    output = Path(output)
    with CorpusProgress("preparing") as progress, ExitStack() as stack:
        writers = _open_writers(stack, output, encode.tokenizer, validation_fraction, shard_tokens)
        batches = _Batches(read_documents(files, text_field, text_mode))
        for encoded in _ordered_map(encode, batches, workers):
            for writer, (tokens, lengths) in zip(writers, encoded.splits):
                writer.add(tokens, lengths)
            progress.add(encoded.documents, encoded.tokens, encoded.bytes)
        _refuse_empty(writers, progress.documents, validation_fraction)
    names = _SPLITS if len(writers) > 1 else (".",)
    splits = [PreparedSplit(output / n, w.documents, w.tokens, len(w.shards)) for n, w in zip(names, writers)]
    return Preparation(tuple(splits), batches.empty, progress.seconds, progress.megabytes_per_second)


def _check_arguments(text_mode: str, validation_fraction: float, workers: int, shard_tokens: int) -> None:
    if text_mode not in TEXT_MODES:
        raise ConfigError(f"--documents {text_mode}: expected one of {', '.join(TEXT_MODES)}")
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"--validation-fraction {validation_fraction}: expected a number in [0, 1)")
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected at least 1")
    if shard_tokens < 1:
        raise ConfigError(f"--shard-tokens {shard_tokens}: expected at least 1")


def _open_writers(
    stack: ExitStack, output: Path, tokenizer: Tokenizer, validation_fraction: float, shard_tokens: int
) -> list[ShardWriter]:
    if not validation_fraction:
        return [stack.enter_context(ShardWriter.create(output, tokenizer, shard_tokens))]
    # The two writers publish inside a directory that is itself staged: both splits appear in one rename.
    parent = stack.enter_context(staged_directory(output))
    return [stack.enter_context(ShardWriter.create(parent / name, tokenizer, shard_tokens)) for name in _SPLITS]


def _refuse_empty(writers: list[ShardWriter], documents: int, validation_fraction: float) -> None:
    if not documents:
        raise DataError("the corpus is empty: the input files hold no document with any text")
    for name, writer in zip(_SPLITS, writers):
        if not writer.documents:
            raise DataError(
                f"the {name} split is empty: none of the {documents} documents falls into it with"
                f" --validation-fraction {validation_fraction}; change the fraction or add data"
            )


class _Batches:
    """Documents grouped for the workers; white space alone is no document, and is counted in `empty`."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self.empty = 0
        self._documents = documents

    def __iter__(self) -> Iterator[list[Document]]:
        batch: list[Document] = []
        size = 0
        for document in self._documents:
            if not document.text or document.text.isspace():
                self.empty += 1
                continue
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


class _Encoder:
    """Tokenizes batches. Only its arguments travel to a worker process, which loads the tokenizer for itself, once."""

    def __init__(self, tokenizer_path: str, validation_fraction: float) -> None:
        self.tokenizer = load_tokenizer(tokenizer_path)
        self._arguments = (tokenizer_path, validation_fraction)
        self._threshold = int(validation_fraction * 2**64)

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return _Encoder, self._arguments

    def __call__(self, documents: list[Document]) -> EncodedBatch:
        data = [_utf8(document) for document in documents]
        encoded = self._encode(documents)
        in_validation = [bool(self._threshold) and _position(text) < self._threshold for text in data]
        splits = tuple(
            self._join([ids for ids, validation in zip(encoded, in_validation) if validation == wanted])
            for wanted in (False, True)
        )
        tokens = sum(len(tokens) for tokens, _ in splits)
        return EncodedBatch(splits, len(documents), tokens, sum(map(len, data)))

    def _encode(self, documents: list[Document]) -> list[list[int]]:
        try:
            return self.tokenizer.encode_batch([document.text for document in documents])
        except DataError as error:
            batch_error = error
        for document in documents:  # one by one, to name the document
            try:
                self.tokenizer.encode(document.text)
            except DataError as error:
                raise DataError(f"{document.origin}: {error}") from error
        raise batch_error

    def _join(self, encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        eod = (self.tokenizer.eod_id,)
        lengths = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
        parts = chain.from_iterable((ids, eod) for ids in encoded)
        tokens = np.fromiter(chain.from_iterable(parts), dtype=np.uint32, count=int(lengths.sum()))
        return tokens, lengths


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        code = ord(document.text[error.start])
        raise DataError(f"{document.origin}: U+{code:04X} is half of a surrogate pair, not valid text") from error


def _position(data: bytes) -> int:
    """Where a document lies between 0 and 2**64: a hash of its text."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


_worker_encoder: _Encoder | None = None


def _start_worker(encoder: _Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _encode_in_worker(documents: list[Document]) -> EncodedBatch:
    return _worker_encoder(documents)


def _ordered_map(
    encode: Callable[[list[Document]], EncodedBatch], batches: Iterable[list[Document]], workers: int
) -> Iterator[EncodedBatch]:
    """`map(encode, batches)` over `workers` processes: in order, with a bounded number of batches under way."""
    if workers == 1:
        yield from map(encode, batches)
        return
    context = multiprocessing.get_context("spawn")  # pyarrow's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, context, _start_worker, (encode,))
    try:
        pending: deque = deque()
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process died, most likely for want of memory; use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)
