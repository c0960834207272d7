"""Matrix products by number format, forward and backward, on one thread of this CPU: which format trains faster here?

A flag of the processor does not tell. With AVX-512 bf16 products are several times as fast as in fp32, and so with AMX; where bf16 is emulated
they are slower.
"""

from __future__ import annotations

import torch
from benchmarks.measure import Options, Row, in_turns

SIZES = ((1024, 256, 1024), (1024, 1024, 256))
"""Tokens, inputs and outputs of the products in a block of the quickstart."""
LEAST_GAIN = 1.2
"""bf16 must be this many times as fast: other operations gain nothing, and rounding costs a little quality."""


def products(options: Options) -> list[Row]:
    """Speed of each format; the last row's baseline is fp32."""
    work = {name: [_product(*sizes, dtype) for sizes in SIZES] for name, dtype in FORMATS.items()}
    turns = in_turns({name: lambda of=of: [one() for one in of] for name, of in work.items()}, options)
    flops = sum(6 * tokens * inputs * outputs for tokens, inputs, outputs in SIZES)
    speeds = {name: turn.rate(flops / 1e9) for name, turn in turns.items()}
    return [
        Row("products", name, best, "GFLOP/s", "cpu", median, baseline=None if name == "fp32" else speeds["fp32"][0])
        for name, (best, median) in speeds.items()
    ]


FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _product(tokens: int, inputs: int, outputs: int, dtype: torch.dtype):
    x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, outputs, dtype=dtype)

    def run() -> None:
        x.grad = weight.grad = None
        torch.nn.functional.linear(x, weight).backward(gradient)

    return run


def fastest(rows: list[Row]) -> str:
    """`bf16` if its products are faster by `LEAST_GAIN`, in the best and the median turn; else `fp32`."""
    fp32, bf16 = rows
    gains = bf16.value / fp32.value, bf16.median / fp32.median
    return "bf16" if min(gains) >= LEAST_GAIN else "fp32"
