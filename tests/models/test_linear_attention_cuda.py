"""Linear attention on a GPU: `bash tests/run.sh --cuda` on a host that has one."""

from __future__ import annotations

import pytest
import torch

from pretrain.config.attention_schema import LinearAttentionConfig
from pretrain.config.model_schema import Model
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.parallel.blocks import set_compute_format
from pretrain.parallel.initialise import initialise

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("kind", ["gated_delta", "mamba2"])
def test_a_gpu_computes_what_a_cpu_does(dtype, limit, kind):
    ids = torch.randint(31, (2, 150), generator=torch.Generator().manual_seed(0))
    documents = (torch.rand(2, 150, generator=torch.Generator().manual_seed(1)) < 0.05).cumsum(1)
    linear = LinearAttentionConfig(kind=kind, pattern=[True, True, False], key_heads=2, value_heads=4, key_dim=6, value_dim=5)
    model = complete(Model(family="custom", dim=24, layers=3, heads=4, ffn_dim=32, vocab_size=31, linear_attention=linear), 200)
    drawn = build_network(model)
    initialise(drawn, seed=0)
    weights = {name: 8.0 * p if p.dim() == 2 else p for name, p in drawn.state_dict().items()}  # wide enough that every part matters
    found = []
    for device, format in (("cpu", torch.float32), ("cuda", dtype)):
        made = build_network(model).to(device)
        made.load_state_dict(weights)
        set_compute_format(made, format)
        losses_B = made(ids[:, :-1].to(device), ids[:, 1:].to(device), documents[:, :-1].to(device))
        losses_B.sum().backward()
        found.append({"loss": losses_B.detach().cpu()} | {name: p.grad.cpu() for name, p in made.named_parameters()})
    whole = max(float(x.norm()) for name, x in found[0].items() if name != "loss")
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() <= limit * max(float(expected.norm()), 1e-2 * whole), name
