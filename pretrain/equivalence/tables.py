"""What a comparison of layouts found, as Markdown: how far results differ, and what each layout sends and holds."""

from __future__ import annotations

from pretrain.equivalence.comparison import Row
from pretrain.equivalence.measured_run import Measured


def table(rows: list[Row]) -> str:
    """A line per layout with the differences in every number format."""
    formats = list(dict.fromkeys(row.format for row in rows))
    titles = [f"{f}: {title}" for f in formats for title in ("gradient of step 1", "loss of every step", "gradient norm")]
    lines = [["layout", *titles, "samples"], ["---"] * (len(titles) + 2)]
    for name in dict.fromkeys(row.case.name for row in rows):
        own = [row for row in rows if row.case.name == name]
        figures = [f"{figure:.1e}" for row in own for figure in (row.gradient, row.loss, row.grad_norm)]
        lines.append([name, *figures, "same" if all(row.same_batches for row in own) else "OTHER"])
    return _markdown(lines)


def costs(rows: list[Row]) -> str:
    """A line per layout and number format: collectives of a step, counted and by formula; bytes that a rank sends and holds; the verdict."""
    titles = [
        "layout",
        "format",
        "micro-steps",
        "collectives of a step, and their formula",
        "sent by a rank",
        "peak memory",
        "verdict",
    ]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        cells = ["-"] * 4
        if row.measured:
            sent = [one.sent for one in row.measured if one.sent is not None]
            shown = (_collectives(row.measured), _size(max(sent))) if sent else ("-", "-")
            cells = [str(row.measured[0].micro_steps), *shown, _size(_peak(row))]
        lines.append([row.case.name, row.format, *cells, verdict(row, rows)])
    return _markdown(lines)


def verdict(row: Row, rows: list[Row]) -> str:
    """What a layout computes, whether it communicates as the formula says, and what it costs more than simpler layouts."""
    said = ["equal" if row.equal else "DIFFERENT"]
    if not row.measured:
        return f"{said[0]}; nothing measured, the run has fewer than 3 steps"
    if not all(one.as_expected for one in row.measured):
        said.append("OTHER COLLECTIVES than the formula's")
    alone = [
        r for r in rows if r.case.processes == 1 and r.format == row.format and r.case.micro == row.case.micro and r.measured
    ]
    if row.case.processes > 1 and alone and _peak(row) > _peak(alone[0]):
        said.append("more memory than single")
    if any((one.sent or 0) > one.sent_by_ddp for one in row.measured):
        said.append("sends more than DDP")
    return "; ".join(said)


def _peak(row: Row) -> int:
    return max(one.peak for one in row.measured)


def _collectives(measured: tuple[Measured, ...]) -> str:
    """Those of a rank, or of each stage's ranks where they differ: `all-gather 28 = 4 x 7`."""
    texts = [_of_rank(one) for one in measured]
    if len(set(texts)) == 1:
        return texts[0]
    ranks = {text: [str(rank) for rank, other in enumerate(texts) if other == text] for text in texts}
    return "; ".join(f"rank {', '.join(own)}: {text}" for text, own in ranks.items())


def _of_rank(one: Measured) -> str:
    parts = []
    for kind in dict.fromkeys([*one.expected, *one.collectives]):
        count = one.collectives.get(kind, 0)
        if one.unknown is None or kind in one.unknown:
            parts.append(f"{kind} {count}, -")
        else:
            sign = "=" if count == one.expected.get(kind, 0) else "≠"
            parts.append(f"{kind} {count} {sign} {one.formula.get(kind, '0')}")
    return ", ".join(parts) or "none"


def _size(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
