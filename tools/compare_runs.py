"""Say where two runs part: the first step and the first parameter that differ, for two layouts, commits or number formats of one run."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Exit code: 0 nothing differs, 1 something does or the runs cannot be compared."
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN_DIR")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=5e-6,
        metavar="R",
        help="relative difference that is mere rounding (default: 5e-6, for fp32)",
    )
    arguments = parser.parse_args(argv)
    if not arguments.tolerance >= 0:
        parser.error(f"--tolerance {arguments.tolerance:g} is below 0")
    return run_tool(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> int:
    from pretrain.equivalence.run_difference import compare_runs

    found = compare_runs(*arguments.runs, arguments.tolerance)
    print("\n".join(found.lines))
    print("nothing differs" if found.parted is None else f"the runs part at step {found.parted}")
    return int(found.parted is not None)


if __name__ == "__main__":
    raise SystemExit(main())
