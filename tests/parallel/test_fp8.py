"""Products in fp8 are those of the rounded factors; what fp8 cannot do is refused; runs learn as in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import gradients, losses, run_main, train

from pretrain.config.attention_schema import LinearAttentionConfig
from pretrain.config.load import load_config
from pretrain.config.model_schema import ExpertsConfig, Model
from pretrain.config.parallel_schema import Precision
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.families import complete
from pretrain.parallel.fp8 import Fp8Product, from_mxfp8, projections, set_fp8, tiled, to_mxfp8
from pretrain.train.plan import make_plan

FP8 = ("precision.compute=bf16", "precision.fp8=tensorwise")
SIZES = ("model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=128")


def rounded(x: torch.Tensor, bits: int, emax: int, dim: int | None) -> torch.Tensor:
    """x with `bits` bits after the leading one, by arithmetic, in fp64: scaled so that the largest of a row or of all is in [2^emax, 2^(emax + 1))."""
    x = x.double()
    largest = x.abs().amax(dim, keepdim=True) if dim is not None else x.abs().amax()
    scale = 2.0 ** (torch.floor(torch.log2(largest)) - emax)
    scaled = x / scale
    least = -6 if bits == 3 else -14  # below this power of two, numbers have fewer bits
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**least))) - bits)
    return torch.round(scaled / step) * step * scale


E4M3, E5M2 = (3, 7), (2, 14)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("rows", [32, 21])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_factors(scaling, rows, stored):
    draw = torch.Generator().manual_seed(1)
    x = (torch.randn(3, rows // 3, 48, generator=draw) * torch.logspace(-3, 1, 48)).bfloat16().requires_grad_()
    weight = (torch.randn(64, 48, generator=draw) * 0.02).to(stored).requires_grad_()
    bias, g = torch.randn(64, generator=draw), torch.randn(3, rows // 3, 64, generator=draw).bfloat16()
    y = Fp8Product(scaling)(x, weight, bias)
    y.backward(g)
    by_row, flat = 1 if scaling == "rowwise" else None, g.flatten(0, 1)
    gradient = E4M3 if by_row else E5M2
    x8, w8 = rounded(x.detach().flatten(0, 1), *E4M3, by_row), rounded(weight.detach().bfloat16(), *E4M3, by_row)
    expected = (x8 @ w8.T).bfloat16() + bias.bfloat16()
    torch.testing.assert_close(y.detach().flatten(0, 1), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()) / 10)
    grad_x = rounded(flat, *gradient, by_row) @ rounded(weight.detach().bfloat16().T, *E4M3, by_row).T
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), grad_x, rtol=1e-2, atol=1e-3 * float(grad_x.abs().max()))
    kept = x.detach().flatten(0, 1)
    grad_w = flat.double().T @ kept.double() if by_row else rounded(flat, *gradient, None).T @ rounded(kept, *E4M3, None)
    assert weight.grad.dtype == stored
    torch.testing.assert_close(weight.grad.double(), grad_w, rtol=1e-2, atol=1e-3 * float(grad_w.abs().max()))


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """x [rows, numbers] in MXFP8 by arithmetic, in fp64: the power of two of each 32 numbers is the smallest that leaves none of them above 448."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(2, keepdim=True).clamp(min=1e-30) / 448))
    scaled = blocks / scale
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    return (torch.round(scaled / step) * step * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("rows", [32, 21])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_products_in_mxfp8_are_those_of_the_rounded_blocks(rows, stored):
    """Blocks run along the sum of each product: over inputs, over outputs, and over tokens."""
    draw = torch.Generator().manual_seed(1)
    x = (torch.randn(rows, 96, generator=draw) * torch.logspace(-3, 1, 96)).bfloat16().requires_grad_()
    weight = (torch.randn(64, 96, generator=draw) * 0.02).to(stored).requires_grad_()
    g = torch.randn(rows, 64, generator=draw).bfloat16()
    y = Fp8Product("mxfp8")(x, weight, None)
    y.backward(g)
    w = weight.detach().bfloat16()
    for found, expected in [
        (y.detach(), in_blocks(x.detach()) @ in_blocks(w).T),
        (x.grad, in_blocks(g) @ in_blocks(w.T.contiguous()).T),
        (weight.grad, in_blocks(g.T.contiguous()) @ in_blocks(x.detach().T.contiguous()).T),
    ]:
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_blocks_in_mxfp8_are_exact_in_bf16_and_use_the_range():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = to_mxfp8(x)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float8_e8m0fnu and scales.shape == (64, 4)
    largest = codes.float().abs().unflatten(1, (4, 32)).amax(2)
    assert float(largest.max()) <= 448 and float(largest.min()) > 224 - 16  # the next smaller scale would be too small
    assert torch.equal(from_mxfp8(codes, scales).double(), in_blocks(x))


def test_scales_stand_where_cublas_looks_for_them():
    """cuBLAS, "1D block scaling factors layout": 128 x 4 scales are 512 bytes; (row, column) is at row % 32 * 16 + row % 128 // 32 * 4 + column % 4."""
    rows, blocks = 200, 6
    scales = torch.randint(1, 250, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = tiled(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert len(found) == 2 * 2 * 512 and int((found == 0).sum()) == len(found) - rows * blocks
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * 2 + block // 4
            assert found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] == scales[row, block]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "mxfp8"])
def test_a_number_that_is_not_finite_stays_visible_and_zeros_are_zeros(scaling, bad):
    x = torch.randn(16, 32).bfloat16()
    x[3, 5] = bad
    weight = torch.randn(16, 32)
    assert not Fp8Product(scaling)(x, weight, None)[3].isfinite().any()
    assert not Fp8Product(scaling)(torch.zeros(16, 32).bfloat16(), weight, None).any()


def network(**values):
    with torch.device("meta"):
        return build_network(complete(Model(dim=64, layers=2, heads=4, ffn_dim=96, vocab_size=40, **values), 8))


def test_patterns_choose_among_the_projections_of_blocks():
    model = network(family="custom", experts=ExpertsConfig(count=4, active=2, ffn_dim=32, shared=1))
    names = list(projections(model, ["*"]))
    assert names and all(name.startswith("layers.") for name in names) and not any("router" in name for name in names)
    gated = network(
        family="custom", experts=ExpertsConfig(count=4, active=2, ffn_dim=32, shared=1, shared_gate=True),
        linear_attention=LinearAttentionConfig(pattern=[True, False]),
    )  # fmt: skip
    alone = {name for name in projections(gated, ["*"]) if name.startswith("layers.0.linear_attention.")}
    assert alone == {f"layers.0.linear_attention.{name}" for name in ("query", "key", "value", "gate", "output")}  # not what is a number per head
    assert not any("shared_gate" in name for name in projections(gated, ["*"]))
    assert list(projections(model, ["layers.1.*"])) == [name for name in names if name.startswith("layers.1.")]
    with pytest.raises(ConfigError, match=r"precision.fp8_modules: output matches no projection of a block; there are layers.0"):
        projections(model, ["*", "output"])
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate is 64 x 96 over 4 tensor-parallel ranks, and fp8 needs multiples of 64"):
        set_fp8(network(family="custom"), Precision(fp8="rowwise", fp8_modules=["*.mlp.*"]), 4)


# The run that a run is compared with, and the largest difference of a gradient, as a share of it. A product of factors with 3 and with 2 bits
# after the leading one is off by some 6%, and a gradient has passed through a few. In the first step every micro-batch is the same in all
# layouts, and with it every scale; tensor-parallel ranks have scales of their own.
NEAR = {"tensorwise": ("bf16", 0.15), "rowwise": ("bf16", 0.15), "mxfp8": ("bf16", 0.15), "mxfp8 fsdp": ("mxfp8", 2e-3), "fsdp": ("tensorwise", 2e-3), "ddp": ("tensorwise", 2e-3),
        "pipeline": ("tensorwise", 2e-3), "tensor": ("tensorwise", 0.15), "pure": ("tensorwise", 0.15)}  # fmt: skip


@pytest.mark.parametrize("names", [("tensorwise", "rowwise", "fsdp"), pytest.param(tuple(NEAR), marks=pytest.mark.slow)], ids=["few", "all"])
def test_runs_learn_as_in_bf16_and_layouts_agree(pool, config_file, names):
    short = (*SIZES, "run.steps=12", "schedule={name: constant, warmup_steps: 0}", "log.gradients_at=[1]")
    runs = {
        "bf16": (1, "precision.compute=bf16"),
        "tensorwise": (1, *FP8),
        "rowwise": (1, "precision.compute=bf16", "precision.fp8=rowwise"),
        "mxfp8": (1, "precision.compute=bf16", "precision.fp8=mxfp8"),
        "mxfp8 fsdp": (2, "precision.compute=bf16", "precision.fp8=mxfp8", "parallel.strategy=fsdp"),
        "ddp": (2, *FP8, "parallel.strategy=ddp"),
        "fsdp": (2, *FP8, "parallel.strategy=fsdp"),
        "pipeline": (2, *FP8, "parallel.strategy=fsdp", "parallel.pipeline=2"),
        "tensor": (2, *FP8, "parallel.strategy=fsdp", "parallel.tensor=2"),
        "pure": (1, *FP8, "precision.master=bf16", "precision.moments=bf16", "parallel.activation_checkpointing=selective"),
    }
    done = {name: train(pool, size, config_file, f"run.name={name}", *short, *options) for name, (size, *options) in runs.items() if name in ("bf16", *names)}
    fall = losses(done["bf16"])[0] - losses(done["bf16"])[-1]
    for name in names:
        reference, most = NEAR[name]
        ours, theirs = gradients(done[name]), gradients(done[reference])
        off = {key: float((g.float() - theirs[key]).norm() / theirs[key].norm()) for key, g in ours.items()}
        assert max(off.values()) < most, (name, max(off.items(), key=lambda item: item[1]))
        assert abs(losses(done[name])[-1] - losses(done["bf16"])[-1]) < 0.03 * fall, name
    plain = gradients(done["bf16"])
    assert max(float((g - plain[key]).norm()) for key, g in gradients(done["tensorwise"]).items()) > 0


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (1, ["precision.fp8=tensorwise"], "precision.fp8=tensorwise has no effect with precision.compute=fp32; set precision.compute=bf16"),
        (1, ["precision.fp8_modules=[layers.0.*]", "precision.compute=bf16"], "precision.fp8_modules=[layers.0.*] has no effect"),
        (1, [*FP8, *SIZES, "precision.fp8_modules=[]"], "precision.fp8_modules=[] leaves no projection for fp8; set precision.fp8=none"),
        (1, [*FP8, "model.dim=24", "model.heads=3", "model.kv_heads=3"], "is 24 x 24, and fp8 needs multiples of 16; leave it out of precision.fp8_modules"),
        (2, [*FP8, *SIZES, "parallel.strategy=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble"], "parallel.pipeline_schedule=zero_bubble puts off gradients of weights in bf16; use 1f1b"),
    ],
)  # fmt: skip
def test_what_fp8_cannot_do_is_refused_in_one_line(pool, config_file, world_size, options, message):
    for code, printed in pool.launch(world_size, run_main, str(config_file), "--check", *options)[:1]:
        assert code == 2 and message in printed and "Traceback" not in printed


def test_a_check_says_what_multiplies_in_fp8(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", *SIZES, *FP8, "precision.fp8_modules=['layers.*.mlp.*']")
    assert code == 0 and "products of 6 of the 14 projections of blocks are in fp8, tensorwise, slower than bf16 on a CPU" in printed


def test_fp8_has_no_effect_where_auto_computes_in_fp32(config_file, monkeypatch):
    monkeypatch.setattr("pretrain.train.number_format.measured_gain", lambda: 1.0)
    options = (*SIZES, "precision.compute=auto", "precision.fp8=rowwise", "precision.fp8_modules=['layers.*']")
    code, printed = run_main(str(config_file), *options, "--check")
    assert code == 0 and "precision.fp8=rowwise has no effect with precision.compute=fp32 (the choice of auto)" in printed
    assert "are in fp8" not in printed
    found = make_plan(load_config(Path(config_file), list(options))[0], 1, torch.device("cpu")).config.precision
    assert (found.compute, found.fp8, found.fp8_modules) == ("fp32", "none", ["*"])
