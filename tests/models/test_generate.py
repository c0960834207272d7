"""Generation: greedy as transformers does it, sampling as a pure function of the seed."""

from __future__ import annotations

import pytest
import torch
from test_decoder import pair

from pretrain.models.generate import generate

PROMPT = [5, 17, 3, 8]


@pytest.mark.parametrize("name", ["plain", "tied", "one key-value head"])
@pytest.mark.parametrize("prompt", [[1], PROMPT, list(range(30))])
def test_greedy_is_transformers_generate_token_for_token(name, prompt):
    ours, theirs = pair(name)
    with torch.no_grad():
        ids = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = ids[0, len(prompt) :].tolist()
    assert generate(ours, prompt, 24, None) == expected
    assert len(expected) == 24


def test_generation_ends_before_the_stop_id():
    ours, _ = pair("plain")
    free = generate(ours, PROMPT, 24, None)
    stop = free[9]
    assert generate(ours, PROMPT, 24, stop) == free[: free.index(stop)]
    assert generate(ours, PROMPT, 24, free[0]) == []
    unused = next(i for i in range(61) if i not in free)
    assert generate(ours, PROMPT, 24, unused) == free


def test_a_seed_decides_what_is_sampled():
    ours, _ = pair("plain")
    one = generate(ours, PROMPT, 20, None, temperature=1.0, seed=1)
    torch.manual_seed(99)
    assert generate(ours, PROMPT, 20, None, temperature=1.0, seed=1) == one
    assert generate(ours, PROMPT, 20, None, temperature=1.0, seed=2) != one
    assert len(one) == 20


def test_sampling_follows_the_distribution_of_the_model():
    ours, _ = pair("plain")
    with torch.no_grad():
        expected = (ours(torch.tensor([PROMPT]))[0, -1] / 0.5).softmax(-1)
    draws = torch.tensor([generate(ours, PROMPT, 1, None, temperature=0.5, seed=s)[0] for s in range(1500)])
    observed = torch.bincount(draws, minlength=61) / len(draws)
    # Total variation of 1500 draws from the same distribution is about 0.06 here.
    assert 0.5 * (observed - expected).abs().sum() < 0.1


def test_top_k_draws_from_the_k_likeliest_only():
    ours, _ = pair("plain")
    with torch.no_grad():
        likeliest = ours(torch.tensor([PROMPT]))[0, -1].topk(3).indices.tolist()
    drawn = {generate(ours, PROMPT, 1, None, temperature=5.0, top_k=3, seed=s)[0] for s in range(100)}
    assert drawn == set(likeliest)
    assert generate(ours, PROMPT, 10, None, temperature=1.0, top_k=1, seed=5) == generate(ours, PROMPT, 10, None)
    assert generate(ours, PROMPT, 10, None, temperature=1.0, top_k=1000, seed=5) == generate(
        ours, PROMPT, 10, None, temperature=1.0, seed=5
    )
