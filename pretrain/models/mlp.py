"""The feed-forward sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.models.layers import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def gate(activation: str, gate_F: Tensor, up_F: Tensor) -> Tensor:
    """activation(gate) × up; of `silu_clamped` both are clamped, the sigmoid is steeper and up is shifted by one (gpt-oss)."""
    if activation == "silu_clamped":
        gate_F, up_F = gate_F.clamp(max=7.0), up_F.clamp(-7.0, 7.0)
        return (up_F + 1) * gate_F * (gate_F * 1.702).sigmoid()
    return ACTIVATIONS[activation](gate_F) * up_F


class Mlp(nn.Module):
    """down(activation(up(x))), or gated (Shazeer, arXiv 2002.05202): down(activation(gate(x)) × up(x))."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(dim, ffn_dim, bias) if gated else None
        self.up = Linear(dim, ffn_dim, bias)
        self.down = Linear(ffn_dim, dim, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(ACTIVATIONS[self.activation](self.up(x_BTD)))
        return self.down(gate(self.activation, self.gate(x_BTD), self.up(x_BTD)))
