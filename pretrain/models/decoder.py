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
from pretrain.models.masks import Mask, attention_backend, document_mask, document_numbers, document_positions


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

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, documents_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each sequence [B], fp32.

        `documents_BT` are whole numbers that say which document each position belongs to (equal neighbours are of one; padding
        has a number of its own): no position then attends to another document, and rotary positions count from 0 in each.
        """
        cos, sin, mask = self._positions(tokens_BT, documents_BT)
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            if self.recompute_blocks and torch.is_grad_enabled():
                x_BTD = checkpoint(layer, x_BTD, cos, sin, mask, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, cos, sin, mask)
        x_BTD = self.norm(x_BTD)
        if self.output is None:
            logits_BTV = F.linear(x_BTD, self.embedding.weight.to(x_BTD.dtype))
        else:
            logits_BTV = self.output(x_BTD)
        return logits_BTV if targets_BT is None else sequence_losses(logits_BTV, targets_BT)

    def _positions(self, tokens_BT: Tensor, documents_BT: Tensor | None) -> tuple[Tensor, Tensor, Mask | None]:
        """Rotary tables, [T, G] or with documents [B, 1, T, G], and the mask, none without documents: plain causal attention."""
        config, device = self.config, tokens_BT.device
        cos, sin = rotary_tables(tokens_BT.shape[1], config.head_dim, config.rope.theta, device)
        if documents_BT is None:
            return cos, sin, None
        if documents_BT.shape != tokens_BT.shape:  # would be broadcast otherwise
            raise ValueError(f"documents are {tuple(documents_BT.shape)}, tokens {tuple(tokens_BT.shape)}")
        numbers_BT = document_numbers(documents_BT)
        positions_BT = document_positions(numbers_BT)
        backend = attention_backend(config, device, training=torch.is_grad_enabled())
        return cos[positions_BT][:, None], sin[positions_BT][:, None], document_mask(numbers_BT, backend)

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
