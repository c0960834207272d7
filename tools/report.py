"""Show runs: a few numbers, a page of curves (HTML, needs no network), or a picture of the loss (PNG)."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="run directories; several are laid over each other"
    )
    parser.add_argument(
        "--output",
        type=_page_or_picture,
        action="append",
        default=[],
        metavar="FILE",
        help="FILE.html or FILE.png, which needs matplotlib (the extra `plot`); may be given several times",
    )
    arguments = parser.parse_args(argv)
    return run_tool(lambda: report(arguments))


def _page_or_picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".html", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: the name must end with .html or .png")
    return path


def report(arguments: argparse.Namespace) -> None:
    from pretrain.observe.report import draw, summary
    from pretrain.observe.report_page import write_page

    for run in arguments.runs:
        if len(arguments.runs) > 1:
            print(f"{run}:")
        print(summary(run))
    for output in arguments.output:
        (write_page if output.suffix == ".html" else draw)(arguments.runs, output)
        print(output)


if __name__ == "__main__":
    raise SystemExit(main())
