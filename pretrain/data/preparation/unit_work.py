"""Does one unit of work: reads its documents, tokenizes them batch by batch, and writes a part. Memory is a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pretrain.data.preparation.documents import Content, DocumentOptions, Piece, PieceReader
from pretrain.data.preparation.encode import Encoder, load_encoder
from pretrain.data.preparation.lines import Tally
from pretrain.data.preparation.parts import PartSummary, PartWriter
from pretrain.data.shards.transfer import Remote
from pretrain.data.tokenizers.tokenizer import TokenizerIdentity
from pretrain.errors import DataError

BATCH_CHARACTERS = 1 << 19
BATCH_DOCUMENTS = 4096
_SAMPLED_UNITS = 64
_SAMPLED_CHARACTERS = 1 << 17
_LAST_PLACE = 2**64 - 1
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class UnitJob:
    """One unit as a process gets it. `inputs`: the numbers of the pieces' files. `cuts_tail`: the end of each document belongs to the
    validation split, instead of some documents.
    """

    unit: int
    pieces: tuple[Piece, ...]
    inputs: tuple[int, ...]
    options: DocumentOptions
    tokenizer_path: str
    tokenizer: TokenizerIdentity
    engine: str
    fim_rate: float
    fim_spm_rate: float
    validation_fraction: float
    cuts_tail: bool
    deduplicate: bool
    parts: Path


@dataclass(frozen=True)
class Work:
    """The work since the last report; `consumed` counts bytes of input."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    consumed: int = 0


@dataclass
class _Batch:
    contents: list[Content] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    readers: list[PieceReader] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)

    def keep(self, numbers: list[int]) -> None:
        """Leave out the other documents."""
        for name, values in vars(self).items():
            setattr(self, name, [values[number] for number in numbers] if values else values)


def do_unit(job: UnitJob, report: Callable[[Work], None]) -> PartSummary:
    """Read, tokenize and write one unit. Raises DataError naming the place in the input; nothing is left behind then.

    If a server or network fails in a way that may pass, the unit is begun again, until the retries end.
    """
    done = Work()

    def count(work: Work) -> None:
        nonlocal done
        done = Work(*(a + b for a, b in zip(dataclasses.astuple(done), dataclasses.astuple(work))))
        report(work)

    def attempt() -> PartSummary:
        nonlocal done
        report(Work(*(-number for number in dataclasses.astuple(done))))  # takes back the reports of an earlier attempt
        done = Work()
        return _attempt(job, count)

    return Remote().persist(job.pieces[0].file.path, attempt)


def _attempt(job: UnitJob, report: Callable[[Work], None]) -> PartSummary:
    begin = time.perf_counter()
    encoder = load_encoder(job.tokenizer_path, job.tokenizer, job.engine, job.fim_rate, job.fim_spm_rate)
    encode_begin = encoder.seconds
    with PartWriter(job.parts, job.unit, encoder.dtype, job.deduplicate) as part:
        unit = _Unit(job, encoder)
        consumed = 0
        for batch in unit.batches():
            tokens, lengths = unit.encoded(batch)
            if not len(lengths):  # the vocabulary can express no document
                continue
            columns = {"bytes": batch.sizes, "input": batch.inputs, "row": batch.rows, "validation": unit.split(batch)}
            if job.deduplicate:
                columns["hash"] = np.frombuffer(b"".join(batch.hashes), "<u8").reshape(-1, 2)
            part.add(tokens, lengths, **columns)
            report(Work(len(lengths), len(tokens), sum(batch.sizes), unit.consumed - consumed))
            consumed = unit.consumed
        report(Work(consumed=unit.consumed - consumed))
        tally = unit.tally
        return part.finish(
            rows=tally.rows,
            empty=tally.empty,
            invalid=tally.invalid,
            invalid_rows=tally.invalid_rows,
            marks=tally.marks,
            seconds=time.perf_counter() - begin,
            encode_seconds=encoder.seconds - encode_begin,
        )


def sample_texts(jobs: Sequence[UnitJob], end_id: int) -> Iterator[str]:
    """A sample of the corpus: some documents, or the beginnings of long ones, from the beginnings of up to 64 evenly spread units.

    Documents that cannot be read or encoded are skipped here; their units report them with their place.
    """
    for job in jobs[:: -(-len(jobs) // _SAMPLED_UNITS)]:
        characters, options = 0, dataclasses.replace(job.options, max_invalid=sys.maxsize)
        with contextlib.suppress(DataError):
            for content, _ in PieceReader(job.pieces[0], options, end_id, Tally()).documents():
                if not isinstance(content, str) or characters > _SAMPLED_CHARACTERS:
                    break
                characters += len(content)
                sample = content[:_SAMPLED_CHARACTERS]
                if sample.isascii() or not _HALF_PAIR.search(sample):
                    yield sample


class _Unit:
    def __init__(self, job: UnitJob, encoder: Encoder) -> None:
        self.tally = Tally()
        self.consumed = 0
        self._job, self._encoder = job, encoder
        self._threshold = int(job.validation_fraction * 2**64)
        self._hashed = bool(self._threshold) or job.deduplicate

    def batches(self) -> Iterator[_Batch]:
        """The documents with text, grouped. White space alone is not a document; it is counted."""
        batch, size, before = _Batch(), 0, 0
        for number, piece in zip(self._job.inputs, self._job.pieces):
            piece.file.refuse_changes()
            self.tally.consumed = 0
            reader = PieceReader(piece, self._job.options, self._encoder.tokenizer.eod_id, self.tally)
            for content, row, place in self._placed(reader):
                size += self._add(batch, content, number, row, reader, place)
                if size >= BATCH_CHARACTERS or len(batch.contents) >= BATCH_DOCUMENTS:
                    self.consumed = before + min(self.tally.consumed, piece.size)
                    yield batch
                    batch, size = _Batch(), 0
            piece.file.refuse_changes()
            before += piece.size
        self.consumed = before
        if batch.contents:
            yield batch

    def _placed(self, reader: PieceReader) -> Iterator[tuple[Content, int, int | None]]:
        """Documents with their rows, and their place between 0 and 2**64 unless their content decides it."""
        for content, row in reader.documents():
            if not self._job.cuts_tail or not isinstance(content, str):
                yield content, row, None
                continue
            cut = tail_begin(content, self._job.validation_fraction)
            head, tail = content[:cut], content[cut:]
            if not _is_blank(content):
                self._refuse_blank(reader.origin(row), head, tail)
            yield head, row, _LAST_PLACE
            yield tail, row + content.count("\n", 0, cut), 0

    def _refuse_blank(self, origin: str, head: str, tail: str) -> None:
        """Raise DataError if a document with text is cut and one of its two parts has no text."""
        for name, part, which, change in (("train", head, "first", "smaller"), ("validation", tail, "last", "larger")):
            if _is_blank(part):
                raise DataError(
                    f"{origin}: one document, cut by --validation-fraction {self._job.validation_fraction} into two; its {which} {len(part)} "
                    f"of {len(head) + len(tail)} characters, the {name} split, hold no text; choose a {change} fraction"
                )

    def _add(self, batch: _Batch, content: Content, number: int, row: int, reader: PieceReader, place: int | None) -> int:
        """Add a document; return its number of characters or ids."""
        if isinstance(content, str):
            if _is_blank(content):
                self.tally.empty += 1
                return 0
            data: bytes | None = None
            if self._hashed or not content.isascii():
                data = self._utf8(content, row, reader)
                if data is None:
                    return 0
            batch.sizes.append(len(content) if data is None else len(data))
        else:
            if not len(content):
                self.tally.empty += 1
                return 0
            data = np.ascontiguousarray(content, "<u4").tobytes() if self._hashed else b""
            batch.sizes.append(0)
        if self._threshold:
            batch.positions.append(document_position(data) if place is None else place)
        if self._job.deduplicate:
            batch.hashes.append(hashlib.blake2b(data, digest_size=16).digest())
        batch.contents.append(content)
        batch.inputs.append(number)
        batch.rows.append(row)
        batch.readers.append(reader)
        return len(content)

    def _utf8(self, text: str, row: int, reader: PieceReader) -> bytes | None:
        try:
            return text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is not a character
            code = ord(text[error.start])
        reader.leave_out(row, f"U+{code:04X} is half of a surrogate pair, not valid text")
        return None

    def encoded(self, batch: _Batch) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and lengths of the documents of a batch. Documents that the vocabulary cannot express are removed from it."""
        try:
            return self._encode(batch.contents)
        except DataError as error:
            batch_error = error
        kept = []
        for number, (content, row, reader) in enumerate(zip(batch.contents, batch.rows, batch.readers)):
            try:  # one by one, to name the document
                self._encode([content])
                kept.append(number)
            except DataError as error:
                reader.leave_out(row, str(error))
        if len(kept) == len(batch.contents):
            raise batch_error
        batch.keep(kept)
        return self._encode(batch.contents)

    def _encode(self, contents: Sequence[Content]) -> tuple[np.ndarray, np.ndarray]:
        """Encode runs of texts and of ids (a folder may hold both) in their order."""
        kinds = [isinstance(content, str) for content in contents]
        if all(kinds):
            return self._encoder.encode(contents)
        if not any(kinds):
            return self._encoder.check(contents)
        results = [(self._encoder.encode if text else self._encoder.check)([item]) for item, text in zip(contents, kinds)]
        return np.concatenate([tokens for tokens, _ in results]), np.concatenate([lengths for _, lengths in results])

    def split(self, batch: _Batch) -> list[bool] | bool:
        """Which documents belong to the validation split."""
        return [position < self._threshold for position in batch.positions] if self._threshold else False


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def tail_begin(text: str, fraction: float) -> int:
    """The beginning of the last `fraction` of a text: at the next line, else at the next word, else right there."""
    place = int(len(text) * (1 - fraction))
    for end in ("\n", " "):
        begin = text.find(end, place) + 1
        if begin and not _is_blank(text[begin:]):
            return begin
    return place


def document_position(data: bytes) -> int:
    """The place of a document between 0 and 2**64: a hash of its text as UTF-8, or of its ids as little-endian uint32."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
