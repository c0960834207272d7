"""A slice of a network computes what the whole would: what pipeline stages stand on. Positions are arguments, as context parallelism needs."""

from __future__ import annotations

import copy

import pytest
import torch

from pretrain.config.attention_schema import AttentionConfig
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.loss import Losses
from pretrain.parallel.initialise import initialise

SIZES = {"dim": 32, "layers": 4, "heads": 4, "vocab_size": 61}
MODELS = {
    "plain": {},
    "tied, learned positions": {"family": "gpt2"},
    "windows on some layers": {
        "family": "custom",
        "attention": AttentionConfig(window=8, window_pattern=[True, False, True, True]),
    },
    "experts": {"family": "custom", "experts": ExpertsConfig(count=4, active=2, balance_loss=0.1, dense_layers=[0])},
    "a token further ahead": {"family": "custom", "predict_ahead": 1},
    "a token further ahead, learned positions": {"family": "custom", "predict_ahead": 1, "positions": "learned"},
}


def decoder(name: str) -> Decoder:
    model = Decoder(complete(Model(**SIZES, **MODELS[name]), 32))
    initialise(model, 3)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(61, (2, 33), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(32) > 20).long().expand(2, -1)
    return ids[:, :-1], ids[:, 1:], documents


def gradients(models: list[Decoder]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:  # both ends have the gradient of their use of a tied table
                found[name] = found.get(name, 0) + parameter.grad
    return found


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_slices_one_after_the_other_have_the_losses_and_gradients_of_the_whole(name, cuts):
    whole, (tokens, targets, documents) = decoder(name), batch()
    spans = [range(start, stop) for start, stop in zip(cuts, cuts[1:])]
    slices = [copy.deepcopy(whole).keep([span]) for span in spans]
    expected = whole(tokens, targets, documents, with_cross_entropy=True)
    expected.objective_B.sum().backward()
    state = ()
    for part, span in zip(slices, spans):
        wanted = part.hidden_like(span, tokens, targets, documents_BT=documents)
        assert [(x.shape, x.dtype) for x in state] == [(x.shape, x.dtype) for x in wanted]
        state = part(tokens, targets, documents, with_cross_entropy=True, span=span, hidden=state)
    assert isinstance(state, Losses)
    assert torch.equal(state.objective_B, expected.objective_B) and torch.equal(state.cross_entropy_B, expected.cross_entropy_B)
    state.objective_B.sum().backward()
    found, wanted = gradients(slices), gradients([whole])
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        assert (found[parameter] - gradient).norm() <= 1e-6 * gradient.norm(), parameter


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_in_one_slice_under_its_name_and_a_tied_table_at_both_ends(name):
    whole = decoder(name)
    slices = [copy.deepcopy(whole).keep([span]) for span in (range(2), range(2, 4))]
    names = [set(dict(part.named_parameters())) for part in slices]
    assert names[0] | names[1] == set(dict(whole.named_parameters()))
    shared = {"embedding.weight"} if whole.config.tie_embeddings or whole.config.predict_ahead else set()
    if whole.config.predict_ahead and whole.config.positions == "learned":
        shared.add("position_embedding.weight")
    assert names[0] & names[1] == shared
    assert [unit.role for unit in slices[0].units()].count("block") == 2


def test_a_slice_says_what_it_is_given_wrongly():
    tokens, *_ = batch()
    whole = decoder("plain")
    first, last = (copy.deepcopy(whole).keep([span]) for span in (range(2), range(2, 4)))
    with pytest.raises(ValueError, match="what the span before returned"):
        last(tokens, span=range(2, 4))
    with pytest.raises(ValueError, match="takes tokens alone"):
        first(tokens, span=range(2), hidden=first(tokens, span=range(2)))


@pytest.mark.parametrize("name", MODELS)
def test_positions_that_are_given_are_those_that_are_counted(name):
    model, (tokens, _, _) = decoder(name), batch()
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens, positions_BT=torch.arange(32).expand(2, -1)))


def test_rotated_scores_depend_on_differences_of_positions_alone():
    model, (tokens, _, _) = decoder("plain"), batch()
    with torch.no_grad():
        counted = model(tokens)
        moved = model(tokens, positions_BT=torch.arange(7, 39).expand(2, -1))
        stretched = model(tokens, positions_BT=2 * torch.arange(32).expand(2, -1))
    torch.testing.assert_close(moved, counted, rtol=1e-4, atol=1e-5)
    assert (stretched - counted).abs().max() > 20 * (moved - counted).abs().max()
