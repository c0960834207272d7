"""Trial: `tools/bench.py` with projections that multiply a limited number of rows at a time.

    python tools/gpu_day/in_parts.py 8192 speed --config configs/models/llama3.1-8b.yaml --micro 4 ... (arguments of tools/bench.py)

Traces of Llama 3.1 8B on two H200s (docs/benchmarks.md) say that with 16,384 rows, of micro-steps of four sequences, cuBLAS chooses kernels for products forward and
for gradients of activations that are 3% slower than twice those with 8,192 rows: 46 ms of a step of 2,633. Gradients of weights are no slower, and stay whole here.
What this gains decides whether `pretrain` gets such a key.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from pretrain.models.layers import Linear  # noqa: E402


@torch.library.custom_op("pretrain_trial::multiply", mutates_args=())
def multiply(x_NI: Tensor, weight_OI: Tensor, rows: int) -> Tensor:
    """x @ weight', `rows` rows of x at a time. The compiler cannot look inside, and so neither joins the parts nor computes them twice."""
    y_NO = x_NI.new_empty(len(x_NI), len(weight_OI))
    for x, y in zip(x_NI.split(rows), y_NO.split(rows)):
        torch.mm(x, weight_OI.t(), out=y)
    return y_NO


@multiply.register_fake
def _(x_NI: Tensor, weight_OI: Tensor, rows: int) -> Tensor:
    return x_NI.new_empty(len(x_NI), len(weight_OI))


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rows = inputs[2]


def _gradients(ctx, g_NO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_NI, weight_OI = ctx.saved_tensors
    return multiply(g_NO, weight_OI.t(), ctx.rows), g_NO.t() @ x_NI, None


multiply.register_autograd(_gradients, setup_context=_keep)


def product_of(rows: int):
    """`project` (models/layers.py) in parts."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = multiply(x.flatten(0, -2), weight.to(x.dtype), rows).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    return product


if __name__ == "__main__":
    from bench import main

    Linear.product = staticmethod(product_of(int(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
