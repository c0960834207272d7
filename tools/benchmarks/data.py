"""The parts that tools/bench.py data measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks import loading, ordering, preparing, steps
from benchmarks.measure import Options, Row

PARTS: dict[str, Callable[[Options], list[Row]]] = {
    "order": ordering.order,
    "loader": loading.loader,
    "shards": loading.shards,
    "start": loading.start,
    "packing": ordering.packing,
    "preparation": preparing.preparation,
    "wait": steps.wait,
    "inspect": steps.inspect,
}


def measure(parts: Sequence[str], options: Options) -> list[Row]:
    """The rows of these parts, in this order. Raises DataError if something computes a wrong result; slowness is no error."""
    rows = []
    for part in parts:
        options.say(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
        rows += PARTS[part](options)
    return rows
