"""torch.compile without its silent fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_VERSIONS = 64
"""How often torch may compile one function anew, for other shapes, masks, kinds of layers, with and without gradients. Its own limit is 8."""


def compile_strictly(function: Callable, **options: Any) -> Callable:
    """`torch.compile(function, **options)`. A function that needs more than `MOST_VERSIONS` versions raises `FailOnRecompileLimitHit`.

    By default torch then runs the function uncompiled for ever, and only warns: slow blocks, or attention whose scores fill the memory. The
    setting holds for all that this process compiles from now on.
    """
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, **options)
