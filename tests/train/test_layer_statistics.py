"""`log.layers_every_steps`: norms, activations and attention scores by layer, equal in every layout and to a computation of this file's own."""

from __future__ import annotations

import math

import pytest
import torch
from running import gradients, some_slow, tool, train

from pretrain.checkpoint.payload import Payload
from pretrain.models.attention import largest_score
from pretrain.models.masks import attention_mask
from pretrain.observe.metrics import FIRST_EXPONENT, LAST_EXPONENT, read_metrics
from pretrain.train.layer_statistics import _sizes, layer_of

STATISTICS = "log.layers_every_steps=2"
# AdamW's first step divides a gradient by its own size, so that with its usual eps the rounding of the smallest ones moves weights, and step 2 with them.
SHORT = ("run.steps=2", "schedule={name: constant, warmup_steps: 0}", "checkpoint.every_steps=1", "log.gradients_at=[1,2]", "optim.eps=1e-6", STATISTICS)  # fmt: skip
SCALARS = ("gradient_norms", "weight_norms", "update_norms", "activations", "largest_activations", "attention_scores")
LAYOUTS = {
    "recomputation": (1, "parallel.activation_checkpointing=full", "batch.micro_sequences=2"),
    "ddp": (2, "parallel.strategy=ddp"),
    "fsdp": (2, "parallel.strategy=fsdp"),
    "hsdp": (4, "parallel.strategy=fsdp", "parallel.replicate=2"),
    "tensor": (2, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "context": (2, "parallel.strategy=fsdp", "parallel.context=2"),
    "ring": (2, "parallel.strategy=fsdp", "parallel.context=2", "parallel.context_method=ring"),
    "pipeline": (2, "parallel.strategy=fsdp", "parallel.pipeline=2", "batch.micro_sequences=2"),
    "fsdp, tensor": (4, "parallel.strategy=fsdp", "parallel.tensor=2"),
    "fsdp, pipeline": (4, "parallel.strategy=fsdp", "parallel.pipeline=2", "batch.micro_sequences=2"),
}
MODELS = {
    "plain": (),
    "documents": ("data.document_mask=true",),
    "window": ("model.family=custom", "model.attention.window=7", "data.document_mask=true"),
    "odd length": ("data.sequence_length=29",),
    "latent": ("model.family=custom", "model.latent={kv_rank: 16, query_rank: 12, rope_dim: 4, plain_dim: 8, value_dim: 8}", "model.kv_heads=null"),
}  # fmt: skip


# Layouts that do not touch attention are tried with the plain model.
PAIRS = [("plain", layout) for layout in LAYOUTS] + [
    (model, layout) for model in list(MODELS)[1:] for layout in ("ring", "context", "pipeline", "tensor")
]
QUICK = [("plain", layout) for layout in ("ddp", "context", "ring", "pipeline")] + [
    ("odd length", "context"),
    ("odd length", "ring"),
]


@pytest.fixture(params=some_slow(MODELS, ["documents", "window", "latent"]))
def alone(request, trained_run, config_file):
    """The overrides of a model, and its run in one process."""
    return MODELS[request.param], trained_run(1, config_file, *SHORT, *MODELS[request.param], "run.name=alone")


def test_sizes_of_gradients_are_counted_alike_where_results_must_be_reproducible():
    """On a GPU, torch's histogram is an error then."""
    numbers = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)) * torch.logspace(-14, 6, 40)
    numbers[0] = 0
    counted = _sizes("w", numbers)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(_sizes("w", numbers), counted) and int(counted.sum()) == 49 * 40
    finally:
        torch.use_deterministic_algorithms(False)


def close(one: dict[str, float], other: dict[str, float], tolerance: float) -> bool:
    return list(one) == list(other) and all(math.isclose(one[key], other[key], rel_tol=tolerance) for key in one)


def test_norms_are_those_of_the_gradients_and_weights_that_the_run_wrote(alone):
    run = alone[1]
    [record] = [r for r in read_metrics(run) if "gradient_norms" in r]
    assert record["step"] == 2
    states = [Payload(run / "checkpoints" / f"step-{step:08d}").read_all("model.") for step in (1, 2)]
    before, after = ({name.removeprefix("model."): value.double() for name, value in state.items()} for state in states)
    found = {
        "gradient_norms": gradients(run, 2),
        "weight_norms": before,
        "update_norms": {n: after[n] - before[n] for n in after},
    }
    for field, tensors in found.items():
        squares: dict[str, float] = {}
        for name, tensor in tensors.items():
            squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + float(tensor.double().square().sum())
        expected = {layer: math.sqrt(squares[layer]) for layer in record[field]}
        assert squares.keys() == expected.keys() and close(record[field], expected, 1e-6), field
    whole = math.sqrt(sum(value**2 for value in record["gradient_norms"].values()))
    assert math.isclose(whole, record["grad_norm"], rel_tol=1e-9)
    sizes = torch.cat([g.flatten() for name, g in gradients(run, 2).items() if layer_of(name) == "layers.0"])
    sizes = sizes[sizes != 0].abs().double().log2().floor().clamp(FIRST_EXPONENT, LAST_EXPONENT - 1)
    expected = [int((sizes == e).sum()) for e in range(FIRST_EXPONENT, LAST_EXPONENT)]
    assert record["gradient_sizes"]["layers.0"] == expected


@pytest.mark.parametrize(
    ("alone", "layout"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
    indirect=["alone"],
)
def test_every_layout_finds_the_same(alone, pool, config_file, layout):
    model, run = alone
    ranks, *overrides = LAYOUTS[layout]
    other = train(pool, ranks, config_file, *SHORT, *model, *overrides)
    one, two = (next(r for r in read_metrics(path) if "gradient_norms" in r) for path in (run, other))
    for field in SCALARS:
        assert close(one[field], two[field], 2e-6), (field, one[field], two[field])
    assert all(value > 0 for field in SCALARS if field != "attention_scores" for value in one[field].values())
    assert list(one["activations"]) == list(one["attention_scores"]) == ["layers.0", "layers.1"]
    moved = sum(
        abs(a - b)
        for layer in one["gradient_sizes"]
        for a, b in zip(one["gradient_sizes"][layer], two["gradient_sizes"][layer])
    )
    assert moved <= 20  # a gradient that rounding brings over a power of 2


def test_activations_and_scores_are_those_that_a_hook_sees(alone, config_file, monkeypatch):
    """The numbers of the next step, computed from the checkpoint before it with plain softmax attention."""
    from pretrain.config.load import load_config
    from pretrain.data.training_data import open_data
    from pretrain.models import attention, build_network
    from pretrain.train.resolve import resolve

    model, run = alone
    config = resolve(load_config(str(config_file), list(model))[0])
    data = open_data(config)
    network = build_network(load_config(str(run / "config.yaml"), [])[0].model)
    state = Payload(run / "checkpoints" / "step-00000001").read_all("model.")
    network.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    scores, outputs = [], []

    def plain(q, k, v, mask, scale, *options, **named):
        grouped = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        all_scores = q.double() @ grouped.double().transpose(-1, -2) * scale
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
        scores.append(float(all_scores.detach().masked_fill(~seen, -torch.inf).max()))
        return attend(q, k, v, mask, scale, *options, **named)

    attend = attention.attend
    monkeypatch.setattr(attention, "attend", plain)
    for layer in network.layers.values():
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].detach()))
    batch = data.loader(0, 1).read(16)
    network(**{name: tensor for name, tensor in batch.inputs.items() if name != "keys_B"})
    record = next(r for r in read_metrics(run) if "activations" in r)
    assert close(record["attention_scores"], {f"layers.{i}": score for i, score in enumerate(scores)}, 1e-5)
    assert close(
        record["activations"], {f"layers.{i}": float(x.double().square().mean().sqrt()) for i, x in enumerate(outputs)}, 1e-5
    )
    assert close(record["largest_activations"], {f"layers.{i}": float(x.abs().max()) for i, x in enumerate(outputs)}, 1e-5)


def test_statistics_change_nothing_of_the_run(pool, config_file):
    one = train(pool, 1, config_file, *SHORT, "run.name=with")
    two = train(pool, 1, config_file, *(key for key in SHORT if key != STATISTICS), "run.name=without")
    for step in (1, 2):
        a, b = (Payload(run / "checkpoints" / f"step-{step:08d}").read_all("") for run in (one, two))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not any("gradient_norms" in record for record in read_metrics(two))


def test_two_runs_are_compared_by_layer(pool, config_file, capsys):
    one = train(pool, 1, config_file, *SHORT, "run.name=one")
    two = train(pool, 1, config_file, *SHORT, "run.name=two", "optim.lr=1e-3")
    assert tool("compare_runs").main([str(one), str(two)]) == 1
    printed = capsys.readouterr().out
    assert "activations    differ first at step 2, layers.0:" in printed
    assert "gradient_norms differ first at step 2, embedding:" in printed


@pytest.mark.parametrize("rows", [1 << 24, 100])
def test_scores_are_found_in_pieces_as_in_one(rows, monkeypatch):
    from pretrain.models import attention

    monkeypatch.setattr(attention, "SCORES_AT_ONCE", rows)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 33, 8, generator=generator) for heads in (4, 2))
    numbers = (torch.rand(2, 33, generator=generator) < 0.2).cumsum(dim=1)
    for backend in ("sdpa", "flex"):
        mask = attention_mask(33, q.device, backend, numbers, 5)
        distance = torch.arange(33)[:, None] - torch.arange(33)
        seen = (distance >= 0) & (distance < 5) & (numbers[:, :, None] == numbers[:, None, :])
        scores = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)).masked_fill(~seen[:, None], -torch.inf)
        assert math.isclose(float(largest_score(q, k, mask, 0.5)), float(scores.max()) / 2, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.3.attention.query.weight", "layers.3"),
        ("layers.0.mlp.experts.2.up", "layers.0"),
        ("model.layers.11.self_attn.q_proj.weight", "model.layers.11"),
        ("embedding.weight", "embedding"),
        ("multi_token.depths.0.block.mlp.up.weight", "multi_token.depths.0"),
        ("encoder.5", "encoder.5"),
    ],
)
def test_a_parameter_belongs_to_a_layer(name, layer):
    assert layer_of(name) == layer


@pytest.mark.slow
def test_compiled_attention_is_left_alone(pool, config_file):
    run = train(pool, 1, config_file, *SHORT, "parallel.compile=blocks")
    [record] = [r for r in read_metrics(run) if "gradient_norms" in r]
    assert "attention_scores" not in record and list(record["activations"]) == ["layers.0", "layers.1"]
    assert record.get("compiled", {"again": 0})["again"] == 0
