"""Train a configuration under single, DDP, FSDP2 and HSDP layouts and compare gradients, losses and samples with one process."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.command_line import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="YAML")
    parser.add_argument("--output", type=Path, default=Path("runs/equivalence"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", help="layouts whose name contains this, besides the reference")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every layout")
    arguments = parser.parse_intermixed_args(argv)
    return run_tool(lambda: check(arguments))


def check(arguments: argparse.Namespace) -> None:
    from pretrain.config.load import load_config
    from pretrain.errors import TrainingError
    from pretrain.observe.equivalence import SINGLE, cases, compare, table

    config, _ = load_config(arguments.config, arguments.overrides)
    wanted = [c for c in cases(config.batch.sequences) if c.name == SINGLE or (arguments.only or "") in c.name]
    rows = compare(arguments.config, arguments.overrides, arguments.output, wanted)
    print(table(rows))
    if arguments.markdown:
        arguments.markdown.write_text(table(rows) + "\n", encoding="utf-8")
    different = [row.case.name for row in rows if not row.equal]
    if different:
        raise TrainingError(f"{len(different)} of {len(rows)} layouts compute something else: {', '.join(different)}")


if __name__ == "__main__":
    raise SystemExit(main())
