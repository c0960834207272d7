"""Dropout by hashing looks random in every direction: its rate, its neighbours, its layers, its samples. Decoders have it in three places."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from pretrain.config.attention_schema import Latent
from pretrain.config.model_schema import ExpertsConfig, Model, Norm
from pretrain.conventions import sample_keys
from pretrain.data.tasks import NextToken
from pretrain.models import build_network
from pretrain.models.attention import attend
from pretrain.models.dropout import Dropout, DropoutOfWeights, make_dropout, position_steps
from pretrain.models.families import complete
from pretrain.models.positions import rotate
from pretrain.parallel.blocks import compile_blocks, compile_model, recompute_blocks
from pretrain.parallel.initialise import initialise

SAMPLES, LENGTH, DIM = 400, 24, 64


def zeroed(rate: float, name: str = "layer", seed: int = 0, samples: int = SAMPLES, length: int = LENGTH, dim: int = DIM):
    keys = torch.from_numpy(sample_keys(seed, np.arange(samples)))
    return (~Dropout(rate, keys, dim, position_steps(length, torch.device("cpu"))).at(name).kept(dim)).double()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """In standard errors of that of independent values."""
    pair = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))
    return float(pair[0, 1]) * one.numel() ** 0.5


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_kept_and_the_mean_too(rate):
    mask = zeroed(rate)
    error = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - rate) < 4 * error
    dropout = Dropout(rate, torch.from_numpy(sample_keys(0, np.arange(SAMPLES))), DIM, position_steps(LENGTH, torch.device("cpu"))).at("layer")
    assert dropout.scale == pytest.approx(1 / (1 - rate), rel=2e-4)
    mean = dropout(torch.ones(SAMPLES, LENGTH, DIM)).double().mean()
    assert abs(float(mean) - 1) < 4 * error / (1 - rate) + 1e-6


def test_neighbours_layers_samples_and_seeds_are_independent():
    mask = zeroed(0.3)
    shifted = {f"{k} components on": (mask[..., k:], mask[..., :-k]) for k in (1, 2, 3, 4, 8, 16)}
    shifted |= {f"{k} positions on": (mask[:, k:], mask[:, :-k]) for k in (1, 2, 3)}
    shifted |= {f"{k} samples on": (mask[k:], mask[:-k]) for k in (1, 2, 3)}
    shifted |= {"another layer": (mask, zeroed(0.3, "layeR")), "another seed": (mask, zeroed(0.3, seed=1))}
    for what, (one, other) in shifted.items():
        assert abs(correlation(one, other)) < 4, what


def test_columns_rows_and_pairs_of_columns_are_distributed_like_coin_throws():
    rate, rows = 0.3, SAMPLES * LENGTH
    mask = zeroed(rate).flatten(0, 1)
    of_columns = (((mask.mean(0) - rate) ** 2) * rows / (rate * (1 - rate))).sum()
    assert abs(float(of_columns) - DIM) < 4 * (2 * DIM) ** 0.5  # chi-squared
    of_rows = float(mask.sum(1).var() / (DIM * rate * (1 - rate)))
    assert abs(of_rows - 1) < 4 * (2 / rows) ** 0.5
    pairs = torch.corrcoef(mask.T)[~torch.eye(DIM, dtype=torch.bool)] * rows**0.5
    assert pairs.abs().max() < 5 and abs(float(pairs.std()) - 1) < 0.1


def test_the_mask_does_not_depend_on_padding_or_on_the_other_samples():
    whole = zeroed(0.5)
    assert torch.equal(zeroed(0.5, samples=7, length=5), whole[:7, :5])
    assert torch.equal(zeroed(0.5, dim=DIM - 1), whole[..., :-1])  # an odd width


def test_gradients_pass_where_values_do():
    keys = torch.from_numpy(sample_keys(3, np.arange(2)))
    x = torch.randn(2, 3, 8, requires_grad=True)
    mask = Dropout(0.5, keys, 8, position_steps(3, torch.device("cpu"))).at("a")
    y = mask(x)
    y.sum().backward()
    assert torch.equal(x.grad, mask.kept(8) * 2.0) and torch.equal(y, x * x.grad)
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        mask(x)
    assert sum(stored) == x.numel()  # for backward, a byte per element


def test_a_sample_has_another_key_in_every_epoch_and_run():
    keys = sample_keys(0, np.arange(10_000))
    assert len(np.unique(np.concatenate([keys, sample_keys(1, np.arange(10_000))]))) == 20_000
    assert np.array_equal(sample_keys(0, np.array([77])), keys[77:78])


def test_nothing_is_dropped_without_keys_or_at_rate_0():
    for rates in ({"dropout": 0.1}, {"attention_dropout": 0.1}):
        assert make_dropout(Model(dim=8, heads=2, **rates), None, 3) is None
        assert make_dropout(Model(dim=8, heads=2, **rates), torch.zeros(1, dtype=torch.int64), 3) is not None
    assert make_dropout(Model(dim=8, heads=2), torch.zeros(1, dtype=torch.int64), 3) is None


# ---- weights of attention -----------------------------------------------------------------------------------------------

HEADS, QUERIES, ATTENDED = 6, 20, 26


def zeroed_weights(rate: float, name: str = "layer", seed: int = 0, samples: int = 120, queries: int = QUERIES, attended: int = ATTENDED):
    """[samples, HEADS, queries, attended]."""
    keys = torch.from_numpy(sample_keys(seed, np.arange(samples)))
    return (~DropoutOfWeights(rate, keys, HEADS, queries).at(name).kept(attended)).double()


def test_weights_are_dropped_independently_in_every_direction():
    rate, mask = 0.3, zeroed_weights(0.3)
    assert abs(float(mask.mean()) - rate) < 4 * (rate * (1 - rate) / mask.numel()) ** 0.5
    others = {"another layer": zeroed_weights(rate, "layeR"), "another seed": zeroed_weights(rate, seed=1)}
    pairs = {what: (mask, other) for what, other in others.items()}
    for dim, what in enumerate(("samples", "heads", "queries", "keys")):
        for k in (1, 2, 3, 4):
            size = mask.shape[dim] - k
            pairs[f"{k} {what} on"] = mask.narrow(dim, k, size), mask.narrow(dim, 0, size)
    # A head's query and the next head's next one, and the like: their numbers are made by sums.
    pairs["a head and a query on"] = mask[:, 1:, 1:], mask[:, :-1, :-1]
    pairs["a head on, a query back"] = mask[:, 1:, :-1], mask[:, :-1, 1:]
    later, earlier = torch.triu_indices(QUERIES, QUERIES, 1)
    pairs["queries and keys exchanged"] = mask[..., later, earlier], mask[..., earlier, later]
    for what, (one, other) in pairs.items():
        assert abs(correlation(one.contiguous(), other.contiguous())) < 4, what
    rows = mask.flatten(0, 2)
    assert abs(float(rows.sum(1).var() / (ATTENDED * rate * (1 - rate))) - 1) < 4 * (2 / len(rows)) ** 0.5
    of_keys = torch.corrcoef(rows.T)[~torch.eye(ATTENDED, dtype=torch.bool)] * len(rows) ** 0.5
    assert of_keys.abs().max() < 5 and abs(float(of_keys.std()) - 1) < 0.15


def test_weights_are_dropped_alike_in_longer_sequences_and_in_any_part():
    whole, keys = zeroed_weights(0.5), torch.from_numpy(sample_keys(0, np.arange(120)))
    assert torch.equal(zeroed_weights(0.5, samples=7, queries=5, attended=9), whole[:7, :, :5, :9])
    mask = DropoutOfWeights(0.5, keys, HEADS, QUERIES).at("layer")
    part = mask.of_heads(slice(2, 4))
    part = part.of_queries(part.steps_R.flip(0)[3:])
    assert torch.equal((~part.kept(11)).double(), whole[:, 2:4].flip(2)[:, :, 3:, :11])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_drops_weights_after_the_softmax(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, heads, QUERIES, 8, generator=generator).to(dtype).requires_grad_() for heads in (HEADS, 2, 2))
    mask = DropoutOfWeights(0.25, KEYS[:3], HEADS, QUERIES).at("layer")
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    own = causal & (torch.arange(QUERIES)[:, None] // 6 == torch.arange(QUERIES) // 6)
    for seen in (None, own[None, None]):
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wide_q, wide_k, wide_v = leaves[0], *(x.repeat_interleave(3, dim=1) for x in leaves[1:])
        scores = (wide_q @ wide_k.mT * 0.3).masked_fill(~(causal if seen is None else seen), -torch.inf)
        right = (scores.softmax(-1) * mask.kept(QUERIES) / 0.75) @ wide_v
        found, g = attend(q, k, v, seen, 0.3, dropout=mask), torch.randn(right.shape, generator=generator)
        closeness = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
        torch.testing.assert_close(found.double(), right, **closeness)
        assert (found - attend(q, k, v, seen, 0.3)).abs().max() > 0.1
        gradients = torch.autograd.grad(found, (q, k, v), g.to(dtype)), torch.autograd.grad(right, leaves, g.double())
        for one, other in zip(*gradients):
            torch.testing.assert_close(one.double(), other, **closeness)


# ---- decoders ---------------------------------------------------------------------------------------------------------

SIZES = {"dim": 32, "layers": 3, "heads": 4, "vocab_size": 61}
DECODERS = {
    "gpt2": Model(family="gpt2", **SIZES),
    "llama": Model(family="llama", **SIZES),
    "parallel": Model(family="gpt_neox", **SIZES),
    "reordered": Model(family="custom", norm=Norm(placement="reordered"), residual_multiplier=0.5, **SIZES),
    "sandwich": Model(family="custom", norm=Norm(placement="sandwich"), **SIZES),
    "post": Model(family="custom", norm=Norm(placement="post"), init_std=0.2, **SIZES),
    "experts": Model(family="custom", experts=ExpertsConfig(count=4, active=2), **SIZES),
    "tokens ahead": Model(family="custom", predict_ahead=2, **SIZES),
    "latent": Model(family="custom", latent=Latent(kv_rank=16, rope_dim=4, plain_dim=8, value_dim=8), **SIZES),
}
RATES = {"hidden states": (0.25, 0.0), "weights of attention": (0.0, 0.25), "both": (0.25, 0.25)}
KEYS = torch.from_numpy(sample_keys(5, np.arange(4)))


def decoder_of(name: str, rates: tuple[float, float] = RATES["both"]):
    network = build_network(complete(dataclasses.replace(DECODERS[name], dropout=rates[0], attention_dropout=rates[1]), 20))
    initialise(network, 3)
    return network


def tokens_of(rows: int = 4, length: int = 20) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (rows, length + 1), generator=torch.Generator().manual_seed(2))
    return {"tokens_BT": ids[:, :-1], "targets_BT": ids[:, 1:]}


def gradients(network, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network.zero_grad()
    losses = network(**inputs)
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", ["gpt2", "parallel", "post"])
def test_a_decoder_drops_where_gpt2_does_and_nowhere_else(name, rates):
    """The network written out, with masks times 1 / (1 - rate) where GPT-2 has embd_pdrop, resid_pdrop and attn_pdrop."""
    network, tokens = decoder_of(name, RATES[rates]), tokens_of()["tokens_BT"]
    dropout, place = Dropout(0.25, KEYS, 32, position_steps(20, torch.device("cpu"))), torch.arange(20)
    hidden, weights = RATES[rates]
    of_weights = DropoutOfWeights(0.25, KEYS, 4, 20)

    def dropped(x, name):
        return x * dropout.at(name).kept(32) / 0.75 if hidden else x

    def attention_of(block, number, x, rope):
        """As `Attention.forward`, of as many heads of keys as of queries."""
        of, heads = block.attention, lambda x: x.unflatten(-1, (4, 8)).transpose(1, 2)
        q, k, v = heads(of.query(x)), heads(of.key(x)), heads(of.value(x))
        if rope is not None:
            q, k = rotate(q, rope, of.layout), rotate(k, rope, of.layout)
        scores = (q @ k.mT * of.scale).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        if weights:
            scores = scores * of_weights.at(f"layers.{number}.attention.weights").kept(20) / 0.75
        return of.output((scores @ v).transpose(1, 2).flatten(2))

    with torch.no_grad():
        x = network.embedding(tokens)
        if network.position_embedding is not None:
            x = x + network.position_embedding(place)
        x = dropped(x, "embedding")
        _, inputs = network._begin(tokens, None, None, None, [block.spec for block in network.layers.values()])
        for number, block in network.layers.items():
            rope, _ = inputs[block.spec.window]
            if name == "post":
                x = block.attention_output_norm(x + dropped(attention_of(block, number, x, rope), f"layers.{number}.attention"))
                x = block.mlp_output_norm(x + dropped(block.mlp(x), f"layers.{number}.mlp"))
                continue
            added = dropped(attention_of(block, number, block.attention_norm(x), rope), f"layers.{number}.attention")
            middle = x if name == "parallel" else x + added
            from_mlp = dropped(block.mlp(block.mlp_norm(middle)), f"layers.{number}.mlp")
            x = x + added + from_mlp
        tied = network.embedding.weight if network.config.tie_embeddings else None
        expected = network.output(x if network.norm is None else network.norm(x), None, tied)
        torch.testing.assert_close(network(tokens, keys_B=KEYS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("rates", ["weights of attention", "both"])
def test_a_decoders_masks_are_a_function_of_the_samples_key_alone(name, rates):
    network, batch = decoder_of(name, RATES[rates]), tokens_of()
    losses, grads = gradients(network, **batch, keys_B=KEYS)
    torch.rand(5)
    for keys in (None, KEYS + 3):
        assert not torch.isclose(gradients(network, **batch, keys_B=keys)[0], losses).any()
    for row in range(4):  # alone as in a batch
        one = gradients(network, **{n: t[row : row + 1] for n, t in batch.items()}, keys_B=KEYS[row : row + 1])[0]
        torch.testing.assert_close(one, losses[row : row + 1], rtol=1e-5, atol=0)
    recompute_blocks(network)
    again, recomputed = gradients(network, **batch, keys_B=KEYS)
    assert torch.equal(again, losses) and all(torch.equal(recomputed[n], g) for n, g in grads.items())


@pytest.mark.parametrize("name", DECODERS)
def test_at_rate_0_and_in_evaluation_a_decoder_computes_what_it_does_without(name):
    batch = tokens_of()
    with_rate, without = decoder_of(name), decoder_of(name, (0.0, 0.0))
    losses, grads = gradients(without, **batch)
    for network, keys in ((without, KEYS), (with_rate, None)):
        found, own = gradients(network, **batch, keys_B=keys)
        assert torch.equal(found, losses) and all(torch.equal(own[n], g) for n, g in grads.items())


def test_slices_of_a_decoder_drop_what_the_whole_drops():
    whole, batch = decoder_of("tokens ahead"), tokens_of()
    spans = range(2), range(2, 3)
    first, last = (copy.deepcopy(whole).keep([span]) for span in spans)
    expected = whole(**batch, keys_B=KEYS)
    hidden = first(**batch, keys_B=KEYS, span=spans[0])
    assert torch.equal(last(**batch, keys_B=KEYS, span=spans[1], hidden=hidden), expected)


def test_compiled_blocks_drop_the_same_and_are_compiled_once():
    network, batch = decoder_of("llama"), tokens_of()
    losses, _ = gradients(network, **batch, keys_B=KEYS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(network, backend="aot_eager")
    compiled, _ = gradients(network, **batch, keys_B=KEYS)
    torch.testing.assert_close(compiled, losses, rtol=1e-6, atol=0)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_drops_the_same_at_any_length_and_stays_one_graph():
    """torch 2.11 ended in an internal error at the second length, and 2.13 broke the graph: the table of positions was made for one length."""
    network = decoder_of("llama")
    compiled = copy.deepcopy(network)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_model(compiled, backend="eager")
    for length in (20, 12, 8, 6):
        batch = {name: values[:, :length] for name, values in tokens_of().items()}
        found, expected = (gradients(model, **batch, keys_B=KEYS)[0] for model in (compiled, network))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert all("fused_loss" in reason for reason in breaks), breaks  # a CPU's loss is not compiled


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 10_000])
def test_a_positions_number_is_its_multiple(length):
    steps = position_steps(length, torch.device("cpu"))
    assert steps.shape == (length,) and all(
        int(steps[p]) % 2**64 == p * 0x9E3779B97F4A7C15 % 2**64 for p in (0, length // 2, length - 1)
    )


def test_samples_carry_keys_in_training_with_dropout_only():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    inputs = NextToken(dropout_seed=5).inputs(tokens, tokens, np.array([2, 0]))
    assert torch.equal(inputs["keys_B"], KEYS[[2, 0]])
    for objective in (NextToken(), NextToken(dropout_seed=5).for_validation()):
        assert "keys_B" not in objective.inputs(tokens, tokens, np.array([0, 1]))
