"""Train a tokenizer: SentencePiece BPE or unigram with byte fallback, byte-level BPE, or one id per byte or character."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.data.preparation.preparation_plan import TEXT_MODES  # noqa: E402
from pretrain.data.tokenizers.tokenizer_training import MODEL_TYPES, SAMPLE_PIECES, train_tokenizer  # noqa: E402
from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="GLOB", help="corpus files; not needed for byte")
    parser.add_argument("--model-type", choices=MODEL_TYPES, required=True)
    parser.add_argument("--vocab-size", type=int, help="number of ids; for char at most this many")
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument(
        "--special-tokens", nargs="+", action="extend", default=[], metavar="TOKEN", help="ids that no text produces, e.g. '<|fim_prefix|>'"
    )
    parser.add_argument("--lowercase", action="store_true", help="learn from the text in lower case")
    parser.add_argument("--text-field", default="text", help="JSON field or Parquet column (default: %(default)s)")
    parser.add_argument("--documents", choices=TEXT_MODES, default="file", help="what a document is in plain text files")
    parser.add_argument(
        "--sample-pieces", type=int, default=SAMPLE_PIECES, help="2 kB stretches of text to learn from (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.lowercase and arguments.model_type == "byte":
        parser.error("--lowercase has no effect with --model-type byte, which learns from no text; leave it out")
    return run_tool(
        lambda: print(
            train_tokenizer(
                arguments.input,
                arguments.output,
                arguments.model_type,
                arguments.vocab_size,
                text_field=arguments.text_field,
                text_mode=arguments.documents,
                sample_pieces=arguments.sample_pieces,
                special_tokens=arguments.special_tokens,
                lowercase=arguments.lowercase,
            )
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
