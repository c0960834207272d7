"""The decoder-only transformer, as single-device code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pretrain.config.schema import Model
from pretrain.models.blocks import Block, Embedding, Linear, RMSNorm, rotary_tables
from pretrain.models.loss import sequence_losses


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out.

    A tied output head is no module of its own: the embedding's weight is one parameter with one name. There are no
    buffers, so a model built on the meta device is complete once its parameters are filled.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.recompute_blocks = False
        shape = (config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim, config.norm_eps)
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(*shape) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each sequence [B], fp32."""
        rope = self.config.rope
        cos_TG, sin_TG = rotary_tables(tokens_BT.shape[1], self.config.head_dim, rope.theta, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            if self.recompute_blocks and torch.is_grad_enabled():
                x_BTD = checkpoint(layer, x_BTD, cos_TG, sin_TG, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, cos_TG, sin_TG)
        x_BTD = self.norm(x_BTD)
        if self.output is None:
            logits_BTV = F.linear(x_BTD, self.embedding.weight.to(x_BTD.dtype))
        else:
            logits_BTV = self.output(x_BTD)
        return logits_BTV if targets_BT is None else sequence_losses(logits_BTV, targets_BT)

    def initial_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values, by its name; None for a norm's gain, which starts at one.

        Projections into the residual stream are scaled down by the square root of their number (GPT-2, section 2.3).
        """
        if "norm" in name:
            return None
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            return self.config.init_std / math.sqrt(2 * self.config.layers)
        return self.config.init_std


def count_parameters(model: nn.Module) -> int:
    """Parameters, a tied one counted once; of whole tensors where they are sharded."""
    return sum(p.numel() for p in model.parameters())
