"""`run.attention_kernel` leaves torch one kernel, and is refused where it would do nothing or could not work."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running import run_main

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.models.attention import attend
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
