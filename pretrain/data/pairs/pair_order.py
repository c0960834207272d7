"""The order of sentence pairs, and how it falls into batches of a number of tokens.

    epoch     a permutation of all pairs, in windows                      |----- window 0 -----|----- window 1 -----|
    window    its pairs by length, cut where a batch is full of tokens    |..|....|......|...|
    batches   of the window, permuted                                     |......|..|...|....|

Pairs of one batch are of about one length, so little of it is padding. The batch of a step is a pure function of the pairs that came
before it, of (seed, fingerprint of the pairs) and of the tokens per batch; who computes which part of it is decided later. Memory
and the cost of seeking are those of a window, whatever the size of the corpus.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

import numpy as np

from pretrain.data.order import permute, round_keys
from pretrain.data.pairs.prepared import PreparedPairs
from pretrain.errors import ConfigError

WINDOW = 1 << 16  # pairs; part of the definition of the order


@dataclass(frozen=True)
class PairWindow:
    """Pairs in the order in which they come, batch after batch: batch i is `pairs[ends[i - 1] : ends[i]]`."""

    pairs: np.ndarray
    ends: np.ndarray


class PairOrder:
    """Batches of at most `tokens` tokens, a pair's count being the longest source plus the longest target of its batch."""

    def __init__(self, pairs: PreparedPairs, tokens: int, seed: int, window: int = WINDOW) -> None:
        if sum(pairs.longest) > tokens:
            raise ConfigError(
                f"batch.tokens={tokens} is less than the longest source and the longest target of {pairs.path} together, "
                f"{pairs.longest[0]} + {pairs.longest[1]}; raise it, or prepare the pairs with --max-source-length and --max-target-length"
            )
        self.pairs, self.tokens, self.seed = pairs, tokens, seed
        self.windows = -(-len(pairs) // window)
        self.window = functools.lru_cache(4)(self._window)

    def batch(self, consumed: int) -> np.ndarray:
        """The pairs of the step that begins after `consumed` pairs. Raises ValueError where no step begins."""
        epoch, place = divmod(consumed, len(self.pairs))
        number = self._window_at(place)
        window = self.window(epoch, number)
        first = place - self._start(number)
        if first and first not in window.ends:
            raise ValueError(f"no batch begins after {consumed} pairs")
        return window.pairs[first : window.ends[np.searchsorted(window.ends, first, side="right")]]

    def at(self, consumed: int) -> int:
        """Pairs of the step that begins after `consumed` pairs."""
        return len(self.batch(consumed))

    def consumed(self, steps: int) -> int:
        """About how many pairs the first `steps` steps take: as many in each as on average in the first window."""
        window = self.window(0, 0)
        return round(steps * len(window.pairs) / len(window.ends))

    def after(self, consumed: int, steps: int) -> int:
        """About how many pairs are consumed `steps` steps after `consumed`."""
        return consumed + self.consumed(steps)

    def _start(self, number: int) -> int:
        # Windows of an epoch are of equal size, as far as that is possible: none is a small rest.
        return number * len(self.pairs) // self.windows

    def _window_at(self, place: int) -> int:
        return bisect.bisect_right(range(self.windows + 1), place, key=self._start) - 1

    def _window(self, epoch: int, number: int) -> PairWindow:
        identity = ("pairs", self.seed, epoch, self.pairs.fingerprint)
        places = np.arange(self._start(number), self._start(number + 1))
        pairs = permute(places, len(self.pairs), round_keys(*identity))
        sources, targets = self.pairs.lengths(pairs)
        by_length = np.lexsort((targets, sources))  # pairs of equal lengths stay in permuted order
        pairs, sources, targets = pairs[by_length], sources[by_length], targets[by_length]
        ends = cut(sources, targets, self.tokens)
        starts = np.concatenate(([0], ends[:-1]))
        batches = permute(np.arange(len(ends)), len(ends), round_keys("batches", number, self.tokens, *identity))
        parts = [pairs[starts[i] : ends[i]] for i in batches]
        return PairWindow(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def cut(sources: np.ndarray, targets: np.ndarray, tokens: int) -> np.ndarray:
    """Where runs end of at most `tokens` tokens, padding included, that each take as many pairs as they can; at least one."""
    ends, count, source, target = [], 0, 0, 0
    for i, (s, t) in enumerate(zip(sources.tolist(), targets.tolist())):
        longest = max(source, s), max(target, t)
        if count and (count + 1) * sum(longest) > tokens:
            ends.append(i)
            count, longest = 0, (s, t)
        count, (source, target) = count + 1, longest
    return np.array([*ends, len(sources)])


def shares(sources: np.ndarray, targets: np.ndarray, ranks: int, tokens: int) -> list[list[np.ndarray]]:
    """Which pairs of a batch each rank computes in each micro-step: indices into the batch, [rank][micro-step].

    Ranks get neighbouring shares of the batch, and every rank the same number of micro-steps, as few as keep each of them to `tokens`
    tokens (0: one). Empty where there are fewer pairs than that: the rank fills up, for the others wait for it.
    """
    parts = np.array_split(np.arange(len(sources)), ranks)
    count = 1
    while tokens:
        cuts = [np.array_split(part, count) for part in parts]
        sizes = (len(cut) * (sources[cut].max() + targets[cut].max()) for cut in sum(cuts, []) if len(cut))
        if max(sizes) <= tokens or count >= max(map(len, parts)):
            break
        count += 1
    return [np.array_split(part, count) for part in parts]
