"""Attention in bf16 and fp32 on a CPU from blocks of matrix products, beside attention in fp64 and torch's fused kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.models import attention, causal_blocks, causal_blocks_fp32
from pretrain.models.attention import attend
from pretrain.models.attention_ways import SHORT, ask_for_kernel
from pretrain.models.causal_blocks import causal_attention
from pretrain.models.causal_blocks_fp32 import causal_attention_fp32

SHAPES = {
    "heads": (2, 4, 4, 256, 64, 64),
    "groups": (2, 6, 2, 300, 32, 32),
    "one group": (1, 4, 1, 130, 16, 16),
    "another width of values": (2, 3, 3, 200, 48, 32),
    "three positions": (30, 4, 2, 3, 8, 8),
}


BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def made(
    batch: int, heads: int, groups: int, length: int, width: int, values: int, sharp: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result, in the memory that a model's layers give them."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, width), (groups, width), (groups, values), (heads, values))
    q, k, v, g = (torch.randn(batch, length, *size, generator=generator).transpose(1, 2) for size in sizes)
    return [(q * sharp).to(dtype), k.to(dtype), v.to(dtype), g.to(dtype)]


def with_gradients(attention_of, q, k, v, g) -> list[torch.Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attention_of(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]


def of_torch(q, k, v) -> torch.Tensor:
    """Its fused kernel, in fp64 its matrix products. The kernel wants values as wide as queries."""
    wider = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    with sdpa_kernel(SDPBackend.MATH if q.dtype == torch.float64 else SDPBackend.FLASH_ATTENTION):
        y = F.scaled_dot_product_attention(q, k, wider, is_causal=True, scale=0.15, enable_gqa=True)
    return y[..., : v.shape[-1]]


def blocks(q, k, v) -> torch.Tensor:
    return causal_attention_fp32(q, k, v, 0.15) if q.dtype == torch.float32 else causal_attention(q, k, v, 0.15)[0]


def errors(found: list[torch.Tensor], true: list[torch.Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true)]


@pytest.mark.parametrize("sharp", [1.0, 20.0, 200.0], ids=["", "sharp", "scores of a thousand"])
@pytest.mark.parametrize("shape", SHAPES)
@BOTH
def test_result_and_gradients_are_as_near_to_fp64_as_those_of_torchs_kernel(dtype, shape, sharp):
    inputs = made(*SHAPES[shape], sharp, dtype)
    true = with_gradients(of_torch, *(x.double() for x in inputs))
    theirs, found = with_gradients(of_torch, *inputs), with_gradients(blocks, *inputs)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in theirs]
    limits = [2 * each + 1e-6 if dtype == torch.float32 else 2.5 * each for each in errors(theirs, true)]
    assert all(mine <= limit for mine, limit in zip(errors(found, true), limits)), (errors(found, true), limits)


def test_scores_of_a_hundred_thousand_and_keys_far_from_zero_are_numbers():
    q, k, v, g = made(1, 4, 2, 300, 64, 64)
    largest = (q.float() @ k.float().repeat_interleave(2, dim=1).mT).max() * 0.15
    for inputs in ((q * (1e5 / largest).item(), k, v, g), (q, k + 10_000, v, g)):
        true, found = with_gradients(of_torch, *(x.double() for x in inputs)), with_gradients(blocks, *inputs)
        assert all(x.isfinite().all() for x in found) and errors(found, true)[0] < 0.03


@pytest.mark.parametrize("sharp", [1e7, 1e10])
def test_scores_beyond_the_bits_of_fp32_have_gradients_that_are_numbers(sharp):
    """Scores above about 4e7 gave NaN."""
    assert all(x.isfinite().all() for x in with_gradients(blocks, *made(1, 4, 2, 300, 64, 64, sharp)))


def test_scores_of_a_hundred_thousand_are_as_good_as_fp32_can_have_them():
    inputs = made(2, 4, 2, 300, 64, 64, 20_000.0, torch.float32)
    true, found = with_gradients(of_torch, *(x.double() for x in inputs)), with_gradients(blocks, *inputs)
    largest = (inputs[0] @ inputs[1].repeat_interleave(2, dim=1).mT).max() * 0.15
    assert largest > 1e5 and max(errors(found, true)) < largest * 2**-23, errors(found, true)


def test_a_row_whose_weight_is_all_on_one_key_has_that_keys_value():
    q, k, v, g = made(2, 4, 4, 300, 64, 64)
    y, g_q, *_ = with_gradients(lambda q, k, v: causal_attention(q, k, v, 1.0)[0], q * 8, k, v, g)
    assert torch.equal(y[:, :, 0], v[:, :, 0]) and g_q[:, :, 0].abs().max() < 1e-4


def test_what_is_long_or_shares_keys_among_many_heads_has_few_shapes_of_products():
    shapes = {}
    for heads, groups, length in ((8, 8, 512), (8, 8, 16_384), (32, 1, 8192), (6, 2, 5000)):
        q = torch.empty(1, heads, length, 1)
        blocks_of = list(causal_blocks._blocks(q, groups))
        assert [x for queries, _ in blocks_of for x in range(queries.start, queries.stop)] == list(range(length))
        assert all(queries.stop <= keys.stop <= length for queries, keys in blocks_of)
        rows = [(queries.stop - queries.start) * heads // groups for queries, _ in blocks_of]
        assert max(rows) <= 1024 or heads // groups <= 8
        shapes[length] = len({(r, keys.stop) for r, (_, keys) in zip(rows, blocks_of)})
    assert shapes[512] == 4 and max(shapes.values()) <= 17, shapes


@BOTH
def test_no_sequences_are_none_and_other_numbers_of_keys_are_refused(dtype):
    q, k, v, _ = made(2, 4, 2, 140, 16, 16, dtype=dtype)
    assert blocks(q[:0], k[:0], v[:0]).shape == (0, 4, 140, 16)
    with pytest.raises(ValueError, match="140 queries cannot have 139 keys"):
        blocks(q, k[:, :, 1:], v[:, :, 1:])


@BOTH
def test_the_first_position_sees_itself_alone(dtype):
    q, k, v, g = made(3, 4, 2, 1, 8, 8, dtype=dtype)
    y, g_q, g_k, g_v = with_gradients(blocks, q, k, v, g)
    assert torch.equal(y, v.repeat_interleave(2, dim=1)) and max(g_q.abs().max(), g_k.abs().max()) < 1e-4
    torch.testing.assert_close(g_v, g.unflatten(1, (2, 2)).sum(2))


@BOTH
def test_no_position_sees_a_later_one_nor_gets_a_gradient_from_an_earlier_one(dtype):
    inputs = made(2, 4, 2, 300, 16, 16, dtype=dtype)
    first = with_gradients(blocks, *inputs)
    changed = [x.clone() for x in inputs]
    for x in changed[:3]:
        x[:, :, 200:] = 3.0
    changed[3][:, :, :200] = 0.0
    assert torch.equal(first[0][:, :, :200], blocks(*changed[:3])[:, :, :200])
    inputs[3][:, :, 200:] = 0.0
    assert all((x[:, :, 200:] == 0).all() for x in with_gradients(blocks, *inputs)[1:])


@pytest.mark.parametrize("shape", [(5, 6, 2, 200, 32, 32), (4, 6, 2, 200, 64, 64), (4, 16, 8, 150, 48, 48), (4, 6, 6, 201, 40, 40)], ids=str)
@pytest.mark.parametrize(("dtype", "threads"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1)], ids=str)
def test_bits_depend_on_no_other_sequence_or_group_nor_on_how_many_are_computed_at_once(dtype, threads, shape, one_thread, monkeypatch):
    """Also where heads do not begin at multiples of 64 bytes. Blocks in fp32 are for one thread: with two, MKL's products then depend on their place."""
    torch.set_num_threads(threads)
    inputs = made(*shape, dtype=dtype)
    whole = with_gradients(blocks, *inputs)
    for at_once in (1, 1 << 17, 1 << 26):
        for module in (causal_blocks, causal_blocks_fp32):
            monkeypatch.setattr(module, "BYTES_AT_ONCE", at_once)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(blocks, *inputs), whole))
    one = with_gradients(blocks, *(x[1:2] for x in inputs))
    assert all(torch.equal(a, b[1:2]) for a, b in zip(one, whole))
    group = with_gradients(blocks, *(x.chunk(2, dim=1)[1] for x in inputs))
    assert all(torch.equal(a, b.chunk(2, dim=1)[1]) for a, b in zip(group, whole))


@BOTH
def test_the_operator_is_what_torch_asks_of_one(dtype):
    """Its shapes, strides, gradients and behaviour under torch.compile."""
    q, k, v, _ = (x.detach().requires_grad_() for x in made(2, 4, 2, 140, 16, 16, dtype=dtype))
    operator = causal_attention_fp32 if dtype == torch.float32 else causal_attention
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operator, (q, k, v, 0.25), test_utils=tests)


def test_it_trains_in_bf16_on_a_cpu_where_it_is_the_fastest(monkeypatch):
    taken = []
    for name in ("causal_attention", "_plain"):
        kernel = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, name=name, kernel=kernel: taken.append(name) or kernel(*a))

    def took(length: int, dtype: torch.dtype, mask: torch.Tensor | None = None) -> str:
        taken.clear()
        q, k, v, _ = (x.to(dtype) for x in made(1, 2, 2, length, 16, 16))
        attend(q, k, v, mask, 0.25)
        return taken[0] if taken else "fused"

    short, length = SHORT, SHORT + 1
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    assert took(length, torch.bfloat16) == "causal_attention" and took(short, torch.bfloat16) == "_plain"
    assert took(length, torch.float32) == "fused" and took(length, torch.bfloat16, mask) == "fused"
    with torch.no_grad():
        assert took(length, torch.bfloat16) == "fused"
    try:
        ask_for_kernel("flash")
        assert took(length, torch.bfloat16) == took(short, torch.bfloat16) == "fused"
    finally:
        ask_for_kernel("auto")


def test_it_trains_in_fp32_where_it_is_the_fastest(one_thread, monkeypatch):
    if not causal_blocks_fp32.HAS_MKL:
        pytest.skip("this build of torch has no MKL, for whose products the blocks are")
    taken = []
    monkeypatch.setattr(attention, "causal_attention_fp32", lambda *a: taken.append(1) or causal_attention_fp32(*a))

    def took(length: int, width: int = 64, keys: int | None = None, mask: torch.Tensor | None = None) -> bool:
        taken.clear()
        q, k, v, _ = made(1, 2, 2, length, width, width, dtype=torch.float32)
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
        q, k, v, g = made(1, 4, 2, length, 64, 64, dtype=torch.float32)
        plain = with_gradients(lambda q, k, v: attend(q, k, v, None, 0.15) * 2, q, k, v, g)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(compiled, q, k, v, g), plain))
        assert torch.equal(plain[0], blocks(q, k, v) * 2) or length == 100 or not causal_blocks_fp32.HAS_MKL
