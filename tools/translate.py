"""Translate sentences, one per line, with a trained encoder-decoder; with references, score the translations.

Translations go to standard output, or to a new file, --output. Scores go to standard error, or with --json to standard output as
the last line: BLEU and chrF by sacrebleu, character and word error rate. A model that was trained in lower case needs --lowercase.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

LENGTH_PENALTY = 0.6


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
    parser.add_argument("--output", type=Path, metavar="FILE", help="new file (default: standard output)")
    # The ranges are those of validation.translation.
    parser.add_argument(
        "--beam", type=within(int, 1, 1000), default=1, metavar="N", help="hypotheses to keep; 1 is greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--length-penalty",
        type=within(float, 0, 100),
        help=f"that of arXiv 1609.08144, with --beam above 1 (default: {LENGTH_PENALTY})",
    )
    parser.add_argument(
        "--max-ratio", type=within(float, 0, 1000), default=2.0, help="most tokens per token of the source (default: %(default)s)"
    )
    parser.add_argument(
        "--max-extra", type=within(int, 1, 1_000_000), default=10, help="tokens beyond that (default: %(default)s)"
    )
    parser.add_argument("--lowercase", action="store_true", help="lower-case the input and the references")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    arguments = parser.parse_args(argv)
    if arguments.length_penalty is not None and arguments.beam == 1:
        parser.error("--length-penalty has no effect with --beam 1; leave it out, or keep more hypotheses")
    if arguments.json and not arguments.reference:
        parser.error("--json prints the scores, which need --reference")
    return run_tool(lambda: run(arguments))


def within(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    """The type of an argument that is a number in this range."""

    def number(text: str) -> float:
        if not least <= kind(text) <= most:  # not a number, for one
            raise argparse.ArgumentTypeError(f"{text} is not in {least}..{most}")
        return kind(text)

    number.__name__ = kind.__name__  # argparse names it for a text that is no number
    return number


def run(arguments: argparse.Namespace) -> None:
    from pretrain.models.generate import Search
    from pretrain.storage import refuse_existing_file
    from pretrain.train.translation import score, translate_file

    if arguments.output:
        refuse_existing_file(arguments.output)
    penalty = LENGTH_PENALTY if arguments.length_penalty is None else arguments.length_penalty
    search = Search(arguments.beam, penalty, arguments.max_ratio, arguments.max_extra)
    files = arguments.input, arguments.reference
    translations, references = translate_file(arguments.model, *files, search, arguments.lowercase)
    if arguments.output:
        arguments.output.write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    else:
        print("\n".join(translations), flush=True)
    if references is not None:
        scores = score(translations, references, arguments.lowercase)
        if arguments.json:
            print(json.dumps(scores.numbers() | {"signature": scores.signature}))
        else:
            print(f"{scores}  ({scores.signature})", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
