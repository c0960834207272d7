"""`run.attention_kernel` leaves torch one kernel, and is refused where it would do nothing or could not work."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running import gradients, largest_gradient_difference, run_main, train
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.load import load_config
from pretrain.config.model_schema import EncoderConfig, Model
from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.attention import attend
from pretrain.models.attention_ways import changing_shapes
from pretrain.models.causal_blocks_fp32 import HAS_MKL
from pretrain.models.families import complete
from pretrain.models.generate import generate
from pretrain.parallel.blocks import DTYPES, set_compute_format
from pretrain.parallel.initialise import initialise
from pretrain.train.attention_kernel import _in_layers, check_attention_kernel, describe_attention, set_attention_kernel
from pretrain.train.resolve import resolve

ENABLED = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


@pytest.mark.parametrize("asked", list(ENABLED))
def test_one_kernel_is_left_and_auto_gives_all_back(asked):
    try:
        set_attention_kernel(asked)
        assert {name for name, enabled in ENABLED.items() if enabled()} == {asked}
    finally:
        set_attention_kernel("auto")
    assert all(enabled() for enabled in ENABLED.values())


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="run.attention_kernel=FA3: .*; install its package, or use flash"):
        set_attention_kernel("FA3")
    assert all(enabled() for enabled in ENABLED.values())


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_kernel_without_effect_on_a_cpu_is_refused(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "run.attention_kernel=cudnn")
    assert code == 2 and "run.attention_kernel=cudnn has no effect on a CPU for this model and its data; set it to auto" in printed
    flash = ["run.attention_kernel=flash", "precision.compute=bf16"]
    effective = [
        [],
        ["data.sequence_length=300"],
        ["data.sequence_length=300", "model.head_dim=320"],
        ["data.sequence_length=300", "parallel.context=2"],
        ["data.document_mask=true", "data.sequence_length=128"],
        ["data.sequence_length=300", "model.attention={window: 300}"],
        ["data.sequence_length=300", "model.attention={window: 30, window_pattern: [true, false]}"],
        ["data.sequence_length=600", "model.attention={window: 400}", "batch.lengths=[{until_tokens: 9999, length: 300}]"],
        ["model.head_dim=64", "data.sequence_length=300", "precision.compute=fp32"],
        ["model.head_dim=64", "data.sequence_length=300", "precision.compute=fp32", "run.threads=1"],
        ["model.head_dim=64", "data.sequence_length=2048", "batch.lengths=[{until_tokens: 9999, length: 512}]", "precision.compute=fp32", "run.threads=1"],
    ]
    for values in effective:
        check_attention_kernel(resolve(load_config(config_file, [*flash, *FAMILY, *values])[0]), CPU)
    without = [
        ["precision.compute=fp32"],
        ["model.head_dim=64", "data.sequence_length=300", "precision.compute=fp32", "run.threads=2"],
        ["model.head_dim=64", "data.sequence_length=128", "precision.compute=fp32", "run.threads=1"],
        ["model.head_dim=32", "data.sequence_length=300", "precision.compute=fp32", "run.threads=1"],
        ["data.sequence_length=600", "parallel.context=2"],
        ["data.sequence_length=160", "parallel.context=2", "parallel.context_method=ring"],
        ["data.sequence_length=160", "parallel.context=2", "precision.compute=fp32"],
        ["model.attention.soft_cap=30"],
        ["model.attention_dropout=0.1"],
        ["data.document_mask=true", "data.sequence_length=300"],
        ["data.sequence_length=300", "model.attention={window: 30}"],
    ]
    for values in without:
        with pytest.raises(ConfigError, match="run.attention_kernel=flash has no effect on a CPU"):
            check_attention_kernel(resolve(load_config(config_file, [*flash, *FAMILY, *values])[0]), CPU)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_the_fused_kernel_of_a_cpu_is_refused_for_values_of_another_width(config_file, compute):
    """torch knows no other kernel then, and would say so at the first step."""
    values = [*FAMILY, "run.attention_kernel=flash", f"precision.compute={compute}", "data.sequence_length=300"]
    check_attention_kernel(resolve(load_config(config_file, [*values, "model.head_dim=40"])[0]), CPU)
    with pytest.raises(ConfigError, match="needs keys and values of one width, and those of model.latent have 40 and 16; set it to auto"):
        check_attention_kernel(resolve(load_config(config_file, [*values, LATENT % 32, "model.kv_heads=4"])[0]), CPU)


def test_blocks_in_fp32_compute_the_same_gradient_in_every_layout(pool, config_file):
    """From 129 positions on, with heads wider than 32 and one thread, without masks."""
    if not HAS_MKL:
        pytest.skip("this build of torch has no MKL, for whose products the blocks are")
    long = ("model={layers: 2, heads: 2, head_dim: 40}", "data.sequence_length=160", "precision.compute=fp32", "run.threads=1")
    long = (*long, "run.steps=1", "schedule.warmup_steps=0", "log.gradients_at=[1]")

    def found(ranks: int, name: str, *layout: str) -> dict[str, torch.Tensor]:
        return gradients(train(pool, ranks, config_file, *long, f"run.name={name}", *layout))

    single, fused = found(1, "auto"), found(1, "fused", "run.attention_kernel=flash")
    assert 0 < largest_gradient_difference(fused, single) < 1e-5
    recomputed = "parallel.activation_checkpointing"
    for name, *layout in (
        ("ddp", "parallel.strategy=ddp"),
        ("fsdp", "parallel.strategy=fsdp", f"{recomputed}=full"),
        ("selective", "parallel.strategy=fsdp", f"{recomputed}=selective"),
        ("tensor", "parallel.strategy=fsdp", "parallel.tensor=2"),
        ("pipeline", "parallel.strategy=fsdp", "parallel.pipeline=2"),
        ("context", "parallel.strategy=fsdp", "parallel.context=2"),
    ):
        assert largest_gradient_difference(found(2, name, *layout), single) < 1e-5, name


FAMILY = ["model.family=custom", "parallel.strategy=fsdp"]
SDPA, MASK = "model.attention_backend=sdpa", "data.document_mask=true"
WINDOW, SOME = "model.attention.window=8", "model.attention={window: 8, window_pattern: [true, false]}"
FLEX = "model.head_dim=16"  # of which FlexAttention compiles its kernels, so that `auto` takes it
RING = ["parallel.context=2", "parallel.context_method=ring"]
WIDE = ["model.head_dim=264"]
LATENT = "model.latent={kv_rank: 16, plain_dim: %d, rope_dim: 8, value_dim: 16}"


@pytest.mark.parametrize(
    ("asked", "values", "said"),
    [
        ("flash", ["precision.compute=fp32"], "does not compute in fp32; use efficient"),
        ("cudnn", ["precision.compute=fp32"], "does not compute in fp32; use efficient"),
        ("FA3", ["precision.compute=fp32"], "does not compute in fp32; use efficient"),
        ("flash", [MASK, SDPA], "takes no masks, and this model or its data need them; use cudnn or efficient"),
        ("flash", [MASK, SDPA, "run.deterministic=true"], "takes no masks, and this model or its data need them; use efficient"),
        ("flash", [SOME, SDPA], "takes no masks, and this model or its data need them; use cudnn or efficient"),
        ("flash", ["parallel.context=2"], "takes no masks, and parallel.context needs them; use cudnn or efficient"),
        ("cudnn", ["run.deterministic=true"], "is not deterministic in backward, as run.deterministic asks; use efficient"),
        ("cudnn", RING, "has no effect with parallel.context_method=ring, which has the efficient kernel; set it to auto"),
        ("flash", [MASK, FLEX], "has no effect where FlexAttention computes all layers (model.attention_backend); set it to auto"),
        ("efficient", [WINDOW, FLEX], "has no effect where FlexAttention computes all layers (model.attention_backend); set it to auto"),
        ("math", ["model.attention.soft_cap=30", SDPA], "has no effect with model.attention.soft_cap, which no kernel of torch's computes; set it to auto"),
        ("cudnn", ["model.attention.sinks=true", SDPA], "has no effect with model.attention.sinks, which no kernel of torch's computes; set it to auto"),
        ("cudnn", ["model.attention_dropout=0.1"], "has no effect on training with model.attention_dropout, which no kernel of torch's computes as we do; set it to auto"),
        ("cudnn", ["model.head_dim=12"], "computes heads of multiples of 8, and this model's have 12; set it to auto"),
        ("efficient", ["model.head_dim=12"], "computes heads of multiples of 8, and this model's have 12; set it to auto"),
        ("efficient", ["model.head_dim=6", "precision.compute=fp32"], "computes heads of multiples of 4, and this model's have 6; set it to auto"),
        ("flash", WIDE, "computes heads of at most 256, and this model's have 264; use efficient"),
        ("cudnn", WIDE, "computes heads of at most 256, and this model's have 264; use efficient"),
        ("flash", ["validation.prompts=[a]", "validation.every_steps=1", "data.validation=[{path: x}]"], "takes no masks, and generation (validation.prompts) needs them; use cudnn or efficient"),
        ("flash", [LATENT % 16, "model.kv_heads=4"], "needs keys and values of one width, and those of model.latent have 24 and 16; use cudnn or efficient"),
    ],
)  # fmt: skip
def test_what_a_kernel_of_a_gpu_cannot_compute_is_refused_before_the_first_step(config_file, asked, values, said):
    """torch ended in "No available kernel" at the first step, or the key did nothing."""
    common = ["precision.compute=bf16", *FAMILY, f"run.attention_kernel={asked}"]
    with pytest.raises(ConfigError) as caught:
        check_attention_kernel(resolve(load_config(config_file, [*common, *values])[0]), GPU)
    assert str(caught.value) == f"run.attention_kernel={asked} {said}"


@pytest.mark.parametrize(
    ("asked", "values"),
    [
        ("flash", ["model.attention.window=100000"]),  # no sample is so long, and no mask is built
        ("flash", [SOME, FLEX]),  # FlexAttention computes the layers with a window
        ("flash", ["model.head_dim=12"]),  # torch fills its rows up
        ("flash", [LATENT % 8, "model.kv_heads=4"]),
        ("efficient", [MASK, SDPA]),
        ("efficient", ["precision.compute=fp32", "model.head_dim=12"]),
        ("efficient", RING),
        ("math", []),
        ("cudnn", [SOME, FLEX]),
    ],
)
def test_a_kernel_that_computes_some_attention_is_taken(config_file, asked, values):
    common = ["precision.compute=bf16", *FAMILY, f"run.attention_kernel={asked}"]
    check_attention_kernel(resolve(load_config(config_file, [*common, *values])[0]), GPU)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("FA3", "takes no masks, and an encoder-decoder needs them; use efficient"),
        ("cudnn", "trains no bias, and model.positions=relative has one; use efficient"),
    ],
)
def test_kernels_without_biases_cannot_train_t5(config_file, asked, said):
    given = load_config(config_file, ["precision.compute=bf16", f"run.attention_kernel={asked}"])[0]
    model = complete(Model(family="t5", dim=32, layers=1, heads=2, vocab_size=64, encoder=EncoderConfig(layers=1)), 32)
    with pytest.raises(ConfigError) as caught:
        check_attention_kernel(dataclasses.replace(given, model=model), GPU)
    assert str(caught.value) == f"run.attention_kernel={asked} {said}"


def test_cudnn_plans_no_kernel_where_shapes_change(tmp_path):
    """It takes about a second to plan a kernel for each new shape, and is what torch prefers on an H100."""
    try:
        set_attention_kernel("auto", shapes_change=True)
        assert {name for name, enabled in ENABLED.items() if enabled()} == set(ENABLED) - {"cudnn"}
        for asked, stays in (("auto", False), ("cudnn", True)):
            set_attention_kernel(asked)
            with changing_shapes():
                assert ENABLED["cudnn"]() == stays
            assert ENABLED["cudnn"]()
    finally:
        set_attention_kernel("auto")
    network = build_network(complete(Model(dim=8, layers=1, heads=1, ffn_dim=8, vocab_size=16), 8))
    initialise(network, 0)
    seen, forward = [], network.forward
    network.forward = lambda *given, **named: (seen.append(ENABLED["cudnn"]()), forward(*given, **named))[1]
    generate(network, [1, 2], 3)
    assert seen and not any(seen) and ENABLED["cudnn"]()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_knows_no_groups_computes_them(dtype):
    """Groups would be refused: there is no other kernel then, and none but this one takes fp32."""
    q = torch.randn(1, 32, 128, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=dtype) for _ in "kv")
    expected = attend(q.double(), *(x.double().repeat_interleave(4, dim=1) for x in (k, v)), None, 0.125)
    try:
        set_attention_kernel("efficient")
        y = attend(q, k, v, None, 0.125)
    finally:
        set_attention_kernel("auto")
    torch.testing.assert_close(y.double(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)


BLOCKS, PRODUCTS, FUSED = "matrix products over blocks of queries", "matrix products", "torch's flash kernel"
OF_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": FUSED,
    "pretrain.causal_attention.default": BLOCKS,
    "pretrain.causal_attention_fp32.default": BLOCKS,
}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["precision.compute=fp32"], FUSED),
        (["precision.compute=fp32", "model.head_dim=40", "data.sequence_length=160"], BLOCKS),
        (["precision.compute=bf16"], PRODUCTS),
        (["precision.compute=bf16", "data.sequence_length=160"], BLOCKS),
        (["precision.compute=bf16", "data.sequence_length=160", "run.attention_kernel=flash"], FUSED),
        (["precision.compute=bf16", "data.sequence_length=160", "data.document_mask=true"], FUSED),
        (
            ["precision.compute=bf16", "data.sequence_length=160", "model.attention={window: 30, window_pattern: [true, false]}"],
            f"{BLOCKS}; in layers with windows {FUSED}",
        ),
        (["precision.compute=fp32", "model.attention.soft_cap=30"], PRODUCTS),
        (["precision.compute=fp32", "model.attention_dropout=0.1"], PRODUCTS),
        (["precision.compute=fp32", LATENT % 32, "model.kv_heads=4"], PRODUCTS),
    ],
)
def test_what_is_said_to_compute_attention_computes_it(config_file, values, said):
    config = resolve(load_config(config_file, [*FAMILY, "model.vocab_size=61", *values])[0])
    length, seen, products = config.data.sequence_length, set(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.add(OF_ATTENTION.get(str(operator)))
            products.append(str(operator) == "aten.bmm.default")
            return operator(*args, **(kwargs or {}))

    network = build_network(config.model)
    set_compute_format(network, DTYPES[config.precision.compute])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        set_attention_kernel(config.run.attention_kernel)
        assert describe_attention(config, CPU) == said
        documents = torch.zeros(1, length, dtype=torch.long) if config.data.document_mask else None
        with Watch():
            ids = torch.zeros(1, length, dtype=torch.long)
            network(ids, ids, documents, keys_B=torch.zeros(1, dtype=torch.long))
    finally:
        set_attention_kernel("auto")
        torch.set_num_threads(threads)
    assert seen - {None} == {BLOCKS: {BLOCKS}, FUSED: {FUSED}, PRODUCTS: set()}.get(said, {BLOCKS, FUSED})
    assert any(products) == (said == PRODUCTS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["data.sequence_length=160", "batch.lengths=[{until_tokens: 9999, length: 80}]"], f"in rows of 80: {PRODUCTS}; in rows of 160: {BLOCKS}"),
        (
            ["data.sequence_length=320", "model.attention.window=200", "batch.lengths=[{until_tokens: 9999, length: 160}]"],
            f"in rows of 160: {BLOCKS}; in rows of 320: {FUSED}",
        ),
        (["data.sequence_length=300", "parallel.context=2"], f"{FUSED}, and {PRODUCTS} where keys are few"),
        (["data.sequence_length=600", "parallel.context=2"], FUSED),
        (["data.sequence_length=160", "parallel.context=2", "parallel.context_method=ring"], "blocks of keys in a ring"),
    ],
)
def test_what_computes_attention_is_said_of_all_rows_and_stretches(config_file, values, said):
    config = resolve(load_config(config_file, [*FAMILY, "model.vocab_size=61", "precision.compute=bf16", *values])[0])
    assert describe_attention(config, CPU) == said


def test_a_bias_that_is_trained_is_for_torch_to_multiply():
    """T5's relative positions add such a bias to the scores."""
    config = Config(model=complete(Model(family="t5", dim=32, layers=1, heads=2, vocab_size=61, encoder=EncoderConfig(layers=1)), 160))
    config.precision.compute = "fp32"
    assert _in_layers(config, CPU) == PRODUCTS
    assert describe_attention(config, CPU) == "by the lengths of each batch"


def test_a_run_says_what_computes_attention(pool, config_file, tmp_path):
    short = ("run.steps=1", "schedule.warmup_steps=0", "checkpoint.every_steps=0", "precision.compute=fp32")
    [(code, printed)] = pool.launch(1, run_main, str(config_file), *short)
    assert code == 0 and f"attention {FUSED}" in printed
