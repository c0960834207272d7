"""The parts that tools/bench.py data measures."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks.measure import Options, Row

PARTS = {
    "order": "ordering",
    "loader": "loading",
    "shards": "loading",
    "start": "loading",
    "packing": "ordering",
    "preparation": "preparing",
    "wait": "steps",
    "inspect": "steps",
}
"""The module that has the function of a part. It is imported when the part is measured, because `--help` need not wait for torch."""


def measure(parts: Sequence[str], options: Options) -> list[Row]:
    """The rows of these parts, in this order. Raises DataError if something computes a wrong result; slowness is no error."""
    rows = []
    for part in parts:
        rows_of = getattr(importlib.import_module(f"benchmarks.{PARTS[part]}"), part)
        options.say(f"{part}: {(rows_of.__doc__ or '').splitlines()[0]}")
        rows += rows_of(options)
    return rows
