"""Continue a text with a trained model: a checkpoint, a run directory (its newest checkpoint) or a Hugging Face directory."""

import argparse
import json
import sys
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print an object with prompt, text and token ids")
    arguments = parser.parse_args(argv)
    if arguments.max_tokens < 1 or arguments.temperature <= 0 or arguments.top_k < 0:
        parser.error("--max-tokens and --temperature must be positive, --top-k not negative; --greedy is temperature 0")
    return run_tool(lambda: sample(arguments))


def sample(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint.open_model import open_model
    from pretrain.errors import ConfigError
    from pretrain.models.generate import generate

    model, tokenizer = open_model(arguments.model)
    prompt = tokenizer.encode(arguments.prompt) or [tokenizer.eod_id]
    longest = model.config.max_sequence_length
    if len(prompt) + arguments.max_tokens > longest:
        raise ConfigError(
            f"--max-tokens={arguments.max_tokens}: with a prompt of {len(prompt)} tokens at most {longest - len(prompt)}; "
            f"the model knows {longest} positions"
        )
    temperature = 0.0 if arguments.greedy else arguments.temperature
    tokens = generate(model, prompt, arguments.max_tokens, tokenizer.eod_id, temperature, arguments.top_k, arguments.seed)
    # A vocabulary may have more rows than the tokenizer has tokens; such a token has no text.
    text = tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": text, "prompt_tokens": prompt, "tokens": tokens}))
    else:
        print(arguments.prompt + text)


if __name__ == "__main__":
    raise SystemExit(main())
