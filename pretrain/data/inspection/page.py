"""The batch of a step as one HTML file, without scripts or anything from outside. No text is taken for markup.

Tokens are shaded in turn. Tokens that are not targets in their sample are grey and struck through, and a coloured bar marks each
document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from pretrain.data.inspection.inspected_step import DocumentPiece, InspectedSample, InspectedStep
from pretrain.data.inspection.terminal import escaped, heading_of, label_of, notes_of, summary_of, unshown_of
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import DataError

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
        state = {True: ' class="good"', False: ' class="bad"'}.get(step.matches, "") if subject == "digest" else ""
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
