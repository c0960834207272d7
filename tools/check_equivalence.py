"""Train a configuration in every layout that fits, and compare it with one process: gradients, losses, collectives, bytes and memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

if TYPE_CHECKING:
    from pretrain.equivalence.comparison import Row, Start

FORMATS = ("fp32", "bf16")


def main(argv: list[str] | None = None, start: Start | None = None) -> int:
    """`start`: what runs a layout, for tests; by default processes as a user starts them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="YAML")
    parser.add_argument(
        "--layouts",
        nargs="+",
        action="extend",
        metavar="LAYOUT",
        help="names of the table in docs/equivalence.md or parts of them ('table': all), or keys of the section parallel such as "
        "'strategy=fsdp tensor=2' (default: every legal layout of up to --ranks processes)",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="most processes (default: GPUs here, or on a CPU its cores, 2 to 4)"
    )
    parser.add_argument("--shrink", action="store_true", help="make the model small first, with its structure kept")
    parser.add_argument("--output", type=Path, default=Path("runs/equivalence"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--from", dest="checkpoint", metavar="CHECKPOINT", help="start from these weights, as run.init_from does"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        action="extend",
        choices=FORMATS,
        help="number formats to compute in (default: precision.compute; both if it is auto)",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every layout")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.ranks is not None and arguments.ranks < 2:
        parser.error(f"--ranks={arguments.ranks} must be at least 2")
    return run_tool(lambda: check(arguments, start))


def check(arguments: argparse.Namespace, start: Start | None) -> None:
    from pretrain.config.load import load_config
    from pretrain.equivalence.cases import chosen
    from pretrain.equivalence.comparison import compare, costs, start_processes, table

    overrides = [*arguments.overrides, *([f"run.init_from={arguments.checkpoint}"] if arguments.checkpoint else [])]
    choice = chosen(arguments.config, overrides, arguments.layouts, arguments.ranks, arguments.shrink)
    print("\n".join(choice.lines), flush=True)
    config, _ = load_config(arguments.config, choice.overrides)
    rows: list[Row] = []
    formats = [config.precision.compute] if config.precision.compute in FORMATS else FORMATS
    for number_format in arguments.formats or formats:
        rows += compare(
            arguments.config, choice.overrides, arguments.output, choice.cases, number_format, start or start_processes
        )
    text = f"{table(rows)}\n\n{costs(rows)}"
    print(f"\n{text}")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")
    _refuse_differences(rows)


def _refuse_differences(rows: list[Row]) -> None:
    from pretrain.errors import TrainingError

    different = [f"{row.case.name} in {row.format}" for row in rows if not row.equal]
    if different:
        raise TrainingError(f"{len(different)} of {len(rows)} layouts compute something else: {', '.join(different)}")
    others = [f"{row.case.name} in {row.format}" for row in rows if not all(one.as_expected for one in row.measured)]
    if others:
        raise TrainingError(
            f"{len(others)} of {len(rows)} layouts communicate otherwise than the formula says: {', '.join(others)}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
