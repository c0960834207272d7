"""Tokenize text, JSON lines (.gz too) or Parquet into shards that training reads."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.command_line import run_tool  # noqa: E402
from pretrain.data.documents import TEXT_MODES  # noqa: E402
from pretrain.data.prepare import prepare  # noqa: E402
from pretrain.data.shard_writer import SHARD_TOKENS  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="GLOB", help="corpus files; ** descends")
    parser.add_argument("--tokenizer", required=True, metavar="DIR_OR_FILE")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument("--text-field", default="text", help="JSON field or Parquet column (default: %(default)s)")
    parser.add_argument("--documents", choices=TEXT_MODES, default="file", help="what a document is in plain text files")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.0, metavar="F", help="share of documents for DIR/validation"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (default: %(default)s)")
    arguments = parser.parse_args(argv)
    return run_tool(
        lambda: print(
            prepare(
                arguments.input,
                arguments.tokenizer,
                arguments.output,
                text_field=arguments.text_field,
                text_mode=arguments.documents,
                validation_fraction=arguments.validation_fraction,
                workers=arguments.workers,
                shard_tokens=arguments.shard_tokens,
            )
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
