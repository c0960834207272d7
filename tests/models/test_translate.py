"""Decoding finds what looking at every sequence finds; the cache, the batch and the beam of one change nothing."""

import itertools

import pytest
import torch
from test_encoder_decoder import model_of, network_of

from pretrain.models.generate import Search, translate

END, VOCABULARY = 0, 5
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2, "vocab_size": VOCABULARY, "encoder": {"vocab_size": 9}}
MODEL = model_of("pre", **SIZES, tie_embeddings=False)


@pytest.fixture(scope="module")
def network():
    """One that writes sequences of many kinds."""
    network = network_of(MODEL)
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            parameter.data *= 3.0
    return network


def sources(count: int, length: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "source_BS": torch.randint(9, (count, length), generator=generator),
        "source_lengths_B": torch.randint(1, length + 1, (count,), generator=generator),
    }


def found(network, inputs, search: Search) -> list[list[int]]:
    return translate(network, **inputs, layers=MODEL.layers, start_id=END, end_id=END, search=search)


def score_of(network, inputs, row: int, tokens: list[int], search: Search) -> float:
    """The normalised score of a whole sequence, from the network without a cache."""
    one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
    with torch.no_grad():
        log = network(tokens_BT=torch.tensor([[END, *tokens]]), **one)[0].log_softmax(-1)
    return search.normalised(sum(float(log[t, token]) for t, token in enumerate([*tokens, END])), len(tokens) + 1)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_the_best_of_all_sequences(network, penalty):
    search = Search(beam=VOCABULARY**4, length_penalty=penalty, max_ratio=0.0, max_extra=3)
    inputs = sources(3)
    results = found(network, inputs, search)
    words = [token for token in range(VOCABULARY) if token != END]
    every = [list(s) for n in range(4) for s in itertools.product(words, repeat=n)]
    for row, result in enumerate(results):
        best = max(every, key=lambda tokens: score_of(network, inputs, row, tokens, search))
        assert result == best
    assert penalty == 0 or any(results)


def test_a_length_penalty_that_no_float_holds_is_a_score_next_to_zero():
    """It was an OverflowError of a long hypothesis, within the range of validation.translation.length_penalty."""
    assert Search(length_penalty=100.0).normalised(-3.0, 100_000) == 0.0
    assert Search(length_penalty=0.6).normalised(-3.0, 7) == pytest.approx(-3.0 / 2**0.6)


def test_greedy_takes_the_likeliest_token_each_time(network):
    inputs, search = sources(8), Search(max_ratio=1.0, max_extra=4)
    for row, result in enumerate(found(network, inputs, search)):
        one, expected = {n: t[row : row + 1] for n, t in inputs.items()}, []
        limit = int(inputs["source_lengths_B"][row]) + 4
        while len(expected) < limit:
            with torch.no_grad():
                token = int(network(tokens_BT=torch.tensor([[END, *expected]]), **one)[0, -1].argmax())
            if token == END:
                break
            expected.append(token)
        assert result == expected


def test_a_beam_of_one_is_greedy(network):
    from pretrain.models import generate as module

    inputs, search = sources(16), Search(max_extra=5)
    first = torch.full((16, 1), END)

    def run(function):
        with torch.no_grad():
            cache = module.DecodingCache(MODEL.layers, 40)
            logits = network(tokens_BT=first, cache=cache, **inputs)[:, -1]
            return function(network, cache, logits, search.limits(inputs["source_lengths_B"]), END, search, module.alone)

    results = run(module._greedy)
    assert results == run(module._beam) == found(network, inputs, search)
    assert len({tuple(r) for r in results}) > 3


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_is_translated_alike_alone_and_among_others(network, beam):
    inputs, search = sources(6), Search(beam=beam)
    together = found(network, inputs, search)
    for row in range(6):
        length = int(inputs["source_lengths_B"][row])
        one = {"source_BS": inputs["source_BS"][row : row + 1, :length], "source_lengths_B": torch.tensor([length])}
        assert found(network, one, search) == [together[row]]


def test_a_wider_beam_scores_no_worse_than_greedy_on_the_whole(network):
    inputs = sources(20)
    totals = {}
    for beam in (1, 4):
        search = Search(beam=beam)
        totals[beam] = sum(
            score_of(network, inputs, row, tokens, search) for row, tokens in enumerate(found(network, inputs, search))
        )
    assert totals[4] > totals[1]


def test_no_translation_is_longer_than_the_limit_and_ranks_are_waited_for(network):
    inputs = sources(4)
    search = Search(beam=2, max_ratio=0.5, max_extra=2)
    assert all(len(r) <= limit for r, limit in zip(found(network, inputs, search), search.limits(inputs["source_lengths_B"])))
    for beam in (1, 2):
        limited = Search(beam=beam, max_ratio=0.0, max_extra=2)
        result, calls = waited_for(network, inputs, limited)
        assert result == found(network, inputs, limited) and calls == 10


def waited_for(network, inputs, search: Search) -> tuple[list[list[int]], int]:
    """The translations, and how often the network was called, where another rank needs 9 steps more than the first."""
    waits, calls = iter([9, *[1] * 9, 0]), []

    def counted(**given):
        calls.append(1)
        return network(**given)

    options = {"layers": MODEL.layers, "start_id": END, "end_id": END, "search": search}
    return translate(counted, **inputs, **options, agree=lambda _: next(waits)), len(calls)
