"""Our decoder computes what transformers' Llama computes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.nn import functional as F

from pretrain.config.schema import Model, Rope
from pretrain.data.targets import IGNORED
from pretrain.errors import ConfigError
from pretrain.models.decoder import Decoder, count_parameters
from pretrain.models.families import family_of, family_of_hf
from pretrain.models.families.llama import LLAMA
from pretrain.models.loss import sequence_losses
from pretrain.models.shape import complete

SMALL = Model(dim=32, layers=2, heads=4, ffn_dim=48, vocab_size=61)
SHAPES = {
    "plain": SMALL,
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "one key-value head": dataclasses.replace(SMALL, kv_heads=1),
    "grouped queries": dataclasses.replace(SMALL, kv_heads=2),
    "narrow heads": dataclasses.replace(SMALL, head_dim=2, kv_heads=2),
    "wide heads": dataclasses.replace(SMALL, heads=2, head_dim=24, kv_heads=1),
    "other theta": dataclasses.replace(SMALL, rope=Rope(theta=500_000.0)),
    "large eps": dataclasses.replace(SMALL, norm_eps=0.1),
    "odd sizes": Model(dim=30, layers=3, heads=5, kv_heads=5, ffn_dim=37, vocab_size=101, tie_embeddings=True, norm_eps=1e-6),
    "derived ffn": Model(dim=16, layers=1, heads=2, vocab_size=7),
}


def shape(name: str) -> Model:
    return complete(SHAPES[name], 64)


@functools.cache
def pair(name: str):
    """Our decoder and transformers' model with the same weights, drawn wide enough that every part matters."""
    from transformers import AutoConfig, LlamaForCausalLM

    model = shape(name)
    fields = {k: v for k, v in LLAMA.to_hf(model).items() if k != "architectures"}
    theirs = LlamaForCausalLM(AutoConfig.for_model(**fields, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        spread, centre = (0.2, 1.0) if parameter.dim() == 1 else (0.15, 0.0)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    weights = theirs.state_dict()
    ours = Decoder(model)
    ours.load_state_dict({name: weights[other].clone() for name, other in LLAMA.names(model).items()}, strict=True)
    return ours, theirs


def tokens(model: Model, sequences: int, length: int) -> torch.Tensor:
    return torch.randint(model.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_logits_are_those_of_transformers(name, length):
    ours, theirs = pair(name)
    ids = tokens(shape(name), 3, length)
    with torch.no_grad():
        expected, got = theirs(ids).logits, ours(ids)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_every_gradient_are_those_of_transformers(name):
    ours, theirs = pair(name)
    ids = tokens(shape(name), 3, 41)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[1, 5:20] = IGNORED
    expected = F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    loss = ours(inputs, targets).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours.zero_grad()
    theirs.zero_grad()
    loss.backward()
    expected.backward()
    reference = dict(theirs.named_parameters())
    for our_name, their_name in LLAMA.names(shape(name)).items():
        gradient, wanted = ours.get_parameter(our_name).grad, reference[their_name].grad
        assert wanted.norm() > 0
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), our_name


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_transformers_counts_them(name):
    ours, theirs = pair(name)
    assert count_parameters(ours) == theirs.num_parameters()
    with torch.device("meta"):
        assert count_parameters(Decoder(shape(name))) == theirs.num_parameters()


def test_the_weight_map_names_every_tensor_on_both_sides_once():
    for name in SHAPES:
        ours, theirs = pair(name)
        names = LLAMA.names(shape(name))
        assert set(names) == {n for n, _ in ours.named_parameters()}
        assert len(set(names.values())) == len(names)
        assert set(names.values()) == {n for n, _ in theirs.named_parameters()}


def test_the_loss_of_a_sequence_is_the_sum_of_its_token_losses():
    ours, theirs = pair("grouped queries")
    ids = tokens(SMALL, 4, 21)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 3], targets[2, :] = IGNORED, IGNORED
    with torch.no_grad():
        losses, logits = ours(inputs, targets), theirs(inputs).logits
    assert losses.dtype == torch.float32
    assert losses[2] == 0
    for row in (0, 1, 3):
        kept = targets[row] != IGNORED
        assert losses[row].item() == pytest.approx(F.cross_entropy(logits[row][kept], targets[row][kept]).item() * kept.sum())
    assert kept.sum() == 20


def test_an_ignored_target_moves_no_gradient():
    ours, _ = pair("tied")
    ids = tokens(SMALL, 1, 12)
    short = ids[:, :7], ids[:, 1:8]
    long = ids[:, :11], torch.where(torch.arange(11) < 7, ids[:, 1:], IGNORED)
    gradients = []
    for inputs, targets in (short, long):
        ours.zero_grad()
        ours(inputs, targets).sum().backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])
    for one, other in zip(*gradients):
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


def test_losses_of_bf16_logits_are_summed_in_fp32():
    logits = torch.randn(2, 300, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(11, (2, 300), generator=torch.Generator().manual_seed(1))
    losses = sequence_losses(logits, targets)
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(2, 300).sum(1)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), exact, rtol=1e-6)


def test_a_later_token_changes_no_earlier_logit():
    ours, _ = pair("one key-value head")
    ids = tokens(SMALL, 1, 20)
    other = ids.clone()
    other[0, 11] = (other[0, 11] + 1) % SMALL.vocab_size
    with torch.no_grad():
        one, two = ours(ids), ours(other)
    assert torch.equal(one[:, :11], two[:, :11])
    assert not torch.equal(one[:, 11:], two[:, 11:])


@pytest.mark.parametrize("name", ["tied", "grouped queries"])
def test_recomputed_blocks_give_bit_equal_gradients(name):
    ours, _ = pair(name)
    ids = tokens(shape(name), 2, 33)
    gradients = []
    for recompute in (False, True):
        ours.recompute_blocks = recompute
        ours.zero_grad()
        loss = ours(ids[:, :-1], ids[:, 1:]).sum()
        loss.backward()
        gradients.append([loss, *(p.grad.clone() for p in ours.parameters())])
    ours.recompute_blocks = False
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_recomputation_really_stores_less():
    ours, _ = pair("derived ffn")
    saved = []
    for recompute in (False, True):
        ours.recompute_blocks = recompute
        stored: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, stored=stored: stored.append(t.numel()) or t, lambda t: t):
            ours(tokens(shape("derived ffn"), 2, 32)).sum()
        saved.append(sum(stored))
    ours.recompute_blocks = False
    assert saved[1] < saved[0] / 2


def test_a_model_on_the_meta_device_has_no_buffers_to_lose():
    with torch.device("meta"):
        decoder = Decoder(shape("plain"))
    assert list(decoder.buffers()) == []
    assert {p.device.type for p in decoder.parameters()} == {"meta"}


# ---- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_comes_back_from_config_json(name):
    assert LLAMA.from_hf(LLAMA.to_hf(shape(name))) == shape(name)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_comes_back_from_what_transformers_writes_itself(name):
    _, theirs = pair(name)
    written = {**theirs.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]}
    assert family_of_hf(written) is LLAMA
    assert LLAMA.from_hf(written) == shape(name)
    assert LLAMA.from_hf(theirs.config.to_dict()) == shape(name)


def test_a_config_json_without_optional_fields_means_what_transformers_takes_it_to_mean():
    from transformers import LlamaConfig

    fields = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    meant, model = (
        LlamaConfig(**fields),
        LLAMA.from_hf({**fields, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    )
    assert model.kv_heads == meant.num_key_value_heads
    assert model.head_dim == meant.head_dim
    assert model.norm_eps == meant.rms_norm_eps
    assert model.max_sequence_length == meant.max_position_embeddings
    assert model.tie_embeddings == meant.tie_word_embeddings
    assert model.rope.theta == meant.rope_parameters["rope_theta"]
    assert model.init_std == meant.initializer_range


def test_the_rotary_base_is_read_in_the_old_spelling_and_in_the_new_one():
    config = LLAMA.to_hf(shape("other theta"))
    for dropped in ("rope_theta", "rope_parameters"):
        assert LLAMA.from_hf({k: v for k, v in config.items() if k != dropped}).rope.theta == 500_000.0


@pytest.mark.parametrize(
    "field, value",
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_field_that_would_change_what_is_computed_is_named_and_refused(field, value):
    with pytest.raises(ConfigError, match=f"config.json: .*{field}.*=") as caught:
        LLAMA.from_hf({**LLAMA.to_hf(shape("plain")), field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"config.json: {field} is missing or no whole number"):
        LLAMA.from_hf({k: v for k, v in LLAMA.to_hf(shape("plain")).items() if k != field})


def test_a_shape_that_transformers_refuses_is_not_exported():
    model = complete(dataclasses.replace(SMALL, heads=3, head_dim=24, kv_heads=1))
    with pytest.raises(ConfigError, match="model.dim=32 is not divisible by model.heads=3: transformers refuses such a llama"):
        LLAMA.to_hf(model)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_architecture_that_is_not_built_is_named_with_those_that_are(architectures):
    with pytest.raises(ConfigError, match=r"architectures=.* is not supported; supported: \['LlamaForCausalLM'\]"):
        family_of_hf({"architectures": architectures})


def test_every_family_of_the_schema_exists():
    import typing

    for name in typing.get_args(typing.get_type_hints(Model)["family"]):
        assert family_of(name).name == name


# ---- shapes -----------------------------------------------------------------------------------------------------------


def test_open_keys_of_a_shape_are_derived():
    model = complete(Model(dim=384, heads=6), 256)
    assert (model.head_dim, model.kv_heads, model.ffn_dim, model.max_sequence_length) == (64, 6, 1024, 256)
    assert complete(Model(dim=64, heads=4, head_dim=8, kv_heads=2, ffn_dim=10), None).ffn_dim == 10
    assert complete(Model(dim=100, heads=4, head_dim=8)).ffn_dim == 320
    assert complete(model, 128) == model


@pytest.mark.parametrize(
    "model, problem",
    [
        (Model(dim=100, heads=6), r"model.dim=100 is not divisible by model.heads=6; nearest legal model.dim: 96 or 102"),
        (Model(dim=2, heads=6), r"nearest legal model.dim: 6, or set model.head_dim"),
        (Model(dim=12, heads=4), r"model.head_dim=3 must be even.*nearest: 2, 4"),
        (Model(dim=64, heads=6, head_dim=8, kv_heads=4), r"model.heads=6 .* model.kv_heads=4; legal: \[1, 2, 3, 6\]"),
        (Model(max_sequence_length=100), r"model.max_sequence_length=100 is below data.sequence_length=128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_keys(model, problem):
    with pytest.raises(ConfigError, match=problem):
        complete(model, 128)
