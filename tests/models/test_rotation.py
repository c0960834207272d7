"""Rotary embedding on a CPU has a backward pass of its own: beside transformers' function and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import complete, family_of
from pretrain.models.positions import rotary_tables, rotate
from pretrain.parallel.blocks import set_compute_format

POSITIONS = {"of a sequence": torch.arange(9), "of documents": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6, 7]])}


def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = rotary_tables(complete(Model(dim=32, heads=2, vocab_size=8)), positions, 9)
    return found if positions.dim() == 1 else tuple(table[:, None] for table in found)


def results(turn, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the gradient of the heads [B, H, T, G], which lie in memory as [B, T, H, G]."""
    x = x.detach().requires_grad_()
    y = turn(x)
    y.backward(gradient)
    return y.detach(), x.grad


@pytest.fixture
def heads() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(2, 9, 2, 16, generator=generator).transpose(1, 2) for _ in range(2))
    return x, gradient


@pytest.mark.parametrize("positions", POSITIONS)
def test_heads_and_gradients_are_those_of_transformers(heads, positions):
    cos, sin = tables(POSITIONS[positions])
    whole = [table if table.dim() == 4 else table[None, None] for table in (cos, sin)]
    expected = results(lambda x: apply_rotary_pos_emb(x, x, whole[0][:, 0], whole[1][:, 0])[0], *heads)
    for ours, theirs in zip(results(lambda x: rotate(x, (cos, sin)), *heads), expected):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_bf16_is_nearer_to_fp32_than_transformers_is():
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(8, 256, 4, 16, generator=generator).transpose(1, 2).bfloat16() for _ in range(2)]
    cos, sin = rotary_tables(complete(Model(dim=32, heads=2, vocab_size=8)), torch.arange(256), 256)
    exact = results(lambda x: rotate(x, (cos, sin)), *(x.float() for x in heads))
    theirs = results(lambda x: apply_rotary_pos_emb(x, x, cos[None].bfloat16(), sin[None].bfloat16())[0], *heads)
    ours = results(lambda x: rotate(x, (cos, sin)), *heads)
    for found, other, correct in zip(ours, theirs, exact):
        assert found.dtype == torch.bfloat16
        assert 0 < (found - correct).norm() < 0.95 * (other - correct).norm()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_what_is_not_turned_keeps_its_gradient_and_lengths_are_kept(heads, layout):
    x, gradient = heads
    cos, sin = (table[:, :8] for table in rotary_tables(complete(Model(dim=16, heads=2, vocab_size=8)), POSITIONS["of a sequence"], 9))
    y, grad_x = results(lambda x: rotate(x, (cos, sin), layout), x, gradient)
    assert torch.equal(y[..., 8:], x[..., 8:]) and torch.equal(grad_x[..., 8:], gradient[..., 8:])
    torch.testing.assert_close(y[..., :8].norm(dim=-1), x[..., :8].norm(dim=-1))
    torch.testing.assert_close(grad_x[..., :8].norm(dim=-1), gradient[..., :8].norm(dim=-1))  # a rotation is orthogonal, and so is its transpose
    torch.testing.assert_close((y * gradient).sum(), (x * grad_x).sum())  # the gradient is by the transpose


def test_tables_are_kept_for_backward_once_and_not_in_each_layer():
    """In bf16 each layer cast them for queries and for keys, and kept four more tables: 134 MB of Llama 3.1 8B at 4,096 tokens."""
    network = build_network(complete(Model(dim=32, layers=3, heads=2, vocab_size=8), 24))
    set_compute_format(network, torch.bfloat16)
    kept, tokens = [], torch.zeros(1, 24, dtype=torch.int64)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        network(tokens, tokens)
    assert len({table.data_ptr() for table in kept if tuple(table.shape) == (24, 16)}) == 2


# ---- scaling: beside transformers' functions -------------------------------------------------------------------------

HUB = {"vocab_size": 8, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
       "max_position_embeddings": 256, "rope_theta": 5e5}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


def read_rope(scaling: dict) -> Model:
    return family_of("llama").from_hf(HUB | {"rope_scaling": scaling})


@pytest.mark.parametrize("factors", [(1.0, 4.0), (1, 2), (0.5, 0.75), (4.0, 4.000001), (1e-6, 1e6)])
def test_llama3_frequencies_are_those_of_transformers(factors):
    scaling = LLAMA3 | dict(zip(("low_freq_factor", "high_freq_factor"), factors))
    compare_scaling(scaling)


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_factor": None}, {"attention_factor": 1}, {"attention_factor": 0.7}, {"mscale": 0.707, "mscale_all_dim": 1.3},
     {"mscale": 0.707}, {"mscale": 0, "mscale_all_dim": 1.0}, {"attention_factor": 1.1, "mscale": 2.0, "mscale_all_dim": 0.5},
     {"beta_fast": 4, "beta_slow": 4}, {"beta_fast": 1, "beta_slow": 32}, {"beta_fast": None, "beta_slow": None, "truncate": False}, {"factor": 1},
     {"original_max_position_embeddings": 8}],
)  # fmt: skip
def test_yarn_frequencies_and_amplitudes_are_those_of_transformers(changes):
    compare_scaling({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | changes)


def compare_scaling(scaling: dict) -> None:
    config = LlamaConfig(**HUB, rope_scaling=dict(scaling))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    angles = torch.arange(64).float()[:, None] * torch.cat((frequencies, frequencies))
    cos, sin = rotary_tables(read_rope(scaling), torch.arange(64), 64)
    torch.testing.assert_close(cos, angles.cos() * amplitude, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * amplitude, rtol=0, atol=1e-5)


@pytest.mark.parametrize("factors", [(4.0, 1.0), (2.0, 2.0)])
def test_llama3_factors_in_the_wrong_order_are_refused_where_transformers_warns(factors):
    scaling = LLAMA3 | dict(zip(("low_freq_factor", "high_freq_factor"), factors))
    with pytest.raises(ConfigError, match=r"low_frequency=. \(low_freq_factor of config.json\) must be below model.rope.high_frequency=. "):
        read_rope(scaling)
    assert ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**HUB, rope_scaling=scaling))[0].isfinite().all()


def test_an_attention_factor_of_zero_is_refused_because_transformers_turns_everything_into_zero():
    """It was read as "derive it", which is what 0 means in our configurations."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.0}
    assert ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**HUB, rope_scaling=dict(scaling)))[1] == 0
    with pytest.raises(ConfigError, match="attention_factor=0 makes every rotated query and key 0 in transformers"):
        read_rope(scaling)
