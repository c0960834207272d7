"""Multi-head latent attention against its definition, and what its cache holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pretrain.config.attention_schema import AttentionConfig, Latent, Rope
from pretrain.config.model_schema import Model, Norm
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.attention import LatentAttention
from pretrain.models.caches import Cache
from pretrain.models.families import complete
from pretrain.models.layer_specs import layer_specs
from pretrain.models.positions import rotary_tables
from pretrain.models.shape import head_widths
from pretrain.parallel.initialise import initialise

LATENT = Latent(kv_rank=10, query_rank=0, rope_dim=4, plain_dim=6, value_dim=14)
SMALL = {"family": "custom", "dim": 24, "layers": 2, "heads": 3, "ffn_dim": 32, "vocab_size": 31}


def model(**others) -> Model:
    return complete(Model(**SMALL, **{"latent": LATENT, **others}), 32)


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer"])
def test_its_norms_begin_with_gains_of_one_whatever_the_others_are(kind):
    """With `rms_offset` they began at zero, and attention got no gradient."""
    config = model(norm=Norm(kind=kind), latent=Latent(kv_rank=10, query_rank=8, rope_dim=4, plain_dim=6, value_dim=14))
    with torch.device("meta"):
        network = build_network(config)
    network.to_empty(device="cpu")
    initialise(network, 0)
    ids = torch.arange(16).view(1, -1)
    network(ids, targets_BT=ids).sum().backward()
    small = [name for name, p in network.named_parameters() if "attention" in name and p.dim() > 1 and not p.grad.norm() > 0]
    assert not small


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_every_score_and_value_is_what_the_definition_says(layout):
    config = model(rope=Rope(layout=layout))
    attention, length = filled(LatentAttention(config)), 7
    x_TD = torch.randn(length, 24, generator=torch.Generator().manual_seed(1))
    tables = rotary_tables(config, torch.arange(length), length)
    got = attention(x_TD[None], tables)[0]
    w = {name: p.detach().double() for name, p in attention.named_parameters()}
    x = x_TD.double()

    def turned(vector, position):
        pairs = vector.view(2, 2).T if layout == "half" else vector.view(2, 2)  # [pair, component]
        out = []
        for i, (a, b) in enumerate(pairs):
            angle = torch.tensor(position / 10000 ** (2 * i / 4))
            out.append(torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]))
        return torch.cat(out)

    down = x @ w["kv_down.weight"].T
    latent = down[:, :10] / (down[:, :10].square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["kv_norm.weight"]
    keys_values = (latent @ w["kv_up.weight"].T).view(length, 3, 20)
    queries = (x @ w["query.weight"].T).view(length, 3, 10)
    rows = []
    for t in range(length):
        heads = []
        for h in range(3):
            q = queries[t, h]
            scores = [
                (q[:6] @ keys_values[s, h, :6] + turned(q[6:], t) @ turned(down[s, 10:], s)) / math.sqrt(10)
                for s in range(t + 1)
            ]
            weights = torch.stack(scores).softmax(0)
            heads.append(weights @ keys_values[: t + 1, h, 6:])
        rows.append(torch.cat(heads) @ w["output.weight"].T)
    assert (got.double() - torch.stack(rows)).abs().max() <= 1e-5


def test_the_cache_holds_one_latent_and_one_key_per_position_whatever_the_heads():
    network = build_network(model())
    initialise(network, seed=0)
    cache = Cache(layer_specs(network.config), 8)
    with torch.no_grad():
        network(torch.tensor([[1, 2, 3]]), cache=cache)
    assert cache.layers[0]._keys.shape == (1, 1, 8, 10) and cache.layers[0]._values.shape == (1, 1, 8, 4)


def test_flops_count_keys_and_values_by_their_own_widths():
    assert build_network(model()).attention_flops(16) == 6 * 3 * (10 + 14) * 2 * 16


def test_the_narrower_of_key_and_value_decides_whether_flex_can_run():
    assert min(head_widths(model())) == 10
    assert min(head_widths(model(latent=Latent(kv_rank=8, rope_dim=8, plain_dim=16, value_dim=12)))) == 12


@pytest.mark.parametrize(
    "others, named",
    [
        ({"latent": Latent(kv_rank=8, rope_dim=4, plain_dim=4)}, "model.latent.value_dim=0"),
        ({"latent": Latent(kv_rank=8, plain_dim=4, value_dim=4), "head_dim": 4}, "model.latent.rope_dim=0"),
        ({"kv_heads": 1}, "model.kv_heads=1 with latent attention"),
        ({"head_dim": 8}, "model.head_dim=8 with latent attention"),
        ({"attention": AttentionConfig(bias=["query"])}, "model.attention.bias="),
        ({"attention": AttentionConfig(sinks=True)}, "model.attention.sinks=True"),
        ({"norm": Norm(qk="head")}, "model.norm.qk=head"),
        ({"rope": Rope(fraction=0.5)}, "model.rope.fraction=0.5"),
        ({"latent": Latent(kv_rank=8, rope_dim=3, plain_dim=4, value_dim=4)}, "model.latent.rope_dim=3 must be even"),
    ],
)
def test_switches_that_have_no_meaning_there_are_refused(others, named):
    with pytest.raises(ConfigError, match=named):
        model(**others)
