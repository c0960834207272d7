"""The part of the terminal page that says what each rank does, and which one holds up the others. It reads ranks.json."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pretrain.observe.metrics import duration
from pretrain.observe.run_story import unix_seconds

MOST_ROWS = 8
"""Ranks that are shown one by one. Of more ranks the page counts phases, and shows the worst FEW."""
FEW = 5
SLOWER = 1.2
"""A rank lags if it works this much longer in a step than the median, and at least SLOWER_SECONDS."""
SLOWER_SECONDS = 0.01
UNHEARD_INTERVALS = 2
"""A rank that has missed so many calls is said not to answer, and a table that is so old is said to be."""


def rank_parts(table: dict[str, Any], width: int) -> Iterable[RenderableType]:
    """The lines about ranks. `table`: the content of ranks.json, empty without that file; `width`: of the terminal."""
    if not table.get("ranks"):
        return
    age = time.time() - unix_seconds(table["updated"])
    patience = UNHEARD_INTERVALS * table["interval"] + 2.0
    is_old = age > patience
    yield _heading(table, age, is_old)
    laggards = [entry for entry in table["ranks"] if is_slow(entry, table["own_median"])]
    if table["world_size"] > MOST_ROWS:
        for phase, count in table["phases"].items():
            yield Text(f"  {count:>6,}  {phase}", no_wrap=True, overflow="ellipsis")
        yield _rows(_worst(table), laggards, patience, width, is_old)
    else:
        yield _rows(table["ranks"], laggards, patience, width, is_old)
    if laggards and not is_old:
        yield _lag(max(laggards, key=lambda entry: entry["own"]), table["own_median"])


def is_slow(entry: dict[str, Any], median: float | None) -> bool:
    """Whether a rank works so much longer for itself in a step than the median that it holds up the others."""
    own = entry["own"]
    return own is not None and median is not None and own >= max(SLOWER * median, median + SLOWER_SECONDS)


def _heading(table: dict[str, Any], age: float, is_old: bool) -> Text:
    median = table["own_median"]
    text = Text.assemble((f"{table['world_size']:,} ranks", "bold"))
    if is_old:
        return text.append(f" as they were {duration(age)} ago: nothing newer is known", style="bold red")
    if median is not None:
        text.append(f", {median:.3f} s of own work in a step (median)", style="dim")
    return text


def _worst(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The few to look at: lost ones, then the slowest."""
    return sorted(table["ranks"], key=lambda e: (not e["lost"], -(e["heard"] or 0.0) // 10, -(e["own"] or 0.0)))[:FEW]


def _rows(entries: list[dict[str, Any]], laggards: list[dict[str, Any]], patience: float, width: int, is_old: bool) -> Table:
    """A line for each rank. A narrow terminal has no room for hosts, which all other messages name as well."""
    wide = width >= 80
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("rank", justify="right", no_wrap=True)
    if wide:
        made.add_column("host", no_wrap=True, overflow="ellipsis", max_width=max(8, width // 5))
    made.add_column("step", justify="right", no_wrap=True)
    made.add_column("phase", overflow="fold")
    made.add_column("for", justify="right", no_wrap=True)
    made.add_column("own work", justify="right", no_wrap=True)
    for entry in entries:
        phase, style = _phase(entry, patience), "red" if entry["lost"] or _is_silent(entry, patience) else ""
        style = "dim" if is_old else style or ("yellow" if entry in laggards else "")
        own = "-" if entry["own"] is None else f"{entry['own']:.3f} s"
        host = [Text(entry["host"] or "-")] if wide else []
        made.add_row(str(entry["rank"]), *host, f"{entry['step']:,}", Text(phase), duration(entry["seconds"]), own, style=style)
    return made


def _is_silent(entry: dict[str, Any], patience: float) -> bool:
    return not entry["lost"] and entry["heard"] is not None and entry["heard"] > patience


def _phase(entry: dict[str, Any], patience: float) -> str:
    if _is_silent(entry, patience):
        return f"no answer for {duration(entry['heard'])}; last: {entry['phase']}"
    return entry["phase"]


def _lag(entry: dict[str, Any], median: float) -> Text:
    where = f" ({entry['host']})" if entry["host"] else ""
    return Text(
        f"rank {entry['rank']}{where} holds up the others: it works {entry['own']:.3f} s for itself in a step, the median rank {median:.3f} s",
        style="yellow",
    )
