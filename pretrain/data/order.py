"""Which sample stands at each position of the stream: the source, by a mixture, and the place in an epoch, by a permutation.

The permutation of range(n) is keyed and computed per index: no array, no state, O(1) memory in n. It is a balanced Feistel network on
2h bits with 4^h >= n. It walks the cycle until it lands inside range(n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002), so it is bijective by construction. Each round hashes the right half with the finaliser of splitmix64 (Steele et al.,
OOPSLA 2014) under its own key. It keeps the *high* bits of the product, so that every output bit depends on every input bit. Rounds
that only mix upwards leave long runs of indices that are all even or all odd.

The mixture has stages of different weights. It cuts the stream into segments, in each of which the weights are constant, and a segment
into blocks of BLOCK samples. The cumulative shares decide how many samples of a block each source has (largest remainder, in
integers). So after any number of whole blocks every source is within one sample of its share. A permutation of the block spreads them.

    position --segment, block--> table of the block: source, n --> the n-th sample of the source, counted over all epochs

A source's samples are counted in the order of their positions, through all segments, so a change of weights loses or repeats no
sample. A segment ends with its stage, or when a source has come `max_epochs` times; its share then goes to the others. The
samples before a position depend on nothing after it, so later stages and new sources can be added during a run.

Nothing here depends on world size, batch size or the planned length of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pretrain.conventions import scramble
from pretrain.errors import ConfigError

ROUNDS = 6  # part of the definition of the order
_MIN_HALF_BITS = 3
BLOCK = 4096  # part of the definition of the order
UNIT = 1 << 32  # shares are whole multiples of 1 / UNIT
_TABLES = 64  # blocks whose tables are kept: 3 MB


def round_keys(*identity: object) -> np.ndarray:
    """ROUNDS 64-bit keys from anything with a stable text form, e.g. (seed, epoch, fingerprint)."""
    digest = hashlib.blake2b("/".join(map(str, identity)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Images of `indices` (each in range(n)) under the permutation of range(n) that `keys` select; int64 in, int64 out.

    Raises ValueError for an index outside range(n) or n outside 1..2^62.
    """
    return _walk(indices, n, keys, _feistel)


def unpermute(images: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """The indices that `permute` takes to `images`: its inverse, at the same cost."""
    return _walk(images, n, keys, _feistel_back)


def _walk(
    values: np.ndarray, n: int, keys: np.ndarray, step: Callable[[np.ndarray, int, np.ndarray], np.ndarray]
) -> np.ndarray:
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"n={n} is outside 1..2^62")
    values = np.asarray(values, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"indices must lie in range({n})")
    half_bits = max(_MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
    result = step(values.astype(np.uint64).ravel(), half_bits, keys)
    outside = np.flatnonzero(result >= np.uint64(n))
    while outside.size:
        walked = step(result[outside], half_bits, keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return result.astype(np.int64).reshape(values.shape)


def _feistel(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ _mix(right + key, half_bits)
    return (left << bits) | right


def _feistel_back(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for key in keys[::-1]:
        left, right = right ^ _mix(left + key, half_bits), left
    return (left << bits) | right


def _mix(z: np.ndarray, half_bits: int) -> np.ndarray:
    return scramble(z) >> np.uint64(64 - half_bits)


@dataclass(frozen=True)
class FullOrder:
    """Any sample may come at any place."""

    size: int
    identity: tuple[object, ...]

    def samples(self, places: np.ndarray) -> np.ndarray:
        return permute(places, self.size, round_keys(*self.identity))

    def places(self, samples: np.ndarray) -> np.ndarray:
        return unpermute(samples, self.size, round_keys(*self.identity))


@dataclass(frozen=True)
class ChunkedOrder:
    """Two levels, so that few shards are open at a time. Chunks of neighbouring samples come in a permuted order, and the samples
    of each window of `window` chunks are permuted.

        samples   |chunk 0|chunk 1|chunk 2|chunk 3|c4|        the last chunk may be short
        chunks    |chunk 2|c4|chunk 0|chunk 3|chunk 1|        permuted
        places    |-- window 0 --|-- window 1 --|-wi-|        permuted within each
    """

    size: int
    chunk: int
    window: int
    identity: tuple[object, ...]

    def samples(self, places: np.ndarray) -> np.ndarray:
        line = self._within_windows(np.asarray(places, dtype=np.int64), permute)
        short_end = (self._short_ordinal + 1) * self.chunk - self._missing
        line = np.where(line >= short_end, line + self._missing, line)
        return permute(line // self.chunk, self._chunks, self._chunk_keys) * self.chunk + line % self.chunk

    def places(self, samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, dtype=np.int64)
        ordinal = unpermute(samples // self.chunk, self._chunks, self._chunk_keys)
        line = ordinal * self.chunk - np.where(ordinal > self._short_ordinal, self._missing, 0) + samples % self.chunk
        return self._within_windows(line, unpermute)

    @property
    def _chunks(self) -> int:
        return -(-self.size // self.chunk)

    @property
    def _missing(self) -> int:
        """How many samples the last chunk lacks."""
        return self._chunks * self.chunk - self.size

    @functools.cached_property
    def _chunk_keys(self) -> np.ndarray:
        return round_keys("chunks", *self.identity)

    @functools.cached_property
    def _short_ordinal(self) -> int:
        """The place in the order of the last, short chunk."""
        return int(unpermute(np.array([self._chunks - 1]), self._chunks, self._chunk_keys)[0])

    def _within_windows(self, line: np.ndarray, move: Callable[[np.ndarray, int, np.ndarray], np.ndarray]) -> np.ndarray:
        length = self.chunk * self.window
        result = np.empty_like(line)
        windows = line // length
        for window in np.unique(windows):
            here, start = windows == window, int(window) * length
            size = min(length, self.size - start)
            result[here] = start + move(line[here] - start, size, round_keys("window", window, *self.identity))
        return result


# ---- the mixture of sources ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Relative weights of the sources up to a stream position (None: without end)."""

    until: int | None
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Segment:
    """A stretch of the stream with constant shares. `base`: samples of each source before `start`."""

    start: int
    end: int | None
    shares: tuple[int, ...]
    base: tuple[int, ...]

    def before(self, block: int) -> list[int]:
        """Samples of each source in the blocks before `block` of this segment: its share, rounded by largest remainder."""
        return _rounded([divmod(block * BLOCK * share, UNIT) for share in self.shares], block * BLOCK)


class Mixture:
    """The segments of a stream of samples, and the source of every sample."""

    def __init__(self, stages: Sequence[Stage], sizes: Sequence[int], max_epochs: Sequence[int | None], seed: int) -> None:
        """`sizes`: samples of each source; `max_epochs`: how often each may be repeated, None without limit.

        Raises ConfigError for a weight too small to be drawn, and for stages in which no weight is above zero.
        """
        self.seed = seed
        self.segments: list[Segment] = []
        self._limits = [None if epochs is None else epochs * size for epochs, size in zip(max_epochs, sizes)]
        self._table = functools.lru_cache(_TABLES)(self._make_table)
        start: int | None = 0
        for number, stage in enumerate(stages):
            if start is not None and not any(stage.weights):
                raise ConfigError(f"data.stages.{number}.weights: no source has a weight above 0")
            try:
                start = self._add_stage(stage, start)
            except ConfigError as error:
                place = "data.sources" if len(stages) == 1 else f"data.stages.{number}.weights"
                raise ConfigError(f"{place}: {error}") from error
        self.length = start
        """Samples that the mixture has; None: without end."""

    def _add_stage(self, stage: Stage, start: int | None) -> int | None:
        """Append the segments of a stage. Return its end, which comes early if all its sources are used up."""
        while start is not None and (stage.until is None or start < stage.until):
            counts = self.counts(start)
            used_up = [limit is not None and count >= limit for limit, count in zip(self._limits, counts)]
            weights = [0.0 if used else weight for used, weight in zip(used_up, stage.weights)]
            if not any(weights):
                break
            self.segments.append(Segment(start, stage.until, _shares(weights), tuple(counts)))
            start = self._end_of_last(stage.until)
            self.segments[-1] = dataclasses.replace(self.segments[-1], end=start)
        return start

    # ---- from positions to samples ------------------------------------------------------------------------------------

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each stream position, and the number of its sample, counted from 0 over all epochs.

        Raises IndexError beyond `length`, if the stages or sources of the stream end.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if self.length is not None and positions.size and positions.max() >= self.length:
            raise IndexError(f"position {positions.max()} lies beyond the {self.length} samples of the mixture")
        starts = np.array([segment.start for segment in self.segments])
        segments = np.searchsorted(starts, positions, side="right") - 1
        blocks, slots = np.divmod(positions - starts[segments], BLOCK)
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        for segment, block in set(zip(segments.tolist(), blocks.tolist())):
            here = (segments == segment) & (blocks == block)
            table_sources, table_numbers = self._table(segment, block)
            sources[here], numbers[here] = table_sources[slots[here]], table_numbers[slots[here]]
        return sources, numbers

    def counts(self, position: int) -> list[int]:
        """Samples of each source before a stream position."""
        if position == 0:
            return [0] * len(self._limits)
        starts = [segment.start for segment in self.segments]
        number = int(np.searchsorted(starts, position - 1, side="right")) - 1
        segment = self.segments[number]
        block, rest = divmod(position - segment.start, BLOCK)
        counts = np.add(segment.base, segment.before(block))
        if rest:
            counts = counts + np.bincount(self._table(number, block)[0][:rest], minlength=len(counts))
        return counts.tolist()

    def positions(self, source: int, numbers: np.ndarray) -> np.ndarray:
        """Stream positions of a source's n-th samples: the inverse of `locate`. -1 for samples that never come."""
        result = np.full(len(numbers), -1, dtype=np.int64)
        for i, number in enumerate(np.asarray(numbers).tolist()):
            result[i] = self._position(source, number)
        return result

    def history(self, until: int) -> list[dict[str, Any]]:
        """The values that decided the positions before `until`: the starts of segments, and their shares per source number."""
        return [
            {"start": segment.start, "shares": {str(s): share for s, share in enumerate(segment.shares) if share}}
            for segment in self.segments
            if segment.start < until
        ]

    # ---- inside -------------------------------------------------------------------------------------------------------

    def _make_table(self, segment: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and number of every sample of a block."""
        one = self.segments[segment]
        first, after = one.before(block), one.before(block + 1)
        counts = [b - a for a, b in zip(first, after)]
        drawn = np.repeat(np.arange(len(counts)), counts)
        if len(counts) - counts.count(0) > 1:
            slots = permute(np.arange(BLOCK), BLOCK, round_keys("mixture", self.seed, one.start, block))
            drawn = drawn[slots]
        numbers = np.empty(BLOCK, dtype=np.int64)
        for source in np.flatnonzero(counts):
            numbers[drawn == source] = one.base[source] + first[source] + np.arange(counts[source])
        return drawn, numbers

    def _end_of_last(self, until: int | None) -> int | None:
        """The end of the last segment: that of its stage, or the place where a source would be repeated too often."""
        last, segment = len(self.segments) - 1, self.segments[-1]
        around: dict[int, tuple[int, int]] = {}  # the positions between which a source is used up
        for source, limit in enumerate(self._limits):
            if limit is not None and segment.shares[source]:
                wanted, share = limit - segment.base[source], segment.shares[source]
                # After any number of blocks a source is within one sample of its share, and its samples may lie anywhere in a
                # block.
                low, high = ((wanted + d) * UNIT // share + segment.start for d in (-1, 2))
                around[source] = low - BLOCK, high + BLOCK
        first = min((high for _, high in around.values()), default=0)
        ends = [self._position_in(last, s, self._limits[s]) for s, (low, _) in around.items() if low <= first]
        return min(ends if until is None else [until, *ends], default=None)

    def _position(self, source: int, number: int) -> int:
        for s, segment in enumerate(self.segments):
            after = None if s + 1 == len(self.segments) else self.segments[s + 1].base[source]
            if number < segment.base[source] or not segment.shares[source] or (after is not None and number >= after):
                continue
            position = self._position_in(s, source, number)
            return position if segment.end is None or position < segment.end else -1
        return -1

    def _position_in(self, segment: int, source: int, number: int) -> int:
        """The position of a source's sample `number` in a segment without end."""
        one = self.segments[segment]
        wanted = number - one.base[source]
        if one.shares[source] == UNIT:
            return one.start + wanted
        # Rounding moves samples by less than one, and a block has at least about one sample of the source.
        near = wanted * UNIT // (one.shares[source] * BLOCK)
        low, high = max(0, near - 1), near + 2
        while low + 1 < high:  # the last block that starts with no more than `wanted` samples
            middle = (low + high) // 2
            low, high = (middle, high) if one.before(middle)[source] <= wanted else (low, middle)
        drawn, numbers = self._table(segment, low)
        return one.start + low * BLOCK + int(np.flatnonzero((drawn == source) & (numbers == number))[0])


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights in units of 1 / UNIT, which add up to UNIT exactly.

    They are computed as fractions of the numbers as written. Sums of floats differ between Python versions, and so would the order.
    """
    written = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(written)
    shares = _rounded([divmod(weight / total * UNIT, 1) for weight in written], UNIT)
    for source, (weight, share) in enumerate(zip(weights, shares)):
        if weight > 0 and share * BLOCK < UNIT:
            raise ConfigError(
                f"source {source}: its weight {weight:g} is below 1/{BLOCK} of the sum {float(total):g} and is too small to be drawn "
                "evenly; raise it, or prepare small sources together as one"
            )
    return tuple(shares)


def _rounded(parts: Sequence[tuple[int, int | Fraction]], total: int) -> list[int]:
    """Numbers, as their whole parts and their remainders, rounded to integers that add up to `total`."""
    counts = [whole for whole, _ in parts]
    by_remainder = sorted(range(len(parts)), key=lambda source: (-parts[source][1], source))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts
