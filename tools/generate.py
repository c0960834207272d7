"""Continue texts with a trained model: a checkpoint, a run directory (its newest checkpoint) or a Hugging Face directory."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.errors import run_tool  # noqa: E402

TEMPERATURE, LARGEST_SEED = 0.8, 2**63


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be empty, and may be given several times"
    )
    prompts.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='one prompt per line; in a .jsonl file one object {"prompt": TEXT} per line',
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="samples of each prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, required=True, metavar="N", help="of each sample")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--temperature", type=float, help=f"(default: {TEMPERATURE})")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens only; 0: from all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the fewest likeliest tokens that have this probability together"
    )
    parser.add_argument(
        "--stop-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end before this token, in addition to the model's own end tokens; may be given several times",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument("--stream", action="store_true", help="print the text as it comes; for a single sample")
    parser.add_argument("--no-bos", action="store_true", help="put nothing before a prompt, whatever the tokenizer asks for")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first sample of a prompt; the next sample has the next seed"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if available)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="number format of weights and activations (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="samples at a time (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compute all positions anew for every token")
    parser.add_argument(
        "--family",
        choices=("hf",),
        help="read a Hugging Face directory as model.family=hf, even if a family of this program could",
    )
    parser.add_argument("--json", action="store_true", help="print one object per line with prompt, text, sample and token ids")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = options()
    arguments = parser.parse_args(argv)
    if arguments.greedy and (arguments.temperature is not None or arguments.top_k or arguments.top_p != 1):
        parser.error("--temperature, --top-k and --top-p have no effect with --greedy; leave them out")
    arguments.temperature = TEMPERATURE if arguments.temperature is None else arguments.temperature
    if min(arguments.max_tokens, arguments.num_samples, arguments.batch_size) < 1 or not 0 < arguments.temperature < math.inf:
        parser.error("--max-tokens, --num-samples, --batch-size and --temperature must be positive; --greedy is temperature 0")
    if not 0 <= arguments.seed <= LARGEST_SEED:
        parser.error(f"--seed {arguments.seed} is not in 0..{LARGEST_SEED}")
    if arguments.stream and (arguments.json or arguments.num_samples > 1 or len(arguments.prompt or []) != 1):
        parser.error("--stream goes with a single --prompt and sample, and without --json")
    if "" in arguments.stop:
        parser.error("--stop must not be empty")
    if arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        parser.error("--top-k must not be negative, --top-p above 0 and at most 1")
    return run_tool(lambda: sample(arguments))


def sample(arguments: argparse.Namespace) -> None:
    from pretrain.evaluation.texts import TextWatch
    from pretrain.huggingface.open_model import best_device, open_model
    from pretrain.models.generate import Sampling, generate_batch, uncached_reason

    texts = arguments.prompt if arguments.prompt is not None else list(read_prompts(arguments.prompt_file))
    device = best_device(arguments.device)
    opened = open_model(arguments.model, device, arguments.dtype, arguments.family)
    check_stop_ids(arguments.stop_id, opened.network.config.vocab_size)
    tokenizer, begin = opened.tokenizer, [] if arguments.no_bos else opened.begin
    place = "prompt " if arguments.prompt_file is None else f"{arguments.prompt_file}:"
    prompts = []
    for number, text in enumerate(texts, start=1):
        origin = f"{place}{number}"
        prompts.append(opened.known(begin + tokenizer.encode(text, origin) or [tokenizer.eod_id], origin))
    for note in [*opened.notes, *limits(opened.network, prompts, arguments.max_tokens)]:
        print(note, file=sys.stderr)
    if begin:
        print(
            f"before each prompt: token {', '.join(map(str, begin))}, as the tokenizer asks (--no-bos: nothing)",
            file=sys.stderr,
        )
    if not arguments.no_cache and (reason := uncached_reason(opened.network)):
        print(f"without a cache: {reason}", file=sys.stderr)
    sampling = Sampling(0.0 if arguments.greedy else arguments.temperature, arguments.top_k, arguments.top_p)
    ends = opened.ends | set(arguments.stop_id)
    jobs = [(i, number) for i in range(len(texts)) for number in range(arguments.num_samples)]
    started, made = time.monotonic(), 0
    for first in range(0, len(jobs), arguments.batch_size):
        batch = jobs[first : first + arguments.batch_size]
        rows, seeds = [prompts[i] for i, _ in batch], [arguments.seed + number for _, number in batch]
        watch = TextWatch(tokenizer, arguments.stop, _print_piece if arguments.stream else None)
        if arguments.stream:
            print(texts[0], end="", flush=True)
        watches = watch if arguments.stop or arguments.stream else None
        found = generate_batch(
            opened.network, rows, arguments.max_tokens, ends, sampling, seeds, not arguments.no_cache, watches
        )
        for row, ((i, number), tokens) in enumerate(zip(batch, found)):
            made += len(tokens)
            text = watch.finish(row, tokens)
            if arguments.stream:
                print()
                continue
            line = {"prompt": texts[i], "text": text, "sample": number, "prompt_tokens": prompts[i], "tokens": tokens}
            show(line, arguments.json, several=len(jobs) > 1)
    seconds = time.monotonic() - started
    print(f"{made} tokens in {seconds:.2f} s: {made / seconds:.1f} tokens/s", file=sys.stderr)


def _print_piece(row: int, text: str) -> None:
    print(text, end="", flush=True)


def show(line: dict[str, Any], as_json: bool, several: bool) -> None:
    print(json.dumps(line) if as_json else line["prompt"] + line["text"] + ("\n---------------" if several else ""), flush=True)


def limits(network: Any, prompts: list[list[int]], max_tokens: int) -> Iterator[str]:
    """A line to print if prompt and continuation exceed the model's positions."""
    longest, most = network.config.max_sequence_length, max(map(len, prompts), default=0)
    if most + max_tokens > longest:
        yield (
            f"the model knows {longest} positions, but prompt and continuation may have {most + max_tokens}: beyond, each token follows from "
            f"the last {longest}, which are computed anew for it"
        )


def read_prompts(path: Path) -> Iterator[str]:
    """The prompts of a file. Raises DataError naming a line that is not a prompt."""
    from pretrain.errors import DataError

    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise DataError(f"{path}: has no prompt in it")
    # splitlines would split at form feeds and other separators, which a prompt may hold.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise DataError(f'{path}:{number}: no object {{"prompt": TEXT}}')
        yield prompt


def check_stop_ids(ids: list[int], vocab_size: int) -> None:
    """Raise ConfigError for an id that no token can have."""
    from pretrain.errors import ConfigError

    if strange := [number for number in ids if not 0 <= number < vocab_size]:
        raise ConfigError(f"--stop-id={strange[0]} is no token of the vocabulary, which has 0 to {vocab_size - 1}")


if __name__ == "__main__":
    raise SystemExit(main())
