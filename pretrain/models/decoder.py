"""The decoder-only transformer, as single-device code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_schema import Model
from pretrain.models.block import Block
from pretrain.models.cache import Cache
from pretrain.models.layers import Embedding, Linear, make_norm
from pretrain.models.loss import sequence_losses
from pretrain.models.masks import (
    Mask,
    attention_backend,
    attention_mask,
    cached_mask,
    document_numbers,
    document_positions,
)
from pretrain.models.network import Parts
from pretrain.models.rotary import Tables, rotary_tables
from pretrain.models.shape import has_rope, has_window


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out. A network (`models/network.py`).

    A tied output head is no module of its own: the embedding's weight is one parameter with one name. There are no
    buffers, so a model built on the meta device is complete once its parameters are filled.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.recompute_blocks = False
        self.embedding = Embedding(config.vocab_size, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.max_sequence_length, config.dim) if learned else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config) if config.norm.placement != "post" else None
        self.output = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each sequence [B], fp32.

        `documents_BT` are whole numbers that say which document each position belongs to (equal neighbours are of one; padding
        has a number of its own): no position then attends to another document, and positions count from 0 in each. With a
        `cache` the tokens continue those that are in it, and are added to it.
        """
        x_BTD, inputs = self._begin(tokens_BT, documents_BT, cache)
        for i, layer in enumerate(self.layers):
            rope, mask = inputs[has_window(self.config, i)]
            rope = rope if has_rope(self.config, i) else None
            if self.recompute_blocks and torch.is_grad_enabled():
                x_BTD = checkpoint(layer, x_BTD, rope, mask, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, rope, mask, cache.layers[i] if cache else None)
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        logits_BTV = self._logits(x_BTD)
        return logits_BTV if targets_BT is None else sequence_losses(logits_BTV, targets_BT)

    def _begin(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, dict[bool, tuple[Tables | None, Mask | None]]]:
        """The residual stream before the first block, and what layers without and with a window get: tables and mask."""
        config, device = self.config, tokens_BT.device
        start = cache.length if cache else 0
        stop = start + tokens_BT.shape[1]
        numbers_BT = positions_BT = None
        if documents_BT is not None:
            if documents_BT.shape != tokens_BT.shape:  # would be broadcast otherwise
                raise ValueError(f"documents are {tuple(documents_BT.shape)}, tokens {tuple(tokens_BT.shape)}")
            numbers_BT = document_numbers(documents_BT)
            positions_BT = document_positions(numbers_BT)
        x_BTD = self.embedding(tokens_BT)
        if config.embedding_multiplier != 1:
            # Rounded to the compute format first, as Gemma does.
            x_BTD = x_BTD * torch.full((), config.embedding_multiplier, dtype=x_BTD.dtype, device=device)
        if self.position_embedding is not None:
            places = torch.arange(start, stop, device=device) if positions_BT is None else positions_BT
            x_BTD = x_BTD + self.position_embedding(places)
        inputs = {}
        for local in {has_window(config, i) for i in range(config.layers)}:
            mask = self._mask(start, stop, numbers_BT, device, local)
            inputs[local] = self._tables(start, stop, positions_BT, device, local), mask
        return x_BTD, inputs

    def _tables(self, start: int, stop: int, positions_BT: Tensor | None, device: torch.device, local: bool) -> Tables | None:
        if self.config.positions != "rope":
            return None
        cos, sin = rotary_tables(self.config, stop, device, local)
        if positions_BT is None:
            return cos[start:], sin[start:]
        return cos[positions_BT][:, None], sin[positions_BT][:, None]

    def _mask(self, start: int, stop: int, numbers_BT: Tensor | None, device: torch.device, local: bool) -> Mask | None:
        """None where only the future is masked, which torch's causal kernel does by itself."""
        switches = self.config.attention
        window = switches.window if local else 0
        if start:
            return cached_mask(start, stop, device, window)
        if numbers_BT is None and not 0 < window < stop and not switches.soft_cap and not switches.sinks:
            return None
        backend = attention_backend(self.config, device, training=torch.is_grad_enabled())
        return attention_mask(stop, device, backend, numbers_BT, window)

    def _logits(self, x_BTD: Tensor) -> Tensor:
        config = self.config
        logits_BTV = F.linear(x_BTD, self.embedding.weight.to(x_BTD.dtype)) if self.output is None else self.output(x_BTD)
        if config.logit_multiplier != 1:
            logits_BTV = logits_BTV * config.logit_multiplier
        if config.logit_soft_cap:
            logits_BTV = config.logit_soft_cap * torch.tanh(logits_BTV / config.logit_soft_cap)
        return logits_BTV

    def parts(self) -> Parts:
        """See `models/network.py`. A table that is used at both ends belongs to neither."""
        if self.output is None:
            return Parts([], list(self.layers), [])
        head = [self.output] if self.norm is None else [self.norm, self.output]
        return Parts([self.embedding], list(self.layers), head)

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's initial values, by its name.

        Projections into the residual stream are scaled down by the square root of their number (GPT-2, section 2.3).
        """
        if name.endswith(("bias", "sinks")):
            return 0.0, 0.0
        if "norm" in name:
            return (0.0 if self.config.norm.kind == "rms_offset" else 1.0), 0.0
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            return 0.0, self.config.init_std / math.sqrt(2 * self.config.layers)
        return 0.0, self.config.init_std


def count_parameters(model: nn.Module) -> int:
    """Parameters, a tied one counted once; of whole tensors where they are sharded."""
    return sum(p.numel() for p in model.parameters())
