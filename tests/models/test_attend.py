"""Windows, soft-caps and sinks: both back ends compute what the definitions say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.attention_schema import AttentionConfig
from pretrain.config.model_schema import Model
from pretrain.models.attention import attend
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.masks import attention_mask, document_numbers

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")


def by_definition(q, k, v, allowed, scale, soft_cap, sinks):
    """Attention of one query and head at a time, in fp64."""
    y = torch.zeros_like(q, dtype=torch.float64)
    repeats = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = [s for s in range(k.shape[2]) if allowed(b, t, s)]
                scores = [float(q[b, h, t].double() @ k[b, h // repeats, s].double()) * scale for s in seen]
                if soft_cap:
                    scores = [soft_cap * math.tanh(s / soft_cap) for s in scores]
                weights = [math.exp(s) for s in scores]
                total = sum(weights) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
                for weight, s in zip(weights, seen):
                    y[b, h, t] += weight / total * v[b, h // repeats, s].double()
    return y


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 14),
    st.sampled_from([0, 1, 3, 8]),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_is_what_its_definition_says(backend, length, window, soft_cap, with_sinks, documents, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    labels = torch.randint(2, (2, length), generator=generator) if documents else torch.zeros(2, length, dtype=torch.long)
    numbers = document_numbers(labels)
    mask = attention_mask(length, CPU, backend, numbers if documents else None, window)
    with torch.no_grad():
        got = attend(q, k, v, mask, 0.3, soft_cap, sinks)

    def allowed(b: int, t: int, s: int) -> bool:
        return s <= t and (not window or t - s < window) and bool(numbers[b, t] == numbers[b, s])

    assert (got - by_definition(q, k, v, allowed, 0.3, soft_cap, sinks)).abs().max() <= 1e-5


@pytest.mark.parametrize("window", [3, 130])
def test_a_token_outside_every_window_changes_no_logit(window):
    """With 2 layers the last position sees no further back than twice the window."""
    attention = AttentionConfig(window=window)
    model = Decoder(complete(Model(dim=32, layers=2, heads=2, vocab_size=50, attention=attention), 300))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(50, (1, 300))
    reach = 2 * (window - 1)
    outside, inside = ids.clone(), ids.clone()
    outside[0, 299 - reach - 1] = (ids[0, 299 - reach - 1] + 1) % 50
    inside[0, 299 - reach] = (ids[0, 299 - reach] + 1) % 50
    with torch.no_grad():
        logits, same, other = (model(x)[0, -1] for x in (ids, outside, inside))
    assert torch.equal(logits, same)
    assert not torch.equal(logits, other)
