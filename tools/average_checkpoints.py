"""Average the weights of several checkpoints: the last ones of a run, or those of several runs."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="CKPT_OR_RUN_DIR", help="checkpoints, or run directories (the newest one of each)"
    )
    parser.add_argument("--output", type=Path, required=True, help="new directory: a checkpoint with weights only")
    parser.add_argument("--last", type=int, metavar="N", help="the N newest checkpoints of one run directory")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="how much each checkpoint counts, in the order of the paths, or from the oldest on (default: all alike)",
    )
    arguments = parser.parse_args(argv)
    if arguments.last is not None and arguments.last < 2:
        parser.error("--last must be 2 or more")
    return run_tool(lambda: average(arguments))


def average(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint.averaging import average_checkpoints, checkpoints_to_average

    checkpoints = checkpoints_to_average(arguments.paths, arguments.last)
    done = average_checkpoints(checkpoints, arguments.output, arguments.shares)
    for checkpoint, share in zip(done.checkpoints, done.shares):
        print(f"{share:6.1%}   {checkpoint}")
    print(f"averaged {len(done.checkpoints)} checkpoints: {done.parameters:,} parameters, fp32")
    print(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
