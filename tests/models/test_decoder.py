"""What every decoder does, whatever its family; what a family computes is in test_families.py."""

from __future__ import annotations

import copy
import dataclasses

import parity
import pytest
import torch
from torch.nn import functional as F

from pretrain.config.model_schema import Model
from pretrain.conventions import IGNORED
from pretrain.errors import ConfigError
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.families.llama import LLAMA
from pretrain.models.loss import sequence_losses
from pretrain.parallel.blocks import recompute_blocks

tokens = parity.tokens
SMALL = Model(dim=32, layers=2, heads=4, ffn_dim=48, vocab_size=61)


def shape(name: str) -> Model:
    return parity.cases("llama")[name]


def pair(name: str):
    return parity.pair("llama", name)


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
    ours = copy.deepcopy(pair(name)[0])
    ids = tokens(shape(name), 2, 33)
    gradients = []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(ours)
        ours.zero_grad()
        loss = ours(ids[:, :-1], ids[:, 1:]).sum()
        loss.backward()
        gradients.append([loss, *(p.grad.clone() for p in ours.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_recomputation_really_stores_less():
    ours = copy.deepcopy(pair("derived ffn")[0])
    saved = []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(ours)
        stored: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, stored=stored: stored.append(t.numel()) or t, lambda t: t):
            ours(tokens(shape("derived ffn"), 2, 32)).sum()
        saved.append(sum(stored))
    assert saved[1] < saved[0] / 2


def test_a_model_on_the_meta_device_has_no_buffers_to_lose():
    with torch.device("meta"):
        decoder = Decoder(shape("plain"))
    assert list(decoder.buffers()) == []
    assert {p.device.type for p in decoder.parameters()} == {"meta"}


# ---- config.json ------------------------------------------------------------------------------------------------------


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
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "short_factor": [1.0]}),
        ("rope_scaling", {"rope_type": "linear", "factor": 3.0}),
        ("rope_parameters", {"rope_type": "su", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_parameters", [1]),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_a_field_that_would_change_what_is_computed_is_named_and_refused(field, value):
    with pytest.raises(ConfigError, match=f"config.json: .*{field}.*=") as caught:
        LLAMA.from_hf({**LLAMA.to_hf(shape("plain")), field: value})
    assert "\n" not in str(caught.value)


def test_a_shape_that_transformers_refuses_is_not_exported():
    model = complete(dataclasses.replace(SMALL, heads=3, head_dim=24, kv_heads=1), 64)
    with pytest.raises(ConfigError, match="model.dim=32 is not divisible by model.heads=3: transformers refuses such a llama"):
        LLAMA.to_hf(model)


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
        (Model(dim=12, heads=4), r"model.head_dim=3 must be even.*nearest: 2 or 4"),
        (Model(dim=8, heads=4, head_dim=1), r"model.head_dim=1 must be even.*nearest: 2$"),
        (Model(dim=64, heads=6, head_dim=8, kv_heads=4), r"model.heads=6 .* model.kv_heads=4; legal: \[1, 2, 3, 6\]"),
        (Model(max_sequence_length=100), r"model.max_sequence_length=100 is below data.sequence_length=128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_keys(model, problem):
    with pytest.raises(ConfigError, match=problem):
        complete(model, 128)
