"""Translate sentences, one per line, with a trained encoder-decoder; with references, score the translations.

Translations go to standard output, or to --output. Scores go to standard error, or with --json to standard output as the last
line: BLEU and chrF by sacrebleu, character and word error rate. A model that was trained in lower case needs --lowercase.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint, run directory (its newest one) or Hugging Face directory of T5",
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="sentences; plain text or .gz or .zst")
    parser.add_argument("--reference", metavar="FILE", help="their translations, line by line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: standard output)")
    parser.add_argument(
        "--beam", type=int, default=1, metavar="N", help="hypotheses to keep; 1 is greedy (default: %(default)s)"
    )
    parser.add_argument("--length-penalty", type=float, default=0.6, help="that of arXiv 1609.08144 (default: %(default)s)")
    parser.add_argument(
        "--max-ratio", type=float, default=2.0, help="most tokens per token of the source (default: %(default)s)"
    )
    parser.add_argument("--max-extra", type=int, default=10, help="tokens beyond that (default: %(default)s)")
    parser.add_argument("--lowercase", action="store_true", help="lower-case the input and the references")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    arguments = parser.parse_args(argv)
    if arguments.beam < 1 or arguments.length_penalty < 0 or arguments.max_ratio < 0 or arguments.max_extra < 1:
        parser.error("--beam and --max-extra must be at least 1, --length-penalty and --max-ratio not negative")
    if arguments.json and not arguments.reference:
        parser.error("--json prints the scores, which need --reference")
    return run_tool(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    from pretrain.models.generate import Search
    from pretrain.train.translation import translate_file

    search = Search(arguments.beam, arguments.length_penalty, arguments.max_ratio, arguments.max_extra)
    files = arguments.input, arguments.reference
    translations, scores = translate_file(arguments.model, *files, search, arguments.lowercase)
    if arguments.output:
        arguments.output.write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    elif not arguments.json:
        print("\n".join(translations))
    if scores is not None:
        if arguments.json:
            print(json.dumps(scores.numbers() | {"signature": scores.signature}))
        else:
            print(f"{scores}  ({scores.signature})", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
