"""Collect Python source from this machine into JSON lines: a corpus that needs no download."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.command_line import run_tool  # noqa: E402
from pretrain.data.preparation.python_source import collect_python_source  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--root", metavar="DIR", help="where to look (default: the interpreter's standard library)")
    parser.add_argument("--max-mb", type=float, default=11, help="most text to collect, in MB (default: %(default)s)")
    arguments = parser.parse_args(argv)
    return run_tool(lambda: print(collect_python_source(arguments.output, arguments.root, arguments.max_mb)))


if __name__ == "__main__":
    raise SystemExit(main())
