"""Text from a model: one sequence at a time, on the model's device, with a cache of keys and values where it has one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pretrain.models.cache import Cache
from pretrain.models.decoder import Decoder


def uncached_reason(model: nn.Module) -> str | None:
    """Why a model generates without a cache, computing every position anew for each token; None where it has one."""
    if not isinstance(model, Decoder):
        return f"model.family={model.config.family} has none here"
    if model.config.positions == "rope" and model.config.rope.scaling == "dynamic":
        return "with model.rope.scaling=dynamic the rotation of earlier keys depends on the length of the whole"
    return None


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    max_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    cached: bool = True,
) -> list[int]:
    """Tokens that continue `prompt`, which is not empty: at most `max_tokens`, up to and without the first of `stop_ids`.

    `temperature` 0 is greedy (the first of equal logits); otherwise logits are divided by it, and what is drawn from is, with
    `top_k` above 0, the k largest, and of these, with `top_p` below 1, the fewest that together have that probability (nucleus
    sampling, arXiv 1904.09751). With `cached`, models that can (`uncached_reason`) compute every position once.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    cache = None
    if cached and uncached_reason(model) is None:
        cache = Cache(model.config.layers, len(prompt) + max_tokens)
    while len(tokens) < len(prompt) + max_tokens:
        if cache is None:
            logits_V = model(torch.tensor([tokens], device=device))[0, -1]
        else:
            logits_V = model(torch.tensor([tokens[cache.length :]], device=device), cache=cache)[0, -1]
        token = choose(logits_V.float().cpu(), temperature, top_k, top_p, generator)
        if token in stop_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def choose(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """The next token of these logits; see `generate`."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        kept = logits_V.topk(min(top_k, logits_V.numel()))
        logits_V = torch.full_like(logits_V, -torch.inf).scatter_(0, kept.indices, kept.values)
    probabilities_V = (logits_V / temperature).softmax(-1)
    if top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # What is before a token must not be enough already: the likeliest is always among them.
        sorted_V = sorted_V.where(sorted_V.cumsum(0) - sorted_V < top_p, 0)
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
