"""Measure training, data, products, collectives, checkpoints, layouts and optimizers, each number beside its comparison."""

import argparse
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]  # a clone works without being installed

from benchmarks.comparison import changes, not_measured  # noqa: E402
from benchmarks.data import PARTS, measure  # noqa: E402
from benchmarks.machine import gpu, machine  # noqa: E402
from benchmarks.measure import (  # noqa: E402
    Options,
    Row,
    as_lines,
    command,
    heading,
    read_rows,
    table,
)  # fmt: skip
from benchmarks.trainers.quality_task import PROGRAMS  # noqa: E402

from pretrain.errors import ConfigError, run_tool  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """What the tool is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    # A shortened option would make another command of the same measurement.
    whole = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    subjects = parser.add_subparsers(dest="subject", required=True, parser_class=whole)
    for add in (
        add_data,
        add_formats,
        add_layouts,
        add_optimizers,
        add_quality,
        add_speed,
        add_training,
        add_matmul,
        add_collectives,
        add_checkpoint,
    ):
        add(subjects)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Keys of a configuration may stand before, between and after options, which argparse does not allow below a subject."""
    arguments, unknown = parser().parse_known_args(argv)
    keys = [word for word in unknown if hasattr(arguments, "overrides") and "=" in word and not word.startswith("-")]
    if len(keys) < len(unknown):
        parser().error(f"unrecognized arguments: {' '.join(word for word in unknown if word not in keys)}")
    if keys:
        arguments.overrides = [*arguments.overrides, *keys]
    return arguments


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    return run_tool(lambda: arguments.measure(arguments, command(["tools/bench.py", *argv])))


def add_data(subjects: argparse._SubParsersAction) -> None:
    data = subjects.add_parser("data", help="order, loader, many shards, start, packing, preparation, data wait, inspection")
    data.add_argument("parts", nargs="*", metavar="PART", type=functools.partial(part_of, PARTS), help=f"some of: {', '.join(PARTS)} (default: all)")
    add_keeping(data, Options.seconds)
    data.add_argument(
        "--source", nargs="+", action="extend", default=[], metavar="GLOB", help="text to prepare (default: this Python's libraries)"
    )
    data.add_argument("--work", type=Path, metavar="DIR", help="the place for a folder of generated data (about 1 GB)")
    data.set_defaults(measure=measure_data)


def add_formats(subjects: argparse._SubParsersAction) -> None:
    formats = subjects.add_parser(
        "formats", help="matrix products in fp32 and bf16 on one thread: which trains faster on this CPU"
    )
    formats.add_argument("--fastest", action="store_true", help="print only the name of the format")
    formats.add_argument("--seconds", type=seconds, default=1.0, metavar="S", help="time to measure (default: %(default)s)")
    formats.set_defaults(measure=compare_formats)


def add_layouts(subjects: argparse._SubParsersAction) -> None:
    layouts = subjects.add_parser(
        "layouts", help="weak scaling: layouts on 1, 2 and 4 ranks, with a batch that grows with them"
    )
    add_keeping(layouts)
    layouts.set_defaults(measure=compare_layouts)


def add_optimizers(subjects: argparse._SubParsersAction) -> None:
    optimizers = subjects.add_parser(
        "optimizers", help="a step of each optimizer beside the passes of its batch, at 125M parameters"
    )
    add_keeping(optimizers)
    optimizers.set_defaults(measure=compare_optimizers)


def add_speed(subjects: argparse._SubParsersAction) -> None:
    """The subject `speed`."""
    speed = subjects.add_parser("speed", help="tokens per second of any model, on any device; also under torchrun")
    speed.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of a configuration")
    speed.add_argument("--config", type=Path, metavar="FILE", help="with the model: configs/models/llama3.2-1b.yaml, say")
    speed.add_argument("--length", type=count, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)")
    speed.add_argument("--micro", type=count, default=1, metavar="N", help="sequences of a micro-step of a rank (default: 1)")
    speed.add_argument("--accumulation", type=count, default=1, metavar="N", help="micro-steps (default: 1)")
    speed.add_argument("--steps", type=count, default=8, metavar="N", help="measured steps (default: %(default)s)")
    speed.add_argument(
        "--profile", type=Path, metavar="DIR", help="profile one more step (docs/metrics.md, log.profile) into DIR/profile"
    )
    speed.add_argument(
        "--one-rank-of",
        type=count,
        metavar="N",
        help="let this process alone compute what a rank of N does: by its kernels and with its memory, but exchanges move nothing",
    )
    speed.add_argument("--rank", type=int, metavar="R", help="with --one-rank-of: which rank (default: 0)")
    speed.add_argument("--name", default="", help="what the row is called (default: the options)")
    add_files(speed)
    speed.set_defaults(measure=compare_speed)


def compare_speed(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.speed import Speed, device_of, measure_speed

    from pretrain.distributed.launcher import launched_ranks

    if arguments.rank is not None and arguments.one_rank_of is None:
        raise ConfigError(f"--rank {arguments.rank} has no effect without --one-rank-of; leave it out")
    arguments.rank = arguments.rank or 0
    asked = Speed(
        arguments.config, arguments.length, arguments.micro, arguments.accumulation, arguments.steps, tuple(arguments.overrides),
        arguments.profile, arguments.one_rank_of, arguments.rank,
    )  # fmt: skip
    # What makes another measurement of it, and is not in the keys.
    sizes = {"length": 4096, "micro": 1, "accumulation": 1, "one_rank_of": None, "rank": 0}
    others = [
        f"--{option.replace('_', '-')} {value}" for option, least in sizes.items() if (value := getattr(arguments, option)) != least
    ]
    others += [f"on {ranks} ranks"] if (ranks := launched_ranks()[2]) > 1 else []
    name = " ".join([arguments.config.stem if arguments.config else "the default model", *arguments.overrides, *others])
    measure_and_keep(arguments, typed, lambda options: measure_speed(asked, arguments.name or name, options), device=device_of(asked))


def add_training(subjects: argparse._SubParsersAction) -> None:
    """The subjects `train` and `peers`."""
    train = subjects.add_parser("train", help="CPU time per token of training, beside its matrix products alone")
    peers = subjects.add_parser("peers", help="the same beside transformers' Trainer and a plain loop, in turns")
    for subject in (train, peers):
        subject.add_argument(
            "--shapes", nargs="+", choices=("A", "B"), default=["A"], help="14M and 110M parameters (default: A)"
        )
        subject.add_argument("--formats", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
        subject.add_argument("--ranks", nargs="+", type=count, default=[1], metavar="N", help="processes, by DDP (default: 1)")
        subject.add_argument("--accumulation", nargs="+", type=count, default=[1], metavar="N", help="micro-steps (default: 1)")
        subject.add_argument(
            "--steps", type=count, default=5, metavar="N", help="measured steps of a turn (default: %(default)s)"
        )
        subject.add_argument("--compiled", action="store_true", help="by torch.compile: pretrain's blocks, the others whole")
        add_keeping(subject)
        subject.set_defaults(measure=compare_programs)
    peers.add_argument("--trainer", metavar="PYTHON", help="of an environment with other versions for the Trainer (default: this one)")
    peers.add_argument("--litgpt", metavar="PYTHON", help="the Python of an environment with LitGPT, to compare it too")


def add_quality(subjects: argparse._SubParsersAction) -> None:
    """The subject `quality`."""
    quality = subjects.add_parser(
        "quality", help="bits per byte after minutes of training, beside other programs; results add up in a file"
    )
    quality.add_argument("--minutes", type=size, default=5.0, help="of training, start-up included (default: 5)")
    quality.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS))
    quality.add_argument("--settings", nargs="+", action="extend", metavar="NAME", help="those of them to run (default: all)")
    quality.add_argument("--format", choices=("bf16", "fp32"), default="bf16", help="of matrix products (default: bf16)")
    quality.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="each has settings of its own (default: cpu)")
    quality.add_argument("--at-once", type=count, default=1, metavar="N", help="trainings at a time, when their steps are known (default: 1)")
    quality.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    quality.add_argument("--steps", type=count, metavar="N", help="how many to take (default: as many as fit into --minutes)")
    quality.add_argument("--work", type=Path, required=True, metavar="DIR", help="a folder for the text, which is kept")
    quality.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="results; those that it has are not run again"
    )
    quality.add_argument("--scale", type=size, default=1.0, help="size of the text; below 1 to try it out")
    quality.set_defaults(measure=compare_quality)


def add_matmul(subjects: argparse._SubParsersAction) -> None:
    matmul = subjects.add_parser(
        "matmul", help="TFLOP/s of squares and of a model's shapes, beside the device's published peak"
    )
    matmul.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    matmul.add_argument("--squares", nargs="+", action="extend", type=count, metavar="N", help="sizes (default: by the device)")
    matmul.add_argument("--model", type=Path, metavar="FILE", help="a configuration: products of its layers as well")
    matmul.add_argument("--tokens", type=count, metavar="N", help="rows of a layer's input (default: by the device)")
    matmul.add_argument("--formats", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    matmul.add_argument("--threads", type=count, default=1, metavar="N", help="on a CPU (default: %(default)s)")
    add_keeping(matmul, 5.0)
    matmul.set_defaults(measure=compare_products)


def add_collectives(subjects: argparse._SubParsersAction) -> None:
    collectives = subjects.add_parser("collectives", help="seconds of collectives by size and ranks, beside a ring's formula")
    collectives.add_argument("--ranks", nargs="+", type=several, default=[2, 4], metavar="N", help="processes (default: 2 4)")
    collectives.add_argument(
        "--sizes", nargs="+", action="extend", type=count, metavar="BYTES", help="of whole tensors (default: 4 KiB to 16 MiB)"
    )
    collectives.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    add_keeping(collectives, 10.0)
    collectives.set_defaults(measure=compare_collectives)


def add_checkpoint(subjects: argparse._SubParsersAction) -> None:
    checkpoint = subjects.add_parser("checkpoint", help="stall of a save, speed of write, load and verification, beside plain files")
    checkpoint.add_argument(
        "--model", type=Path, metavar="FILE", default=TOOLS.parent / "configs" / "models" / "llama-25m.yaml",
        help="the configuration that gives the size (default: llama-25m)",
    )  # fmt: skip
    checkpoint.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default: %(default)s)"
    )
    kinds, words = ("stall", "files"), "stall: of a save in the background; files: the rest (default: both)"
    checkpoint.add_argument("parts", nargs="*", metavar="PART", type=functools.partial(part_of, kinds), default=kinds, help=words)
    checkpoint.add_argument("--work", type=Path, metavar="DIR", help="where files are written: the storage that is measured")
    add_keeping(checkpoint, 5.0)
    checkpoint.set_defaults(measure=compare_checkpoints)


def add_keeping(subject: argparse.ArgumentParser, time: float | None = None) -> None:
    """The options of subjects that keep a line per row. `time`: the default of `--seconds`, for those that have it."""
    if time is not None:
        subject.add_argument(
            "--seconds", type=seconds, default=time, metavar="S", help="for what is compared (default: %(default)s)"
        )
    subject.add_argument("--scale", type=size, default=1.0, help="size of what is measured; below 1 to try it out")
    add_files(subject)


def add_files(subject: argparse.ArgumentParser) -> None:
    """The options of all subjects whose rows are kept and compared."""
    subject.add_argument("--json", type=Path, metavar="FILE", help="add a line per row to this file")
    subject.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json FILE: print what changed since, and what was not alike")


def part_of(parts: Sequence[str], text: str) -> str:
    if text not in parts:
        raise argparse.ArgumentTypeError(f"unknown part {text}; there are {', '.join(parts)}")
    return text


def seconds(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError("must be a number that is not negative")
    return float(text)


def count(text: str, least: int = 1) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return int(text)


def several(text: str) -> int:
    return count(text, least=2)


def size(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError("must be a positive number")
    return float(text)


def measure_and_keep(
    arguments: argparse.Namespace, typed: str, *measurements: Callable[[Options], list[Row]], device: str = "cpu"
) -> None:
    """Measure, print, keep, one measurement after the other. Of processes that measure together, the first one prints and keeps.

    `device`: where they measure; cuda keeps the GPU's name.
    """
    earlier = read_rows(arguments.compare) if arguments.compare else []
    if arguments.json:
        arguments.json.open("a").close()  # before something is measured and could not be kept
    place = getattr(arguments, "work", None)
    if place is not None and not place.is_dir():
        raise ConfigError(f"--work {place}: {'not a directory' if place.exists() else 'no such directory; make it first'}")
    given = {name: value for name, value in vars(arguments).items() if name in ("seconds", "scale")}
    measured: list[Row] = []
    for rows_of in measurements:
        start = machine()
        with tempfile.TemporaryDirectory(prefix="bench-", dir=place) as work:
            rows = rows_of(Options(Path(work), source=tuple(getattr(arguments, "source", ())), **given))
        if int(os.environ.get("RANK", "0")) != 0:
            continue
        start, end = {**start, **gpu(device)}, machine()
        print(heading(start, end, typed), table(rows), sep="\n\n")
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(as_lines(rows, start, end, typed))
        if arguments.compare:
            print("", *changes(rows, earlier, typed, start), sep="\n")
        measured += rows
    if measured and (gone := not_measured(measured, earlier, typed)):
        print("", *gone, sep="\n")


def compare_programs(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.training import ALONE, ONLY_IN_ANOTHER, PROGRAMS, Case, compare_trainers, environments

    cases = [
        Case(shape, number_format, ranks, accumulation, arguments.compiled)
        for shape in arguments.shapes
        for number_format in arguments.formats
        for ranks in arguments.ranks
        for accumulation in arguments.accumulation
    ]
    pythons = environments(getattr(arguments, "trainer", None), getattr(arguments, "litgpt", None))
    there = [name for name in PROGRAMS if name != ONLY_IN_ANOTHER or name in pythons]
    programs = ALONE if arguments.subject == "train" else there
    # Each case is kept when it is measured: all of them take long.
    each = [lambda options, case=case: compare_trainers([case], programs, arguments.steps, options, pythons) for case in cases]
    measure_and_keep(arguments, typed, *each)


def compare_quality(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.quality import compare

    print(compare(arguments, typed))


def compare_products(arguments: argparse.Namespace, typed: str) -> None:
    import torch
    from benchmarks.matmul import SQUARES, TOKENS, matmul

    torch.set_num_threads(arguments.threads)
    device, model, formats = arguments.device, arguments.model, arguments.formats
    squares, tokens = arguments.squares or SQUARES[device], arguments.tokens or TOKENS[device]
    measure_and_keep(arguments, typed, lambda options: matmul(squares, model, tokens, formats, device, options), device=device)


def compare_collectives(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.collectives import SIZES, collectives

    sizes = arguments.sizes or SIZES
    device = "cuda" if arguments.backend == "nccl" else "cpu"
    measure_and_keep(arguments, typed, lambda options: collectives(arguments.ranks, sizes, arguments.backend, options), device=device)


def compare_checkpoints(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.saving import saving

    device = arguments.device
    measure_and_keep(arguments, typed, lambda options: saving(arguments.model, device, arguments.parts, options), device=device)


def compare_formats(arguments: argparse.Namespace, typed: str) -> None:
    import torch
    from benchmarks.products import fastest, products

    torch.set_num_threads(1)
    rows = products(Options(Path(), arguments.seconds))
    print(
        fastest(rows) if arguments.fastest else f"{table(rows)}\n\nprecision.compute={fastest(rows)} trains faster on this CPU"
    )


def compare_layouts(arguments: argparse.Namespace, typed: str) -> None:
    from benchmarks.scaling import weak_scaling

    measure_and_keep(arguments, typed, weak_scaling)


def compare_optimizers(arguments: argparse.Namespace, typed: str) -> None:
    import torch
    from benchmarks.updates import updates

    torch.set_num_threads(1)
    measure_and_keep(arguments, typed, updates)


def measure_data(arguments: argparse.Namespace, typed: str) -> None:
    measure_and_keep(arguments, typed, lambda options: measure(arguments.parts or list(PARTS), options))


if __name__ == "__main__":
    raise SystemExit(main())
