"""A picture of a profiled step: what every rank computes, when it waits, and which collectives are under way meanwhile."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import DataError, line_of, reason_of
from pretrain.observe.profile_time import COMMUNICATION, LOSS, STEP, spent
from pretrain.observe.report import pyplot_for_files
from pretrain.storage import replace_file

COLOUR_OF = {
    "forward and backward": "#8fb3d9",
    LOSS: "#c2571a",
    "optimizer": "#2f855a",
    "waiting for ranks": "#d64545",
    "collectives": "#805ad5",
}
TRACE = re.compile(r"step-(\d+)\.rank-(\d+)\.trace\.json\.gz")
_AGAIN = "profile the step again, or give another by --step"
GAP = 0.02
"""Milliseconds between pieces of one kind that are drawn as one."""


@dataclass(frozen=True)
class RankTime:
    """A rank's step: by kind, stretches in milliseconds since its begin."""

    rank: int
    milliseconds: float
    stretches: dict[str, list[tuple[float, float]]]

    def total(self, kind: str) -> float:
        """Milliseconds of a kind."""
        return sum(end - begin for begin, end in self.stretches[kind])

    @property
    def hidden(self) -> float:
        """The share of the collectives' time in which the rank did not wait for them. 0 without collectives."""
        under_way = self.total("collectives")
        waiting = sum(
            _overlap(wait, other) for wait in self.stretches["waiting for ranks"] for other in self.stretches["collectives"]
        )
        return 1 - waiting / under_way if under_way else 0.0


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def read_step(run: Path, step: int | None = None) -> list[RankTime]:
    """The ranks of a profiled step, by default of the last one. Raises DataError without such a step, and for a damaged trace."""
    if not run.is_dir():
        raise DataError(f"{run}: no such directory; give the directory of a run")
    found = {(int(m[1]), int(m[2])): path for path in (run / "profile").glob("*.gz") if (m := TRACE.fullmatch(path.name))}
    steps = sorted({number for number, _ in found})
    if not steps or (step is not None and step not in steps):
        which = f"step {step} was not profiled; there are {steps}" if steps else "no step was profiled"
        raise DataError(f"{run}: {which}; train with log.profile=[STEP]")
    chosen = steps[-1] if step is None else step
    return [_read(path, rank) for (number, rank), path in sorted(found.items()) if number == chosen]


def _read(path: Path, rank: int) -> RankTime:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        took = spent(events, any(event.get("cat") == "kernel" for event in events))
    except StopIteration as error:
        raise DataError(f"{path}: cannot be read as a trace: it lacks the span of the step, {STEP!r}; {_AGAIN}") from error
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else line_of(error)
        raise DataError(f"{path}: cannot be read as a trace: {reason}; {_AGAIN}") from error
    stretches: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLOUR_OF}
    for piece in sorted(took.pieces, key=lambda one: one.start):
        kind = {LOSS: LOSS, "optimizer": "optimizer", COMMUNICATION: "waiting for ranks"}.get(
            piece.group, "forward and backward"
        )
        _add(stretches[kind], (piece.start - took.start) / 1e3, (piece.end - took.start) / 1e3)
    for begin, end in took.collectives:
        _add(stretches["collectives"], (begin - took.start) / 1e3, (end - took.start) / 1e3)
    return RankTime(rank, (took.end - took.start) / 1e3, stretches)


def _add(stretches: list[tuple[float, float]], begin: float, end: float) -> None:
    if stretches and begin - stretches[-1][1] <= GAP:
        stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
    else:
        stretches.append((begin, end))


def draw_timelines(steps: list[tuple[str, list[RankTime]]], output: Path) -> None:
    """Draw steps, each with its title, below each other on one scale. Raises DataError without matplotlib."""
    pyplot = pyplot_for_files()
    from matplotlib.patches import Patch

    lanes = [len(ranks) for _, ranks in steps]
    figure, panels = pyplot.subplots(
        len(steps), 1, sharex=True, squeeze=False, dpi=120, layout="constrained", figsize=(9, 1.1 + sum(0.45 + 0.55 * n for n in lanes)),
        gridspec_kw={"height_ratios": lanes},
    )  # fmt: skip
    for axes, (title, ranks) in zip(panels[:, 0], steps):
        for place, rank in enumerate(ranks):
            for kind, stretches in rank.stretches.items():
                bottom, height = (place + 0.62, 0.2) if kind == "collectives" else (place + 0.08, 0.5)
                axes.broken_barh([(begin, end - begin) for begin, end in stretches], (bottom, height), color=COLOUR_OF[kind])
        axes.set_ylim(len(ranks), 0)
        axes.set_yticks([place + 0.45 for place in range(len(ranks))], [f"rank {rank.rank}" for rank in ranks])
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1, 0].set_xlabel("milliseconds since the step began")
    shown = [kind for kind in COLOUR_OF if any(rank.stretches[kind] for _, ranks in steps for rank in ranks)]
    figure.legend(
        [Patch(color=COLOUR_OF[kind]) for kind in shown],
        shown,
        loc="outside upper center",
        ncols=len(shown),
        frameon=False,
        fontsize=9,
    )
    replace_file(output, lambda aside: figure.savefig(aside, format="png"), durable=False)
    pyplot.close(figure)


def describe_step(title: str, ranks: list[RankTime]) -> list[str]:
    """A line per rank."""
    return [
        f"{title}, rank {rank.rank}: {rank.milliseconds:.1f} ms, waiting {rank.total('waiting for ranks'):.1f} ms; collectives under way "
        f"{rank.total('collectives'):.1f} ms, {rank.hidden:.0%} of that behind computation"
        for rank in ranks
    ]
