"""Measure the speed of training, of the data path, of matrix products, layouts and optimizers on this machine. Each number stands beside its comparison."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]  # a clone works without being installed

from benchmarks.data import PARTS, measure  # noqa: E402
from benchmarks.measure import (  # noqa: E402
    Options,
    as_json,
    as_lines,
    changes,
    command,
    heading,
    machine,
    read_lines,
    table,
)  # fmt: skip

from pretrain.errors import run_tool  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """What the tool is asked."""
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
    layouts = subjects.add_parser(
        "layouts", help="weak scaling: layouts on 1, 2 and 4 ranks, with a batch that grows with them"
    )
    layouts.add_argument("--scale", type=float, default=1.0, help="size of the runs; below 1 to try it out")
    optimizers = subjects.add_parser(
        "optimizers", help="a step of each optimizer beside the passes of its batch, at 125M parameters"
    )
    optimizers.add_argument("--scale", type=float, default=1.0, help="size of the model; below 1 to try it out")
    add_speed(subjects)
    add_training(subjects)
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    if arguments.subject == "formats":
        return run_tool(lambda: compare_formats(arguments))
    if arguments.subject == "layouts":
        return run_tool(lambda: compare_layouts(arguments, command(["tools/bench.py", *argv])))
    if arguments.subject == "speed":
        return run_tool(lambda: compare_speed(arguments, command(["tools/bench.py", *argv])))
    if arguments.subject in ("train", "peers"):
        return run_tool(lambda: compare_programs(arguments, command(["tools/bench.py", *argv])))
    if arguments.subject == "optimizers":
        return run_tool(lambda: compare_optimizers(arguments, command(["tools/bench.py", *argv])))
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser().error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if arguments.seconds < 0 or arguments.scale <= 0:
        parser().error("--seconds must not be negative, --scale must be positive")
    return run_tool(lambda: run(arguments, command(["tools/bench.py", *argv])))


def add_speed(subjects: argparse._SubParsersAction) -> None:
    """The subject `speed`."""
    speed = subjects.add_parser("speed", help="tokens per second of any model, on any device; also under torchrun")
    speed.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of a configuration")
    speed.add_argument("--config", type=Path, metavar="FILE", help="with the model: configs/models/llama3.2-1b.yaml, say")
    speed.add_argument("--length", type=int, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)")
    speed.add_argument("--micro", type=int, default=1, metavar="N", help="sequences of a micro-step of a rank (default: 1)")
    speed.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-steps (default: 1)")
    speed.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (default: %(default)s)")
    speed.add_argument("--name", default="", help="what the row is called (default: the options)")
    speed.add_argument("--json", type=Path, metavar="FILE", help="add the row to this file")


def compare_speed(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.speed import Speed, measure_speed

    asked = Speed(
        arguments.config, arguments.length, arguments.micro, arguments.accumulation, arguments.steps, tuple(arguments.overrides)
    )
    start = machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        model = [arguments.config.stem] if arguments.config else []
        rows = measure_speed(asked, arguments.name or " ".join([*model, *arguments.overrides]), Options(Path(work)))
    if int(os.environ.get("RANK", "0")) == 0:
        end = machine()
        print(heading(start, end, typed), table(rows), sep="\n\n")
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(as_lines(rows, start, end, typed))


def add_training(subjects: argparse._SubParsersAction) -> None:
    """The subjects `train` and `peers`."""
    train = subjects.add_parser("train", help="CPU time per token of training, beside its matrix products alone")
    peers = subjects.add_parser("peers", help="the same beside transformers' Trainer and a plain loop, in turns")
    for subject in (train, peers):
        subject.add_argument(
            "--shapes", nargs="+", choices=("A", "B"), default=["A"], help="15M and 110M parameters (default: A)"
        )
        subject.add_argument("--formats", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
        subject.add_argument("--ranks", nargs="+", type=int, default=[1], metavar="N", help="processes, by DDP (default: 1)")
        subject.add_argument("--accumulation", nargs="+", type=int, default=[1], metavar="N", help="micro-steps (default: 1)")
        subject.add_argument(
            "--steps", type=int, default=5, metavar="N", help="measured steps of a turn (default: %(default)s)"
        )
        subject.add_argument("--scale", type=float, default=1.0, help="below 1 to try it out")
        subject.add_argument("--json", type=Path, metavar="FILE", help="add a line per row to this file")
        subject.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json FILE: print what changed since")


def compare_programs(arguments: argparse.Namespace, typed: str) -> None:
    """Measure, print, keep."""
    from benchmarks.training import ALONE, PROGRAMS, Case, compare_trainers

    cases = [
        Case(shape, number_format, ranks, accumulation)
        for shape in arguments.shapes
        for number_format in arguments.formats
        for ranks in arguments.ranks
        for accumulation in arguments.accumulation
    ]
    earlier = read_lines(arguments.compare) if arguments.compare else []
    start = machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        options = Options(Path(work), scale=arguments.scale)
        rows = compare_trainers(cases, ALONE if arguments.subject == "train" else list(PROGRAMS), arguments.steps, options)
    end = machine()
    print(heading(start, end, typed), table(rows), *changes(rows, earlier), sep="\n\n")
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(as_lines(rows, start, end, typed))


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
