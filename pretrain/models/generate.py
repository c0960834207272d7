"""Text from a model, on the model's device: several sequences at a time, with a cache of keys and values where it has one.

    prompts of one or of several lengths --padded on the left, each a document of its own--> [B, T] --> one token each --> ...

A padded row computes what it would alone: padding is another document, which nothing attends to, and positions count from 0 in each.
Models that cannot tell documents apart (`model.family: hf`, dynamic scaling) get rows of equal length together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pretrain.errors import GenerationError
from pretrain.models.attention_ways import changing_shapes
from pretrain.models.caches import Cache
from pretrain.models.decoder import Decoder
from pretrain.models.encoder_decoder import DecodingCache
from pretrain.models.layer_specs import layer_specs


def uncached_reason(model: nn.Module) -> str | None:
    """Why a model generates without a cache, computing every position anew for each token; None where it has one."""
    if not isinstance(model, Decoder):
        return f"model.family={model.config.family} has none here"
    if model.config.positions == "rope" and model.config.rope.scaling == "dynamic":
        return "with model.rope.scaling=dynamic the rotation of earlier keys depends on the length of the whole"
    return None


def batchable(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """The indices of sequences, in groups that may be padded to one length.

    That is one group of all. Where a position may compute something else in a longer sequence, a group has sequences of equal length, and the
    shortest come first.
    """
    if uncached_reason(model) is None:
        return [list(range(len(lengths)))]
    alike: dict[int, list[int]] = {length: [] for length in sorted(set(lengths))}
    for i, length in enumerate(lengths):
        alike[length].append(i)
    return list(alike.values())


@dataclass
class _Row:
    """A sequence under way."""

    index: int
    prompt: int
    tokens: list[int]
    generator: torch.Generator
    ended: bool = False


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. `temperature` 0 takes the largest logit, the first of equal ones. Otherwise logits are divided by it, and the
    token is drawn. `top_k` above 0 draws from the k largest alone. `top_p` below 1 draws from the fewest that together have that
    probability (nucleus sampling, arXiv 1904.09751).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


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
    """`generate_batch` of one prompt."""
    sampling = Sampling(temperature, top_k, top_p)
    return generate_batch(model, [prompt], max_tokens, stop_ids, sampling, [seed], cached)[0]


@torch.no_grad()
@changing_shapes()
def generate_batch(
    model: nn.Module,
    prompts: Sequence[list[int]],
    max_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = Sampling(),
    seeds: Sequence[int] = (),
    cached: bool = True,
    ends: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Tokens that continue each prompt, none of which is empty: at most `max_tokens`, up to and without the first of `stop_ids`.

    What a row draws depends on its seed (0 by default), its prompt and the model alone. With `cached`, models that can
    (`uncached_reason`) compute every position once. `ends` is called after each token with the index of its prompt and the tokens that continue it so
    far; True ends the row. Beyond `model.max_sequence_length` a row sees its last so many tokens, counted from 0,
    all computed anew for each token. Raises GenerationError where logits are no numbers.
    """
    rows = [
        _Row(index, len(prompt), list(prompt), torch.Generator().manual_seed(seed))
        for index, (prompt, seed) in enumerate(zip(prompts, seeds or [0] * len(prompts), strict=True))
    ]
    cached = cached and uncached_reason(model) is None
    for group in batchable(model, [row.prompt for row in rows]):
        _continue(model, [rows[i] for i in group], max_tokens, frozenset(stop_ids), sampling, cached, ends)
    return [row.tokens[row.prompt :] for row in rows]


def _continue(
    model: nn.Module,
    rows: list[_Row],
    max_tokens: int,
    stop_ids: frozenset[int],
    sampling: Sampling,
    cached: bool,
    ends: Callable[[int, list[int]], bool] | None,
) -> None:
    context = model.config.max_sequence_length
    longest = max((row.prompt for row in rows), default=0)
    kept = min(context, longest + max_tokens)
    cache = Cache(layer_specs(model.config), kept) if cached and longest <= context else None
    for step in range(max_tokens):
        if not rows:
            return
        if longest + step > context:
            cache = None  # what is kept was computed at positions that are others now
        logits_BV = _next_logits(model, [row.tokens[-context:] for row in rows], cache)
        for row, logits_V in zip(rows, logits_BV):
            token = choose(logits_V, sampling.temperature, sampling.top_k, sampling.top_p, row.generator)
            row.ended = token in stop_ids
            if not row.ended:
                row.tokens.append(token)
                row.ended = ends is not None and ends(row.index, row.tokens[row.prompt :])
        left = [i for i, row in enumerate(rows) if not row.ended]
        if cache is not None and len(left) < len(rows):
            cache.select(torch.tensor(left, dtype=torch.long, device=next(model.parameters()).device))
        rows = [rows[i] for i in left]


def _next_logits(model: nn.Module, rows: list[list[int]], cache: Cache | None) -> Tensor:
    """Logits [B, V] of what follows each row, fp32 on the CPU. What is in the cache is not computed again."""
    device = next(model.parameters()).device
    if cache is not None and cache.length:
        logits_BV = model(torch.tensor([row[-1:] for row in rows], device=device), cache=cache)[:, -1]
    else:
        length = max(map(len, rows))
        documents_BT = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        tokens_BT = torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device)
        inputs = {"documents_BT": documents_BT} if min(map(len, rows)) < length else {}
        if cache is not None:
            inputs["cache"] = cache
        logits_BV = model(tokens_BT, **inputs)[:, -1]
    logits_BV = logits_BV.float().cpu()
    if (odd_B := are_no_numbers(logits_BV)).any():
        raise GenerationError(
            f"the model's logits after {len(rows[int(odd_B.int().argmax())])} tokens are no numbers (NaN or infinity): its weights are damaged or "
            "diverged, or the number format is too narrow for it; try --dtype fp32 or another checkpoint"
        )
    return logits_BV


def are_no_numbers(logits_BV: Tensor) -> Tensor:
    """Rows [B] with a logit that is NaN or plus infinity."""
    return (logits_BV.isnan() | (logits_BV == torch.inf)).any(-1)


def choose(logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """The next token of these logits; see `Sampling`."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        kept = logits_V.topk(min(top_k, logits_V.numel()))
        logits_V = torch.full_like(logits_V, -torch.inf).scatter_(0, kept.indices, kept.values)
    # From the largest down, so that a temperature next to 0 leaves no infinity but those of what is never drawn. The limits are finite in fp32.
    probabilities_V = ((logits_V - logits_V.max()) / min(max(temperature, 1e-30), 1e30)).softmax(-1)
    if top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # What is before a token must not be enough already. The likeliest is always among them, even if top_p is 0 in fp32.
        is_kept_V = sorted_V.cumsum(0) - sorted_V < top_p
        is_kept_V[0] = True
        sorted_V = sorted_V.where(is_kept_V, 0)
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, sorted_V)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


Agree = Callable[[int], int]
"""The largest of the numbers that the ranks give. With sharded weights every rank must call the network as often as the others."""


def alone(number: int) -> int:
    """`Agree` of a single process."""
    return number


@dataclass(frozen=True)
class Search:
    """How a translation is searched. A hypothesis of n tokens, its end included, scores log probability / ((5 + n) / 6)^penalty (Wu et
    al., arXiv 1609.08144, equation 14). Its end is forced after `max_ratio` × source tokens + `max_extra` tokens.
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
        return score * ((5 + length) / 6) ** -self.length_penalty  # a divisor could exceed all floats


@dataclass
class _Hypotheses:
    """The hypotheses of one sentence: the beam, best first, and those that have ended, with normalised scores."""

    active: list[tuple[float, list[int]]]
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False


@torch.no_grad()
@changing_shapes()
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
    """The best translation found of each source, without its end token. `call`: the network, placed, whose logits are numbers; `layers`: its decoder
    blocks.
    """
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
    """Rows are sentence × beam + hypothesis. Each step looks at the 2 × beam best continuations. Those that end are kept aside if they are
    among the best `beam`; the best `beam` of the others go on. A sentence is done when `beam` hypotheses have ended, or when no open one
    can still win.
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
