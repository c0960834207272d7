"""Continue a text with a trained model: a checkpoint, a run directory (its newest checkpoint) or a Hugging Face directory."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from pretrain.command_line import run_tool  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompt", required=True, help="text to continue; may be empty")
    parser.add_argument("--max-tokens", type=int, required=True, metavar="N")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--temperature", type=float, default=0.8, help="(default: %(default)s)")
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
        help="end before this token, as before the end of document",
    )
    parser.add_argument("--no-cache", action="store_true", help="compute all positions anew for every token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print an object with prompt, text and token ids")
    arguments = parser.parse_args(argv)
    if arguments.max_tokens < 1 or not arguments.temperature > 0 or arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        parser.error(
            "--max-tokens and --temperature must be positive, --top-k not negative, --top-p above 0 and at most 1; "
            "--greedy is temperature 0"
        )
    return run_tool(lambda: sample(arguments))


def sample(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint.open_model import open_model
    from pretrain.errors import ConfigError
    from pretrain.models.generate import generate, uncached_reason

    model, tokenizer = open_model(arguments.model)
    prompt = tokenizer.encode(arguments.prompt) or [tokenizer.eod_id]
    longest = model.config.max_sequence_length
    if len(prompt) + arguments.max_tokens > longest:
        raise ConfigError(
            f"--max-tokens={arguments.max_tokens}: with a prompt of {len(prompt)} tokens at most {longest - len(prompt)}; "
            f"the model knows {longest} positions"
        )
    temperature = 0.0 if arguments.greedy else arguments.temperature
    if not arguments.no_cache and (reason := uncached_reason(model)):
        print(f"without a cache: {reason}", file=sys.stderr)
    started = time.monotonic()
    tokens = generate(
        model,
        prompt,
        arguments.max_tokens,
        {tokenizer.eod_id, *arguments.stop_id},
        temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.seed,
        cached=not arguments.no_cache,
    )
    seconds = time.monotonic() - started
    print(f"{len(tokens)} tokens in {seconds:.2f} s: {len(tokens) / seconds:.1f} tokens/s", file=sys.stderr)
    # A vocabulary may have more rows than the tokenizer has tokens; such a token has no text.
    text = tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": text, "prompt_tokens": prompt, "tokens": tokens}))
    else:
        print(arguments.prompt + text)


if __name__ == "__main__":
    raise SystemExit(main())
