"""Cuts the input into units of work. A unit is read, tokenized and written by one process, and kept once it is finished.

    many small files ─┐
                      ├─▶ unit 0, unit 1, unit 2, ... in the order of the documents
    one large file  ──┘   (cut at lines, row groups, record batches or ids; compressed files, csv and web archives are never cut)

The cuts depend on the names, sizes and inner structure of the files alone: never on processes or machines, so that these may
change from one run to the next. Units are about 1/256 of the input between 2 and 32 MB, so that few files still occupy all
processes, and larger again when there would be more than 65,536 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.data.preparation.columns import WHOLE, column_parts
from pretrain.data.preparation.documents import DocumentOptions
from pretrain.data.preparation.inputs import InputFile
from pretrain.data.preparation.token_files import IdFile
from pretrain.data.remote.transfer import Remote

Span = tuple[int, int, int]
"""(number of the input file, start, stop) of a piece."""

_LEAST_BYTES, _USUAL_BYTES = 1 << 21, 1 << 25
_USUAL_UNITS, _MOST_UNITS = 1 << 8, 1 << 16
UNIT_FILES = 4096


def unit_size(files: Sequence[InputFile]) -> int:
    """Bytes of input per unit."""
    total = sum(file.size for file in files)
    return max(_LEAST_BYTES, min(_USUAL_BYTES, total // _USUAL_UNITS), total // _MOST_UNITS)


def plan_units(files: Sequence[InputFile], options: DocumentOptions, unit_bytes: int) -> list[list[Span]]:
    """The pieces of each unit. A file that is cut shares none of its units with another file."""
    units: list[list[Span]] = []
    group: list[Span] = []
    size = 0
    for number, file in enumerate(files):
        parts = _parts(file, options, unit_bytes)
        if group and (len(parts) > 1 or size + file.size > unit_bytes or len(group) == UNIT_FILES):
            units.append(group)
            group, size = [], 0
        if len(parts) > 1:
            units += [[(number, start, stop)] for start, stop in parts]
        else:
            group.append((number, 0, WHOLE))
            size += file.size
    return [*units, group] if group else units


def _parts(file: InputFile, options: DocumentOptions, unit_bytes: int) -> list[tuple[int, int]]:
    kind = file.kind(options.ids_dtype)
    if file.size <= unit_bytes or kind in ("csv", "warc") or (kind == "text" and options.text_mode == "file"):
        return [(0, WHOLE)]
    if kind in ("parquet", "arrow"):
        return Remote().persist(file.path, lambda: column_parts(file, kind, unit_bytes))
    if kind != "ids" and not file.is_divisible:
        return [(0, WHOLE)]
    length = len(IdFile(file, options.ids_dtype)) if kind == "ids" else file.size
    count = -(-file.size // unit_bytes)
    bounds = [length * part // count for part in range(count + 1)]
    return list(zip(bounds, bounds[1:]))
