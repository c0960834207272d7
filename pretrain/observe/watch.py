"""A run as a terminal page that follows it: state, speed, losses, the last checkpoint, what the ranks do and had to say."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pretrain.errors import DataError
from pretrain.observe.followed_log import EVALUATED, FollowedLog
from pretrain.observe.metrics import METRICS_FILE, STARTS_FILE, duration, number_or_dash, read_lines, shown_number
from pretrain.observe.rank_file import RANKS_FILE
from pretrain.observe.run_story import costs_until_now, silence, unix_seconds
from pretrain.storage import read_object

BARS = "▁▂▃▄▅▆▇█"
EVENT = re.compile(r"^(?P<time>\S+ \S+) (?P<level>WARNING|ERROR|CRITICAL) rank (?P<rank>\d+) \S+: (?P<text>.*)$")
EVENT_BYTES = 1 << 16
"""The end of a rank's log that is looked through for warnings."""
MOST_EVENTS = 6
MOST_LOGS = 64
"""Logs that are looked through: those that were written to last. A thousand would be read every few seconds."""
MOST_ROWS = 8
"""Ranks that are shown one by one. Of more ranks the page counts phases, and shows the worst FEW."""
FEW = 5
SLOWER = 1.2
"""A rank lags if it works this much longer in a step than the median, and at least SLOWER_SECONDS."""
SLOWER_SECONDS = 0.01
UNHEARD_INTERVALS = 2
"""A rank that has missed so many calls is said not to answer, and a table that is so old is said to be."""
LIVE_STATES = ("starting", "running", "failed")
"""States in which it matters what the ranks do, or did last."""


def page(run: Path, width: int, height: int | None = None, log: FollowedLog | None = None) -> RenderableType:
    """The page as it stands now, in a terminal of this size; None: as high as it takes. A low terminal shows fewer numbers.

    `log`: that of the page before. Only what has come since is read. Without one, the log is read from its beginning.

    Raises DataError for a directory without a run.
    """
    status, ranks = read_object(run / "status.json"), read_object(run / RANKS_FILE)
    starts = list(read_lines(run / STARTS_FILE)) if (run / STARTS_FILE).is_file() else []
    if not starts:
        if not ranks and not (run / STARTS_FILE).is_file():
            raise DataError(f"{run}: no run has started there ({STARTS_FILE} is missing)")
        parts = [Text("starting", style="bold yellow"), *rank_parts(ranks, width), *_events(run)]
        return Panel(Group(*parts), title=Text(str(run)), title_align="left")
    start = starts[-1]
    _check_start(start, run / STARTS_FILE)
    log = log or FollowedLog(run / METRICS_FILE)
    log.look()
    steps = start["config"]["run"]["steps"]
    above = [_headline(status, log), _bar(status.get("step", 0), steps, width)]
    below = [*(rank_parts(ranks, width) if status.get("state", "starting") in LIVE_STATES else ()), _place(status, starts, run)]
    below += _events(run)
    numbers = []
    if log.last is not None:
        room = None if height is None else height - 3 - _lines([*above, *below], width)  # the border, and the curve
        numbers = [_numbers(log, status, start, width, room), _curve(log, width)]
    return Panel(Group(*above, *numbers, *below), title=Text(str(run)), title_align="left")


def _check_start(start: dict[str, Any], path: Path) -> None:
    """Raise DataError unless the record of a start has the configuration that the page shows."""
    try:
        known = isinstance(start["config"]["run"]["steps"], int) and isinstance(start["config"]["parallel"]["strategy"], str)
    except (KeyError, TypeError):
        known = False
    if not known:
        raise DataError(f"{path}: the last start has no configuration (config.run.steps, config.parallel.strategy); restore it")


def _lines(parts: Iterable[RenderableType], width: int) -> int:
    return len(Console(width=width - 4).render_lines(Group(*parts)))


def _headline(status: dict[str, Any], log: FollowedLog) -> Text:
    state = status.get("state", "starting")
    colour = {"running": "green", "finished": "blue", "failed": "red"}.get(state, "yellow")
    text = Text(state, style=f"bold {colour}")
    if status.get("reason"):
        text.append(f": {status['reason']}", style="default")
    if silent := silence(status, log.steps, log.last or {}):
        text.append(f"  {silent}", style="bold red")
    return text


def _bar(step: int, steps: int, width: int) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        f"step {step:,} of {steps:,}",
        ProgressBar(total=steps, completed=step, width=max(10, width - 45)),
        f"{step / steps:.1%}",
    )
    return row


def _numbers(log: FollowedLog, status: dict[str, Any], start: dict[str, Any], width: int, rows: int | None) -> Table:
    last, table, pairs = (
        costs_until_now(log.last or {}, status),
        Table.grid(padding=(0, 3)),
        1 if width < 90 else 2 if width < 140 else 3,
    )
    rank_speed = (last.get("tokens_per_second") or 0.0) / start.get("world_size", 1)
    evaluated = {}
    for field in EVALUATED:
        measured = log.newest(field)
        for name, value in (measured or {field: {}})[field].items():
            evaluated[f"{field.replace('_', ' ')} {name}"] = f"{shown_number(value, '.4f')} at step {measured['step']:,}"
    cells = {
        "loss": number_or_dash(last.get("loss"), ".4f"),
        "time left": duration(last.get("seconds_left")),
        **evaluated,
        "gradient norm": number_or_dash(last.get("grad_norm"), ".3f"),
        "learning rate": number_or_dash(last.get("lr"), ".2e"),
        "tokens/s": number_or_dash(last.get("tokens_per_second"), ",.0f"),
        "tokens/s and rank": number_or_dash(rank_speed or None, ",.0f"),
        "seconds a step": number_or_dash(last.get("step_seconds"), ".3f"),
        "waiting for data": number_or_dash(last.get("data_wait"), ".1%"),
        "MFU": number_or_dash(last.get("mfu"), ".1%"),
        "steps skipped": number_or_dash(last.get("skipped"), ","),
        "device hours": number_or_dash(last.get("device_hours"), ",.4g"),
        "of them in steps that count": number_or_dash(last.get("goodput"), ".1%"),
        "watts": number_or_dash(last.get("watts"), ",.0f"),
        "cost": number_or_dash(last.get("cost"), ",.2f"),
    }
    shown = [(name, value) for name, value in cells.items() if value != "-"]
    if rows is not None:
        shown = shown[: max(2, rows) * pairs]
    for first in range(0, len(shown), pairs):
        table.add_row(*(part for name, value in shown[first : first + pairs] for part in (Text(name, style="dim"), value)))
    return table


def _curve(log: FollowedLog, width: int) -> Text:
    """The loss of the second half of the run so far, as a row of bars."""
    half = [loss for loss in log.losses[len(log.losses) // 2 :] if not math.isnan(loss)]
    room = max(10, width - 34)
    size = max(1, -(-len(half) // room))
    means = [sum(part) / len(part) for part in (half[i : i + size] for i in range(0, len(half), size))]
    if not means:
        return Text("")
    low, high = min(means), max(means)
    bars = "".join(BARS[round((value - low) / (high - low or 1.0) * (len(BARS) - 1))] for value in means)
    return Text.assemble(("loss ", "dim"), f"{means[0]:.3f} ", (bars, "cyan"), f" {means[-1]:.3f}")


def _place(status: dict[str, Any], starts: list[dict[str, Any]], run: Path) -> Text:
    saved = status.get("checkpoint")
    stamp = run / "checkpoints" / saved / "manifest.json" if saved else None
    age = f", {duration(time.time() - stamp.stat().st_mtime)} ago" if stamp and stamp.is_file() else ""
    strategy = starts[-1]["config"]["parallel"]["strategy"]
    where = f"{starts[-1].get('world_size', '?')} ranks ({strategy}), main rank on {status.get('host', '?')}, process {status.get('pid', '?')}"
    return Text(f"last checkpoint {saved or 'none'}{age}; {where}; start {len(starts)}", style="dim")


def _events(run: Path) -> Iterable[RenderableType]:
    """The newest warnings and errors in the logs that were written to last. Late and lost ranks are among them: the main rank names them."""
    found = []
    states = {log: log.stat() for log in (run / "logs").glob("rank-*.log")}
    for log in sorted(states, key=lambda log: states[log].st_mtime_ns)[-MOST_LOGS:]:
        with log.open("rb") as file:
            file.seek(max(0, states[log].st_size - EVENT_BYTES))
            found += [match for line in file.read().decode("utf-8", "replace").splitlines() if (match := EVENT.match(line))]
    for match in sorted(found, key=lambda event: event["time"])[-MOST_EVENTS:]:
        colour = "yellow" if match["level"] == "WARNING" else "red"
        yield Text.assemble((f"{match['time'][:19]} rank {match['rank']} ", "dim"), (match["text"][:400], colour))


# ---- what each rank does, and which one holds up the others ----------------------------------------------------------


def rank_parts(table: dict[str, Any], width: int) -> Iterable[RenderableType]:
    """The lines about ranks. `table`: the content of ranks.json, empty without that file; `width`: of the terminal."""
    if not table.get("ranks"):
        return
    age = time.time() - unix_seconds(table["updated"])
    patience = UNHEARD_INTERVALS * table["interval"] + 2.0
    is_old = age > patience
    yield _heading(table, age, is_old)
    laggards = [entry for entry in table["ranks"] if _is_slow(entry, table["own_median"])]
    if table["world_size"] > MOST_ROWS:
        for phase, count in table["phases"].items():
            yield Text(f"  {count:>6,}  {phase}", no_wrap=True, overflow="ellipsis")
        yield _rows(_worst(table), laggards, patience, width, is_old)
    else:
        yield _rows(table["ranks"], laggards, patience, width, is_old)
    if laggards and not is_old:
        yield _lag(max(laggards, key=lambda entry: entry["own"]), table["own_median"])


def _is_slow(entry: dict[str, Any], median: float | None) -> bool:
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
