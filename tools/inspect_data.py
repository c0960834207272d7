"""Show what a run reads or has read: the batch of a step, the steps of a document, the coverage of its sources, damaged files."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

SHOWN, SHOWN_IN_HTML = 8, 64  # samples, unless --samples says more
SIGHTINGS = 100  # of a document, in the text
LINES, WIDTH, WIDEST = 12, 100, 5000  # of the text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s (--run RUN_DIR | --config FILE) WHAT [options]")
    of = parser.add_argument_group("of which run").add_mutually_exclusive_group()
    of.add_argument("--run", type=Path, metavar="RUN_DIR", help="a run that has started, whether or not it has ended")
    of.add_argument("--config", type=Path, metavar="FILE", help="a planned run, with key=value after it")
    what = parser.add_argument_group("what")
    what.add_argument("--step", type=int, metavar="N", help="the batch of step N (from 1), past or to come")
    what.add_argument("--document", type=int, metavar="D", help="the steps that see document D (from 0)")
    what.add_argument("--coverage", action="store_true", help="how much of each source was read, up to now or to --step")
    what.add_argument("--corrupt-check", metavar="DIR_OR_RUN", help="hash the files of prepared data, or of a run's")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rank", type=int, metavar="R", help="only the part of the batch that data-parallel rank R reads (from 0)"
    )
    how.add_argument("--source", metavar="NAME", help="the source of --document; needed if there are several")
    how.add_argument("--epochs", type=int, metavar="K", help="--document: look as far as epoch K, beyond the run's last step")
    how.add_argument(
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="--config: data-parallel ranks (default: those of the configuration, or 1)",
    )
    how.add_argument(
        "--samples",
        type=int,
        metavar="K",
        help=f"most samples shown, 0: all (default: {SHOWN}; HTML {SHOWN_IN_HTML}; JSON all)",
    )
    how.add_argument("--lines", type=int, metavar="L", help=f"most lines of a document, 0: all (default: {LINES})")
    how.add_argument("--ids", action="store_true", default=None, help="show token ids too")
    how.add_argument("--width", type=int, metavar="W", help=f"columns of the text (default: {WIDTH})")
    how.add_argument("--json", action="store_true", help="everything, as one JSON object")
    how.add_argument("--html", type=Path, metavar="FILE", help="write the batch as a page for a browser")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --config")
    arguments = parser.parse_intermixed_args(argv)
    check_usage(parser, arguments)
    arguments.lines = LINES if arguments.lines is None else arguments.lines
    arguments.width = WIDTH if arguments.width is None else arguments.width
    return run_tool(lambda: inspect(arguments))


def check_usage(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    asked = [name for name in ("document", "corrupt_check") if getattr(arguments, name) is not None]
    asked += ["coverage"] if arguments.coverage else ["step"] if arguments.step is not None else []
    if len(asked) != 1:
        parser.error("give one of --step N, --document D, --coverage and --corrupt-check DIR_OR_RUN")
    if (arguments.run is None and arguments.config is None) != (asked == ["corrupt_check"]):
        parser.error("--corrupt-check takes the place of --run and --config, and everything else needs one of them")
    if (arguments.overrides or arguments.ranks) and arguments.config is None:
        parser.error("key=value and --ranks go with --config; a run that has started has its own")
    check_ways(parser, arguments, asked[0])
    for name, least in (("samples", 0), ("lines", 0), ("width", 40), ("epochs", 1), ("ranks", 1)):
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if arguments.width is not None and arguments.width > WIDEST:
        parser.error(f"--width must be at most {WIDEST}")


def check_ways(parser: argparse.ArgumentParser, arguments: argparse.Namespace, asked: str) -> None:
    """End with bad usage for an option that would do nothing."""
    options = {"step": ("rank", "html", "samples", "lines", "ids"), "document": ("source", "epochs")}
    for needs, option in ((needs, option) for needs, group in options.items() for option in group):
        if getattr(arguments, option) is not None and asked != needs:
            parser.error(f"--{option} goes with --{needs}")
    if arguments.html is not None and arguments.json:
        parser.error("--html writes a page and --json prints an object; give one of them")
    without_text = [f"--{name.replace('_', '-')}" for name in ("html", "json", "corrupt_check") if getattr(arguments, name)]
    for option in ("lines", "ids", "width"):
        if getattr(arguments, option) is not None and without_text:
            parser.error(f"--{option} is about the text, and has no effect with {without_text[0]}; leave it out")


def inspect(arguments: argparse.Namespace) -> None:
    from pretrain.data.inspection import views

    if arguments.corrupt_check is not None:
        from pretrain.data.inspection.integrity import check_integrity, refuse_damage

        integrity = check_integrity(arguments.corrupt_check)
        show(arguments, integrity, views.integrity_lines(integrity))
        refuse_damage(integrity)
        return
    history = open_history(arguments)
    if arguments.coverage:
        from pretrain.data.inspection.coverage import measure_coverage

        coverage = measure_coverage(history, arguments.step)
        show(arguments, coverage, views.coverage_lines(coverage, arguments.width))
    elif arguments.document is not None:
        from pretrain.data.inspection.inspected_step import find_document

        found = find_document(
            history, arguments.document, arguments.source, arguments.epochs, None if arguments.json else SIGHTINGS
        )
        show(arguments, found, views.sightings_lines(found, arguments.width))
    else:
        show_step(arguments, history)


def open_history(arguments: argparse.Namespace) -> Any:
    from pretrain.data.inspection.history import History

    if arguments.run is not None:
        return History.read(arguments.run)
    from pretrain.config.load import load_config

    config, _ = load_config(arguments.config, arguments.overrides)
    return History.planned(config, arguments.ranks)


def show_step(arguments: argparse.Namespace, history: Any) -> None:
    from pretrain.data.inspection import views
    from pretrain.data.inspection.inspected_step import check_digest, inspect_step

    default = None if arguments.json else SHOWN_IN_HTML if arguments.html else SHOWN
    most = default if arguments.samples is None else arguments.samples or None
    step = inspect_step(history, arguments.step, arguments.rank, most)
    if arguments.html:
        views.write_page(step, arguments.html)
        print(arguments.html)
    else:
        show(arguments, step, views.step_lines(step, arguments.width, arguments.lines, arguments.ids))
    check_digest(step)


def show(arguments: argparse.Namespace, found: Any, lines: Iterable[str]) -> None:
    print(json.dumps(dataclasses.asdict(found)) if arguments.json else "\n".join(lines), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
