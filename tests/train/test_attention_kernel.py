"""`run.attention_kernel` leaves torch one kernel, and is refused where it would do nothing or could not work."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running import run_main

from pretrain.config.load import load_config
from pretrain.config.model_schema import Model
from pretrain.errors import ConfigError
from pretrain.models import build_network
from pretrain.models.attention import attend, changing_shapes
from pretrain.models.families import complete
from pretrain.models.generate import generate
from pretrain.parallel.initialise import initialise
from pretrain.train.attention_kernel import check_attention_kernel, set_attention_kernel

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


def test_a_kernel_without_effect_or_without_masks_is_refused(pool, config_file):
    [(code, printed)] = pool.launch(1, run_main, str(config_file), "--check", "run.attention_kernel=cudnn")
    assert code == 2 and "run.attention_kernel=cudnn has no effect on a CPU for this model and its data; set it to auto" in printed
    cpu, flash = torch.device("cpu"), ["run.attention_kernel=flash", "precision.compute=bf16"]
    for effective in ([], ["data.sequence_length=300"], ["data.document_mask=true", "data.sequence_length=128"]):
        check_attention_kernel(load_config(config_file, [*flash, *effective])[0], cpu)
    for without in (["precision.compute=fp32"], ["model.attention.soft_cap=30"], ["data.document_mask=true", "data.sequence_length=300"]):
        with pytest.raises(ConfigError, match="run.attention_kernel=flash has no effect on a CPU"):
            check_attention_kernel(load_config(config_file, [*flash, *without])[0], cpu)
    for asked in ("flash", "cudnn", "FA3"):
        config, _ = load_config(config_file, [f"run.attention_kernel={asked}", "precision.compute=fp32"])
        with pytest.raises(ConfigError, match=f"run.attention_kernel={asked} does not compute in fp32"):
            check_attention_kernel(config, torch.device("cuda"))
    config, _ = load_config(config_file, ["run.attention_kernel=flash", "precision.compute=bf16", "data.document_mask=true"])
    with pytest.raises(ConfigError, match="run.attention_kernel=flash takes no masks"):
        check_attention_kernel(config, torch.device("cuda"))
    free = dataclasses.replace(config, run=dataclasses.replace(config.run, attention_kernel="efficient"))
    check_attention_kernel(free, torch.device("cuda"))


@pytest.mark.parametrize(
    ("asked", "values", "said"),
    [
        ("flash", ["parallel.context=2"], "takes no masks, and parallel.context needs them; use efficient"),
        ("FA3", ["model.encoder.layers=2"], "takes no masks, and an encoder-decoder needs them; use efficient"),
        ("flash", ["model.positions=relative"], "takes no masks, and model.positions=relative needs them; use efficient"),
        ("flash", ["model.latent.kv_rank=16"], "needs keys and values of one width, which model.latent has not; use efficient"),
        ("cudnn", ["model.positions=relative"], "trains no bias, and model.positions=relative has one; use efficient"),
        ("cudnn", ["run.deterministic=true"], "is not deterministic in backward; set run.deterministic=false, or use efficient"),
        ("cudnn", ["parallel.context=2", "parallel.context_method=ring"], "has no effect with parallel.context_method=ring, which has the efficient kernel; set it to auto"),
    ],
)  # fmt: skip
def test_what_a_kernel_of_a_gpu_cannot_compute_is_refused_before_the_first_step(config_file, asked, values, said):
    """torch ended in "No available kernel" at the first step."""
    common = ["model.family=custom", "parallel.strategy=fsdp", "precision.compute=bf16"]
    config, _ = load_config(config_file, [*common, *values, f"run.attention_kernel={asked}"])
    with pytest.raises(ConfigError) as caught:
        check_attention_kernel(config, torch.device("cuda"))
    assert str(caught.value) == f"run.attention_kernel={asked} {said}"
    check_attention_kernel(load_config(config_file, [*common, *values, "run.attention_kernel=efficient"])[0], torch.device("cuda"))


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
