"""Results of inspection for a person: lines of plain text, or the batch of a step as a page for a browser.

JSON is the exact form; here unprintable characters are escaped.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from pretrain.data.inspection.coverage import Coverage, SourceCoverage
from pretrain.data.inspection.inspected_step import DocumentPiece, InspectedSample, InspectedStep, Sightings
from pretrain.data.inspection.integrity import Integrity
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError


def summary_of(step: InspectedStep) -> list[tuple[str, str]]:
    """The batch as a whole, as (subject, text); the first lines of every view."""
    state = "made" if step.made else f"future: the run is at step {step.current_step}"
    micro = step.sequences // step.ranks // step.micro_sequences
    drawn = ", ".join(f"{name} {count:,}" for name, count in step.samples_of.items())
    inputs = step.sequences * step.sequence_length
    rows = f" in {step.rows_per_sample} rows" if step.rows_per_sample > 1 else ""
    digest = {
        True: "matches metrics.jsonl",
        False: f"DIFFERS from metrics.jsonl, {step.logged_digest}: the step read other samples",
        None: "not in metrics.jsonl: the step was not logged" if step.made else "the step is in the future",
    }[step.digest_matches]
    return [
        ("step", f"{step.step:,} of {step.last_step:,} of {step.run}, {state}"),
        (
            "batch",
            f"{step.sequences:,} samples of {step.sequence_length:,} tokens{rows} at stream positions {step.first_position:,}.."
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
    if step.taken_out is not None:
        return f"{step.target_tokens:,} carry a loss: {step.taken_out:,} of {inputs:,} tokens, taken out in spans, their sentinels, and ends"
    return f"{step.target_tokens:,} of {inputs:,} carry a loss"


def heading_of(sample: InspectedSample) -> str:
    """A sample in a line."""
    return (
        f"position {sample.position:,}, rank {sample.rank}, micro-step {sample.micro_step}: "
        f"{escaped(sample.source)} sample {sample.sample:,}, epoch {sample.epoch}"
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
        heading = f"── {heading_of(sample)} "
        yield heading + "─" * max(2, width - len(heading))
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
        rows = []
        for one in found.seen:
            numbers = one.step, one.rank, one.micro_step, one.position, one.epoch, one.sample
            rows.append([*(f"{number:,}" for number in numbers), "made" if one.made else "to come"])
        yield from _grid(["step", "rank", "micro-step", "position", "epoch", "sample", ""], rows)
    if not found.complete:
        yield "and more times (--json has all)"


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
    head = ["source", "packing", "length", "samples", "drawn", "epochs", "distinct", "unseen"]
    yield from _grid(head, [_source_row(source) for source in coverage.sources])
    for segment in coverage.segments if len(coverage.sources) > 1 else []:
        yield ""
        yield f"positions {segment.start:,}..{segment.end - 1:,}"
        rows = [
            [name, f"{wanted:.4%}", f"{segment.achieved[name]:.4%}", f"{segment.achieved[name] - wanted:+.4%}"]
            for name, wanted in segment.wanted.items()
        ]
        yield from _grid(["source", "wanted", "achieved", "difference"], rows)


def _source_row(source: SourceCoverage) -> list[str]:
    counts = [source.packing, *(f"{number:,}" for number in (source.sequence_length, source.samples, source.drawn))]
    unseen = f"{source.unseen:,} ({source.unseen / source.samples:.1%})"
    return [escaped(source.name), *counts, f"{source.epochs:.3f}", f"{source.distinct:,}", unseen]


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
        for number, part in enumerate(_broken(escaped(line), width - 2)):
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
    indents = {"initial_indent": first, "subsequent_indent": after}
    yield from textwrap.wrap(text, width, **indents, break_long_words=False, break_on_hyphens=False) or [first]


def _table(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    for subject, text in rows:
        yield from _wrapped(escaped(text), width, f"{subject:<9}", " " * 9)


def _grid(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table. The first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in [head, *rows]:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---- the page --------------------------------------------------------------------------------------------------------

# No scripts and nothing from outside; no text is taken for markup. Tokens are shaded in turn. Tokens that are not targets in their
# sample are grey and struck through, and a coloured bar marks each document.

_LONGEST_CHARACTER = 4  # bytes in UTF-8, so no more tokens than that
_INCOMPLETE = "\ufffd"
_GOLDEN_ANGLE = 137.508  # degrees: neighbouring documents get hues far apart

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f24; --soft: #667080; --line: #d9dee5;
  --a: #e4edfb; --b: #f1f5fb; --none: #8a93a0; --good: #11713a; --bad: #b3261e; --bar: 62%; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #dde3ea; --soft: #94a0ae; --line: #323941;
  --a: #2a3a52; --b: #212831; --none: #77818d; --good: #63c98b; --bad: #ff8a80; --bar: 55%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: 0 0 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.key { color: var(--soft); font-size: .85rem; margin: 0 0 1.5rem; } .key > span { margin-right: 1.25rem; white-space: nowrap; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 0 0 1rem; }
summary { padding: .6rem 1rem; cursor: pointer; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
summary small { font-weight: 400; color: var(--soft); margin-left: .75rem; }
section { border-left: 4px solid hsl(var(--hue) 60% var(--bar)); margin: 0 1rem 1rem; padding: 0 0 0 .85rem; }
section h2 { font-size: .82rem; font-weight: 500; color: var(--soft); margin: 0 0 .3rem; overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  font: 13px/1.7 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.a, .b { background: var(--a); border-radius: 3px; padding: .1em 0; -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.b { background: var(--b); }
.n { color: var(--none); text-decoration: line-through; text-decoration-thickness: 1px; }
.t { background: none; outline: 1px dashed var(--soft); outline-offset: -1px; }
.e { color: var(--soft); font: 11px/1 system-ui, sans-serif; border: 1px solid var(--line); border-radius: 3px; padding: .15em .4em;
  white-space: nowrap; }
.e.n { opacity: .65; }
s { text-decoration: none; color: var(--none); opacity: .55; } s::before { content: "\\21b5"; } s.tab::before { content: "\\2192"; }
.pad { margin: 0 1rem 1rem; color: var(--soft); font-size: .82rem; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # if some text became markup in spite of all, it could do nothing
_KEY = (
    '<p class="key"><span><span class="a">to</span><span class="b">kens</span> shaded in turn</span>'
    '<span><span class="a n">not a target</span> in this sample</span>'
    '<span><span class="a t">target only</span> the token after the sample</span>'
    '<span><span class="e">end</span> end-of-document token</span></p>'
)


def write_page(step: InspectedStep, file: Path) -> None:
    """Write the page of a step. Raises DataError when the file cannot be written."""
    try:
        file.write_text("".join(page(step)), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(f"{file}: cannot be written: {error.strerror}") from error


def page(step: InspectedStep) -> Iterator[str]:
    """The HTML, in parts."""
    decode = load_tokenizer(step.tokenizer).decode
    title = f"Step {step.step:,} of {step.run}" + (f", rank {step.rank}" if step.rank is not None else "")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n<dl>\n"
    )
    for subject, text in summary_of(step):
        state = {True: ' class="good"', False: ' class="bad"'}.get(step.digest_matches, "") if subject == "digest" else ""
        yield f"<dt>{subject}</dt><dd{state}>{_text(text)}</dd>\n"
    yield f"</dl>\n{_KEY}\n"
    texts = functools.lru_cache(1 << 16)(lambda ids: decode(ids))
    for sample in step.shown:
        yield from _sample(sample, step.objective, texts)
    if note := unshown_of(step):
        yield f'<p class="key">{_text(note)}</p>\n'
    yield "</body>\n</html>\n"


Decode = Callable[[tuple[int, ...]], str]


def _sample(sample: InspectedSample, objective: str, decode: Decode) -> Iterator[str]:
    note = notes_of(sample, objective)
    yield f"<details open>\n<summary>{_text(heading_of(sample))}{f'<small>{_text(note)}</small>' if note else ''}</summary>\n"
    for piece in sample.pieces:
        hue = piece.document * _GOLDEN_ANGLE % 360
        yield f'<section style="--hue:{hue:.0f}"><h2>{_text(label_of(piece))}</h2><pre>{"".join(_piece(sample, piece, decode))}</pre></section>\n'
    if sample.padding:
        yield f'<p class="pad">{sample.padding:,} tokens of padding</p>\n'
    yield "</details>\n"


def _piece(sample: InspectedSample, piece: DocumentPiece, decode: Decode) -> Iterator[str]:
    ids = sample.tokens[piece.place : piece.place + piece.length]
    body = ids[:-1] if piece.ends else ids
    place = piece.place
    for turn, (count, text) in enumerate(token_texts(decode, body)):
        # A token is the target of the input before it.
        learned = all(p > 0 and sample.targets[p - 1] is not None for p in range(place, place + count))
        title = f"{'id' if count == 1 else 'ids'} {' '.join(map(str, sample.tokens[place : place + count]))}, at {place}"
        yield f'<span class="{"ab"[turn % 2]}{"" if learned else " n"}" title="{title}">{_token(text)}</span>'
        place += count
    if piece.ends:
        learned = place > 0 and sample.targets[place - 1] is not None
        yield f'<span class="e{"" if learned else " n"}" title="id {sample.tokens[place]}, at {place}">end</span>'
        place += 1
    after = sample.targets[-1]
    if place == len(sample.tokens) and after is not None:  # the sample ends here, and its last target is the token after it
        yield f'<span class="a t" title="id {after}, target only">{_token(decode((after,))) or "end"}</span>'


def token_texts(decode: Decode, ids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The text that each token adds, as (number of tokens, text). Tokens that are parts of one character stand together."""
    before: tuple[int, ...] = ()
    start = 0
    for end in range(1, len(ids) + 1):
        here = tuple(ids[start:end])
        prefix, text = decode(before) if before else "", decode(before + here)
        if text.endswith(_INCOMPLETE) and len(here) < _LONGEST_CHARACTER and end < len(ids):
            continue
        yield len(here), text[len(prefix) :] if text.startswith(prefix) else decode(here)
        before, start = here, end


def _token(text: str) -> str:
    """A token's text as HTML. Line ends and tabs have marks, which are not copied with the text."""
    lines = ["<s class=tab></s>\t".join(_text(part) for part in line.split("\t")) for line in text.split("\n")]
    return "<s></s>\n".join(lines)


def _text(text: str) -> str:
    return escape(escaped(text))
