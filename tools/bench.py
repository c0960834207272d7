"""Measure the speed of the data path, of matrix products, layouts and optimizers on this machine. Each number stands beside its comparison."""

import argparse
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]  # a clone works without being installed

from benchmarks.data import PARTS, measure  # noqa: E402
from benchmarks.measure import Options, as_json, command, heading, machine, table  # noqa: E402

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__)
    subjects = parser.add_subparsers(dest="subject", required=True)
    data = subjects.add_parser("data", help="order, loader, many shards, start, packing, preparation, data wait, inspection")
    data.add_argument("parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)} (default: all)")
    data.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    data.add_argument(
        "--seconds",
        type=float,
        default=Options.seconds,
        metavar="S",
        help="for each group of things compared (default: %(default)s)",
    )
    data.add_argument("--scale", type=float, default=1.0, help="size of what is generated; below 1 to try it out")
    data.add_argument(
        "--source", nargs="+", default=[], metavar="GLOB", help="text to prepare (default: this Python's libraries)"
    )
    data.add_argument("--work", type=Path, metavar="DIR", help="the place for a folder of generated data (about 1 GB)")
    formats = subjects.add_parser(
        "formats", help="matrix products in fp32 and bf16 on one thread: which trains faster on this CPU"
    )
    formats.add_argument("--fastest", action="store_true", help="print only the name of the format")
    formats.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time to measure (default: %(default)s)")
    layouts = subjects.add_parser("layouts", help="weak scaling: layouts on 1, 2 and 4 ranks, with a batch that grows with them")
    layouts.add_argument("--scale", type=float, default=1.0, help="size of the runs; below 1 to try it out")
    optimizers = subjects.add_parser("optimizers", help="a step of each optimizer beside the passes of its batch, at 125M parameters")
    optimizers.add_argument("--scale", type=float, default=1.0, help="size of the model; below 1 to try it out")
    arguments = parser.parse_args(argv)
    if arguments.subject == "formats":
        return run_tool(lambda: compare_formats(arguments))
    if arguments.subject == "layouts":
        return run_tool(lambda: compare_layouts(arguments, command(["tools/bench.py", *argv])))
    if arguments.subject == "optimizers":
        return run_tool(lambda: compare_optimizers(arguments, command(["tools/bench.py", *argv])))
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        data.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if arguments.seconds < 0 or arguments.scale <= 0:
        data.error("--seconds must not be negative, --scale must be positive")
    return run_tool(lambda: run(arguments, command(["tools/bench.py", *argv])))


def compare_formats(arguments: argparse.Namespace) -> None:
    import torch
    from benchmarks.products import fastest, products

    torch.set_num_threads(1)
    rows = products(Options(Path(), arguments.seconds))
    print(
        fastest(rows) if arguments.fastest else f"{table(rows)}\n\nprecision.compute={fastest(rows)} trains faster on this CPU"
    )


def compare_layouts(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.scaling import weak_scaling

    start = machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        rows = weak_scaling(Options(Path(work), scale=arguments.scale))
    print(heading(start, machine(), typed), table(rows), sep="\n\n")


def compare_optimizers(arguments: argparse.Namespace, typed: str) -> None:
    import torch
    from benchmarks.updates import updates

    torch.set_num_threads(1)
    start = machine()
    rows = updates(Options(Path(), scale=arguments.scale))
    print(heading(start, machine(), typed), table(rows), sep="\n\n")


def run(arguments: argparse.Namespace, typed: str) -> None:
    start = machine()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.work) as work:
        options = Options(Path(work), arguments.seconds, arguments.scale, tuple(arguments.source))
        rows = measure(arguments.parts or list(PARTS), options)
    end = machine()
    print(heading(start, end, typed))
    print()
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(as_json(rows, start, end, typed), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
