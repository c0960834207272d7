"""What tools/bench.py data measures, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrain.bench import loading, ordering, preparation, training
from pretrain.bench.measure import Options, Row

PARTS: dict[str, Callable[[Options], list[Row]]] = {
    "order": ordering.order,
    "loader": loading.loader,
    "shards": loading.shards,
    "start": loading.start,
    "packing": ordering.packing,
    "preparation": preparation.preparation,
    "wait": training.wait,
    "inspect": training.inspect,
}


def measure(parts: Sequence[str], options: Options) -> list[Row]:
    """The rows of these parts, in this order. Raises DataError when something computes a wrong result; slow is no error."""
    rows = []
    for part in parts:
        options.say(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
        rows += PARTS[part](options)
    return rows
