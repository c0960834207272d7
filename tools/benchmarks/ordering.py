"""Speed of the order of samples, and of packing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
from benchmarks.corpora import document_lengths
from benchmarks.measure import MILLION, Options, Row, in_turns, rate_row, require

from pretrain.data.order import ChunkedOrder, FullOrder, permute, round_keys, unpermute
from pretrain.data.packing import GROUP, pack

_SAMPLES = 10**10


def order(options: Options) -> list[Row]:
    """Indices per second at N = 10^10 on one core, and memory in N."""
    count = options.scaled(1 << 20, 1 << 12)
    consecutive, keys = np.arange(count) + _SAMPLES // 3, round_keys(0)
    full, chunked = FullOrder(_SAMPLES, (0,)), ChunkedOrder(_SAMPLES, 1 << 16, 8, (0,))
    for images, back in (
        (permute(consecutive, _SAMPLES, keys), partial(unpermute, n=_SAMPLES, keys=keys)),
        (chunked.samples(consecutive), chunked.places),
    ):
        require(len(np.unique(images)) == count and np.array_equal(back(images), consecutive), "the order is no bijection")
    functions: dict[str, Callable[[], object]] = {
        "permute": lambda: permute(consecutive, _SAMPLES, keys),
        "unpermute, its inverse": lambda: unpermute(permute_images, _SAMPLES, keys),
        "FullOrder.samples": lambda: full.samples(consecutive),
        "ChunkedOrder.samples, 8 shards at a time": lambda: chunked.samples(consecutive),
        "numpy": lambda: np.random.default_rng(0).permutation(count),
    }
    permute_images = permute(consecutive, _SAMPLES, keys)
    turns = in_turns(functions, options)
    baseline = turns.pop("numpy").rate(count / MILLION)[0]
    more = {"target": 3.0, "baseline": baseline, "note": f"baseline: numpy permutes an array of {count:,}"}
    rows = [
        rate_row("order", f"{name}, N = 10^10", its, count / MILLION, "M indices/s/core", "cpu", **more)
        for name, its in turns.items()
    ]
    few = np.arange(4096)
    least, middle, most = (_peak_memory(partial(permute, few, n, keys)) / 1024 for n in (10**6, 10**10, 10**18))
    name, note = "memory at its peak for 4,096 indices, N = 10^18", f"baseline: N = 10^6; N = 10^10: {middle:.0f} KiB"
    return [*rows, Row("order", name, most, "KiB", target=1.1 * least, better="lower", baseline=least, note=note)]


def _peak_memory(function: Callable[[], object]) -> int:
    function()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def packing(options: Options) -> list[Row]:
    """Documents per second of best-fit packing, and how full its samples are, for log-normal lengths."""
    rows = []
    for length in (1024, 2048, 8192):
        lengths = np.minimum(document_lengths(np.random.default_rng(0), options.scaled(GROUP, 1 << 10)), length)
        sample_of, samples = pack(lengths, length)
        loads = np.bincount(sample_of, weights=lengths)
        require(len(loads) == samples and loads.max() <= length, "best-fit packing overfills a sample")
        functions = {"pack": partial(pack, lengths, length), "numpy": lambda lengths=lengths: np.sort(lengths)}
        turns = in_turns(functions, options)
        count = len(lengths) / MILLION
        baseline = turns["numpy"].rate(count)[0]
        note = f"groups of {len(lengths):,} documents; baseline: numpy sorts their lengths"
        name = f"best fit, sequences of {length}"
        full, padded = 100 * loads.mean() / length, 100 * lengths.mean() / length
        beside = "baseline: padded, a document or a part of one to a sample"
        rows += [
            rate_row("packing", name, turns["pack"], count, "M documents/s/core", "cpu", baseline=baseline, note=note),
            Row("packing", f"{name}: inputs that are tokens", full, "%", baseline=padded, note=beside),
        ]
    return rows
