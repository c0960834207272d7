"""Text from a model: one sequence at a time, on one device."""

from __future__ import annotations

import torch

from pretrain.models.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    max_tokens: int,
    stop_id: int | None,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Tokens that continue `prompt`: at most `max_tokens`, up to and without `stop_id`.

    `temperature` 0 is greedy (the first of equal logits); otherwise logits are divided by it and, with `top_k` above 0, only the
    k largest are drawn from.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        logits_V = model(torch.tensor([tokens]))[0, -1].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if top_k:
                kept = logits_V.topk(min(top_k, logits_V.numel()))
                logits_V = torch.full_like(logits_V, -torch.inf).scatter_(0, kept.indices, kept.values)
            token = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
        if token == stop_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
