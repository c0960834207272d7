"""Matrix products by number format, forward and backward, on one thread of this CPU: which format trains faster here?"""

from __future__ import annotations

import torch
from benchmarks.measure import Options, Row, in_turns

from pretrain.train.number_format import LEAST_GAIN, SIZES, training_product


def products(options: Options) -> list[Row]:
    """Speed of each format; the last row's baseline is fp32."""
    work = {name: [training_product(*sizes, dtype) for sizes in SIZES] for name, dtype in FORMATS.items()}
    turns = in_turns({name: lambda of=of: [one() for one in of] for name, of in work.items()}, options)
    flops = sum(6 * tokens * inputs * outputs for tokens, inputs, outputs in SIZES)
    speeds = {name: turn.rate(flops / 1e9) for name, turn in turns.items()}
    return [
        Row("products", name, best, "GFLOP/s", "cpu", median, baseline=None if name == "fp32" else speeds["fp32"][0])
        for name, (best, median) in speeds.items()
    ]


FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fastest(rows: list[Row]) -> str:
    """`bf16` if its products are faster by `LEAST_GAIN`, in the best and the median turn; else `fp32`."""
    fp32, bf16 = rows
    gains = bf16.value / fp32.value, bf16.median / fp32.median
    return "bf16" if min(gains) >= LEAST_GAIN else "fp32"
