"""Draw the loss curves of runs, and print their first and last losses."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        action="append",
        metavar="RUN_DIR",
        help="may be given several times, to compare runs",
    )
    parser.add_argument("--output", type=Path, metavar="PNG", help="picture to write; needs matplotlib, the extra `plot`")
    arguments = parser.parse_args(argv)
    return run_tool(lambda: report(arguments))


def report(arguments: argparse.Namespace) -> None:
    from pretrain.observe.report import draw, summary

    for run in arguments.run:
        if len(arguments.run) > 1:
            print(f"{run}:")
        print(summary(run))
    if arguments.output:
        draw(arguments.run, arguments.output)
        print(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
