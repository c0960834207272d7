"""Context parallelism of encoder-decoders: ranks share the positions of each source and those of each target.

    encoder      the source positions at hand meet the keys and values of the whole source
    decoder      the target positions at hand meet those of earlier target positions, as in `context.py`
    cross        the target positions at hand meet those of the whole source

Sources are cut as targets are, though their stretches all have the same work: so one rule says which positions a rank has. Lengths of
sources mask keys, which every rank knows in full. T5's biases are made for the queries at hand. Micro-batches differ in length, and a pipeline
recomputes one after the forward pass of another: so attention takes lengths from its own arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pretrain.models.dropout import WeightMask
from pretrain.models.positions import RelativeBias
from pretrain.parallel.collectives import extend
from pretrain.parallel.context import ContextAxis, OwnQueries


class PairedContextAxis(ContextAxis):
    """The axis `context` of an encoder-decoder."""

    def split(self, network: nn.Module) -> None:
        self.encoding = {layer.attention for layer in network.encoder.values()}
        super().split(network)
        for layer in network.decoder.values():
            extend(layer.cross, TargetsOfSources, context=self)
        for module in network.modules():
            if isinstance(module, RelativeBias):
                module.rows_at_hand = self.own

    def queries(self, attention: nn.Module) -> type:
        return SourceQueries if attention in self.encoding else TargetQueries


class SourceQueries(OwnQueries):
    """Self-attention of the encoder, whose queries are of the source positions at hand."""

    context: PairedContextAxis

    def attend(self, q_BHRG: Tensor, k_BKRG: Tensor, v_BKRG: Tensor, mask: Tensor, *options: Any, **named: Any) -> Tensor:
        k_BKSG, v_BKSG = (self.context.gather_heads(x, mask.shape[-1]) for x in (k_BKRG, v_BKRG))
        masks = (mask, mask) if mask.shape[2] == 1 else mask.chunk(2, dim=2)
        return self.attend_rows(q_BHRG, k_BKSG, v_BKSG, masks, *options, length=mask.shape[-1], **named)


class TargetQueries(OwnQueries):
    """Self-attention of the decoder, with a causal mask or T5's biases [1, H, R, T] of the target positions at hand."""

    context: PairedContextAxis

    def attend(
        self, q_BHRG: Tensor, k_BKRG: Tensor, v_BKRG: Tensor, bias: Tensor | None, *options: Any, **named: Any
    ) -> Tensor:
        # Without biases the positions that fill up count as real ones. They are later than these, which do not see them.
        length = q_BHRG.shape[2] * self.context.size if bias is None else bias.shape[-1]
        k_BKTG, v_BKTG = (self.context.gather_heads(x, length) for x in (k_BKRG, v_BKRG))
        if bias is None:
            masks = self.context.make_mask(length, q_BHRG.device, None, None, 0)
        else:
            masks = [rows[..., :last] for rows, (_, last) in zip(bias.chunk(2, dim=2), self.context.stretches(length))]
        return self.attend_rows(q_BHRG, k_BKTG, v_BKTG, masks, *options, **named)


class TargetsOfSources:
    """Cross-attention, whose queries are of the target positions at hand, and whose keys and values are of the whole source."""

    context: PairedContextAxis

    def forward(self, x_BRD: Tensor, keys_values: Any, mask: Tensor, dropout: WeightMask | None = None) -> Tensor:
        dropout = dropout and dropout.of_queries(self.context.own(dropout.steps_R, dim=0))
        return super().forward(x_BRD, keys_values, mask, dropout)

    def attend(self, q_BHRG: Tensor, k_BKRG: Tensor, v_BKRG: Tensor, mask: Tensor, *options: Any, **named: Any) -> Tensor:
        k_BKSG, v_BKSG = (self.context.gather_heads(x, mask.shape[-1]) for x in (k_BKRG, v_BKRG))
        if self.watch_scores is not None:
            places_R = self.context.own(torch.arange(1, self.context.length + 1)[None])[0]  # 0: filling
            self.real_queries = places_R.nonzero().flatten().to(q_BHRG.device)
        return super().attend(q_BHRG, k_BKSG, v_BKSG, mask, *options, **named)
