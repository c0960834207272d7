"""Tokenize a corpus into shards that training reads.

The corpus may be text, source code, JSON lines, CSV or WET, each also as .gz, .bz2, .xz or .zst. It may also be Parquet, Arrow, a
Hugging Face dataset, or token ids (.npy, .bin, or a field of ids). Give files, folders or URLs (s3://, gs://, https://, ...).
Interrupted work is kept: the same command continues it, and says so if nothing is left to do.

On several machines with a shared disk: the same command everywhere with --task I --tasks N, then
    prepare_data.py merge --output DIR
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.data.preparation.binary_inputs import IDS_DTYPES  # noqa: E402
from pretrain.data.preparation.inputs import InputFile  # noqa: E402
from pretrain.data.preparation.preparation_plan import TEXT_MODES, Settings  # noqa: E402
from pretrain.data.preparation.prepare import merge, prepare  # noqa: E402
from pretrain.data.preparation.process_pool import usable_cores  # noqa: E402
from pretrain.data.shards.writer import SHARD_TOKENS  # noqa: E402
from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["merge"]:
        return _merge(argv[1:])
    arguments = vars(_arguments(argv))
    inputs, dataset = arguments.pop("input"), arguments.pop("dataset")
    config, split = arguments.pop("dataset_config"), arguments.pop("dataset_split")

    def run() -> None:
        files = inputs
        if dataset:
            from pretrain.data.preparation.inputs import dataset_files

            files = dataset_files(dataset, config, split)
        print(prepare(files, **arguments))

    return run_tool(run)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.dataset == "":
        parser.error("--dataset is empty; give the name or the folder of a Hugging Face dataset")
    for option in ("dataset_split", "dataset_config"):
        if getattr(arguments, option) is not None and arguments.dataset is None:
            parser.error(f"--{option.replace('_', '-')} has no effect without --dataset; leave it out")
    if arguments.fim_spm_rate is not None and not arguments.fim_rate:
        parser.error("--fim-spm-rate has no effect without --fim-rate; give both, or leave it out")
    _check_inputs(parser, arguments)
    arguments.text_mode = arguments.text_mode or Settings.text_mode
    arguments.dataset_split = arguments.dataset_split or "train"
    arguments.fim_spm_rate = Settings.fim_spm_rate if arguments.fim_spm_rate is None else arguments.fim_spm_rate
    return arguments


def _check_inputs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with bad usage for an option about a kind of file that no input is. Folders, patterns and URLs may hold any, so only names of files are judged."""
    named = [Path(name) for name in arguments.input or []]
    if not all(path.is_file() for path in named):
        return
    if arguments.ids_dtype and all(path.suffix.lower() != ".bin" for path in named):
        parser.error("--ids-dtype has no effect, because no input is a .bin file; leave it out")
    kinds = {InputFile(path.name, str(path), 0, 0).kind(arguments.ids_dtype) for path in named}
    if arguments.text_mode and named and "text" not in kinds:
        parser.error("--documents has no effect, because no input is a plain text file; leave it out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument(
        "--input", nargs="+", action="extend", metavar="PATH", help="files, folders, patterns (** descends into folders), and URLs of these"
    )
    corpus.add_argument("--dataset", metavar="NAME_OR_DIR", help="a Hugging Face dataset, downloaded or on disk")
    parser.add_argument("--dataset-config", metavar="NAME", help="which configuration of the dataset")
    parser.add_argument("--dataset-split", metavar="NAME", help="which split of the dataset (default: train)")
    parser.add_argument("--tokenizer", required=True, metavar="DIR_OR_FILE")
    _add_shared(parser, 0)
    parser.add_argument(
        "--text-field", default="text", metavar="F[,F]", help="field of the text; several fields are joined by a blank line"
    )
    parser.add_argument(
        "--documents",
        dest="text_mode",
        choices=TEXT_MODES,
        help=f"what a document is in plain text files (default: {Settings.text_mode})",
    )
    parser.add_argument("--ids-field", default="", metavar="F", help="field of token ids, taken instead of text")
    parser.add_argument("--ids-dtype", default="", choices=("", *IDS_DTYPES), help="type of the ids in .bin files")
    parser.add_argument("--deduplicate", action="store_true", help="keep only the first of equal documents")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="share of documents for DIR/validation; a few text files give their ends",
    )
    parser.add_argument(
        "--fim-rate", type=float, default=0.0, metavar="F", help="share of documents in fill-in-the-middle form"
    )
    parser.add_argument(
        "--fim-spm-rate",
        type=float,
        metavar="F",
        help=f"share of those with the suffix first (default: {Settings.fim_spm_rate})",
    )
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (default: %(default)s)")
    parser.add_argument("--task", type=int, metavar="I", help="do only this part of the work, 0 to N-1")
    parser.add_argument("--tasks", type=int, default=1, metavar="N", help="how many parts the work is divided into")
    parser.add_argument("--restart", action="store_true", help="delete what an interrupted start has left")
    return parser


def _merge(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="prepare_data.py merge", description="Put together the work of the tasks.")
    _add_shared(parser, None)
    arguments = vars(parser.parse_args(argv))
    return run_tool(lambda: print(merge(**arguments)))


def _add_shared(parser: argparse.ArgumentParser, default_invalid: int | None) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument(
        "--max-invalid",
        type=int,
        default=default_invalid,
        metavar="N",
        help="unusable rows that may be left out; they are counted and listed in invalid.jsonl (default: "
        + ("what the tasks were given)" if default_invalid is None else "%(default)s)"),
    )
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(main())
