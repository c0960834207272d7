"""Decoding with an encoder-decoder: greedy, and beam search with length normalisation. Sources are encoded once, and keys and values of
the target positions are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pretrain.models.encoder_decoder import DecodingCache

Agree = Callable[[int], int]
"""The largest of the numbers that the ranks give. With sharded weights every rank must call the network as often as the others."""


def alone(number: int) -> int:
    """`Agree` of a single process."""
    return number


@dataclass(frozen=True)
class Search:
    """How translations are looked for. A hypothesis of n tokens, its end included, scores log probability / ((5 + n) / 6)^penalty (Wu et
    al., arXiv 1609.08144, equation 14); it has at most `max_ratio` × source tokens + `max_extra` tokens, then its end is forced.
    """

    beam: int = 1
    length_penalty: float = 0.6
    max_ratio: float = 2.0
    max_extra: int = 10

    def limits(self, source_lengths_B: Tensor) -> list[int]:
        """Most tokens of each translation, its end not counted."""
        return [int(self.max_ratio * length) + self.max_extra for length in source_lengths_B.tolist()]

    def normalised(self, score: float, length: int) -> float:
        """The score of a hypothesis of `length` tokens, its end included."""
        return score / ((5 + length) / 6) ** self.length_penalty


@dataclass
class _Hypotheses:
    """Of one sentence: the beam, best first, and what has ended, with its normalised score."""

    active: list[tuple[float, list[int]]]
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False


@torch.no_grad()
def translate(
    call: Callable[..., Tensor],
    source_BS: Tensor,
    source_lengths_B: Tensor,
    layers: int,
    start_id: int,
    end_id: int,
    search: Search,
    agree: Agree = alone,
) -> list[list[int]]:
    """The best translation found of each source, without its end token. `call`: the network, placed; `layers`: its decoder blocks."""
    limits = search.limits(source_lengths_B)
    cache = DecodingCache(layers, agree(max(limits)) + 1)
    tokens_B1 = torch.full((len(limits), 1), start_id, device=source_BS.device)
    sources = {"source_BS": source_BS, "source_lengths_B": source_lengths_B}
    logits_BV = call(tokens_BT=tokens_B1, cache=cache, **sources)[:, -1].float()
    run = _greedy if search.beam == 1 else _beam
    return run(call, cache, logits_BV, limits, end_id, search, agree)


def _greedy(
    call, cache: DecodingCache, logits_BV: Tensor, limits: list[int], end_id: int, search: Search, agree: Agree
) -> list[list[int]]:
    """The likeliest token, the first of equal ones, until it is the end."""
    results: list[list[int]] = [[] for _ in limits]
    open_rows = set(range(len(limits)))
    while True:
        tokens_B = logits_BV.argmax(-1)
        chosen = tokens_B.tolist()
        open_rows = {row for row in open_rows if chosen[row] != end_id and len(results[row]) < limits[row]}
        for row in open_rows:
            results[row].append(chosen[row])
        if not agree(len(open_rows)):
            return results
        logits_BV = call(tokens_BT=tokens_B[:, None], cache=cache)[:, -1].float()


def _beam(
    call, cache: DecodingCache, logits_BV: Tensor, limits: list[int], end_id: int, search: Search, agree: Agree
) -> list[list[int]]:
    """Rows are sentence × beam + hypothesis. Of the 2 × beam best continuations, those among the best `beam` that end are kept aside, and
    the best `beam` that do not end go on. A sentence is done when `beam` hypotheses have ended, or none that is open can still win.
    """
    count, beam, device = len(limits), search.beam, logits_BV.device
    sentences = [_Hypotheses([(0.0, [])]) for _ in limits]
    rows = torch.arange(count, device=device).repeat_interleave(beam)
    cache.select(rows)
    logits_RV = logits_BV[rows]
    while True:
        scores_RV = logits_RV.log_softmax(-1) + _scores(sentences, beam, device)
        best = scores_RV.view(count, -1).topk(min(2 * beam, beam * logits_RV.shape[1]))
        totals, places, size = best.values.tolist(), best.indices.tolist(), logits_RV.shape[1]
        parents = []
        ends = scores_RV[:, end_id].view(count, beam).tolist()
        for i, sentence in enumerate(sentences):
            candidates = [(score, place // size, place % size) for score, place in zip(totals[i], places[i])]
            if len(sentence.active[0][1]) == limits[i]:
                candidates = sorted(((score, k, end_id) for k, score in enumerate(ends[i])), key=lambda c: -c[0])
            parents += [i * beam + k for k in _advance(sentence, candidates, limits[i], end_id, search)]
        if not agree(sum(not sentence.done for sentence in sentences)):
            return [max(sentence.ended, key=lambda ended: ended[0])[1] for sentence in sentences]
        cache.reorder(torch.tensor(parents, device=device))
        last = [(tokens or [end_id])[-1] for sentence in sentences for _, tokens in _padded(sentence, beam)]
        logits_RV = call(tokens_BT=torch.tensor(last, device=device)[:, None], cache=cache)[:, -1].float()


def _advance(
    sentence: _Hypotheses, candidates: list[tuple[float, int, int]], limit: int, end_id: int, search: Search
) -> list[int]:
    """Take the continuations (score, hypothesis, token), best first, into a sentence; which hypothesis each row continues."""
    beam = search.beam
    if sentence.done:
        return list(range(beam))
    active, parents = [], []
    for rank, (score, k, token) in enumerate(candidates):
        if score == -torch.inf or len(active) == beam:
            break
        tokens = sentence.active[k][1]
        if token != end_id:
            active.append((score, [*tokens, token]))
            parents.append(k)
        elif rank < beam:
            sentence.ended.append((search.normalised(score, len(tokens) + 1), tokens))
    sentence.done = not active or len(sentence.ended) >= beam
    if sentence.ended and not sentence.done:
        # Scores only fall, and the longest hypothesis divides by most.
        attainable = search.normalised(active[0][0], limit + 1)
        sentence.done = attainable <= max(score for score, _ in sentence.ended)
    if active:
        sentence.active = active
    return parents + [0] * (beam - len(parents))


def _padded(sentence: _Hypotheses, beam: int) -> list[tuple[float, list[int]]]:
    """The beam, filled up where it is not full yet."""
    return sentence.active + [(-torch.inf, sentence.active[0][1])] * (beam - len(sentence.active))


def _scores(sentences: list[_Hypotheses], beam: int, device: torch.device) -> Tensor:
    return torch.tensor([score for sentence in sentences for score, _ in _padded(sentence, beam)], device=device)[:, None]
