"""The kernel of attention: what `run.attention_kernel` asks for, and what computes attention in the end."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.attention import SDPBackend

from pretrain.config.schema import Config
from pretrain.distributed.shards import stretch_length
from pretrain.errors import ConfigError
from pretrain.models.attention_ways import SHORT, ask_for_kernel, repeats_groups, way_of
from pretrain.models.causal_blocks_fp32 import LONGEST, NARROW, SHORTEST
from pretrain.models.families import family_of
from pretrain.models.layer_specs import has_windows
from pretrain.models.masks import attention_backend
from pretrain.models.shape import head_widths
from pretrain.train.resolve import needs_masks

_SWITCHES = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
_OTHERS = ("FA3", "FA4")
"""Packages that take the place of torch's flash kernel."""
_WIDEST = 256  # head of torch's flash kernel


def check_attention_kernel(config: Config, device: torch.device) -> None:
    """Raise ConfigError for a kernel without effect, or one that cannot compute this model's attention."""
    if config.model.attention_backend == "varlen" and (reason := _refusal_of_varlen(config)):
        raise ConfigError(f"model.attention_backend=varlen {reason}; set it to auto")
    asked = config.run.attention_kernel
    if asked == "auto":
        return
    if device.type == "cpu":
        if asked != "flash" or not _has_products(config):
            raise ConfigError(
                f"run.attention_kernel={asked} has no effect on a CPU for this model and its data; set it to auto"
            )
        if reason := _refusal_of_unequal_widths(config):
            raise ConfigError(f"run.attention_kernel={asked} {reason}; set it to auto")
        return
    if reason := _without_effect(config, device, asked):
        raise ConfigError(f"run.attention_kernel={asked} has no effect {reason}; set it to auto")
    if reason := _refusal(config, device, asked):
        raise ConfigError(f"run.attention_kernel={asked} {reason}; {_advice(config, device)}")


def _without_effect(config: Config, device: torch.device, asked: str) -> str | None:
    """Why a GPU computes this run's attention otherwise whatever the key says; None where it has an effect."""
    if config.parallel.context > 1 and config.parallel.context_method == "ring" and asked != "efficient":
        return "with parallel.context_method=ring, which has the efficient kernel"
    if config.model.attention_dropout:
        return "on training with model.attention_dropout, which no kernel of torch's computes as we do"
    if not needs_masks(config) or not _are_all_masked(config):
        return None
    if attention_backend(config.model, device, training=True) == "flex":
        return "where FlexAttention computes all layers (model.attention_backend)"
    if config.model.attention_backend == "varlen":
        return None if asked in _OTHERS else "where torch's flash kernel computes all layers (model.attention_backend=varlen)"
    switches = config.model.attention
    if switches.soft_cap or switches.sinks:
        return f"with model.attention.{'soft_cap' if switches.soft_cap else 'sinks'}, which no kernel of torch's computes"
    return None


def _are_all_masked(config: Config) -> bool:
    """Whether every layer has more than the causal mask, given that some layer has (`needs_masks`)."""
    switches = config.model.attention
    return bool(config.data.document_mask or switches.soft_cap or switches.sinks) or all(has_windows(config.model))


def _refusal(config: Config, device: torch.device, asked: str) -> str | None:
    """Why a GPU's kernel cannot compute this run's attention. torch would say so at the first step, without the key."""
    model, is_flash = config.model, asked in ("flash", *_OTHERS)
    has_bias, shares_positions = model.positions == "relative", config.parallel.context > 1
    if config.precision.compute == "fp32" and (is_flash or asked == "cudnn"):
        return "does not compute in fp32"
    if is_flash and needs_masks(config) and attention_backend(model, device, training=True) == "sdpa":
        return "takes no masks, and this model or its data need them"
    if is_flash and config.validation.prompts:
        return "takes no masks, and generation (validation.prompts) needs them"
    if is_flash and (model.encoder.layers or has_bias or shares_positions):
        what = "an encoder-decoder" if model.encoder.layers else "model.positions=relative" if has_bias else "parallel.context"
        return f"takes no masks, and {what} needs them"
    if asked == "cudnn" and has_bias:
        return "trains no bias, and model.positions=relative has one"
    if asked == "cudnn" and config.run.deterministic:
        return "is not deterministic in backward, as run.deterministic asks"
    return _refusal_of_widths(config, asked) if family_of(model.family).is_ours else None


def _refusal_of_varlen(config: Config) -> str | None:
    """Why torch's kernel for sequences of any length cannot compute this run's attention."""
    switches, key = config.model.attention, head_widths(config.model)[0]
    reasons = {
        "does not compute in fp32": config.precision.compute == "fp32",
        "knows no soft-cap, as model.attention.soft_cap asks": switches.soft_cap,
        "knows no sinks, as model.attention.sinks asks": switches.sinks,
        "drops no weights, as model.attention_dropout asks": config.model.attention_dropout,
        f"computes heads of multiples of 8, up to {_WIDEST}, and this model's have {key}": key % 8 or key > _WIDEST,
    }
    return _refusal_of_unequal_widths(config) or next((reason for reason, holds in reasons.items() if holds), None)


def _refusal_of_widths(config: Config, asked: str) -> str | None:
    """Likewise, for the widths of keys and values of a head (torch's sdp_utils.cpp)."""
    key, value = head_widths(config.model)
    unit = 4 if config.precision.compute == "fp32" else 8
    if asked in ("flash", *_OTHERS):
        if reason := _refusal_of_unequal_widths(config):
            return reason
        if key > _WIDEST:
            return f"computes heads of at most {_WIDEST}, and this model's have {key}"
    elif asked in ("cudnn", "efficient") and (key % unit or value % unit):
        return f"computes heads of multiples of {unit}, and this model's have {key if key % unit else value}"
    elif asked == "cudnn" and max(key, value) > (widest := _widest_of_cudnn()):
        return f"computes heads of at most {widest}, and this model's have {max(key, value)}"
    return None


def _refusal_of_unequal_widths(config: Config) -> str | None:
    """torch's flash kernels on GPUs and on CPUs know one width of a head."""
    key, value = head_widths(config.model)
    return f"needs keys and values of one width, and those of model.latent have {key} and {value}" if key != value else None


def _widest_of_cudnn() -> int:
    """Width of the widest head that cuDNN trains on this GPU: twice as wide on Hopper. A check without a GPU assumes one."""
    return 128 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9 else 256


def _advice(config: Config, device: torch.device) -> str:
    possible = [
        name
        for name in ("cudnn", "efficient")
        if not _without_effect(config, device, name) and not _refusal(config, device, name)
    ]
    return f"use {' or '.join(possible)}" if possible else "set it to auto"


def _has_products(config: Config) -> bool:
    """Whether training on a CPU multiplies matrices where torch's fused kernel could compute attention (`models.attention.attend`).

    It says the same on every host. In fp32 it supposes that processes may have one thread, with which blocks are taken, unless `run.threads`
    says otherwise.
    """
    switches = config.model.attention
    if not family_of(config.model.family).is_ours or switches.soft_cap or switches.sinks or config.model.attention_dropout:
        return False
    has_any = config.data.pairs is not None or config.model.encoder.layers > 0  # their lengths differ
    lengths = [config.data.sequence_length, *(stage.length for stage in config.batch.lengths)]
    if config.parallel.context > 1:  # each rank has two stretches of a sequence, with masks
        stretch = stretch_length(min(lengths), config.parallel.context)
        return config.precision.compute == "bf16" and config.parallel.context_method != "ring" and stretch <= SHORT
    is_masked = _is_always_masked(config, min(lengths))
    if config.precision.compute == "bf16":
        return not is_masked or has_any or min(lengths) <= SHORT
    fits = has_any or any(SHORTEST <= length <= LONGEST for length in lengths)
    return fits and not is_masked and head_widths(config.model)[0] > NARROW and config.run.threads in (None, 1)


def _is_always_masked(config: Config, shortest: int) -> bool:
    """Whether every layer has more than the causal mask at every length of the run, the shortest one included."""
    if config.model.positions == "relative":
        return True
    has_all = needs_masks(config) and _are_all_masked(config)
    return has_all and (config.data.document_mask or (config.model.attention.window or 0) < shortest)


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


_WAYS = {
    "products": "matrix products",
    "blocks": "matrix products over blocks of queries",
    "blocks_fp32": "matrix products over blocks of queries",
}
_KERNELS = {
    SDPBackend.MATH: "matrix products",
    SDPBackend.FLASH_ATTENTION: "torch's flash kernel",
    SDPBackend.EFFICIENT_ATTENTION: "torch's efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's kernel",
}


def describe_attention(config: Config, device: torch.device) -> str:
    """What computes attention in training, by `run.attention_kernel`, this device, and this process's threads."""
    if not family_of(config.model.family).is_ours:
        return "as transformers computes it"
    if config.parallel.context > 1 and config.parallel.context_method == "ring":
        return "blocks of keys in a ring"
    if device.type == "cpu" and (config.data.pairs is not None or config.model.encoder.layers):
        return "by the lengths of each batch"
    found = {}
    for length in sorted({*(stage.length for stage in config.batch.lengths), config.data.sequence_length}):
        rows = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
        found.setdefault(_in_layers(rows, device), []).append(length)
    texts = list(found)
    if len(texts) == 1:
        return texts[0]
    return "; ".join(f"in rows of {', '.join(map(str, found[text]))}: {text}" for text in texts)


def _in_layers(config: Config, device: torch.device) -> str:
    """What computes attention in all layers, in rows of `data.sequence_length`."""
    has_own_masks = config.model.positions == "relative" or config.model.encoder.layers > 0 or config.parallel.context > 1
    masked, length = has_own_masks or needs_masks(config), config.data.sequence_length
    if config.parallel.context > 1:  # each stretch of queries meets the keys up to its end
        stretch = stretch_length(length, config.parallel.context)
        few, many = (_computed_by(config, device, True, stretch, keys) for keys in (stretch, length))
        return many if few == many else f"{many}, and {few} where keys are few"
    if not masked or has_own_masks or _are_all_masked(config):
        return _computed_by(config, device, masked, length, length)
    plain, windows = (_computed_by(config, device, has_mask, length, length) for has_mask in (False, True))
    return f"{plain}; in layers with windows {windows}"


def _computed_by(config: Config, device: torch.device, has_mask: bool, rows: int, length: int) -> str:
    model, switches = config.model, config.model.attention
    is_special = bool(switches.soft_cap or switches.sinks or model.attention_dropout)
    if has_mask and needs_masks(config) and attention_backend(model, device, training=True) == "flex":
        return "FlexAttention"
    if has_mask and needs_masks(config) and model.attention_backend == "varlen":
        asked = config.run.attention_kernel
        return f"{asked if asked in _OTHERS else 'the flash kernel of torch'} over documents"
    if device.type != "cpu":  # there no kernel is chosen by the length
        rows, length = min(rows, 1024), min(length, 1024)
    key, value = head_widths(config.model)
    dtype = torch.bfloat16 if config.precision.compute == "bf16" else torch.float32

    def of(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.empty(1, heads, length, width, dtype=dtype, device=device, requires_grad=True)

    q, k, v = of(model.heads, rows, key), of(model.kv_heads, length, key), of(model.kv_heads, length, value)
    way = way_of(q, k, has_mask, is_special)
    if way != "fused":
        return _WAYS[way]
    if repeats_groups(q, k, has_mask):
        k, v = of(model.heads, length, key), of(model.heads, length, value)
    has_bias = model.positions == "relative"  # which is trained
    mask = (
        torch.empty(rows, length, dtype=dtype if has_bias else torch.bool, device=device, requires_grad=has_bias)
        if has_mask
        else None
    )
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=not has_mask, enable_gqa=q.shape[1] != k.shape[1])
    asked = config.run.attention_kernel
    return asked if asked in _OTHERS else _KERNELS.get(SDPBackend(choice), f"torch's kernel {choice}")
