"""A run for people: a few numbers and the loss curve."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

from pretrain.errors import DataError, install_command
from pretrain.observe.report_page import facts
from pretrain.observe.run_story import read_story
from pretrain.storage import replace_file


def _records(run: Path) -> list[dict[str, Any]]:
    """The log lines that count, without those of skipped steps, which have no loss."""
    return [record for record in read_story(run).records if record.get("loss") is not None]


def summary(run: Path) -> str:
    """The run in a few numbers, a line each: state, loss, validation, tokens, speed, time."""
    found = facts(read_story(run))
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in found.items())


def _smoothed(values: list[float]) -> list[float]:
    """The mean around each value, over a window of a tenth of the curve. The window is narrower at the ends, so as not to shift them."""
    half = len(values) // 20
    sums = [0.0, *itertools.accumulate(values)]
    widths = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + w + 1] - sums[i - w]) / (2 * w + 1) for i, w in enumerate(widths)]


COLOURS = ("#3b6ea5", "#d1662f", "#4f8f4f", "#8a5fa8", "#a0802c", "#5b5b5b")


def pyplot_for_files() -> ModuleType:
    """matplotlib's pyplot, set up to draw into files. Raises DataError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise DataError(f"drawing needs matplotlib, which is not installed; run {install_command('plot')}") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a name with two $ is a name
    from matplotlib import pyplot

    return pyplot


def draw(runs: list[Path], output: Path) -> None:
    """Loss curves over tokens as a picture. A single run also shows its single steps; several runs have a colour each."""
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), dpi=120, layout="constrained")
    for run, colour in zip(runs, itertools.cycle(COLOURS)):
        records, prefix = _records(run), "" if len(runs) == 1 else f"{run.name}, "
        millions, losses = [r["tokens"] / 1e6 for r in records], [r["loss"] for r in records]
        if len(runs) == 1:
            axes.plot(millions, losses, color=colour, linewidth=0.8, alpha=0.4, label="training, single steps")
        axes.plot(millions, _smoothed(losses), color=colour, linewidth=1.6, label=f"{prefix}training, smoothed")
        checked = [r for r in records if "validation" in r]
        for name in checked[-1]["validation"] if checked else []:
            points = [(r["tokens"] / 1e6, r["validation"][name]) for r in checked if name in r["validation"]]
            of_validation = COLOURS[1] if len(runs) == 1 else colour
            axes.plot(*zip(*points), "o-", color=of_validation, markersize=4, linewidth=1, label=f"{prefix}validation: {name}")
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel("loss (nats per token)")
    last = _records(runs[0])[-1]
    axes.set_title(
        f"{runs[0].name}: {last['loss']:.3f} after {last['step']} steps" if len(runs) == 1 else "loss of several runs"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, lambda aside: figure.savefig(aside, format="png"), durable=False)
    pyplot.close(figure)
