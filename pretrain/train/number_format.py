"""Number formats that go together, and which one a device trains faster in: what `precision.compute: auto` asks.

A flag of a CPU does not tell. With AVX-512 bf16 products are several times as fast as in fp32, and so with AMX; where bf16 is emulated they are
slower. So products are measured.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from pretrain.config.schema import Config
from pretrain.errors import ConfigError
from pretrain.optim.eight_bits import LARGEST_RATIO
from pretrain.parallel.ddp import keeps_buckets
from pretrain.parallel.fp8 import projections, set_fp8, takes_scales_of_rows

SIZES = ((1024, 256, 1024), (1024, 1024, 256))
"""Tokens, inputs and outputs of the products in a block of the quickstart."""
FEW = ((64, 256, 1024),)
"""These take a CPU without bf16 some 40 ms, and those above more than a second."""
LEAST_GAIN = 1.2
"""bf16 must be this many times as fast: other operations gain nothing, and rounding costs a little quality."""
LEAST_OF_FEW = 0.25
"""A CPU has no products in bf16 where those of a few tokens reach less than this share of their speed in fp32. Without AVX-512 it was 0.06 to 0.11."""
TURNS = 5
LEAST_EPS = 1e-8
"""`optim.eps` of AdamW with moments in 8 bits must be at least this: their least root of a mean of squares is 4e-9."""


def check_formats(config: Config) -> None:
    """Raise ConfigError for formats of the optimizer's means that its rule cannot have."""
    precision = config.precision
    if precision.moments != "fp32" and config.optim.name == "adafactor":
        raise ConfigError(
            f"precision.moments={precision.moments}: optim.name=adafactor keeps a number per row and column, in fp32; remove the key"
        )
    if config.optim.name == "schedule_free_adamw" and (precision.moments, precision.master) != ("fp32", "fp32"):
        raise ConfigError(
            "optim.name=schedule_free_adamw keeps weights whose small differences it needs, in fp32; remove "
            + ("precision.moments" if precision.moments != "fp32" else "precision.master")
        )
    if precision.moments == "8bit" and config.optim.name != "adamw":
        raise ConfigError(
            f"precision.moments=8bit is for optim.name=adamw, whose mean of squares says how large its other mean can be; for {config.optim.name} use bf16"
        )
    if precision.moments == "8bit" and (ratio := _largest_ratio(*config.optim.betas)) > LARGEST_RATIO:
        size = f"{ratio:.3g} times" if ratio < math.inf else "any multiple of"
        raise ConfigError(
            f"optim.betas={list(config.optim.betas)} with precision.moments=8bit: the mean of gradients may come to {size} the root of the mean "
            f"of squares, and 8 bits end at {LARGEST_RATIO:g} times; take betas nearer to [0.9, 0.95], or set precision.moments=bf16"
        )
    if precision.moments == "8bit" and config.optim.eps < LEAST_EPS:
        raise ConfigError(
            f"optim.eps={config.optim.eps:g} with precision.moments=8bit: gradients below 4e-9 cannot be told from 0 in 8 bits, and only an eps "
            f"of {LEAST_EPS:g} or more keeps them from mattering; raise it, or set precision.moments=bf16"
        )


def _largest_ratio(first: float, second: float) -> float:
    """The largest that AdamW's mean of gradients can be, as a multiple of the root of its mean of squares: by the inequality of Cauchy and Schwarz."""
    falling = (first**2 / second if second else math.inf) if first else 0.0
    return (1 - first) / math.sqrt((1 - second) * (1 - falling)) if falling < 1 else math.inf


def plan_fp8(config: Config, network: nn.Module, device: torch.device) -> list[str]:
    """Give a network without values its products in fp8, if there are any, and return a line about them. Raises ConfigError for a network or a device
    that cannot have them.
    """
    precision = config.precision
    if precision.fp8 == "none":
        return []
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < ((10, 0) if precision.fp8 == "mxfp8" else (8, 9)):
        raise ConfigError(
            f"precision.fp8={precision.fp8}: {torch.cuda.get_device_name(device)} has no such products; set it to none"
        )
    if precision.fp8 == "rowwise" and device.type == "cpu" and not takes_scales_of_rows():
        raise ConfigError(
            f"precision.fp8=rowwise: torch {torch.__version__} has no such products on a CPU; install torch 2.13, or set it to tensorwise"
        )
    set_fp8(network, precision, config.parallel.tensor)
    chosen = projections(network, precision.fp8_modules)
    inner = projections(network, ["*"])
    slow = ", slower than bf16 on a CPU" if device.type == "cpu" else ""
    return [f"products of {len(chosen)} of the {len(inner)} projections of blocks are in fp8, {precision.fp8}{slow}"]


def check_gradients(config: Config, strategy: str, ranks: int) -> None:
    """Raise ConfigError if a strategy cannot keep gradients in the format that is asked for."""
    precision = config.precision
    if precision.gradients == "bf16" != precision.master and strategy == "ddp":
        raise ConfigError(
            f"precision.gradients=bf16: parallel.strategy=ddp keeps no gradients that are coarser than the weights, which are in {precision.master}; "
            "remove it, or use parallel.strategy=fsdp"
        )
    if precision.gradients == "fp32" != precision.master and strategy == "ddp" and keeps_buckets(config, ranks):
        raise ConfigError(
            f"precision.gradients=fp32 with precision.master=bf16 and run.deterministic: DDP keeps its buckets on {ranks} ranks only if it looks for "
            "parameters without a gradient, and here it is shown none; use parallel.strategy=fsdp"
        )


class FormatChoice(NamedTuple):
    """The number format to compute in, and why: a few words."""

    format: str
    reason: str = "the configuration says so"


def chosen_format(compute: str, device: torch.device, begun_in: str | None = None) -> FormatChoice:
    """What `precision.compute` comes to on a device. `begun_in`: the format of the run that goes on, which `auto` keeps."""
    if compute != "auto":
        return FormatChoice(compute)
    if begun_in is not None:
        return FormatChoice(begun_in, "the run began in it")
    if device.type == "cuda":
        able = has_bf16(device)
        return FormatChoice("bf16", "the GPU computes in it") if able else FormatChoice("fp32", "the GPU has no bf16")
    gain = measured_gain()
    if gain < LEAST_OF_FEW:  # a few products tell that they are slow, and not how slow
        return FormatChoice("fp32", "products in bf16 are far slower than in fp32 on this CPU")
    faster = "bf16" if gain >= LEAST_GAIN else "fp32"
    return FormatChoice(faster, f"products in bf16 are {gain:.1f} times as fast as in fp32 on this CPU")


def notes_on_format(compute: str, choice: FormatChoice, device: torch.device) -> list[str]:
    """What `auto` came to, and that bf16 is slow on a CPU that has no such products, for the lines at the start of a run."""
    notes = [f"precision.compute=auto: {choice.format}, because {choice.reason}"] if compute == "auto" else []
    if choice.format == "bf16" and device.type == "cpu" and gain_of_few() < LEAST_OF_FEW:
        notes.append("products in bf16 are far slower than in fp32 on this CPU; to train on it, take precision.compute=fp32")
    return notes


def has_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16, if only slowly, without torch imitating it in fp32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache
def measured_gain() -> float:
    """How many times as fast this process multiplies matrices in bf16, forward and backward."""
    return few if (few := gain_of_few()) < LEAST_OF_FEW else _gain(SIZES)


@functools.cache
def gain_of_few() -> float:
    """The same of a few tokens: it says only whether a CPU has products in bf16."""
    return _gain(FEW)


def _gain(sizes: tuple[tuple[int, int, int], ...]) -> float:
    """In CPU time, which other programs disturb less."""
    work = {dtype: [training_product(*size, dtype) for size in sizes] for dtype in (torch.float32, torch.bfloat16)}
    best = dict.fromkeys(work, float("inf"))
    for turn in range(TURNS + 1):
        for dtype, products in work.items():
            started = time.process_time()
            for product in products:
                product()
            if turn:  # the first one warms up
                best[dtype] = min(best[dtype], time.process_time() - started)
    return best[torch.float32] / max(best[torch.bfloat16], 1e-9)


def drawn(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers on the default device, from a generator of their own. A GPU multiplies ones with less power, and so faster."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    return torch.randn(rows, columns, dtype=dtype, generator=generator)


def training_product(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[], None]:
    """A function that makes one product forward, and the two of its backward pass."""
    x, weight = (drawn(rows, inputs, dtype).requires_grad_() for rows in (tokens, outputs))
    gradient = drawn(tokens, outputs, dtype)

    def run() -> None:
        x.grad = weight.grad = None
        torch.nn.functional.linear(x, weight).backward(gradient)

    return run
