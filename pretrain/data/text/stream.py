"""Training samples straight from text, for those who will not prepare: documents are tokenized while the model trains.

    corpus --number % ranks--> documents of a rank --tokenize, each closed by eod--> tokens --cut--> windows, one token shared

Documents that hold any text are numbered in the order of the corpus, and go on being numbered when it starts again; data
rank r of R takes those whose number is r modulo R. The stream of a rank never ends, so every rank can always make its
share of a step. Over the ranks each document is trained on once per epoch, but ranks do not reach the end of an epoch at
the same step: those with shorter documents are ahead.

What is exact and what is not:

- On the same number of ranks a run continues with the very tokens that come next (`Cursor`).
- On another number of ranks no document is lost and some are repeated (`continue_cursors`). The samples of a step depend on
  the number of ranks, which those of prepared data do not.
- There is no shuffle. The order is that of the files, and a shuffle buffer cannot be resumed exactly without saving it;
  prepare the data for a global one.
- Every rank reads all of the text to find its own, and again up to the cursor in a resume (within one file, or within the
  whole of a Hub dataset); prepared data has neither cost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from pretrain.data.preparation.documents import Document
from pretrain.data.text.corpus import Corpus, Place
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

# Documents are tokenized together up to these sizes. The libraries release the GIL while they tokenize but hold it while
# they make a list of the ids, about 0.1 us for each: 64K characters keep that to a few milliseconds.
_BATCH_CHARACTERS = 1 << 16
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Cursor:
    """Where the next window of a rank begins: at token `used` of the document at (`file`, `row`) of the corpus.

    `document` is the number of that document since the run began and `epoch` how often the corpus was started again. With
    `used` 0 the next window begins at the first document from there on that belongs to the rank.
    """

    epoch: int = 0
    file: int = 0
    row: int = 0
    document: int = 0
    used: int = 0

    @property
    def place(self) -> Place:
        return self.file, self.row

    def to_list(self) -> list[int]:
        """The cursor as JSON."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, values: Any) -> Cursor:
        """The cursor that `to_list` wrote. Raises CheckpointError for anything else."""
        if not isinstance(values, list) or len(values) != 5 or not all(type(v) is int and v >= 0 for v in values):
            raise CheckpointError(
                f"data cursor {values!r}: expected 5 whole numbers (epoch, file, row, document, used tokens);"
                " resume from another checkpoint"
            )
        return cls(*values)


START = Cursor()


@dataclass(frozen=True)
class Continuation:
    """Cursors of the ranks that continue a run.

    `repeated_documents`: how many documents may be seen twice, wholly or in part; `description`: a line for the log.
    """

    cursors: list[Cursor]
    repeated_documents: int
    description: str


def continue_cursors(saved: Sequence[Cursor], data_size: int) -> Continuation:
    """Cursors with which `data_size` ranks continue after the ranks that `saved` these, in the order of the ranks.

    As many ranks continue exactly. Another number of ranks starts at the smallest cursor: every document before it was
    used up by the rank it belonged to, so none is lost; those behind it that other ranks had already begun are repeated.
    """
    if len(saved) == data_size:
        return Continuation(list(saved), 0, f"text stream: {data_size} data ranks continue exactly where they were")
    first = min(saved, key=lambda cursor: (cursor.document, -cursor.used))
    # The document in progress goes on where it was, in the rank that it now belongs to.
    owner = first.document % data_size
    cursors = [first if rank == owner else replace(first, used=0) for rank in range(data_size)]
    repeated = sum(_begun(cursor, rank, len(saved), first.document) for rank, cursor in enumerate(saved))
    repeated -= first.used > 0
    return Continuation(
        cursors,
        repeated,
        f"text stream: {len(saved)} data ranks became {data_size}, all continue at document {first.document:,} of the run;"
        f" no document is lost, {repeated:,} may be seen twice",
    )


def _begun(cursor: Cursor, rank: int, ranks: int, first: int) -> int:
    """How many documents numbered `first` or above the rank of this cursor has begun."""
    end = cursor.document + (cursor.used > 0)
    return len(range(first + (rank - first) % ranks, end, ranks))


@dataclass(frozen=True)
class TextStream:
    """The endless token stream of data rank `data_rank` of `data_size`, cut into samples of `sequence_length` targets."""

    corpus: Corpus
    tokenizer: Tokenizer
    sequence_length: int
    data_rank: int = 0
    data_size: int = 1

    def identity(self) -> dict[str, Any]:
        """Everything but the number of ranks that decides the tokens, for a checkpoint to be compared with."""
        return {
            "corpus": self.corpus.identity(),
            "tokenizer_sha256": self.tokenizer.fingerprint,
            "eod_id": self.tokenizer.eod_id,
            "sequence_length": self.sequence_length,
        }

    def batches(self, share: int, cursor: Cursor = START, ahead: int = 2) -> Iterator[tuple[np.ndarray, Cursor]]:
        """Windows from `cursor` on, [share, sequence_length + 1] int64 at a time, each with the cursor after it. Endless.

        Neighbouring windows share one token. A thread reads up to `ahead` batches ahead (0: none, the caller reads); close
        the iterator to stop it. Raises DataError, after the batches before it, for a document that cannot be read or
        tokenized, for fewer documents than ranks, and for a corpus that no longer has the document of the cursor.
        """
        stop = threading.Event()
        source = self._read(share, cursor, stop)
        if ahead == 0:
            yield from source
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="text-stream")
        coming: deque[Future[tuple[np.ndarray, Cursor]]] = deque()
        try:
            while True:
                while len(coming) <= ahead:
                    coming.append(pool.submit(next, source))
                yield coming.popleft().result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            source.close()

    def _read(self, share: int, cursor: Cursor, stop: threading.Event) -> Iterator[tuple[np.ndarray, Cursor]]:
        length = self.sequence_length
        buffer = _Buffer(cursor)
        for place, tokens in self._tokenized(cursor, stop):
            buffer.add(place, tokens)
            while buffer.available > share * length:
                tokens, after = buffer.take(share * length)
                windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
                yield windows.astype(np.int64), after

    def _tokenized(self, cursor: Cursor, stop: threading.Event) -> Iterator[tuple[Cursor, np.ndarray]]:
        """The documents of this rank from `cursor` on, whole, as tokens with eod, each with the cursor of its beginning."""
        for batch in _grouped(self._owned(cursor, stop)):
            try:
                encoded = self.tokenizer.encode_batch([document.text for _, document in batch])
            except DataError:
                # One by one, so that those before the one at fault are used and that one is named.
                encoded = (_encode_one(self.tokenizer, document) for _, document in batch)
            for (place, _), ids in zip(batch, encoded):
                tokens = np.empty(len(ids) + 1, dtype=np.int32)
                tokens[:-1], tokens[-1] = ids, self.tokenizer.eod_id
                yield place, tokens

    def _owned(self, cursor: Cursor, stop: threading.Event) -> Iterator[tuple[Cursor, Document]]:
        """The documents of this rank from `cursor` on, epoch after epoch until `stop`, with cursors of their beginnings."""
        if cursor.used and cursor.document % self.data_size != self.data_rank:
            raise ValueError(f"{cursor} is inside a document of another rank than {self.data_rank} of {self.data_size}")
        epoch, number, start, resumed = cursor.epoch, cursor.document, cursor.place, cursor != START
        while True:
            first = number
            for place, document in self._from(start, resumed, stop):
                if number % self.data_size == self.data_rank:
                    yield Cursor(epoch, *place, number), document
                number += 1
            if stop.is_set():
                return
            if start == START.place and number - first < self.data_size:
                raise DataError(
                    f"the corpus has {number - first} documents with text, fewer than the {self.data_size} data ranks; use"
                    " fewer ranks, make each line a document, or prepare the data (tools/prepare_data.py)"
                )
            epoch, start, resumed = epoch + 1, START.place, False
            if epoch % 10 ** (len(str(epoch)) - 1) == 0:  # 1, 2, ... 9, 10, 20, ...: a tiny corpus shall not fill the log
                log.info("text stream: data rank %d starts epoch %d at document %d", self.data_rank, epoch, number)

    def _from(self, start: Place, resumed: bool, stop: threading.Event) -> Iterator[tuple[Place, Document]]:
        """Documents with text from `start` on, where one has to be if that is the cursor of a run being `resumed`."""
        began, passed = time.perf_counter(), 0
        for place, document in self.corpus.read(start):
            if stop.is_set():
                return
            if place < start:
                passed += 1
                continue
            if not document.text or document.text.isspace():
                continue
            if resumed and place != start:
                break
            if resumed:
                seconds = time.perf_counter() - began
                log.info("text stream: read past %d rows to %s in %.1f s", passed, document.origin, seconds)
                resumed = False
            yield place, document
        if resumed and not stop.is_set():
            raise DataError(
                f"the checkpoint continues at row {start[1]} of file {start[0]} (from 0) of the corpus, which has no text"
                " there any more; restore the corpus, or start a new run"
            )


class _Buffer:
    """Tokenized documents end to end, of which the first may be used in part."""

    def __init__(self, start: Cursor) -> None:
        self.available = -start.used  # what was used before is taken off the first document
        self._used = start.used
        self._documents: deque[tuple[Cursor, np.ndarray]] = deque()

    def add(self, start: Cursor, tokens: np.ndarray) -> None:
        if not self._documents and self._used >= len(tokens):
            raise DataError(
                f"row {start.row} of file {start.file} (from 0) of the corpus has {len(tokens):,} tokens, but the checkpoint"
                f" continues at token {self._used:,}: the corpus has changed; restore it, or start a new run"
            )
        self._documents.append((start, tokens))
        self.available += len(tokens)

    def take(self, count: int) -> tuple[np.ndarray, Cursor]:
        """The next `count` + 1 tokens, of which the last stays, and the cursor of that last one."""
        parts = []
        missing = count
        while missing:
            _, tokens = self._documents[0]
            part = tokens[self._used : self._used + missing]
            parts.append(part)
            missing -= len(part)
            self._used += len(part)
            if self._used == len(tokens):
                self._documents.popleft()
                self._used = 0
        self.available -= count
        start, tokens = self._documents[0]
        parts.append(tokens[self._used : self._used + 1])
        return np.concatenate(parts), replace(start, used=self._used)


def _grouped(documents: Iterator[tuple[Cursor, Document]]) -> Iterator[list[tuple[Cursor, Document]]]:
    batch: list[tuple[Cursor, Document]] = []
    size = 0
    try:
        for place, document in documents:
            batch.append((place, document))
            size += len(document.text)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    except DataError:
        yield batch  # what came before the one that cannot be read is used
        raise


def _encode_one(tokenizer: Tokenizer, document: Document) -> list[int]:
    try:
        return tokenizer.encode(document.text)
    except DataError as error:
        raise DataError(f"{document.origin}: {error}") from error
