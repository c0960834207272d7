"""Draw the loss curve of a run, and print where it started and ended."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.command_line import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument(
        "--output", type=Path, metavar="PNG", help="picture to write (needs matplotlib: pip install pretrain[plot])"
    )
    arguments = parser.parse_args(argv)
    return run_tool(lambda: report(arguments))


def report(arguments: argparse.Namespace) -> None:
    from pretrain.observe.report import draw, summary

    print(summary(arguments.run))
    if arguments.output:
        draw(arguments.run, arguments.output)
        print(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
