"""Train a configuration under single, DDP, FSDP2 and HSDP layouts and compare gradients, losses and samples with one process."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

FORMATS = ("fp32", "bf16")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="YAML")
    parser.add_argument("--output", type=Path, default=Path("runs/equivalence"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--from", dest="checkpoint", metavar="CHECKPOINT", help="start from these weights, as run.init_from does"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, help="number formats to compute in (default: precision.compute)"
    )
    parser.add_argument("--only", metavar="TEXT", help="layouts whose name contains this, besides the reference")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every layout")
    arguments = parser.parse_intermixed_args(argv)
    return run_tool(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> None:
    from pretrain.config.load import load_config
    from pretrain.errors import TrainingError
    from pretrain.models.families import complete
    from pretrain.observe.equivalence import cases, compare, selected, table

    overrides = [*arguments.overrides, *([f"run.init_from={arguments.checkpoint}"] if arguments.checkpoint else [])]
    config, _ = load_config(arguments.config, overrides)
    experts = bool(complete(config.model, config.data.sequence_length).experts.count)
    wanted = selected(cases(config.batch.sequences, experts), arguments.only or "")
    rows = []
    for number_format in arguments.formats or [config.precision.compute]:
        rows += compare(arguments.config, overrides, arguments.output, wanted, number_format)
    print(table(rows))
    if arguments.markdown:
        arguments.markdown.write_text(table(rows) + "\n", encoding="utf-8")
    different = [f"{row.case.name} in {row.format}" for row in rows if not row.equal]
    if different:
        raise TrainingError(f"{len(different)} of {len(rows)} layouts compute something else: {', '.join(different)}")


if __name__ == "__main__":
    raise SystemExit(main())
