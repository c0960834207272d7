"""How much of each source a run has read, in which shares, and how much is left: by arithmetic, without reading the data.

A source's samples are numbered in the order in which they are drawn, over all epochs. So each stretch of a run has drawn a range of
numbers. Within one order, ranges say how many samples are distinct. Samples are listed only if a run changed its order in mid-epoch
(run.accept_changes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pretrain.data.inspection.history import History, Stretch
from pretrain.data.order import UNIT
from pretrain.data.samples import Samples
from pretrain.data.stream import Shuffle
from pretrain.errors import DataError

_LISTED = 1 << 22  # samples listed at a time


@dataclass(frozen=True)
class SourceCoverage:
    """The samples drawn from a source, of `sequence_length` inputs each. It has `samples`; `distinct` are the different ones among
    those `drawn`, and `unseen` have not come yet.
    """

    name: str
    path: str
    packing: str
    sequence_length: int
    samples: int
    drawn: int
    distinct: int
    epochs: float
    unseen: int


@dataclass(frozen=True)
class SegmentCoverage:
    """A part of the run in which the shares of the mixture are constant; positions [start, end) of the stream.

    `wanted` and `achieved`: share of each source by name.
    """

    start: int
    end: int
    wanted: dict[str, float]
    achieved: dict[str, float]


@dataclass(frozen=True)
class Coverage:
    """The samples that a run has read after `step` steps."""

    run: str
    step: int
    last_step: int
    samples: int
    inputs: int
    sources: list[SourceCoverage]
    segments: list[SegmentCoverage]


@dataclass
class _Drawn:
    """The samples that several stretches drew from a source that they cut alike: ranges of numbers by their order."""

    source: Samples
    packing: str
    ranges: dict[Shuffle, list[tuple[int, int]]] = field(default_factory=dict)


def measure_coverage(history: History, step: int | None = None) -> Coverage:
    """Measure what a run has read after `step` steps (default: all that it has made). Raises DataError for a step that it lacks."""
    if step is None and not history.current:
        raise DataError(f"{history.name} has made no step; give --step N to see what it will have read then")
    step = history.current if step is None else step
    history.stretch_of(step)  # refuses a step that does not exist
    drawn: dict[tuple, _Drawn] = {}
    inputs = 0
    for stretch, first, after in _read(history, step):
        _add_ranges(drawn, stretch, first, after)
        inputs += (after - first) * stretch.config.data.sequence_length
    samples = history.stretch_of(step).consumed(step)
    sources = [_covered(one) for one in drawn.values()]
    return Coverage(history.name, step, history.last, samples, inputs, sources, _segments(history, step))


def _read(history: History, step: int) -> Iterator[tuple[Stretch, int, int]]:
    """The stretches of the first `step` steps, and the positions [first, after) that each has read by then."""
    for stretch in history.stretches:
        if stretch.start.step < step:
            yield stretch, stretch.start.samples, stretch.consumed(min(step, stretch.last))


def _add_ranges(drawn: dict[tuple, _Drawn], stretch: Stretch, first: int, after: int) -> None:
    stream, packing = stretch.stream, stretch.config.data.packing
    before, until = stream.mixture.counts(first), stream.mixture.counts(after)
    for number, source in enumerate(stream.sources):
        key = source.data.fingerprint, packing, source.sequence_length
        one = drawn.setdefault(key, _Drawn(source, packing))
        one.source = source  # its latest name
        if before[number] < until[number]:
            one.ranges.setdefault(stream.shuffle, []).append((before[number], until[number]))


def _covered(one: _Drawn) -> SourceCoverage:
    source, size = one.source, len(one.source)
    drawn = sum(after - first for ranges in one.ranges.values() for first, after in ranges)
    distinct = _distinct(one)
    return SourceCoverage(
        name=source.name,
        path=str(source.data.path),
        packing=one.packing,
        sequence_length=source.sequence_length,
        samples=size,
        drawn=drawn,
        distinct=distinct,
        epochs=drawn / size,
        unseen=size - distinct,
    )


def _distinct(one: _Drawn) -> int:
    """The number of different samples in the ranges."""
    size = len(one.source)
    parts: list[tuple[Shuffle, int, int, int]] = []  # order, epoch, places [begin, end) in it
    for shuffle, ranges in one.ranges.items():
        for first, after in _merged(ranges):
            for epoch in range(first // size, -(-after // size)):
                begin, end = max(first - epoch * size, 0), min(after - epoch * size, size)
                if end - begin == size:
                    return size
                parts.append((shuffle, epoch, begin, end))
    if len(parts) < 2:
        return sum(end - begin for *_, begin, end in parts)
    seen = np.zeros(size, dtype=bool)
    for shuffle, epoch, begin, end in parts:
        order = shuffle.order(one.source, epoch)
        for start in range(begin, end, _LISTED):
            seen[order.samples(np.arange(start, min(end, start + _LISTED)))] = True
    return int(seen.sum())


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers as ranges that neither touch nor overlap."""
    merged: list[tuple[int, int]] = []
    for first, after in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(after, merged[-1][1])
        else:
            merged.append((first, after))
    return merged


def _segments(history: History, step: int) -> list[SegmentCoverage]:
    """The parts of the first `step` steps with constant shares."""
    parts: list[tuple[int, int, dict[str, float], dict[str, int]]] = []  # start, end, wanted shares, samples drawn
    for stretch, first, after in _read(history, step):
        mixture, names = stretch.stream.mixture, [source.name for source in stretch.stream.sources]
        for segment in mixture.segments:
            start, end = max(first, segment.start), after if segment.end is None else min(after, segment.end)
            if start < end:
                wanted = {name: share / UNIT for name, share in zip(names, segment.shares)}
                drawn = dict(zip(names, np.subtract(mixture.counts(end), mixture.counts(start)).tolist()))
                if parts and parts[-1][2] == wanted and parts[-1][1] == start:
                    start, drawn = parts[-1][0], {name: drawn[name] + n for name, n in parts.pop()[3].items()}
                parts.append((start, end, wanted, drawn))
    return [
        SegmentCoverage(start, end, wanted, {name: n / (end - start) for name, n in drawn.items()})
        for start, end, wanted, drawn in parts
    ]
