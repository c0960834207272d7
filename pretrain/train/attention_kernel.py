"""The kernel of attention: what `run.attention_kernel` asks for."""

from __future__ import annotations

import torch

from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.models.attention import SHORT, ask_for_kernel
from pretrain.models.families import family_of
from pretrain.train.resolve import needs_masks

_SWITCHES = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
_OTHERS = ("FA3", "FA4")
"""Packages that take the place of torch's flash kernel."""


def check_attention_kernel(config: Config, device: torch.device) -> None:
    """Raise ConfigError for a kernel without effect, or one that cannot compute this model's attention."""
    asked = config.run.attention_kernel
    if asked == "auto":
        return
    if device.type == "cpu":
        if asked != "flash" or not _has_products(config):
            raise ConfigError(
                f"run.attention_kernel={asked} has no effect on a CPU for this model and its data; set it to auto"
            )
        return
    if reason := _refusal(config, asked):
        raise ConfigError(f"run.attention_kernel={asked} {reason}")


def _refusal(config: Config, asked: str) -> str | None:
    """Why a GPU's kernel cannot compute this run's attention. torch would say so at the first step, without the key."""
    model, parallel, is_flash = config.model, config.parallel, asked in ("flash", *_OTHERS)
    has_bias, shares_positions = model.positions == "relative", parallel.context > 1
    if config.precision.compute == "fp32" and (is_flash or asked == "cudnn"):
        return "does not compute in fp32; set precision.compute=bf16, or use efficient"
    if shares_positions and parallel.context_method == "ring" and asked != "efficient":
        return "has no effect with parallel.context_method=ring, which has the efficient kernel; set it to auto"
    if is_flash and needs_masks(config) and model.attention_backend != "flex":
        return "takes no masks, and this model or its data need them; use cudnn or efficient"
    if is_flash and (model.encoder.layers or has_bias or shares_positions):
        what = "an encoder-decoder" if model.encoder.layers else "model.positions=relative" if has_bias else "parallel.context"
        return f"takes no masks, and {what} needs them; use efficient"
    if is_flash and model.latent.kv_rank:
        return "needs keys and values of one width, which model.latent has not; use efficient"
    if asked == "cudnn" and has_bias:
        return "trains no bias, and model.positions=relative has one; use efficient"
    if asked == "cudnn" and config.run.deterministic:
        return "is not deterministic in backward; set run.deterministic=false, or use efficient"
    return None


def _has_products(config: Config) -> bool:
    """Whether training on a CPU multiplies matrices where torch's fused kernel could compute attention (`models.attention.attend`)."""
    switches = config.model.attention
    if config.precision.compute != "bf16" or not family_of(config.model.family).splits or switches.soft_cap or switches.sinks:
        return False
    return config.data.sequence_length <= SHORT or not needs_masks(config)


def set_attention_kernel(asked: str, shapes_change: bool = False) -> None:
    """Let attention use this kernel alone; `auto`: all of them, but for cuDNN's where `shapes_change` at nearly every step. Raises ConfigError
    for a package that is not there.
    """
    if asked in _OTHERS:
        from torch.nn.attention import activate_flash_attention_impl

        try:
            activate_flash_attention_impl(asked)
        except (ImportError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"run.attention_kernel={asked}: {str(error).splitlines()[0]}; install its package, or use flash"
            ) from error
    ask_for_kernel(asked)
    for name, switch in _SWITCHES.items():
        switch(asked in ("auto", name) or (name == "flash" and asked in _OTHERS))
    if asked == "auto" and shapes_change:
        _SWITCHES["cudnn"](False)
