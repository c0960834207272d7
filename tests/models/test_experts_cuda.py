"""What of experts and latent attention needs a GPU: `bash tests/run.sh --cuda` on a host that has one."""

from __future__ import annotations

import pytest
import torch

from pretrain.config.attention_schema import Latent
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.models import build_network
from pretrain.models import experts as experts_module
from pretrain.models.experts import Experts, dispatch
from pretrain.models.families import complete
from pretrain.models.shape import with_values
from pretrain.parallel.initialise import initialise

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gradients(experts: Experts, x_ND, chosen_NK, weights_NK) -> list[torch.Tensor]:
    experts.zero_grad()
    y_ND = dispatch(experts, x_ND, chosen_NK, weights_NK)
    y_ND.float().square().sum().backward()
    return [y_ND.detach(), *(p.grad.clone() for p in experts.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_the_grouped_kernel_computes_what_one_expert_after_the_other_does(bias, empty, monkeypatch):
    torch.manual_seed(0)
    experts = Experts(8, 64, 48, "silu_clamped" if bias else "silu", True, bias).cuda()
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.1)
    x_ND = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    chosen_NK = torch.rand(300, 4 if empty else 8, device="cuda").topk(2).indices  # half of the experts get nothing
    weights_NK = torch.rand(300, 2, device="cuda")
    assert experts_module._has_grouped_kernel(x_ND, experts.up)
    grouped = gradients(experts, x_ND, chosen_NK, weights_NK)
    assert all(torch.equal(a, b) for a, b in zip(grouped, gradients(experts, x_ND, chosen_NK, weights_NK)))
    monkeypatch.setattr(experts_module, "_has_grouped_kernel", lambda *_: False)
    looped = gradients(experts, x_ND, chosen_NK, weights_NK)
    for a, b in zip(grouped, looped):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
        assert a.isfinite().all()


def test_a_model_with_experts_and_latent_attention_computes_on_a_gpu_what_it_computes_on_a_cpu():
    model = complete(
        Model(
            family="custom", dim=64, layers=2, heads=4, ffn_dim=96, vocab_size=61,
            latent=Latent(kv_rank=32, query_rank=48, rope_dim=16, plain_dim=32, value_dim=32),
            experts=ExpertsConfig(count=8, active=2, ffn_dim=48, shared=1, dense_layers=[0], balance_loss=0.1),
        ), 128
    )  # fmt: skip
    ids = torch.randint(61, (2, 128), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(128) // 50).expand(2, 128)
    found = {}
    for device, backend in (("cpu", "sdpa"), ("cuda", "sdpa"), ("cuda", "flex")):
        network = build_network(with_values(model, {"attention_backend": backend}))
        initialise(network, seed=0)
        network.to(device)
        losses = network(ids.to(device), targets_BT=ids.to(device), documents_BT=documents.to(device))
        losses.sum().backward()
        found[device, backend] = {n: p.grad.cpu() for n, p in network.named_parameters()}
    reference = found["cpu", "sdpa"]
    for key, other in found.items():
        assert all((other[n] - g).norm() <= 1e-3 * g.norm() for n, g in reference.items()), key


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_training_with_experts_lowers_the_loss(pool, config_file, compiled):
    from running import train

    from pretrain.observe.metrics import read_metrics

    options = ("model.family=qwen3_moe", "model.experts.count=8", "model.experts.active=2", "model.experts.ffn_dim=32")
    run = train(
        pool, 1, config_file, "run.device=cuda", "precision.compute=bf16", f"parallel.compile={'blocks' if compiled else 'none'}", *options
    )
    records = read_metrics(run)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
