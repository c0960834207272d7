"""Convert checkpoints to and from Hugging Face's format (safetensors, config.json, tokenizer files), and exports on to GGUF."""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    directions = parser.add_subparsers(dest="direction", required=True)
    to_hf = directions.add_parser(
        "to-hf",
        help="a directory that AutoModelForCausalLM (for T5 AutoModelForSeq2SeqLM) and AutoTokenizer of transformers load",
    )
    to_hf.add_argument("--checkpoint", type=Path, required=True, help="checkpoint or run directory (its newest one)")
    to_hf.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format of the weights (default: %(default)s)"
    )
    to_hf.add_argument(
        "--weights",
        choices=("model", "ema"),
        default="model",
        help="the weights, or their running mean (optim.ema_decay; default: %(default)s)",
    )
    to_hf.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest size of a weight file, in 10^9 bytes (default: %(default)s)",
    )
    from_hf = directions.add_parser("from-hf", help="a checkpoint with weights only, for run.init_from and the tools")
    from_hf.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    from_hf.add_argument(
        "--family", choices=("hf",), help="read it as model.family=hf: any model that transformers builds from a configuration"
    )
    for direction in (to_hf, from_hf):
        direction.add_argument("--output", type=Path, required=True, help="new directory")
        direction.add_argument(
            "--verify",
            action="store_true",
            help="also compare logits with transformers before the output appears; takes memory for the whole model",
        )
    to_gguf = directions.add_parser(
        "to-gguf", help="convert to-hf's output to a file for llama.cpp, by llama.cpp's own converter"
    )
    to_gguf.add_argument("--model", type=Path, required=True, help="directory that to-hf wrote")
    to_gguf.add_argument("--output", type=Path, required=True, metavar="FILE", help="new file")
    to_gguf.add_argument(
        "--llama-cpp", type=Path, required=True, metavar="DIR", help="llama.cpp's sources, with convert_hf_to_gguf.py"
    )
    to_gguf.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16", "q8_0"),
        default="fp32",
        help="number format of the weights (default: %(default)s)",
    )
    to_gguf.add_argument("--name", help="name of the model, written into the file (default: the file's)")
    to_gguf.add_argument("--python", type=Path, help="interpreter that runs the converter, if this one lacks its imports")
    to_gguf.add_argument(
        "--inexact", action="store_true", help="convert even a model that llama.cpp computes differently, and say what differs"
    )
    arguments = parser.parse_args(argv)
    if arguments.direction == "to-hf" and not 0.001 <= arguments.shard_gb < math.inf:
        parser.error("--shard-gb must be a number from 0.001 on")
    return run_tool(lambda: convert(arguments))


def convert(arguments: argparse.Namespace) -> None:
    if arguments.direction == "to-hf":
        from pretrain.huggingface.export_model import export

        shard_bytes = round(arguments.shard_gb * 1e9)
        given = arguments
        done = export(given.checkpoint, given.output, given.dtype, given.verify, shard_bytes, given.weights)
        print(f"exported {done.checkpoint}: {done.parameters:,} parameters, {arguments.dtype}, weights in {done.files} file(s)")
        print("verified: every tensor reads back as it was written; names and shapes are those that transformers expects")
        for note in done.notes:
            print(f"note: {note}")
    elif arguments.direction == "to-gguf":
        from pretrain.huggingface.gguf import to_gguf

        given = arguments
        plan = to_gguf(given.model, given.output, given.llama_cpp, given.dtype, given.name, given.python, given.inexact)
        for note in filter(None, [plan.problem, *plan.notes]):
            print(f"note: {note}")
        if plan.task["expected"]:
            print("verified: merges or scores and special tokens in the file are those of the export")
        print(given.output)
        return
    else:
        from pretrain.huggingface.import_model import MODEL_FILE, import_model

        done = import_model(arguments.model, arguments.output, arguments.verify, arguments.family)
        print(f"imported {arguments.model}: {done.parameters:,} parameters; tokenizer: {done.tokenizer}")
        for note in done.notes:
            print(f"note: {note}")
        print(
            f"to go on with this model, include {arguments.output}/{MODEL_FILE} in a configuration and set run.init_from={arguments.output}"
        )
    if done.compared is not None:
        print(f"verified: {done.compared}")
    print(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
