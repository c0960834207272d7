"""The content of a step's batch: samples, the documents in them, tokens, text. And the inverse: when a run reads a document.

step --history--> stretch --schedule--> stream positions --stream--> samples --pieces--> documents --tokenizer--> text
document --samples.find--> samples --stream.positions--> positions --schedule--> steps, ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.conventions import IGNORED
from pretrain.data.inspection.history import History, Stretch
from pretrain.data.samples import Samples
from pretrain.data.shards.reader import PreparedData
from pretrain.data.stream import DIGEST_MODULUS, Stream, digest
from pretrain.data.tasks import Spans
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import DataError

_ROWS = 64  # samples in memory at a time: batches may be of 10^7 tokens


@dataclass(frozen=True)
class DocumentPiece:
    """A stretch of one document in a sample.

    `input`, `row`: the file that the document came from, and its line or row there, from 0. `offset`, `place`: where the first
    token lies in the document and in the sample. `document_tokens`: the document's length with its end-of-document token. `text`
    is without that token; `ends`: whether it is here.
    """

    document: int
    input: str
    row: int
    offset: int
    length: int
    document_tokens: int
    place: int
    ends: bool
    text: str


@dataclass(frozen=True)
class InspectedSample:
    """A sample of a batch. Ranks, micro-steps, samples and epochs are counted from 0.

    `targets`: the token after each token, None without a loss; with span corruption, None if that token is not taken out.
    """

    position: int
    rank: int
    micro_step: int
    source: str
    sample: int
    epoch: int
    tokens: list[int]
    targets: list[int | None]
    padding: int
    pieces: list[DocumentPiece]


@dataclass(frozen=True)
class InspectedStep:
    """The batch of a step. `shown`: the requested samples; everything else is about the whole batch.

    `tokenizer`: directory of the data's tokenizer. `digest`: see stream.digest, over all ranks. `logged_digest`: that of metrics.jsonl,
    None if the step was not logged. `digest_matches`: whether the two are equal, None without a logged one.
    """

    run: str
    tokenizer: str
    step: int
    made: bool
    current_step: int
    last_step: int
    first_position: int
    sequences: int
    micro_sequences: int
    ranks: int
    rank: int | None
    sequence_length: int
    rows_per_sample: int
    packing: str
    objective: str
    document_mask: bool
    boundary_loss: bool
    seed: int
    samples_of: dict[str, int]
    target_tokens: int
    taken_out: int | None
    digest: str
    logged_digest: str | None
    asked: int
    shown: list[InspectedSample]
    digest_matches: bool | None


def inspect_step(history: History, step: int, rank: int | None = None, most: int | None = None) -> InspectedStep:
    """The batch of a step, of one data-parallel rank or all. `most`: the number of samples to take apart; None: all.

    Raises DataError or ConfigError for a step or rank that the run does not have, and for data that cannot be read.
    """
    stretch = history.stretch_of(step)
    config, ranks, stream = stretch.config, stretch.start.data_size, stretch.stream
    if rank is not None and not 0 <= rank < ranks:
        raise DataError(f"--rank {rank}: step {step} is read by " + (f"ranks 0..{ranks - 1}" if ranks > 1 else "rank 0 alone"))
    first, after = stretch.consumed(step - 1), stretch.consumed(step)
    share = (after - first) // ranks
    wanted = np.arange(first, after) if rank is None else first + rank * share + np.arange(share)
    shown = wanted if most is None else wanted[:most]
    reader = _StretchReader(stretch, first, after - first)
    spans = Spans.of_data(config.data)
    target_tokens, total, samples = 0, 0, []
    for positions in np.split(np.arange(first, after), range(_ROWS, after - first, _ROWS)):
        tokens_BT, targets_BT = np.empty((2, len(positions), stream.sequence_length), dtype=np.int64)
        stream.read(positions, tokens_BT, targets_BT)
        total += digest(positions, tokens_BT, targets_BT)
        if spans is not None:  # the model learns the tokens that are taken out
            lost_BT = spans.masks(stretch.stream.shuffle.seed, positions)[:, 1:]
            targets_BT[:, -1] = IGNORED
            targets_BT[:, :-1] = np.where(lost_BT, tokens_BT[:, 1:], IGNORED)
        target_tokens += int(np.count_nonzero(targets_BT != IGNORED))
        here = np.isin(positions, shown)
        samples += reader.samples(positions[here], tokens_BT[here], targets_BT[here])
    own, logged = f"{total % DIGEST_MODULUS:013x}", (history.logged(step) or {}).get("batch")
    sources = stream.locate(np.arange(first, after))[0]
    counts = np.bincount(sources, minlength=len(stream.sources)).tolist()
    return InspectedStep(
        run=history.name,
        tokenizer=str(stream.data.tokenizer_path),
        step=step,
        made=step <= history.current,
        current_step=history.current,
        last_step=history.last,
        first_position=first,
        sequences=after - first,
        micro_sequences=config.batch.micro_sequences,
        ranks=ranks,
        rank=rank,
        sequence_length=stream.sequence_length,
        rows_per_sample=stretch.schedule.rows_at(first),
        packing=config.data.packing,
        objective=config.data.objective,
        document_mask=config.data.document_mask,
        boundary_loss=config.data.boundary_loss,
        seed=stream.shuffle.seed,
        samples_of={source.name: count for source, count in zip(stream.sources, counts)},
        target_tokens=target_tokens if spans is None else (after - first) * spans.target_length,
        taken_out=None if spans is None else target_tokens,
        digest=own,
        logged_digest=logged,
        asked=len(wanted),
        shown=samples,
        digest_matches=None if logged is None else logged == own,
    )


def check_digest(step: InspectedStep) -> None:
    """Raise DataError if the step was logged and read other samples than those shown."""
    if step.digest_matches is False:
        raise DataError(
            f"step {step.step}: the step read other samples than those shown: their digest is {step.digest}, but metrics.jsonl has "
            f"{step.logged_digest}; the data or the program was changed since"
        )


def _place(stretch: Stretch, number: int, sequences: int) -> tuple[int, int]:
    """Rank and micro-step of sample `number` among the `sequences` of a step."""
    rank, place = divmod(number, sequences // stretch.start.data_size)
    return rank, place // stretch.config.batch.micro_sequences


class _StretchReader:
    """Takes samples apart."""

    def __init__(self, stretch: Stretch, first: int, sequences: int) -> None:
        self.stretch, self.first, self.sequences = stretch, first, sequences
        self.stream: Stream = stretch.stream
        self.tokenizer: Tokenizer = load_tokenizer(self.stream.data.tokenizer_path)

    def samples(self, positions: np.ndarray, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Iterator[InspectedSample]:
        located = (values.tolist() for values in self.stream.locate(positions))
        for row, (position, source, sample, epoch) in enumerate(zip(positions.tolist(), *located)):
            rank, micro_step = _place(self.stretch, position - self.first, self.sequences)
            pieces = list(self._pieces(self.stream.sources[source], sample, tokens_BT[row]))
            targets = targets_BT[row].tolist()
            yield InspectedSample(
                position=position,
                rank=rank,
                micro_step=micro_step,
                source=self.stream.sources[source].name,
                sample=sample,
                epoch=epoch,
                tokens=tokens_BT[row].tolist(),
                targets=[None if target == IGNORED else target for target in targets],
                padding=len(targets) - sum(piece.length for piece in pieces),
                pieces=pieces,
            )

    def _pieces(self, source: Samples, sample: int, tokens_T: np.ndarray) -> Iterator[DocumentPiece]:
        data, place = source.data, 0
        for start, length in source.pieces(sample):
            for document, begin, end in documents_between(data, start, start + length):
                first, upto = max(begin, start), min(end, start + length)
                ids = tokens_T[place : place + upto - first].tolist()
                ends = upto == end
                name, row = data.origin(document)
                text = self.tokenizer.decode(ids[:-1] if ends else ids)
                yield DocumentPiece(document, name, row, first - begin, upto - first, end - begin, place, ends, text)
                place += upto - first


def documents_between(data: PreparedData, start: int, end: int) -> Sequence[tuple[int, int, int]]:
    """(document, its start, its end) for the documents with tokens in the stretch [start, end) of the token stream."""
    first, last = data.document_at(start), data.document_at(end - 1)
    ends = data.document_ends(first, last + 1).tolist()
    starts = [data.document_span(first)[0], *ends[:-1]]
    return list(zip(range(first, last + 1), starts, ends))


# ---- the inverse -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sighting:
    """A sample with tokens of the document, and its step. `made`: whether the run has made that step."""

    step: int
    rank: int
    micro_step: int
    position: int
    epoch: int
    sample: int
    made: bool


@dataclass(frozen=True)
class Sightings:
    """Sightings of a document up to step `until`; `complete`: whether these are all. `samples`: those with its tokens, in the last cut
    of the data.
    """

    run: str
    source: str
    document: int
    input: str
    row: int
    tokens: int
    samples: list[int]
    until: int
    complete: bool
    seen: list[Sighting]


def find_document(
    history: History, document: int, source: str | None = None, epochs: int | None = None, most: int | None = None
) -> Sightings:
    """The steps that see a document of a source as an input. A single source need not be named.

    It looks up to the run's last step. With `epochs` it looks until the source has come so often, as if the run were that long.
    `most`: stop after so many. Raises DataError for a document or source that does not exist.
    """
    samples = _source(history.stretches[-1], source)
    data = samples.data
    if not 0 <= document < data.documents:
        raise DataError(f"document {document}: {samples.name} has documents 0..{data.documents - 1}")
    start, end = data.document_span(document)
    everywhere = _seen(history, samples, document, epochs)
    seen = list(itertools.islice(everywhere, most))
    complete = next(everywhere, None) is None
    until = history.last if epochs is None else max([history.last, *(sighting.step for sighting in seen)])
    name, row = data.origin(document)
    found = samples.find(start, end).tolist()
    return Sightings(history.name, samples.name, document, name, row, end - start, found, until, complete, seen)


def _source(stretch: Stretch, name: str | None) -> Samples:
    sources = stretch.stream.sources
    names = [source.name for source in sources]
    if name is None and len(sources) > 1:
        raise DataError(f"--source is missing: the run has {', '.join(names)}")
    if name is not None and name not in names:
        raise DataError(f"--source {name}: the run has no such source; it has {', '.join(names)}")
    return sources[0 if name is None else names.index(name)]


def _seen(history: History, samples: Samples, document: int, epochs: int | None) -> Iterator[Sighting]:
    start, end = samples.data.document_span(document)
    for stretch in history.stretches:
        stream, first, after = stretch.stream, stretch.start.samples, stretch.consumed(stretch.last)
        beyond = epochs if stretch is history.stretches[-1] else None
        # The same source may have had another name or another place.
        source = next((i for i, own in enumerate(stream.sources) if own.data.fingerprint == samples.data.fingerprint), None)
        if source is None:
            continue
        found, size = stream.sources[source].find(start, end), len(stream.sources[source])
        drawn, drawn_after = stream.mixture.counts(first)[source], stream.mixture.counts(after)[source]
        for epoch in range(drawn // size, max(beyond or 0, -(-drawn_after // size))):
            positions = stream.positions(source, found, epoch)
            for position, sample in sorted(zip(positions.tolist(), found.tolist())):
                if position >= first and (position < after or beyond is not None):
                    step = stretch.step_of(position)
                    begin, end_of_step = stretch.consumed(step - 1), stretch.consumed(step)
                    rank, micro_step = _place(stretch, position - begin, end_of_step - begin)
                    yield Sighting(step, rank, micro_step, position, epoch, sample, step <= history.current)
