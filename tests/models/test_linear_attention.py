"""Linear attention against the recurrences of papers and against transformers; its documents, cache, memory and initial weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence import position_by_position, written_position_by_position
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pretrain.config.attention_schema import AttentionConfig, Latent, LinearAttentionConfig, Rope
from pretrain.config.model_schema import EncoderConfig, Model
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.caches import Cache, RecurrentCache
from pretrain.models.families import complete
from pretrain.models.layer_specs import layer_specs
from pretrain.models.linear_attention import GatedDeltaNet, Mamba2
from pretrain.models.recurrences import CHUNK, _chunk_states, gated_delta_rule, short_convolution, state_space_dual
from pretrain.parallel.blocks import set_compute_format
from pretrain.parallel.initialise import initialise

SMALL = {"family": "custom", "dim": 24, "layers": 3, "heads": 4, "ffn_dim": 32, "vocab_size": 31}
LINEAR = LinearAttentionConfig(pattern=[True, True, False], key_heads=2, value_heads=4, key_dim=6, value_dim=5)
MAMBA = dataclasses.replace(LINEAR, kind="mamba2")
both_kinds = pytest.mark.parametrize("linear", [LINEAR, MAMBA], ids=["gated_delta", "mamba2"])


def model(**others) -> Model:
    return complete(Model(**{**SMALL, "linear_attention": LINEAR, **others}), 200)


def network(config: Model, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    made = build_network(config)
    initialise(made, seed=0)
    for p in made.parameters():  # wide enough that every part matters
        p.data = (p.data * (8.0 if p.dim() == 2 else 1.0)).to(dtype)
    return made


def arguments(length: int, seed: int = 0, keys: int = 2, repeats: int = 2, g: int = 6, v: int = 5, strength: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(2, keys, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    unit = torch.nn.functional.normalize
    return [
        unit(draw(length, g), dim=-1),
        unit(draw(length, g), dim=-1),
        draw(repeats, length, v),
        -strength * draw(repeats, length).exp(),
        2 * draw(repeats, length).sigmoid(),
    ]


# ---- the recurrences --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(st.integers(1, 20), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 9])),
    st.sets(st.integers(0, 2 * CHUNK), max_size=6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_chunks_give_the_results_state_and_gradients_of_the_recurrence(length, begins, has_state, corrects, seed):
    inputs = [x.requires_grad_() for x in arguments(length, seed)[: 5 if corrects else 4]]
    state = torch.randn(2, 2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    begins_BT = torch.zeros(2, length, dtype=torch.bool)
    begins_BT[1, [t for t in begins if t < length]] = True
    others = (begins_BT if begins else None, state if has_state else None)
    weights = torch.randn(2, 2, 2, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for rule in (gated_delta_rule, position_by_position) if corrects else (state_space_dual, written_position_by_position):
        y, last = rule(*inputs, *others)
        wanted = [*inputs, *([state] if has_state else [])]
        found.append([y.detach(), last.detach(), *torch.autograd.grad((y * weights).sum() + last.square().sum(), wanted)])
    for got, expected in zip(*found):
        assert (got - expected).norm() <= 1e-11 * max(1.0, float(expected.norm()))


def test_the_results_are_those_of_transformers_rule_position_by_position():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, log_decay, rate = (x.float() for x in arguments(150))
    theirs = [x.transpose(1, 2) for x in (q, k, v.flatten(1, 2), log_decay.flatten(1, 2), rate.flatten(1, 2))]
    expected, last = torch_recurrent_gated_delta_rule(*theirs, output_final_state=True)
    y, state = gated_delta_rule(q * 6**-0.5, k, v, log_decay, rate)
    assert (y.flatten(1, 2).transpose(1, 2) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (state.flatten(1, 2) - last).abs().max() <= 1e-5 * last.abs().max()


def test_the_state_space_dual_is_that_of_transformers():
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    q, k, v, log_decay, _ = (x.float() for x in arguments(150))
    step = torch.rand(2, 150, 4, generator=torch.Generator().manual_seed(0))
    decay = torch.tensor([-0.3, -1.0, -2.0, -7.0])
    head = lambda x: x.permute(0, 3, 1, 2, 4).flatten(2, 3)  # noqa: E731
    expected, last = mamba2_chunk_scan(
        head(v), step, decay, k.transpose(1, 2), q.transpose(1, 2), chunk_size=32, D=torch.zeros(4), return_final_states=True
    )
    by_head = lambda x_BTH: x_BTH.unflatten(-1, (2, 2)).permute(0, 2, 3, 1)  # noqa: E731
    y, state = state_space_dual(q, k, v * by_head(step)[..., None], by_head(step * decay))
    assert (head(y) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (state.flatten(1, 2).mT - last).abs().max() <= 1e-5 * last.abs().max()


@pytest.mark.parametrize("strength", [1e-6, 1.0, 100.0, 1e30])
@pytest.mark.parametrize(
    "rule, recurrence", [(gated_delta_rule, position_by_position), (state_space_dual, written_position_by_position)]
)
def test_decays_of_any_strength_neither_overflow_nor_lose_precision(strength, rule, recurrence):
    """Sums of logarithms grow with the length of a chunk; only their differences between two positions count."""
    exact = arguments(3 * CHUNK, strength=strength)[: 5 if rule is gated_delta_rule else 4]
    inputs = [x.float().requires_grad_() for x in exact]
    y, state = rule(*inputs)
    y.sum().backward()
    assert all(torch.isfinite(x).all() for x in (y, state, *(x.grad for x in inputs)))
    expected, _ = recurrence(*exact)
    assert (y - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("moves", [(4, 3, 6, 6), (4, 3, 1, 5)])
def test_the_operator_of_chunks_is_what_torch_wants_of_an_operator(moves):
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)  # noqa: E731
    torch.library.opcheck(_chunk_states, (draw(*moves), draw(4, 3, 6, 5), draw(4, 6, 5)))


@pytest.mark.parametrize("rule, count", [(gated_delta_rule, 5), (state_space_dual, 4)])
def test_what_is_traced_of_a_rule_does_not_grow_with_the_length(rule, count):
    """A compiler would need minutes for the chunks of a long sequence one by one, and so would an estimate of memory."""
    traced = [make_fx(lambda *inputs: rule(*inputs))(*arguments(chunks * CHUNK)[:count]) for chunks in (2, 9)]
    assert len(traced[0].graph.nodes) == len(traced[1].graph.nodes) < 150


def test_a_short_convolution_is_torchs_of_one_channel_at_a_time():
    x_BTC, filter_CW = torch.randn(2, 9, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    expected = torch.nn.functional.conv1d(x_BTC.mT, filter_CW[:, None], padding=3, groups=6)[..., :9].mT
    assert torch.allclose(short_convolution(x_BTC, filter_CW), expected, atol=1e-12)
    assert torch.allclose(short_convolution(x_BTC[:, 4:], filter_CW, None, x_BTC[:, 1:4]), expected[:, 4:], atol=1e-12)


# ---- documents and cache ------------------------------------------------------------------------------------------------


@both_kinds
def test_a_document_computes_alone_what_it_computes_among_others(linear):
    made = network(model(linear_attention=linear), torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        set_compute_format(made, torch.float64)
        lengths = [3, 1, 70, 2, 64, 9]
        ids = torch.randint(31, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        with torch.no_grad():
            whole = made(ids, documents_BT=documents)
            alone = torch.cat([made(part) for part in ids.split(lengths, 1)], 1)
    assert (whole - alone).abs().max() <= 1e-10 * alone.abs().max()


@pytest.mark.parametrize("steps", [[1] * 12, [70, 1, 1, 8], [2, 1, 77], [64, 64], [1, 130]])
@both_kinds
def test_a_cache_continues_what_one_pass_computes(steps, linear):
    made, length = network(model(linear_attention=linear)), sum(steps)
    ids = torch.randint(31, (2, length), generator=torch.Generator().manual_seed(0))
    cache = Cache(layer_specs(made.config), length)
    with torch.no_grad():
        parts = [made(part, cache=cache) for part in ids.split(steps, 1)]
        whole = made(ids)
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-4 * whole.abs().max()
    assert cache.length == length


@pytest.mark.parametrize("lengths", [(2, 9), (1, 3), (5, 5)])
@both_kinds
def test_rows_that_are_filled_up_on_the_left_continue_as_they_would_alone(lengths, linear):
    """The last inputs of a convolution may reach into what fills up."""
    made, longest = network(model(linear_attention=linear)), max(lengths)
    rows = [torch.randint(31, (1, n + 6), generator=torch.Generator().manual_seed(n)) for n in lengths]
    filled = torch.cat([torch.cat((row.new_zeros(1, longest - n), row[:, :n]), 1) for row, n in zip(rows, lengths)])
    documents = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    cache = Cache(layer_specs(made.config), longest + 6)
    with torch.no_grad():
        made(filled, documents_BT=documents, cache=cache)
        cache.select(torch.tensor([1, 0]))
        for step in range(6):
            new = torch.cat([row[:, n + step : n + step + 1] for row, n in zip(rows, lengths)])
            got = made(new[[1, 0]], cache=cache)[:, -1]
            expected = torch.cat([made(row[:, : n + step + 1])[:, -1] for row, n in zip(rows, lengths)])
            assert (got[[1, 0]] - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_state_does_not_grow_with_the_positions():
    made = network(model())
    cache = Cache(layer_specs(made.config), 150)
    with torch.no_grad():
        made(torch.zeros(1, 150, dtype=torch.long), cache=cache)
    assert isinstance(cache.layers[0], RecurrentCache)
    assert cache.layers[0].state.shape == (1, 2, 2, 6, 5)
    assert [x.shape for x in cache.layers[0].recent] == [(1, 3, 12), (1, 3, 12), (1, 3, 20)]


# ---- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GatedDeltaNet, Mamba2])
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_keeps_the_results_of_the_projections_and_no_chunks(compiled, kind):
    sizes = LinearAttentionConfig(pattern=[True, True, False], key_heads=4, value_heads=4, key_dim=16, value_dim=16)
    layer = kind(model(dim=64, linear_attention=sizes))
    for p in layer.parameters():
        p.data.normal_(std=0.1)
    x_BTD = torch.randn(2, 512, 64, requires_grad=True)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y_BTD = run(x_BTD)
    own = {p.data_ptr() for p in layer.parameters()} | {x_BTD.data_ptr()}
    kept = {x.data_ptr(): x.untyped_storage().nbytes() for x in saved if x.data_ptr() not in own}
    # Queries, keys, values, the gate and the result; two numbers per head.
    assert sum(kept.values()) <= 1.05 * 4 * 2 * 512 * (5 * 64 + 2 * 4)
    y_BTD.sum().backward()


@both_kinds
def test_bf16_differs_from_fp32_by_the_rounding_of_the_projections(linear):
    made = network(model(linear_attention=linear))
    ids = torch.randint(31, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = made(ids)
        set_compute_format(made, torch.bfloat16)
        rounded = made(ids)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() <= 0.05 * exact.norm()


@torch.no_grad()
def test_initial_weights_forget_as_the_reference_implementation_does():
    """flash-linear-attention: exp(log_decay_scale) is uniform up to 16, softplus(decay_bias) log-uniform from 0.001 to 0.1."""
    config = model(heads=64, dim=128, linear_attention=LinearAttentionConfig(pattern=[True, True, False], key_dim=2))
    made, again = (build_network(config) for _ in range(2))
    initialise(made, seed=1)
    initialise(again, seed=1)
    layer, other = made.layers["0"].linear_attention, made.layers["1"].linear_attention
    scale, step = layer.log_decay_scale.exp(), torch.nn.functional.softplus(layer.decay_bias)
    assert 0 < scale.min() < 2 < 14 < scale.max() <= 16 and 6 < scale.mean() < 10
    assert 0.001 <= step.min() < 0.002 < 0.05 < step.max() <= 0.1 + 1e-6
    assert abs(float(step.log().mean()) - math.log(0.01)) < 0.5
    assert not torch.equal(layer.decay_bias, other.decay_bias)
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), again.parameters()))
    assert float(layer.query_filter.std()) == pytest.approx(12**-0.5, rel=0.1)
    assert torch.equal(layer.output_norm.weight, torch.ones(2))


@torch.no_grad()
def test_mamba_2_forgets_at_first_as_its_authors_code_does():
    """mamba_ssm: exp(log_decay_scale) is uniform from 1 to 16, softplus(decay_bias) log-uniform from 0.001 to 0.1, skip is 1."""
    made = build_network(model(dim=128, linear_attention=LinearAttentionConfig(kind="mamba2", pattern=[True, False], key_dim=2, value_dim=4)))
    initialise(made, seed=1)
    layer = made.layers["0"].linear_attention
    scale, step = layer.log_decay_scale.exp(), torch.nn.functional.softplus(layer.decay_bias)
    assert 1 <= scale.min() < 3 < 14 < scale.max() <= 16 and 7 < scale.mean() < 10
    assert 0.001 <= step.min() < 0.002 < 0.05 < step.max() <= 0.1 + 1e-6
    assert torch.equal(layer.skip, torch.ones(64)) and torch.equal(layer.output_norm.weight, torch.ones(256))
    assert not layer.value_filter_bias.any()


def test_flops_of_a_layer_do_not_grow_with_the_length():
    made = build_network(model())
    assert made.attention_flops(64) - made.attention_flops(32) == 6 * 4 * (6 + 6) * 32  # of the one layer with attention
    assert made.attention_flops(32) == 6 * 4 * (6 + 6) * 32 + 2 * 18 * 4 * 6 * 5


# ---- configuration ------------------------------------------------------------------------------------------------------


def test_sizes_that_are_not_given_are_those_of_attention():
    sizes = model(linear_attention=LinearAttentionConfig(pattern=[True, False]), kv_heads=2).linear_attention
    assert (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.kernel) == (4, 4, 6, 6, 4)
    assert [spec.mixer for spec in layer_specs(model())] == ["gated_delta", "gated_delta", "attention"]


def test_sizes_of_mamba_2_that_are_not_given_are_those_of_its_authors():
    sizes = model(linear_attention=LinearAttentionConfig(kind="mamba2", pattern=[True, False]), dim=256).linear_attention
    assert (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.kernel) == (1, 8, 128, 64, 4)
    assert layer_specs(model(linear_attention=MAMBA))[0].mixer == "mamba2"


@pytest.mark.parametrize("name", ["key_heads", "value_heads", "key_dim", "value_dim"])
def test_a_size_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"model.linear_attention.{name}=0 leaves nothing of linear attention; set it to 1 or more"):
        model(linear_attention=LinearAttentionConfig(pattern=[True, False], **{name: 0}))


def test_layers_without_attention_are_not_rotated_and_have_no_window():
    config = model(attention=AttentionConfig(window=8))
    assert [(spec.window, spec.rope) for spec in layer_specs(config)] == [(0, False), (0, False), (8, True)]


@pytest.mark.parametrize(
    "others, named",
    [
        ({"linear_attention": LinearAttentionConfig(pattern=[True])}, "leaves none of model.layers=3 with attention"),
        ({"linear_attention": LinearAttentionConfig(pattern=[True, False, True, False])}, "has 4 entries for model.layers=3"),
        (
            {"linear_attention": LinearAttentionConfig(pattern=[True, False], key_heads=2, value_heads=3)},
            "value_heads=3 is not divisible by model.linear_attention.key_heads=2",
        ),
        (
            {"linear_attention": LinearAttentionConfig(pattern=[True, False], norm_placement="post")},
            "norm_placement=post with model.norm.placement=pre: post norms the residual stream itself",
        ),
        ({"rope": Rope(pattern=[True, True, False])}, r"rope.pattern=\[True, True, False\] names only layers without attention, by model.linear_attention.pattern="),
        ({"attention": AttentionConfig(window=8, window_pattern=[False, True, False])}, "attention.window_pattern=.* names only layers"),
        ({"encoder": EncoderConfig(layers=2), "positions": "none"}, "model.linear_attention.pattern=.* is not built for an encoder"),
        (
            {"attention": AttentionConfig(output_gate=True), "latent": Latent(kv_rank=8, rope_dim=2, plain_dim=4, value_dim=4)},
            "model.attention.output_gate=True with latent attention",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(others, named):
    with pytest.raises(ConfigError, match=named):
        model(**others)
