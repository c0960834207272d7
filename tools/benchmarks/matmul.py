"""The speed of matrix products by number format: squares and the shapes of a model's layers, beside the published peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.measure import Options, Row, in_turns, rate_row, require_device
from benchmarks.models import resolved_model
from benchmarks.products import FORMATS
from torch import nn

from pretrain.config.schema import Config
from pretrain.models import network_without_values
from pretrain.observe.flops import peak_flops
from pretrain.train.number_format import drawn, training_product

SQUARES = {"cpu": (512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
TOKENS = {"cpu": 1024, "cuda": 16384}
"""Rows of a layer's input, by device."""
_QUEUED = 2e12
"""FLOPs that a turn of a GPU has at least, so that the start of one product does not count."""


@dataclass(frozen=True)
class Product:
    """`count` products of a network that have one shape: [tokens, inputs] by [inputs, outputs]."""

    name: str
    tokens: int
    inputs: int
    outputs: int
    count: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of one product."""
        return 2 * self.tokens * self.inputs * self.outputs


def matmul(
    squares: Sequence[int], model: Path | None, tokens: int, formats: Sequence[str], device: str, options: Options
) -> list[Row]:
    """TFLOP/s of each square (one product) and of each shape of the layers (the product forward and the two backward)."""
    require_device(device)
    config = resolved_model(model) if model else None
    layers = layer_products(config, options.scaled(tokens, 8), options.scale) if config else []
    rows = []
    for name in formats:
        work: dict[str, tuple[Callable[[], object], float]] = {}
        with torch.device(device), torch.no_grad():
            for size in (options.scaled(square, 8) for square in squares):
                work[f"square of {size}"] = _square(size, FORMATS[name]), 2 * size**3
        with torch.device(device):
            for one in layers:
                label = f"{one.name}: {one.tokens} x {one.inputs} -> {one.outputs}, {one.count} time{'s' if one.count > 1 else ''}"
                work[label] = training_product(one.tokens, one.inputs, one.outputs, FORMATS[name]), 3 * one.flops
        rows += _measured(name, work, torch.device(device), options)
    return rows


def layer_products(config: Config, tokens: int, scale: float = 1.0) -> list[Product]:
    """The products of a network's weights, by shape. Each expert of a layer gets its mean share of the tokens."""
    network = network_without_values(config)
    found: dict[tuple[int, int, int], list[str]] = {}
    for path, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3:  # experts [count, outputs, inputs]
                rows, count = max(1, tokens * config.model.experts.active // weight.shape[0]), weight.shape[0]
            elif weight.dim() == 2 and isinstance(module, nn.Linear):
                rows, count = tokens, 1
            else:
                continue
            name = path.rsplit(".", 1)[-1] if count == 1 else f"experts' {name}"
            inputs, outputs = (max(8, round(size * scale)) for size in (weight.shape[-1], weight.shape[-2]))
            found.setdefault((rows, inputs, outputs), []).extend([name] * count)
    head = tokens, max(8, round(config.model.dim * scale)), max(8, round(config.model.vocab_size * scale))
    if head not in found:  # it has the embedding's table
        found[head] = ["head"]
    return [Product(", ".join(dict.fromkeys(names)), *shape, len(names)) for shape, names in found.items()]


def _square(size: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    left, right = (drawn(size, size, dtype) for _ in "lr")
    return lambda: left @ right


def _measured(
    name: str, work: dict[str, tuple[Callable[[], object], float]], device: torch.device, options: Options
) -> list[Row]:
    repeats = {what: math.ceil(_QUEUED / flops) if device.type == "cuda" else 1 for what, (_, flops) in work.items()}

    def turn(run: Callable[[], object], times: int) -> None:
        for _ in range(times):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    calls = {what: lambda run=run, what=what: turn(run, repeats[what]) for what, (run, _) in work.items()}
    for call in calls.values():
        call()
    # CPU time tells of one thread; a GPU and several threads are timed by the clock.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    turns = in_turns(calls, options, time.process_time if alone else time.perf_counter)
    peak = peak_flops(device, name)
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else torch.cuda.get_device_name(device)
    rows = []
    for what, (_, flops) in work.items():
        count = flops * repeats[what] / 1e12
        share = (
            f"{turns[what].rate(count)[0] * 1e12 / peak:.1%} of the published peak"
            if peak
            else "the published peak is not known"
        )
        rows.append(
            rate_row(
                f"matmul {name}", what, turns[what], count, "TFLOP/s", "cpu" if alone else "wall",
                baseline=peak and peak / 1e12, note=f"{where}; {share}",
            )
        )  # fmt: skip
    return rows
