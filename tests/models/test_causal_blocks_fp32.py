"""Attention in fp32 on a CPU from blocks of matrix products, beside attention in fp64 and torch's fused kernel."""

from __future__ import annotations

import pytest
import torch
from models.test_causal_blocks import SHAPES, errors, of_torch, with_gradients
from models.test_causal_blocks import made as made_in_bf16
from torch.nn.attention import SDPBackend

from pretrain.models import attention, causal_blocks_fp32
from pretrain.models.attention import ask_for_kernel, attend
from pretrain.models.causal_blocks_fp32 import causal_attention_fp32


def made(*shape: float) -> list[torch.Tensor]:
    return [x.float() for x in made_in_bf16(*shape)]


def blocks(q, k, v) -> torch.Tensor:
    return causal_attention_fp32(q, k, v, 0.15)


def fused(q, k, v) -> torch.Tensor:
    return of_torch(q, k, v, SDPBackend.FLASH_ATTENTION)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sharp", [1.0, 20.0, 200.0], ids=["", "sharp", "scores of a thousand"])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients_are_as_near_to_fp64_as_those_of_torchs_kernel(shape, sharp):
    inputs = made(*SHAPES[shape], sharp)
    true = with_gradients(of_torch, *(x.double() for x in inputs))
    theirs, found = with_gradients(fused, *inputs), with_gradients(blocks, *inputs)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in theirs]
    limits = [2 * each + 1e-6 for each in errors(theirs, true)]
    assert all(mine <= limit for mine, limit in zip(errors(found, true), limits)), (errors(found, true), limits)


def test_scores_of_a_hundred_thousand_are_as_good_as_fp32_can_have_them():
    inputs = made(2, 4, 2, 300, 64, 64, 20_000.0)
    true, found = with_gradients(of_torch, *(x.double() for x in inputs)), with_gradients(blocks, *inputs)
    largest = (inputs[0] @ inputs[1].repeat_interleave(2, dim=1).mT).max() * 0.15
    assert largest > 1e5 and max(errors(found, true)) < largest * 2**-23, errors(found, true)


@pytest.mark.parametrize("shape", [(4, 6, 2, 200, 64, 64), (4, 16, 8, 150, 48, 48), (4, 6, 6, 201, 40, 40)], ids=str)
def test_bits_depend_on_no_other_sequence_or_group_nor_on_how_many_are_computed_at_once(shape, one_thread, monkeypatch):
    """Also where heads do not begin at multiples of 64 bytes. With two threads, MKL's products then depend on their place."""
    inputs = made(*shape)
    whole = with_gradients(blocks, *inputs)
    for at_once in (1, 1 << 17, 1 << 26):
        monkeypatch.setattr(causal_blocks_fp32, "BYTES_AT_ONCE", at_once)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(blocks, *inputs), whole))
    one = with_gradients(blocks, *(x[1:2] for x in inputs))
    assert all(torch.equal(a, b[1:2]) for a, b in zip(one, whole))
    group = with_gradients(blocks, *(x.chunk(2, dim=1)[1] for x in inputs))
    assert all(torch.equal(a, b.chunk(2, dim=1)[1]) for a, b in zip(group, whole))


def test_no_position_sees_a_later_one_nor_gets_a_gradient_from_an_earlier_one():
    inputs = made(2, 4, 2, 300, 16, 16)
    first = with_gradients(blocks, *inputs)
    changed = [x.clone() for x in inputs]
    for x in changed[:3]:
        x[:, :, 200:] = 3.0
    assert torch.equal(first[0][:, :, :200], blocks(*changed[:3])[:, :, :200])
    inputs[3][:, :, 200:] = 0.0
    assert all((x[:, :, 200:] == 0).all() for x in with_gradients(blocks, *inputs)[1:])


def test_no_sequences_are_none_and_other_numbers_of_keys_are_refused():
    q, k, v, _ = made(2, 4, 2, 140, 16, 16)
    assert blocks(q[:0], k[:0], v[:0]).shape == (0, 4, 140, 16)
    with pytest.raises(ValueError, match="140 queries cannot have 139 keys"):
        blocks(q, k[:, :, 1:], v[:, :, 1:])


def test_the_operator_is_what_torch_asks_of_one():
    """Its shapes, strides, gradients and behaviour under torch.compile."""
    q, k, v, _ = (x.detach().requires_grad_() for x in made(2, 4, 2, 140, 16, 16))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(causal_attention_fp32, (q, k, v, 0.25), test_utils=tests)


def test_it_trains_where_it_is_the_fastest(one_thread, monkeypatch):
    if not causal_blocks_fp32.HAS_MKL:
        pytest.skip("this build of torch has no MKL, for whose products the blocks are")
    taken = []
    monkeypatch.setattr(attention, "causal_attention_fp32", lambda *a: taken.append(1) or causal_attention_fp32(*a))

    def took(length: int, width: int = 64, keys: int | None = None, mask: torch.Tensor | None = None) -> bool:
        taken.clear()
        q, k, v, _ = made(1, 2, 2, length, width, width)
        attend(q[:, :, -keys:] if keys else q, k, v, mask, 0.25)
        return bool(taken)

    assert took(129) and took(129, 40) and took(1536)
    assert not (took(128) or took(129, 32) or took(1537) or took(200, keys=150))
    assert not took(200, mask=torch.ones(200, 200, dtype=torch.bool).tril())
    with torch.no_grad():
        assert not took(200)
    try:
        ask_for_kernel("flash")
        assert not took(200)
    finally:
        ask_for_kernel("auto")
    torch.set_num_threads(2)
    assert not took(200)


def test_compiled_attention_takes_it_at_any_length(one_thread):
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, None, 0.15) * 2, fullgraph=True)
    for length in (200, 140, 150, 100):
        q, k, v, g = made(1, 4, 2, length, 64, 64)
        plain = with_gradients(lambda q, k, v: attend(q, k, v, None, 0.15) * 2, q, k, v, g)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(compiled, q, k, v, g), plain))
        assert torch.equal(plain[0], blocks(q, k, v) * 2) or length == 100 or not causal_blocks_fp32.HAS_MKL
