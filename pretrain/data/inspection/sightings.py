"""The inverse: when a run reads a document. document --samples.find--> samples --stream.positions--> positions --> steps, ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrain.data.inspection.history import History, Stretch
from pretrain.data.samples import Samples
from pretrain.errors import DataError


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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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


def _seen(history: History, samples: Samples, document: int, epochs: int | None) -> Iterator[Sighting]:
    start, end = samples.data.document_span(document)
    for stretch in history.stretches:
        index = next((i for i, own in enumerate(stretch.stream.sources) if _is_same(own, samples)), None)
        if index is not None:
            last = stretch is history.stretches[-1]
            yield from _seen_in(stretch, index, start, end, history.current, epochs if last else None)


def _source(stretch: Stretch, name: str | None) -> Samples:
    sources = stretch.stream.sources
    names = [source.name for source in sources]
    if name is None and len(sources) > 1:
        raise DataError(f"--source is missing: the run has {', '.join(names)}")
    if name is not None and name not in names:
        raise DataError(f"--source {name}: the run has no such source; it has {', '.join(names)}")
    return sources[0 if name is None else names.index(name)]


def _is_same(one: Samples, other: Samples) -> bool:
    return one.data.fingerprint == other.data.fingerprint  # a source is the same under another name or in another place


def _seen_in(stretch: Stretch, source: int, start: int, end: int, current: int, epochs: int | None) -> Iterator[Sighting]:
    stream = stretch.stream
    samples = stream.sources[source].find(start, end)
    size, first, after = len(stream.sources[source]), stretch.start.samples, stretch.consumed(stretch.last)
    drawn, drawn_after = stream.mixture.counts(first)[source], stream.mixture.counts(after)[source]
    upto = -(-drawn_after // size) if epochs is None else max(epochs, -(-drawn_after // size))
    for epoch in range(drawn // size, upto):
        positions = stream.positions(source, samples, epoch)
        for position, sample in sorted(zip(positions.tolist(), samples.tolist())):
            if position >= first and (position < after or epochs is not None):
                yield _sighting(stretch, position, sample, epoch, current)


def _sighting(stretch: Stretch, position: int, sample: int, epoch: int, current: int) -> Sighting:
    step = stretch.step_of(position)
    begin, end = stretch.consumed(step - 1), stretch.consumed(step)
    rank, place = divmod(position - begin, (end - begin) // stretch.start.data_size)
    return Sighting(step, rank, place // stretch.config.batch.micro_sequences, position, epoch, sample, step <= current)
