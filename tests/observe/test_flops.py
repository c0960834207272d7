"""The FLOP count is the one torch counts, and an unknown device has no peak."""

from __future__ import annotations

import pytest
import torch
from running import on_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.model_schema import EncoderConfig, Model
from pretrain.models import build_network
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.observe.flops import peak_flops


@pytest.mark.parametrize("length", [16, 128])
@pytest.mark.parametrize(
    "model",
    [
        Model(dim=64, layers=3, heads=4, vocab_size=500),
        Model(dim=64, layers=2, heads=4, kv_heads=1, vocab_size=300, tie_embeddings=True),
        Model(dim=48, layers=1, heads=4, kv_heads=2, head_dim=32, ffn_dim=100, vocab_size=77),
        Model(dim=48, layers=2, heads=4, vocab_size=77, predict_ahead=2),
        Model(dim=48, layers=2, heads=4, vocab_size=77, predict_ahead=1, tie_embeddings=True),
    ],
)
def test_flops_are_those_that_torch_counts_in_forward_and_backward(model, length):
    model = complete(model, length)
    with torch.device("meta"):
        decoder = Decoder(model)
        tokens = torch.zeros(3, length, dtype=torch.long)
        # The math backend multiplies whole matrices: no causal discount, as in our convention.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            decoder(tokens, tokens).sum().backward()
    assert on_meta(model).flops_per_token(length) * 3 * length == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_flops_of_a_published_model_are_the_published_ones():
    # Llama 3 8B (arXiv 2407.21783, table 3): 8.03e9 parameters, of which 0.525e9 are the embedding.
    model = complete(Model(dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn_dim=14336, vocab_size=128256), 8192)
    assert on_meta(model).matmul_parameters() == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert on_meta(model).matmul_parameters() == 7_504_658_432
    assert on_meta(model).flops_per_token(8192) == 6 * 7_504_658_432 + 12 * 32 * 4096 * 8192


def test_a_tied_head_is_counted_once_and_the_look_up_never():
    tied, untied = (complete(Model(vocab_size=1000, tie_embeddings=tie), 64) for tie in (True, False))
    assert on_meta(tied).flops_per_token(64) == on_meta(untied).flops_per_token(64)
    with torch.device("meta"):
        parameters = dict(Decoder(untied).named_parameters())
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() == 2 and name != "embedding.weight")
    assert on_meta(untied).matmul_parameters() == matrices


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40", None),
        ("NVIDIA A1000", None),
        ("NVIDIA H100", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_device_is_known_or_is_not_guessed(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), "bf16") == peak


def test_a_cpu_and_a_format_without_a_known_peak_have_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(torch.device("cpu"), "bf16") is None
    assert peak_flops(torch.device("cuda", 0), "fp32") is None


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_an_encoder_decoder_are_those_that_torch_counts(tied):
    model = complete(
        Model(
            family="transformer",
            dim=64,
            layers=3,
            encoder=EncoderConfig(layers=2, vocab_size=300),
            heads=4,
            vocab_size=500,
            tie_embeddings=tied,
        )
    )
    source, target = 24, 16
    with torch.device("meta"):
        network = build_network(model)
        inputs = {"source_BS": torch.zeros(3, source, dtype=torch.long), "source_lengths_B": torch.full((3,), source)}
        inputs |= {name: torch.zeros(3, target, dtype=torch.long) for name in ("tokens_BT", "targets_BT")}
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            network(**inputs).sum().backward()
    assert on_meta(model).flops_per_token(source, target) * 3 * target == pytest.approx(counter.get_total_flops(), rel=0.01)
