"""Tokenize parallel files, in which line i of one is the translation of line i of the other, into pairs that training reads.

Files are plain text, .gz or .zst. A pair with an empty side, or one longer than the limits, is left out and counted. A pair with a
side that is not UTF-8, or that the tokenizer refuses, is an error unless --max-invalid allows to leave it out.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.data.pairs.prepared_pairs import PairOptions, Split, prepare_pairs  # noqa: E402
from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", action="extend", required=True, metavar="FILE", help="sentences to translate, one per line")
    parser.add_argument("--target", nargs="+", action="extend", required=True, metavar="FILE", help="their translations")
    parser.add_argument(
        "--validation-source", nargs="+", action="extend", metavar="FILE", help="with it OUTPUT has the parts train and validation"
    )
    parser.add_argument("--validation-target", nargs="+", action="extend", metavar="FILE")
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR_OR_FILE", help="tokenizer of both languages, or of the sources"
    )
    parser.add_argument("--target-tokenizer", metavar="DIR_OR_FILE", help="tokenizer of the targets, if they have their own")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument("--lowercase", action="store_true", help="in lower case, both sides")
    parser.add_argument(
        "--max-source-length", type=int, default=0, metavar="N", help="leave out longer ones, in tokens; 0: no limit"
    )
    parser.add_argument("--max-target-length", type=int, default=0, metavar="N", help="likewise")
    parser.add_argument(
        "--max-invalid",
        type=int,
        default=0,
        metavar="N",
        help="unusable pairs that may be left out; they are counted and listed in invalid.jsonl (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if (arguments.validation_source is None) != (arguments.validation_target is None):
        parser.error("--validation-source and --validation-target go together")
    validation = arguments.validation_source and Split(arguments.validation_source, arguments.validation_target)
    lengths = arguments.max_source_length, arguments.max_target_length
    options = PairOptions(arguments.lowercase, *lengths, arguments.max_invalid)

    def run() -> None:
        train = Split(arguments.source, arguments.target)
        tokenizers = arguments.tokenizer, arguments.target_tokenizer
        print("\n".join(prepare_pairs(arguments.output, train, validation, *tokenizers, options)))

    return run_tool(run)


if __name__ == "__main__":
    raise SystemExit(main())
