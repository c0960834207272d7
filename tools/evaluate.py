"""Evaluate a model: perplexity and bits per byte of texts, and tasks of lm-evaluation-harness.

The model is a checkpoint, a run directory (its newest checkpoint) or a Hugging Face directory. --follow evaluates each checkpoint of a run that
is under way. It does so in this process, and writes evaluations.jsonl into the run's directory.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

TEXT_FIELD, DOCUMENTS = "text", "file"
SETTINGS = ("tokens", "length", "dtype", "text_field", "documents", "shots", "limit", "task_folder")
"""The options that decide a result, besides what is evaluated."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILES", help="files, folder or pattern of texts, as for prepare_data.py"
    )
    parser.add_argument(
        "--data", action="append", default=[], type=Path, metavar="DIR", help="prepared data, made with the model's tokenizer"
    )
    parser.add_argument(
        "--tasks", nargs="+", action="extend", default=[], metavar="NAME", help="tasks of lm-evaluation-harness, which has to be installed"
    )
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="folder of task files of your own")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each task (default: all)")
    parser.add_argument("--text-field", metavar="NAME", help=f"field or column of the text (default: {TEXT_FIELD})")
    parser.add_argument(
        "--documents", choices=("file", "line"), help=f"what a document of a plain text file is (default: {DOCUMENTS})"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="take no further document after so many tokens of a text")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens that the model sees at once (default: as many as it knows)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at a time (default: 8)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if available)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    parser.add_argument(
        "--follow", action="store_true", help="--model is a run: evaluate each of its checkpoints, until it has ended"
    )
    parser.add_argument("--json", action="store_true", help="print one object per result")
    arguments = parser.parse_args(argv)
    if not (arguments.text or arguments.data or arguments.tasks):
        parser.error("nothing to evaluate on: give --text, --data or --tasks")
    for name in ("batch_size", "tokens", "limit"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} is not above 0")
    for name in ("task_folder", "shots", "limit"):
        if getattr(arguments, name) is not None and not arguments.tasks:
            parser.error(f"--{name.replace('_', '-')} has no effect without --tasks")
    for name, default in (("text_field", TEXT_FIELD), ("documents", DOCUMENTS)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif not arguments.text:
            parser.error(f"--{name.replace('_', '-')} has no effect without --text; leave it out")
    return run_tool(lambda: evaluate(arguments))


def evaluate(arguments: argparse.Namespace) -> None:
    if not arguments.follow:
        show(results_of(arguments.model, arguments), arguments.json)
        return
    from pretrain.evaluation.follow import follow

    def numbers(checkpoint: Path) -> dict[str, Any]:
        return {name: value for line in results_of(checkpoint, arguments) for name, value in as_numbers(line).items()}

    on = [*arguments.text, *map(str, arguments.data), *(arguments.tasks or [])]
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    settings["task_folder"] = None if arguments.task_folder is None else str(arguments.task_folder)

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    for step, found in follow(arguments.model, numbers, on, settings, wait_seconds=5.0, tell=tell):
        print(json.dumps({"step": step, **found}) if arguments.json else f"step {step}: {_joined(found)}", flush=True)


def results_of(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from pretrain.errors import DataError
    from pretrain.evaluation.scores import Scorer, documents_of, prepared_documents
    from pretrain.huggingface.open_model import best_device, open_model

    opened = open_model(model, best_device(arguments.device), arguments.dtype)
    for note in opened.notes:
        print(note, file=sys.stderr)
    scorer = Scorer(opened, arguments.length, arguments.batch_size)
    found = [
        scorer.score(name, documents_of(name, opened, arguments.text_field, arguments.documents), arguments.tokens).as_dict()
        for name in arguments.text
    ]
    found += [scorer.score(str(path), prepared_documents(path, opened), arguments.tokens).as_dict() for path in arguments.data]
    if arguments.tasks:
        try:
            from pretrain.evaluation.harness import run_tasks
        except ImportError as error:
            raise DataError(f"--tasks needs lm-evaluation-harness ({error}); run pip install lm_eval") from error
        tasks = run_tasks(scorer, arguments.tasks, arguments.task_folder, arguments.limit, arguments.shots)
        found += [{"name": name, **metrics} for name, metrics in tasks.items()]
    return found


def as_numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result that belong on a curve, by name."""
    left = ("name", "documents", "tokens", "bytes", "perplexity")
    return {f"{line['name']} {key}": value for key, value in line.items() if key not in left and value is not None}


def _joined(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in found.items())


def show(lines: list[dict[str, Any]], as_json: bool) -> None:
    for line in lines:
        if as_json:
            print(json.dumps(line))
        elif "perplexity" in line:
            bits = f", {line['bits_per_byte']:.4f} bits per byte" if line["bits_per_byte"] is not None else ""
            print(
                f"{line['name']}: loss {line['loss']:.4f}, perplexity {line['perplexity']:.3f}{bits} "
                f"({line['tokens']:,} tokens of {line['documents']:,} document{'' if line['documents'] == 1 else 's'})"
            )
        else:
            print(f"{line['name']}: {_joined({key: value for key, value in line.items() if key != 'name'})}")


if __name__ == "__main__":
    raise SystemExit(main())
