"""Every family computes what transformers computes, in every configuration of its case file, and is written and read without loss."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from parity import ALL, FAMILIES, cases, on_disk, pair, tokens, translate
from recurrence import position_by_position, written_position_by_position
from running import on_meta
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.model_schema import Model
from pretrain.conventions import IGNORED
from pretrain.errors import ConfigError
from pretrain.models import build_network, linear_attention
from pretrain.models.caches import Cache
from pretrain.models.decoder import count_parameters
from pretrain.models.families import families, family_of, family_of_hf
from pretrain.models.families.declare.weights import resolve
from pretrain.models.layer_specs import layer_specs
from pretrain.models.shape import with_values

every_case = pytest.mark.parametrize("family, name", ALL)
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_case
def test_logits_are_those_of_transformers(family, name):
    ours, theirs = pair(family, name)
    for length in (1, 2, 17, 40):
        ids = tokens(ours.config, 3, length)
        with torch.no_grad():
            expected, got = theirs(ids).logits, ours(ids)
        assert expected.std() > 0.1
        assert (got - expected).abs().max() <= 1e-5


@every_case
def test_loss_and_every_gradient_are_those_of_transformers(family, name):
    ours, theirs = pair(family, name)
    ids = tokens(ours.config, 3, 41)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[1, 5:20] = IGNORED
    ours.zero_grad()
    theirs.zero_grad()
    expected = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    loss = F.cross_entropy(ours(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    wanted = translate(family, ours.config, on_disk(family, ours.config, theirs, {**theirs.state_dict(), **gradients}))
    for parameter_name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        reference = wanted[parameter_name]
        if ours.config.positions != "rope" and ours.config.norm.qk == "none" and parameter_name.endswith("key.bias"):
            # It adds the same to all scores of a query, which the softmax does not see: both are roundings of zero.
            assert max(parameter.grad.norm(), reference.norm()) <= 1e-5
            continue
        assert reference.norm() > 0, parameter_name
        assert (parameter.grad - reference).norm() <= 1e-4 * reference.norm(), parameter_name


@every_case
def test_the_weight_map_names_every_tensor_on_both_sides_once_and_back_gives_the_same_bits(family, name):
    ours, theirs = pair(family, name)
    model = ours.config
    written = on_disk(family, model, theirs, theirs.state_dict())
    weights = dict(ours.named_parameters())
    back: dict[str, torch.Tensor] = {}
    for line in resolve(family_of(family).weights, model, list(weights)):
        back |= dict(zip(line.theirs, line.layout.to_theirs([weights[n].detach() for n in line.ours], model), strict=True))
    heads = {"lm_head.weight", "embed_out.weight"} if model.tie_embeddings else set()
    assert set(back) == set(written) - heads
    assert all(torch.equal(back[name], written[name]) for name in back)
    assert all(tensor.is_contiguous() for tensor in back.values())


@every_case
def test_parameters_are_counted_as_transformers_counts_them(family, name):
    ours, theirs = pair(family, name)
    assert sum(p.numel() for p in ours.parameters() if p.requires_grad) == theirs.num_parameters(only_trainable=True)
    with torch.device("meta"):
        assert count_parameters(build_network(ours.config)) == count_parameters(ours)


# The last case of each family; the others with `-m slow`: python -m pytest tests/models/test_families.py -m slow
@pytest.mark.parametrize(
    "family, name", [pytest.param(*case, marks=() if case in dict(ALL).items() else pytest.mark.slow) for case in ALL]
)
def test_flops_are_those_that_torch_counts(family, name, monkeypatch):
    model = cases(family)[name]
    # Products of chunks, and what is computed again, are more than the recurrence, which counts.
    monkeypatch.setattr(linear_attention, "gated_delta_rule", position_by_position)
    monkeypatch.setattr(linear_attention, "state_space_dual", written_position_by_position)
    monkeypatch.setattr(linear_attention._ComputedAgain, "apply", lambda function, *tensors: function(*tensors))
    # The counter sees whole matrices where we count what a window leaves.
    model = with_values(model, {"attention.window": 0, "attention_backend": "sdpa"})
    with torch.device("meta"):
        network = build_network(model)
        ids = torch.zeros(3, 32, dtype=torch.long)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            network(ids).float().sum().backward()
    assert on_meta(model).flops_per_token(32) * 3 * 32 == pytest.approx(counter.get_total_flops(), rel=0.01)


@every_case
def test_a_cache_changes_no_logit(family, name):
    ours, _ = pair(family, name)
    ids = tokens(ours.config, 2, 24)
    if ours.config.rope.scaling == "dynamic":
        pytest.skip("the base of dynamic scaling depends on the whole length: keys in a cache were rotated by another")
    cache = Cache(layer_specs(ours.config), 24)
    with torch.no_grad():
        pieces = [ours(ids[:, start:stop], cache=cache) for start, stop in ((0, 5), (5, 6), (6, 7), (7, 19), (19, 24))]
        whole = ours(ids)
    assert cache.length == 24
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= 1e-5


@every_case
def test_documents_in_one_sequence_give_the_logits_that_each_gives_alone(family, name):
    ours, _ = pair(family, name)
    ids = tokens(ours.config, 1, 40)
    documents = torch.tensor([[3] * 7 + [1] * 1 + [2] * 20 + [9] * 12])
    if ours.config.rope.scaling == "dynamic":
        pytest.skip("the base of dynamic scaling depends on the whole length, which is that of all documents together")
    with torch.no_grad():
        together = ours(ids, documents_BT=documents)
        alone = torch.cat([ours(part) for part in ids.split([7, 1, 20, 12], dim=1)], dim=1)
    assert (together - alone).abs().max() <= 1e-5


@every_case
def test_a_model_comes_back_from_config_json(family, name):
    model, entry = cases(family)[name], family_of(family)
    assert entry.from_hf(entry.to_hf(model)) == model


@every_case
def test_a_model_comes_back_from_what_transformers_writes_itself(family, name):
    ours, theirs = pair(family, name)
    entry = family_of(family)
    for written in (theirs.config.to_diff_dict(), theirs.config.to_dict()):
        written = {**written, "architectures": [entry.architecture]}
        assert family_of_hf(written) is entry
        assert entry.from_hf(written) == ours.config


@every_family
def test_a_field_that_is_not_known_is_named_and_refused(family):
    entry = family_of(family)
    model = next(iter(cases(family).values()))
    for field, value in (("quantization_config", {"bits": 4}), ("some_new_switch", 1)):
        with pytest.raises(ConfigError, match=f"config.json: {field}=") as caught:
            entry.from_hf({**entry.to_hf(model), field: value})
        assert "\n" not in str(caught.value)


@every_family
def test_every_required_field_is_missed_by_name(family):
    entry = family_of(family)
    config = entry.to_hf(next(iter(cases(family).values())))
    required = [f.theirs for f in entry.fields if not isinstance(f.default, (int, float, bool, list, str, type(None)))]
    assert len(required) >= 4
    for field in required:
        with pytest.raises(ConfigError, match=f"config.json: {field} is missing( or no whole number)?$"):
            entry.from_hf({k: v for k, v in config.items() if k != field})


@every_family
def test_a_switch_that_the_family_cannot_express_is_named_and_refused(family):
    entry = family_of(family)
    model = next(iter(cases(family).values()))
    with pytest.raises(ConfigError, match=f"model.positions=relative is not what model.family={family} computes, which is "):
        entry.to_hf(dataclasses.replace(model, positions="relative"))


def test_every_family_of_the_schema_exists_and_has_a_case_file():
    names = set(typing.get_args(typing.get_type_hints(Model)["family"]))
    assert names - {"custom", "hf", "transformer"} == {family.name for family in families()} == {*FAMILIES, "t5"}  # test_t5.py


@pytest.mark.parametrize("architectures", [["BertModel"], [], None])
def test_an_architecture_that_is_not_built_is_named_with_those_that_are(architectures):
    with pytest.raises(ConfigError, match=r"architectures=.* is not supported; supported: \[.*'LlamaForCausalLM'"):
        family_of_hf({"architectures": architectures})
