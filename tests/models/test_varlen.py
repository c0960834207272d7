"""Documents as sequences of their own (`model.attention_backend=varlen`): torch's kernel runs on CUDA only, so a definition takes its place here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from running import losses, run_main, train
from torch.nn import functional as F
from torch.nn.attention import varlen

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.conventions import document_starts
from pretrain.data.tasks import documents_of
from pretrain.errors import ConfigError
from pretrain.models import decoder, masks
from pretrain.models.attention import largest_score
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.masks import attention_backend, attention_mask, document_numbers
from pretrain.parallel.initialise import initialise
from pretrain.train.attention_kernel import check_attention_kernel, describe_attention
from pretrain.train.memory_estimate import estimate_memory
from pretrain.train.resolve import resolve

PLAIN = Model(dim=32, layers=4, heads=4, ffn_dim=48, vocab_size=61, init_std=0.1)
MODELS = {
    "plain": complete(PLAIN, 40),
    "groups": complete(dataclasses.replace(PLAIN, kv_heads=2), 40),
    "windows": complete(dataclasses.replace(PLAIN, family="mistral", attention=dataclasses.replace(PLAIN.attention, window=7)), 40),
}


def by_definition(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """What torch's documentation says of `varlen_attn`, sequence by sequence."""
    assert q.dim() == 3 and ends_q.dtype == torch.int32 and ends_q is ends_k and window_size[1] == 0
    assert ends_q[0] == 0 and ends_q[-1] == len(q) and (ends_q.diff() >= 0).all() and ends_q.diff().max() <= longest_q == longest_k
    parts = []
    for begin, end in zip(ends_q[:-1].tolist(), ends_q[1:].tolist()):
        if begin == end:
            continue
        here = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        parts.append(F.scaled_dot_product_attention(*here, attn_mask=seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    monkeypatch.setattr(decoder, "attention_backend", lambda model, *_: model.attention_backend)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("knows_groups", [True, False])
def test_losses_and_gradients_are_those_of_dense_masks(on_a_cpu, monkeypatch, name, knows_groups):
    monkeypatch.setattr(masks, "_varlen_knows_groups", lambda: knows_groups)
    torch.manual_seed(0)
    tokens_BT, targets_BT = torch.randint(61, (2, 3, 40))
    documents_BT = (torch.rand(3, 40) < 0.15).cumsum(dim=1)
    documents_BT[1] = 0  # one document
    documents_BT[2, 30:] = torch.arange(100, 110)  # padding: each token is a document of its own
    starts_BN = torch.from_numpy(document_starts(documents_BT.numpy()))
    found = {}
    for backend, options in {"sdpa": {}, "varlen": {"starts_BN": starts_BN}, "made here": {}}.items():
        network = Decoder(dataclasses.replace(MODELS[name], attention_backend="sdpa" if backend == "sdpa" else "varlen"))
        initialise(network, 0)
        loss_B = network(tokens_BT, targets_BT, documents_BT, **options)
        loss_B.sum().backward()
        found[backend] = loss_B.detach(), {name: p.grad for name, p in network.named_parameters()}
    for backend in ("varlen", "made here"):
        torch.testing.assert_close(found[backend], found["sdpa"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found["sdpa"][0][2], network(tokens_BT, targets_BT)[2], atol=1e-3)


@given(arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(2, 70)), elements=st.integers(0, 3)))
def test_starts_are_where_documents_begin(tokens_BT):
    documents_BT = documents_of(tokens_BT, 0)
    starts_BN = document_starts(documents_BT)
    rows, length = documents_BT.shape
    width = starts_BN.shape[1]
    assert starts_BN.dtype == np.int32 and width >= 16 and width & (width - 1) == 0
    for starts, documents in zip(starts_BN, documents_BT):
        begins = [place for place in range(length) if place == 0 or documents[place] != documents[place - 1]]
        assert starts.tolist() == begins + [length] * (width - len(begins)) and (width == 16 or width < 2 * max(len(set(row)) for row in documents_BT.tolist()))


@pytest.mark.parametrize("window", [0, 5])
def test_the_largest_score_is_that_of_dense_masks(window):
    torch.manual_seed(1)
    q_BHTG, k_BHTG = torch.randn(2, 3, 4, 20, 8)
    numbers_BT = document_numbers((torch.rand(3, 20) < 0.3).cumsum(dim=1))
    starts_BN = torch.from_numpy(document_starts(numbers_BT.numpy()))
    device = torch.device("cpu")
    packed = attention_mask(20, device, "varlen", None, window, starts_BN)
    dense = attention_mask(20, device, "sdpa", numbers_BT, window)
    assert largest_score(q_BHTG, k_BHTG, packed, 0.5) == largest_score(q_BHTG, k_BHTG, dense, 0.5)


CHECKED = ("model={family: llama, attention_backend: varlen}", "data.document_mask=true", "precision.compute=bf16", "parallel.strategy=single")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("precision.compute=fp32", "does not compute in fp32"),
        ("model.head_dim=12", "computes heads of multiples of 8, up to 256, and this model's have 12"),
        ("model={family: gemma2, attention_backend: varlen}", "knows no soft-cap"),
        ("model={family: custom, attention: {sinks: true}}", "knows no sinks"),
        ("model.attention_dropout=0.1", "drops no weights"),
        ("run.attention_kernel=efficient", "run.attention_kernel=efficient has no effect where torch's flash kernel computes all layers"),
    ],
)
def test_what_the_kernel_cannot_compute_is_refused(config_file, override, said):
    config = resolve(load_config(config_file, [*CHECKED, override])[0])
    with pytest.raises(ConfigError, match=said):
        check_attention_kernel(config, torch.device("cuda"))


def test_what_computes_attention_is_printed_and_its_memory_is_that_of_flex(config_file):
    config = resolve(load_config(config_file, [*CHECKED])[0])
    check_attention_kernel(config, torch.device("cuda"))
    assert describe_attention(config, torch.device("cuda")) == "the flash kernel of torch over documents"
    with pytest.raises(ConfigError, match=r"attention_backend=varlen cannot train on run.device=cpu: torch's kernel exists on CUDA only"):
        attention_backend(config.model, torch.device("cpu"), training=True)
    held = {
        backend: estimate_memory(load_config(config_file, [*CHECKED, "model.vocab_size=264", "model.head_dim=16", f"model.attention_backend={backend}"])[0], 1).stages[0]
        for backend in ("varlen", "flex", "sdpa")
    }
    starts = 2 * config.batch.micro_sequences * 16 * 4  # of two micro-steps
    assert dataclasses.replace(held["varlen"], activations=held["varlen"].activations - starts) == held["flex"] != held["sdpa"]
    # Where a checkpoint is evaluated elsewhere, or in fp32, masks are dense.
    assert attention_backend(config.model, torch.device("cpu"), training=False) == "sdpa"
    assert attention_backend(config.model, torch.device("cuda"), False, torch.float32) == "sdpa"
    assert attention_backend(config.model, torch.device("cuda"), False) == "varlen"


def train_by_definition(config_file: str, *overrides: str) -> tuple[int, str]:
    """A run with the definition in the place of torch's kernel, on a CPU."""
    from unittest.mock import patch

    from pretrain.train import attention_kernel, plan

    def asked(model, *_, **__):
        return model.attention_backend

    with (
        patch.object(varlen, "varlen_attn", by_definition),
        patch.object(decoder, "attention_backend", asked),
        patch.object(plan, "attention_backend", asked),
        patch.object(attention_kernel, "attention_backend", asked),
        patch.object(plan, "check_attention_kernel", lambda *_: None),
    ):
        return run_main(config_file, *overrides)


@pytest.mark.parametrize(("ranks", "options"), [(1, ["parallel.strategy=single"]), (2, ["parallel.strategy=fsdp", "parallel.pipeline=2", "batch.micro_sequences=4"])])
def test_a_run_has_the_losses_of_dense_masks(pool, config_file, prepared, ranks, options):

    short = ("model.family=llama", "data.document_mask=true", "run.steps=3", "schedule={name: constant, warmup_steps: 0}", "validation.every_steps=3", f"data.validation=[{{path: {prepared}, name: v}}]", *options)
    dense = train(pool, ranks, config_file, "run.name=dense", *short, "model.attention_backend=sdpa")
    for code, printed in pool.launch(ranks, train_by_definition, str(config_file), "run.name=packed", *short, "model.attention_backend=varlen"):
        assert code == 0, printed
    assert losses(dense.parent / "packed") == pytest.approx(losses(dense), rel=1e-5)
