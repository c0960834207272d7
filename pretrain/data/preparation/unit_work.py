"""Does one unit of work: reads its documents, tokenizes them batch by batch, and writes a part. Memory is a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.data.preparation.documents import Content, PieceReader
from pretrain.data.preparation.encode import Encoder, load_encoder
from pretrain.data.preparation.parts import PartSummary, PartWriter
from pretrain.data.preparation.preparation_plan import Piece, Settings
from pretrain.data.preparation.text_inputs import Tally
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import DataError
from pretrain.transfer import Remote

BATCH_CHARACTERS = 1 << 19
BATCH_DOCUMENTS = 4096
_SAMPLED_UNITS = 64
_SAMPLED_CHARACTERS = 1 << 17
_LAST_PLACE = 2**64 - 1
_LEAST_PART = 16
"""Characters that each side of a cut file has at least. Shorter ends would be more than the share that was asked for."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")

Work = Sequence[int]
"""The work since the last report: documents, tokens, bytes of text, bytes of input."""


@dataclass(frozen=True)
class UnitJob:
    """One unit as a process gets it. `cuts_tail`: the end of each document belongs to the validation split, instead of some documents."""

    unit: int
    pieces: tuple[Piece, ...]
    settings: Settings
    tokenizer_path: str
    tokenizer: TokenizerIdentity
    engine: str
    cuts_tail: bool
    parts: Path


def do_unit(job: UnitJob, report: Callable[[Work], None]) -> PartSummary:
    """Read, tokenize and write one unit. Raises DataError naming the place in the input; nothing is left behind then.

    If a server or network fails in a way that may pass, the unit is begun again, until the retries end.
    """
    done = np.zeros(4, np.int64)

    def count(work: Work) -> None:
        done[:] += work
        report(work)

    def attempt() -> PartSummary:
        report((-done).tolist())  # takes back the reports of an earlier attempt
        done[:] = 0
        return _attempt(job, count)

    return Remote().persist(job.pieces[0].file.path, attempt)


def _attempt(job: UnitJob, report: Callable[[Work], None]) -> PartSummary:
    settings = job.settings
    encoder = load_encoder(job.tokenizer_path, job.tokenizer, job.engine, settings.fim_rate, settings.fim_spm_rate)
    with PartWriter(job.parts, job.unit, encoder.dtype, settings.deduplicate) as part:
        unit = _Unit(job, encoder)
        consumed = 0
        for batch in unit.batches():
            batch, tokens, lengths = unit.encoded(batch)
            if batch:
                columns = {name: [getattr(document, name) for document in batch] for name in _COLUMNS}
                if settings.deduplicate:
                    columns["hash"] = np.frombuffer(b"".join(document.hash for document in batch), "<u8").reshape(-1, 2)
                part.add(tokens, lengths, **columns)
            report((len(batch), len(tokens), sum(document.bytes for document in batch), unit.consumed - consumed))
            consumed = unit.consumed
        return part.finish(**{name: value for name, value in vars(unit.tally).items() if name != "consumed"})


def sample_texts(units: Sequence[Sequence[Piece]], settings: Settings, end_id: int) -> Iterator[str]:
    """A sample of the corpus: some documents, or the beginnings of long ones, from the beginnings of up to 64 evenly spread units.

    Documents that cannot be read or encoded are skipped here; their units report them with their place.
    """
    settings = dataclasses.replace(settings, max_invalid=sys.maxsize)
    for pieces in units[:: -(-len(units) // _SAMPLED_UNITS)]:
        characters = 0
        with contextlib.suppress(DataError):
            for content, _ in PieceReader(pieces[0], settings, end_id, Tally()).documents():
                if not isinstance(content, str) or characters > _SAMPLED_CHARACTERS:
                    break
                characters += len(content)
                sample = content[:_SAMPLED_CHARACTERS]
                if sample.isascii() or not _HALF_PAIR.search(sample):
                    yield sample


class _Document(NamedTuple):
    """A document and its record in the part. `reader` and `row` say where it is from."""

    content: Content
    bytes: int
    input: int
    row: int
    validation: bool
    hash: bytes
    reader: PieceReader


_COLUMNS = ("bytes", "input", "row", "validation")


class _Unit:
    def __init__(self, job: UnitJob, encoder: Encoder) -> None:
        self.tally = Tally()
        self.consumed = 0
        self._job, self._encoder = job, encoder
        self._threshold = int(job.settings.validation_fraction * 2**64)
        self._hashed = bool(self._threshold) or job.settings.deduplicate

    def batches(self) -> Iterator[list[_Document]]:
        """The documents with text, grouped; the last group may be empty. White space alone is not a document; it is counted."""
        batch: list[_Document] = []
        size = before = 0
        for piece in self._job.pieces:
            piece.file.refuse_changes()
            self.tally.consumed = 0
            reader = PieceReader(piece, self._job.settings, self._encoder.tokenizer.eod_id, self.tally)
            for content, row, place in self._placed(reader):
                if (document := self._document(content, row, reader, place)) is None:
                    continue
                batch.append(document)
                size += len(content)
                if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                    self.consumed = before + min(self.tally.consumed, piece.size)
                    yield batch
                    batch, size = [], 0
            piece.file.refuse_changes()
            before += piece.size
        self.consumed = before
        yield batch

    def _placed(self, reader: PieceReader) -> Iterator[tuple[Content, int, int | None]]:
        """Documents with their rows, and their place between 0 and 2**64 unless their content decides it."""
        for content, row in reader.documents():
            if not self._job.cuts_tail:
                yield content, row, None
                continue
            cut = _tail_begin(content, self._job.settings.validation_fraction)
            head, tail = content[:cut], content[cut:]
            if min(len(head), len(tail)) < _LEAST_PART or _is_blank(head) or _is_blank(tail):
                yield content, row, _LAST_PLACE
                continue
            yield head, row, _LAST_PLACE
            yield tail, row + content.count("\n", 0, cut), 0

    def _document(self, content: Content, row: int, reader: PieceReader, place: int | None) -> _Document | None:
        """The document; None if it has no text, or text that is not valid, and is counted."""
        if _is_blank(content):
            self.tally.empty += 1
            return None
        data, size = b"", 0
        if not isinstance(content, str):
            data = np.ascontiguousarray(content, "<u4").tobytes() if self._hashed else b""
        elif content.isascii() and not self._hashed:
            size = len(content)
        else:
            try:
                data = content.encode()
            except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is not a character
                reader.leave_out(row, f"U+{ord(content[error.start]):04X} is half of a surrogate pair, not valid text")
                return None
            size = len(data)
        if self._threshold and place is None:
            place = _document_place(data)
        is_validation = place is not None and place < self._threshold
        digest = hashlib.blake2b(data, digest_size=16).digest() if self._job.settings.deduplicate else b""
        return _Document(content, size, reader.piece.number, row, is_validation, digest, reader)

    def encoded(self, batch: list[_Document]) -> tuple[list[_Document], np.ndarray, np.ndarray]:
        """The documents of a batch with their tokens and lengths, without those that the vocabulary cannot express."""
        try:
            return batch, *self._encoder.encode([document.content for document in batch])
        except DataError as error:
            batch_error = error
        kept = []
        for document in batch:
            try:  # one by one, to name the document
                self._encoder.encode([document.content])
                kept.append(document)
            except DataError as error:
                document.reader.leave_out(document.row, str(error))
        if len(kept) == len(batch):
            raise batch_error
        return kept, *self._encoder.encode([document.content for document in kept])


def _is_blank(content: Content) -> bool:
    return not len(content) or (isinstance(content, str) and content.isspace())


def _tail_begin(text: str, fraction: float) -> int:
    """The beginning of the last `fraction` of a text: at the next line, else at the next word, else right there."""
    place = int(len(text) * (1 - fraction))
    for end in ("\n", " "):
        begin = text.find(end, place) + 1
        if begin and not _is_blank(text[begin:]):
            return begin
    return place


def _document_place(data: bytes) -> int:
    """The place of a document between 0 and 2**64: a hash of its text as UTF-8, or of its ids as little-endian uint32."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
