"""Draw docs/images/quality.png: bits per byte that each program reached, from tools/benchmarks/quality_results.jsonl."""

import argparse
import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "benchmarks" / "quality_results.jsonl"
COLORS = {"pretrain": "C0", "nanoGPT's loop": "C1", "HF Trainer": "C2"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "quality.png", metavar="PNG")
    arguments = parser.parse_args()
    draw([json.loads(line) for line in RESULTS.read_text().splitlines()], arguments.output)
    print(arguments.output)
    return 0


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = sorted({result["minutes"] for result in results})
    figure, panels = pyplot.subplots(
        len(budgets), 1, figsize=(9, 1 + 0.45 * rows(results)), sharex=True, squeeze=False, layout="constrained",
        height_ratios=[rows([r for r in results if r["minutes"] == budget]) for budget in budgets],
    )  # fmt: skip
    for panel, budget in zip(panels[:, 0], budgets):
        groups = defaultdict(list)
        for result in results:
            if result["minutes"] == budget:
                groups[result["program"], f"{result['setting']}, {result['format']}"].append(result["bits_per_byte"])
        best_last = sorted(groups.items(), key=lambda group: -sum(group[1]) / len(group[1]))
        for place, ((program, _), bits) in enumerate(best_last):
            mean = sum(bits) / len(bits)
            panel.barh(place, mean, color=COLORS[program], alpha=0.35)
            panel.plot(bits, [place] * len(bits), "o", color=COLORS[program])
            panel.annotate(f"{mean:.3f}", (max(bits), place), xytext=(8, 0), textcoords="offset points", va="center")
        panel.set_yticks(range(len(best_last)), [f"{program}\n{setting}" for (program, setting), _ in best_last])
        panel.set_title(f"{budget:g} minutes on two cores", loc="left")
        panel.margins(x=0.12)
    panels[-1, 0].set_xlabel("bits per byte of a text that was not trained on (a dot per seed; less is better)")
    figure.savefig(path, dpi=110)


def rows(results: list[dict]) -> int:
    """How many rows the figure has for these results."""
    return len({(result["minutes"], result["program"], result["setting"], result["format"]) for result in results})


if __name__ == "__main__":
    raise SystemExit(main())
