"""FlexAttention's own kernels, which train on CUDA only: `bash tests/run.sh --cuda` on a host with a GPU. Not run in CI."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from pretrain.config.attention_schema import AttentionConfig
from pretrain.config.schema import Model
from pretrain.conventions import document_starts
from pretrain.models.decoder import Decoder
from pretrain.models.families import complete
from pretrain.models.masks import attention_backend
from pretrain.parallel.blocks import compile_blocks, recompute_blocks
from pretrain.parallel.initialise import initialise

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NOT_REHEARSED = pytest.mark.skipif(
    "REHEARSAL_LIBRARY" in os.environ,
    reason="in a rehearsal FlexAttention is torch's definition, which waits and makes whole masks",
)
MODEL = complete(Model(dim=128, layers=3, heads=4, ffn_dim=192, vocab_size=61, init_std=0.1), 512)
HEADS = {
    "plain": MODEL,
    "grouped queries": dataclasses.replace(MODEL, kv_heads=2),
    "heads of 16": complete(Model(dim=128, layers=3, heads=4, head_dim=16, ffn_dim=192, vocab_size=61, init_std=0.1), 512),
}
LENGTHS = [128, 384, 500]  # the blocks of FlexAttention are of 128


@pytest.fixture(autouse=True)
def _compiled_anew():
    """FlexAttention is compiled for each shape, and the process may have only so many versions of it."""
    torch._dynamo.reset()


def decoder(model: Model, backend: str, dtype: torch.dtype = torch.float32) -> Decoder:
    built = Decoder(dataclasses.replace(model, attention_backend=backend))
    initialise(built, 0)
    built.embedding.compute_dtype = dtype
    return built.cuda()


def batch(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(61, (3, length + 1), generator=generator)
    documents = (torch.rand(3, length, generator=generator) < 0.02).cumsum(dim=1)
    documents[1] = 0
    return ids[:, :-1].cuda(), ids[:, 1:].cuda(), documents.cuda()


def gradients(model: Decoder, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*batch(length, seed)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - g).norm() / g.norm()) for name, g in other.items())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", HEADS)
def test_flex_and_sdpa_have_the_same_gradients(name, length):
    sdpa, flex = (gradients(decoder(HEADS[name], backend), length) for backend in ("sdpa", "flex"))
    assert largest_difference(flex, sdpa) <= 1e-5


@pytest.mark.parametrize("name", HEADS)
def test_in_bf16_flex_is_as_near_to_fp32_as_sdpa_is(name):
    exact = gradients(decoder(HEADS[name], "sdpa"), 500)
    sdpa, flex = (gradients(decoder(HEADS[name], backend, torch.bfloat16), 500) for backend in ("sdpa", "flex"))
    assert largest_difference(flex, exact) <= 1.5 * largest_difference(sdpa, exact)


NOT_PRETENDED = pytest.mark.skipif("REHEARSAL_LIBRARY" in os.environ, reason="the pretended device has no such kernel")
WINDOWS = complete(Model(family="mistral", dim=128, layers=3, heads=4, ffn_dim=192, vocab_size=61, init_std=0.1, attention=AttentionConfig(window=100)), 512)


@NOT_PRETENDED
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["plain", "grouped queries", "windows"])
def test_in_bf16_documents_of_any_length_are_as_near_to_fp32_as_sdpa_is(name, compiled):
    model = WINDOWS if name == "windows" else HEADS[name]
    exact = gradients(decoder(model, "sdpa"), 500)
    found = {}
    for backend in ("sdpa", "varlen"):
        network = decoder(model, backend, torch.bfloat16)
        network.compute_dtype = torch.bfloat16
        if compiled:
            compile_blocks(network)
        found[backend] = gradients(network, 500)
    assert largest_difference(found["varlen"], exact) <= 1.5 * largest_difference(found["sdpa"], exact)


@NOT_PRETENDED
def test_documents_of_any_length_never_make_the_host_wait():
    model = decoder(HEADS["plain"], "varlen", torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    tokens_BT, targets_BT, documents_BT = batch(500)
    starts_BN = torch.from_numpy(document_starts(documents_BT.cpu().numpy())).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = model(tokens_BT, targets_BT, documents_BT, starts_BN=starts_BN)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_recomputed_and_compiled_blocks_change_nothing(backend):
    model = decoder(HEADS["grouped queries"], backend)
    plain = gradients(model, 500)
    for prepare in ([recompute_blocks], [compile_blocks], [recompute_blocks, compile_blocks], [compile_blocks, recompute_blocks]):
        model = decoder(HEADS["grouped queries"], backend)
        for change in prepare:
            change(model)
        assert largest_difference(gradients(model, 500), plain) <= 1e-5


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_packed_documents_have_the_logits_of_each_alone(backend):
    model = decoder(HEADS["grouped queries"], backend)
    ids, _, documents = batch(500)
    with torch.no_grad():
        packed = model(ids, None, documents)
        for row in range(len(ids)):
            for label in documents[row].unique():
                here = documents[row] == label
                alone = model(ids[row : row + 1, here])
                assert (packed[row, here] - alone[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flex", marks=NOT_REHEARSED)])
def test_masks_never_make_the_host_wait_for_the_device(backend):
    model, inputs = decoder(HEADS["plain"], backend), batch(500, seed=1)
    gradients(model, 500)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_deterministic_runs_repeat_every_bit(backend):
    torch.use_deterministic_algorithms(True)
    try:
        model = decoder(HEADS["grouped queries"], backend)
        one, other = gradients(model, 500), gradients(model, 500)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


def test_other_documents_compile_nothing_anew():
    model = decoder(HEADS["plain"], "flex")
    gradients(model, 500)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in range(1, 4):
        gradients(model, 500, seed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@NOT_REHEARSED
def test_flex_does_without_the_memory_of_a_dense_mask():
    """At 8,192 positions that is 64 MiB per sequence, and as many numbers again while a layer works."""
    model = dataclasses.replace(MODEL, layers=1)
    peaks = {}
    for backend in ("sdpa", "flex"):
        built = decoder(model, backend, torch.bfloat16)
        gradients(built, 8192)
        torch.cuda.reset_peak_memory_stats()
        gradients(built, 8192)
        peaks[backend] = torch.cuda.max_memory_allocated()
        del built
    assert peaks["sdpa"] - peaks["flex"] >= 2 * 8192**2, peaks


def test_auto_is_flex_here():
    assert attention_backend(MODEL, torch.device("cuda", 0), training=True) == "flex"


def test_evaluation_of_many_lengths_compiles_few_versions():
    model, before = decoder(MODEL, "flex"), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for length in range(200, 280):
            model(*batch(length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4
