"""The decoder-only transformer, as single-device code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.conventions import IGNORED
from pretrain.models.block import Block
from pretrain.models.cache import Cache
from pretrain.models.experts import MixtureOfExperts
from pretrain.models.head import OutputHead
from pretrain.models.layers import Embedding, make_norm
from pretrain.models.loss import Losses, LossOptions
from pretrain.models.masks import (
    Mask,
    attention_backend,
    attention_mask,
    cached_mask,
    document_numbers,
    document_positions,
)
from pretrain.models.multi_token import MultiTokenPrediction
from pretrain.models.network import Parts
from pretrain.models.rotary import Tables, rotary_tables
from pretrain.models.router import Router, RouterReport
from pretrain.models.shape import has_rope, has_window

Inputs = dict[bool, tuple[Tables | None, Mask | None]]
"""What layers without and with a window get: rotary tables and mask."""


class Decoder(nn.Module):
    """Token ids in; logits, or the summed loss of each sequence, out. A network (`models/network.py`).

    A tied output head has no weight: the embedding's is one parameter with one name. There are no
    buffers, so a model built on the meta device is complete once its parameters are filled.
    """

    def __init__(self, config: Model, loss: Loss | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute_blocks = False
        self.router_reports: dict[int, RouterReport] = {}
        self.embedding = Embedding(config.vocab_size, config.dim)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.max_sequence_length, config.dim) if learned else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config) if config.norm.placement != "post" else None
        options = LossOptions.of(loss, config.logit_soft_cap, config.logit_multiplier)
        self.output = OutputHead(config.dim, config.vocab_size, options, tied=config.tie_embeddings)
        self.multi_token = _multi_token(config, loss) if config.predict_ahead else None

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        with_cross_entropy: bool = False,
    ) -> Tensor | Losses:
        """Logits [B, T, V] in the compute format; with targets, the summed token losses of each sequence [B], fp32, in training
        with the auxiliary losses of routers (`models/router.py`). `with_cross_entropy`: return that alone beside them.

        `documents_BT` are whole numbers that say which document each position belongs to (equal neighbours are of one; padding
        has a number of its own): no position then attends to another document, and positions count from 0 in each. With a
        `cache` the tokens continue those that are in it, and are added to it.
        """
        embedded_BTD, inputs = self._begin(tokens_BT, documents_BT, cache)
        counted_BT = targets_BT != IGNORED if targets_BT is not None and torch.is_grad_enabled() else None
        reports: dict[int, RouterReport | None] = {}
        # As a view, so that the gradients of the first block's two uses meet before those of multi-token prediction (see `Layer.forward` of
        # the encoder-decoder).
        x_BTD = embedded_BTD.view_as(embedded_BTD)
        for i, layer in enumerate(self.layers):
            x_BTD, reports[i] = self._run(layer, i, x_BTD, inputs, cache, counted_BT)
        hidden_BTD, x_BTD = x_BTD, x_BTD if self.norm is None else self.norm(x_BTD)
        tied = self.embedding.weight if self.config.tie_embeddings else None
        if targets_BT is None:
            return self.output(x_BTD, None, tied)
        if self.multi_token is None or counted_BT is None:
            losses = self.output(x_BTD, targets_BT, tied, with_cross_entropy=True)
            objective_B = self._with_routers(losses.objective_B, reports)
            return Losses(objective_B, losses.cross_entropy_B) if with_cross_entropy else objective_B

        def run_ahead(block: Block, y_BTD: Tensor) -> Tensor:
            y_BTD, reports[len(reports)] = self._run(block, self.config.layers - 1, y_BTD, inputs, None, counted_BT)
            return y_BTD

        ahead = self.multi_token(hidden_BTD, embedded_BTD, run_ahead)
        losses = self.multi_token.losses(self.output, x_BTD, ahead, targets_BT, documents_BT, tied)
        objective_B = self._with_routers(losses.objective_B.sum(dim=0), reports)
        return Losses(objective_B, losses.cross_entropy_B[0]) if with_cross_entropy else objective_B

    def _run(
        self, block: Block, layer: int, x_BTD: Tensor, inputs: Inputs, cache: Cache | None, counted_BT: Tensor | None
    ) -> tuple[Tensor, RouterReport | None]:
        rope, mask = inputs[has_window(self.config, layer)]
        rope = rope if has_rope(self.config, layer) else None
        if self.recompute_blocks and torch.is_grad_enabled():
            return checkpoint(block, x_BTD, rope, mask, None, counted_BT, use_reentrant=False)
        return block(x_BTD, rope, mask, cache.layers[layer] if cache else None, counted_BT)

    def _with_routers(self, losses_B: Tensor, reports: dict[int, RouterReport | None]) -> Tensor:
        """Losses with those of the routers; what these say is added up over micro-steps, until someone takes it."""
        for layer, report in reports.items():
            if report is not None:
                losses_B = losses_B + report.loss_B
                loss, counts = self.router_reports.get(layer, (0, 0))
                self.router_reports[layer] = RouterReport(
                    loss + report.loss_B.detach().double().sum(), counts + report.counts_E
                )
        return losses_B

    def take_router_reports(self) -> dict[int, RouterReport]:
        """By layer with experts, what its router said in training since the last call, losses summed to a scalar."""
        reports, self.router_reports = self.router_reports, {}
        return reports

    def routers(self) -> dict[int, Router]:
        """By layer with experts; the blocks of multi-token prediction are numbered on after the last layer."""
        blocks = [*self.layers, *(depth.block for depth in (self.multi_token.depths if self.multi_token else []))]
        return {i: block.mlp.router for i, block in enumerate(blocks) if isinstance(block.mlp, MixtureOfExperts)}

    def _begin(self, tokens_BT: Tensor, documents_BT: Tensor | None, cache: Cache | None) -> tuple[Tensor, Inputs]:
        """The residual stream before the first block, and what blocks get."""
        config, device = self.config, tokens_BT.device
        start = cache.length if cache else 0
        stop = start + tokens_BT.shape[1]
        numbers_BT = positions_BT = None
        if documents_BT is not None:
            if documents_BT.shape != tokens_BT.shape:  # would be broadcast otherwise
                raise ValueError(f"documents are {tuple(documents_BT.shape)}, tokens {tuple(tokens_BT.shape)}")
        if cache is not None:
            documents_BT = cache.label(documents_BT, tokens_BT.shape[1])
        if documents_BT is not None:  # of all positions
            numbers_BT = document_numbers(documents_BT)
            positions_BT = document_positions(numbers_BT)[:, start:]
        x_BTD = self.embedding(tokens_BT)
        if config.embedding_multiplier != 1:
            # Rounded to the compute format first, as Gemma does.
            x_BTD = x_BTD * torch.full((), config.embedding_multiplier, dtype=x_BTD.dtype, device=device)
        if self.position_embedding is not None:
            places = torch.arange(start, stop, device=device) if positions_BT is None else positions_BT
            x_BTD = x_BTD + self.position_embedding(places)
        inputs = {}
        for local in {has_window(config, i) for i in range(config.layers)}:
            mask = self._mask(start, stop, numbers_BT, device, local, cache)
            inputs[local] = self._tables(start, stop, positions_BT, device, local), mask
        return x_BTD, inputs

    def _tables(self, start: int, stop: int, positions_BT: Tensor | None, device: torch.device, local: bool) -> Tables | None:
        if self.config.positions != "rope":
            return None
        cos, sin = rotary_tables(self.config, stop, device, local)
        if positions_BT is None:
            return cos[start:], sin[start:]
        return cos[positions_BT][:, None], sin[positions_BT][:, None]

    def _mask(
        self, start: int, stop: int, numbers_BT: Tensor | None, device: torch.device, local: bool, cache: Cache | None
    ) -> Mask | None:
        """None where only the future is masked, which torch's causal kernel does by itself."""
        switches = self.config.attention
        window = switches.window if local else 0
        if start or (cache is not None and numbers_BT is not None):
            return cached_mask(start, stop, device, window, numbers_BT)
        if numbers_BT is None and not 0 < window < stop and not switches.soft_cap and not switches.sinks:
            return None
        backend = attention_backend(self.config, device, training=torch.is_grad_enabled())
        return attention_mask(stop, device, backend, numbers_BT, window)

    def parts(self) -> Parts:
        """See `models/network.py`. A table that is used at both ends belongs to neither."""
        blocks = [*self.layers, *(self.multi_token.depths if self.multi_token else [])]
        if self.config.tie_embeddings:
            return Parts([], blocks, [])
        return Parts([self.embedding], blocks, [self.output] if self.norm is None else [self.norm, self.output])

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's initial values, by its name.

        Projections into the residual stream are scaled down by the square root of their number (GPT-2, section 2.3).
        """
        if name.endswith(("bias", "sinks", "correction")):
            return 0.0, 0.0
        if "norm" in name:
            return (0.0 if self.config.norm.kind == "rms_offset" else 1.0), 0.0
        if name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down", "shared.down.weight")):
            return 0.0, self.config.init_std / math.sqrt(2 * self.config.layers)
        return 0.0, self.config.init_std


def _multi_token(config: Model, loss: Loss | None) -> MultiTokenPrediction:
    def block() -> Block:
        return Block(config, config.layers - 1)

    weight = (loss or Loss()).predict_ahead_weight
    return MultiTokenPrediction(config.predict_ahead, config.dim, block, lambda: make_norm(config), weight)


def count_parameters(model: nn.Module) -> int:
    """Parameters, a tied one counted once; of whole tensors where they are sharded."""
    return sum(p.numel() for p in model.parameters())
