"""Draw profiled steps (log.profile) of one or several runs: what each rank computes, where it waits, which collectives are under way."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="run directories; several are drawn on one scale")
    parser.add_argument("--step", type=int, metavar="N", help="the profiled step (default: the last one of each run)")
    parser.add_argument(
        "--title", action="append", metavar="TEXT", help="a title for each run, in order: give it once a run (default: their names, or their paths where names are equal)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png", help="needs matplotlib (the extra `plot`)")
    arguments = parser.parse_args(argv)
    if arguments.output.suffix != ".png":  # matplotlib would draw into another file, whose name ends with .png
        parser.error(f"--output {arguments.output}: the name must end with .png")
    if arguments.title and len(arguments.title) != len(arguments.runs):
        parser.error(f"{len(arguments.title)} --title for {len(arguments.runs)} runs")
    return run_tool(lambda: draw(arguments))


def draw(arguments: argparse.Namespace) -> None:
    from pretrain.observe.timeline import describe_step, draw_timelines, read_step
    from pretrain.storage import real

    names = [real(run).name for run in arguments.runs]
    told_apart = [name if names.count(name) == 1 else str(run) for name, run in zip(names, arguments.runs)]
    titles = arguments.title or told_apart
    steps = [(title, read_step(run, arguments.step)) for title, run in zip(titles, arguments.runs)]
    for title, ranks in steps:
        print(*describe_step(title, ranks), sep="\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw_timelines(steps, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
