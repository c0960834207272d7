"""Results of inspection as lines of plain text for a person. JSON is the exact form; here unprintable characters are escaped."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator

from pretrain.data.inspection.coverage import Coverage, SourceCoverage
from pretrain.data.inspection.inspected_step import DocumentPiece, InspectedSample, InspectedStep
from pretrain.data.inspection.integrity import Integrity
from pretrain.data.inspection.sightings import Sighting, Sightings


def summary_of(step: InspectedStep) -> list[tuple[str, str]]:
    """The batch as a whole, as (subject, text); the first lines of every view."""
    state = "made" if step.made else f"future: the run is at step {step.current_step}"
    micro = step.sequences // step.ranks // step.micro_sequences
    drawn = ", ".join(f"{name} {count:,}" for name, count in step.samples_of.items())
    inputs = step.sequences * step.sequence_length
    digest = {
        True: "matches metrics.jsonl",
        False: f"DIFFERS from metrics.jsonl, {step.logged_digest}: the step read other samples",
        None: "not in metrics.jsonl: the step was not logged" if step.made else "the step is in the future",
    }[step.matches]
    return [
        ("step", f"{step.step:,} of {step.last_step:,} of {step.run}, {state}"),
        (
            "batch",
            f"{step.sequences:,} samples of {step.sequence_length:,} tokens at stream positions {step.first_position:,}.."
            f"{step.first_position + step.sequences - 1:,}: "
            f"{_count(step.ranks, 'rank')} x {_count(micro, 'micro-step')} x {step.micro_sequences:,}",
        ),
        ("sources", drawn),
        (
            "data",
            f"packing {step.packing}, document mask {'on' if step.document_mask else 'off'}, "
            f"loss on boundaries {'on' if step.boundary_loss else 'off'}, order of seed {step.seed}",
        ),
        ("targets", _targets(step, inputs)),
        ("digest", f"{step.digest} {digest}"),
    ]


def _targets(step: InspectedStep, inputs: int) -> str:
    if step.objective == "span_corruption":
        return f"{step.target_tokens:,} of {inputs:,} tokens are taken out in spans and carry a loss, as do sentinels and ends"
    return f"{step.target_tokens:,} of {inputs:,} carry a loss"


def heading_of(sample: InspectedSample) -> str:
    """A sample in a line."""
    epoch = f"epoch {sample.epoch}"
    return (
        f"position {sample.position:,}, rank {sample.rank}, micro-step {sample.micro_step}: "
        f"{escaped(sample.source)} sample {sample.sample:,}, {epoch}"
    )


def label_of(piece: DocumentPiece) -> str:
    """The document of a piece, and which part of it the piece is."""
    where = f" from {escaped(piece.input)} row {piece.row:,}"
    last = piece.offset + piece.length
    part = "whole" if piece.length == piece.document_tokens else f"tokens {piece.offset:,}..{last - 1:,}"
    return f"document {piece.document:,}{where}, {part} of {_count(piece.document_tokens, 'token')}"


def notes_of(sample: InspectedSample, objective: str) -> str:
    """How many targets carry no loss, empty if all do. For spans: where they are."""
    if objective == "span_corruption":
        return f"taken out: tokens {', '.join(_ranges(i + 1 for i, target in enumerate(sample.targets) if target is not None))}"
    ignored = sample.targets.count(None)
    if not ignored:
        return ""
    padding = f", {sample.padding:,} of them padding" if sample.padding else ""
    return f"{ignored:,} of {len(sample.targets):,} targets carry no loss{padding}"


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Rising numbers as text: first..last for each run of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [f"{first}..{last}" if last > first else str(first) for first, last in runs]


def unshown_of(step: InspectedStep) -> str:
    """How many samples were not shown; empty if all were."""
    left = step.asked - len(step.shown)
    return f"{_count(left, 'more sample')} not shown (--samples 0 shows all)" if left else ""


def step_lines(step: InspectedStep, width: int, most_lines: int, ids: bool) -> Iterator[str]:
    """The batch of a step. `most_lines`: lines of a document's text, 0 for all; `ids`: show token ids too."""
    yield from _table(summary_of(step), width)
    for sample in step.shown:
        yield ""
        yield _rule(heading_of(sample), width)
        for piece in sample.pieces:
            yield from _wrapped(label_of(piece), width, "┌ ", "│   ")
            yield from _cut(_text_lines(piece.text, width), most_lines)
            if ids:
                numbers = " ".join(map(str, sample.tokens[piece.place : piece.place + piece.length]))
                yield from _wrapped(f"ids {numbers}", width, "│ ", "│     ")
            left = piece.document_tokens - piece.offset - piece.length
            yield "└ end of document" if piece.ends else f"└ cut: {_count(left, 'token')} of the document to follow"
        if note := notes_of(sample, step.objective):
            yield f"  {note}"
    if note := unshown_of(step):
        yield ""
        yield note


def sightings_lines(found: Sightings, width: int) -> Iterator[str]:
    """The steps of a run that read a document."""
    origin = f", from {escaped(found.input)} row {found.row:,}"
    yield from _table(
        [
            ("document", f"{found.document:,} of {escaped(found.source)}{origin}: {_count(found.tokens, 'token')}"),
            ("samples", ", ".join(f"{n:,}" for n in found.samples[:20]) + (", …" if len(found.samples) > 20 else "") or "none"),
        ],
        width,
    )
    if not found.samples:
        yield "it is in no sample: it lies in the tail of the source, which is too short for one"
    elif not found.seen:
        yield f"no step up to {found.until:,} of {found.run} reads it; --epochs K looks beyond"
    else:
        yield ""
        rows = [_sighting(one) for one in found.seen]
        yield from _grid(["step", "rank", "micro-step", "position", "epoch", "sample", ""], rows)
    if not found.complete:
        yield "and more times (--json has all)"


def _sighting(one: Sighting) -> list[str]:
    numbers = (one.step, one.rank, one.micro_step, one.position, one.epoch, one.sample)
    return [*(f"{number:,}" for number in numbers), "made" if one.made else "to come"]


def coverage_lines(coverage: Coverage, width: int) -> Iterator[str]:
    """How much a run has read of each source."""
    yield from _table(
        [
            ("run", f"{coverage.run}, step {coverage.step:,} of {coverage.last_step:,}"),
            ("read", f"{coverage.samples:,} samples, {coverage.inputs:,} inputs"),
        ],
        width,
    )
    yield ""
    head = ["source", "packing", "length", "samples", "drawn", "epochs", "distinct", "unseen", "tokens", "targets", "padding"]
    yield from _grid(head, [_source_row(source) for source in coverage.sources])
    if not all(source.exact for source in coverage.sources):
        yield "~ in proportion to whole epochs"
    for source in coverage.sources:
        if source.left_out:
            yield f"{escaped(source.name)}: the last {_count(source.left_out, 'token')} fill no sample and are never an input"
    for segment in coverage.segments if len(coverage.sources) > 1 else []:
        yield ""
        yield f"positions {segment.start:,}..{segment.end - 1:,}"
        rows = [
            [name, f"{wanted:.4%}", f"{segment.achieved[name]:.4%}", f"{segment.achieved[name] - wanted:+.4%}"]
            for name, wanted in segment.wanted.items()
        ]
        yield from _grid(["source", "wanted", "achieved", "difference"], rows)


def _source_row(source: SourceCoverage) -> list[str]:
    about = "" if source.exact else "~"
    amounts = [f"{about}{number:,}" for number in (source.tokens, source.targets, source.padding)]
    counts = [source.packing, *(f"{number:,}" for number in (source.sequence_length, source.samples, source.drawn))]
    unseen = f"{source.unseen:,} ({source.unseen / source.samples:.1%})"
    return [escaped(source.name), *counts, f"{source.epochs:.3f}", f"{source.distinct:,}", unseen, *amounts]


def integrity_lines(integrity: Integrity) -> Iterator[str]:
    """Every damaged file, and how many files were checked."""
    for damage in integrity.damaged:
        yield f"damaged  {escaped(damage.file)}: {damage.problem}"
    yield f"{_count(integrity.files, 'file')} hashed, {integrity.bytes:,} bytes: {len(integrity.damaged) or 'none'} damaged"


# ---- text ---------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """`text` with everything that does not print (controls, invisible and direction marks, unassigned) as a backslash escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def columns(character: str) -> int:
    """The number of terminal columns that a printable character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _text_lines(text: str, width: int) -> Iterator[str]:
    """The lines of a text. A line that is too long continues after a dotted bar."""
    for line in text.split("\n") if text else []:
        line = escaped(line)
        if line.isascii() and len(line) <= width - 2:
            yield f"│ {line}"
            continue
        for number, part in enumerate(_broken(line, width - 2)):
            yield ("┊ " if number else "│ ") + part


def _broken(line: str, width: int) -> Iterator[str]:
    part, used = [], 0
    for character in line:
        needed = columns(character)
        if used + needed > width:
            yield "".join(part)
            part, used = [], 0
        part.append(character)
        used += needed
    yield "".join(part)


def _cut(lines: Iterable[str], most: int) -> Iterator[str]:
    lines = iter(lines)
    yield from itertools.islice(lines, most or None)
    left = sum(1 for _ in lines)
    if left:
        yield f"│ … {_count(left, 'more line')} (--lines 0 shows all)"


def _wrapped(text: str, width: int, first: str, after: str) -> Iterator[str]:
    """`text` broken between words."""
    line, empty = first, True
    for word in text.split(" "):
        if not empty and len(line) + 1 + len(word) > width:
            yield line
            line, empty = after, True
        line += word if empty else f" {word}"
        empty = False
    yield line


def _table(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    for subject, text in rows:
        yield from _wrapped(escaped(text), width, f"{subject:<9}", " " * 9)


def _rule(text: str, width: int) -> str:
    return f"── {text} " + "─" * max(2, width - len(text) - 4)


def _grid(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table. The first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in [head, *rows]:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
